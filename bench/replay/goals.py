"""The goals that the project has set itself, and how runs stand to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay.load import Point
from bench.replay.results import medians, points, ratio
from bench.replay.rounds import Engines, Run


@dataclass(frozen=True)
class Scenario:
    """A load that goals are set for."""

    title: str
    prompt_tokens: int
    block_size: int
    chunk: int  # 0: the whole prompt in one step

    def matches(self, point: Point, engines: Engines) -> bool:
        """Whether a run is of this scenario."""
        whole = engines.chunk >= point.prompt_tokens
        chunk_fits = whole if self.chunk == 0 else engines.chunk == self.chunk
        block_fits = self.block_size in (0, engines.block_size)
        return point.prompt_tokens == self.prompt_tokens and block_fits and chunk_fits


ONE_STEP = Scenario("16,000 tokens in one step, block 64", 16000, 64, 0)
CHUNKED = Scenario("8,000 tokens, block 128, chunks of 2,048", 8000, 128, 2048)
SHORT = Scenario("256 tokens", 256, 0, 0)


@dataclass(frozen=True)
class Goal:
    """A measure of a mode of ours is at most a multiple of another mode's.

    Against "limit": the value itself, which is a multiple of its own limit.
    """

    scenario: Scenario
    what: str
    key: str
    against: str
    at_most: float
    ours: str = "kvpush-push"

    def measured(self, runs: Sequence[Run], point: Point) -> float | None:
        """The ratio, if these runs have it."""
        if self.against == "limit":
            return medians(runs, point, self.ours).get(self.key)
        return ratio(runs, point, self.key, self.ours, self.against)


GOALS = (
    Goal(ONE_STEP, "handoff p50", "handoff_p50_ms", "stock-push", 0.5),
    Goal(ONE_STEP, "handoff p50", "handoff_p50_ms", "stock-pull", 0.85),
    Goal(ONE_STEP, "handoff p50", "handoff_over_limit", "limit", 1.2),
    Goal(ONE_STEP, "TPOT mean", "tpot_mean_ms", "stock-push", 0.85),
    Goal(ONE_STEP, "TPOT mean", "tpot_mean_ms", "stock-pull", 0.75),
    Goal(ONE_STEP, "TPOT mean", "tpot_mean_ms", "decode-alone", 1.15),
    Goal(CHUNKED, "handoff p50", "handoff_p50_ms", "stock-push", 0.35),
    Goal(CHUNKED, "handoff p50", "handoff_p50_ms", "stock-pull", 0.45),
    Goal(CHUNKED, "handoff p50", "handoff_over_limit", "limit", 1.2),
    Goal(CHUNKED, "TTFT p50", "ttft_p50_ms", "stock-push", 0.65),
    Goal(CHUNKED, "TTFT p50", "ttft_p50_ms", "stock-pull", 0.8),
    Goal(SHORT, "TTFT p50", "ttft_p50_ms", "stock-push", 1.0),
    Goal(SHORT, "TPOT mean", "tpot_mean_ms", "stock-push", 1.0),
    Goal(ONE_STEP, "TTFT p50", "ttft_p50_ms", "stock-pull", 1.0, "kvpush-pull"),
    Goal(ONE_STEP, "TPOT mean", "tpot_mean_ms", "kvpush-push", 1.0, "kvpush-pull"),
    Goal(CHUNKED, "TTFT p50", "ttft_p50_ms", "stock-pull", 1.0, "kvpush-pull"),
    Goal(CHUNKED, "TPOT mean", "tpot_mean_ms", "kvpush-push", 1.0, "kvpush-pull"),
)


@dataclass(frozen=True)
class Standing:
    """A goal and what was measured."""

    goal: Goal
    value: float

    @property
    def met(self) -> bool:
        """To the two digits that are shown."""
        return round(self.value, 2) <= self.goal.at_most


def standings(runs: Sequence[Run]) -> list[Standing]:
    """The goals that these runs say something of, in their order."""
    found = []
    for goal in GOALS:
        for point in points(runs):
            same = [r for r in runs if r.point == point and goal.scenario.matches(point, r.engines)]
            value = goal.measured(same, point)
            if value is not None:
                found.append(Standing(goal, value))
    return found
