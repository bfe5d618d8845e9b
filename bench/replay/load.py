"""One load through one pair of engines: arrivals, serving, and what the times come to."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.engines.pair import EngineError, Mode, Pair, Timeline

DRAIN_LIMIT_S = 120.0

# vLLM's engine makes a request's id unique with eight hexadecimal digits.
_ID_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


@dataclass(frozen=True)
class Point:
    """One load: how often requests come, and how long they are."""

    rate: float
    prompt_tokens: int
    output_tokens: int
    count: int


@dataclass(frozen=True)
class Measured:
    """What one load gave: values in milliseconds, and the blocks of each request on either side."""

    values: dict[str, float]
    blocks: list[tuple[list[int], list[int]]]


def prompts_and_arrivals(point: Point, mode: Mode, seed: int) -> list[tuple[float, list[int]]]:
    """The same for every mode: seconds from the start, and tokens."""
    draw = random.Random(seed)
    at = 0.0
    planned = []
    for _ in range(point.count):
        at += draw.expovariate(point.rate)
        tokens = [draw.randrange(1000) for _ in range(point.prompt_tokens)]
        planned.append((at, tokens[: mode.prompt_tokens] if mode.prompt_tokens else tokens))
    return planned


def serve(pair: Pair, point: Point, seed: int) -> list[Timeline]:
    """Send the requests when they are due; returns them when all have ended."""
    planned = prompts_and_arrivals(point, pair.mode, seed)
    begin = time.perf_counter()
    ended: list[Timeline] = []
    for number, (at, tokens) in enumerate(planned):
        while (left := begin + at - time.perf_counter()) > 0:
            ended += pair.pump(left)
        pair.submit(f"s{seed}-{number}", tokens, point.output_tokens)
    return ended + pair.drain(DRAIN_LIMIT_S)


def measure(pair: Pair, point: Point, seed: int) -> Measured:
    """Serve one load and condense it."""
    pair.reset()
    before = pair.report()
    ended = serve(pair, point, seed)
    after = pair.report()
    failed = [t.request for t in ended if t.decode_reason != "length"]
    if failed:
        raise EngineError(f"{pair.mode.name}: {len(failed)} requests failed: {failed[:5]}")
    values = condense(ended)
    for side in after:
        spent = after[side]["cpu_s"] - before[side]["cpu_s"]
        values[f"{side}_cpu_ms"] = 1e3 * spent / point.count
        stamps = after[side]["stamps"]
        if stamps is not None:
            values[f"{side}_wrong_tokens"] = float(stamps["wrong_tokens"])
            values[f"{side}_tokens_checked"] = float(stamps["tokens_checked"])
    return Measured(values, _blocks_of_both(after))


def _blocks_of_both(reports: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(prefill's, decode's) block ids of each request, in the order of their ends."""
    if "prefill" not in reports:
        return []
    sides = [
        {_ID_SUFFIX.sub("", request): ids for request, ids in reports[side]["blocks"].items()}
        for side in ("prefill", "decode")
    ]
    return [(ids, sides[1][request]) for request, ids in sides[0].items() if request in sides[1]]


def condense(ended: Sequence[Timeline]) -> dict[str, float]:
    """Milliseconds."""
    ttft = [t.ttft_s for t in ended]
    tpot = [t.tpot_s for t in ended]
    gaps = [gap for t in ended for gap in t.gaps_s]
    values = {
        "ttft_p50_ms": _percentile(ttft, 50),
        "ttft_p99_ms": _percentile(ttft, 99),
        "tpot_mean_ms": 1e3 * statistics.fmean(tpot),
        "itl_p50_ms": _percentile(gaps, 50),
        "itl_p99_ms": _percentile(gaps, 99),
    }
    handoffs = [t.handoff_s for t in ended if t.prefill_end]
    if handoffs:
        values["handoff_p50_ms"] = _percentile(handoffs, 50)
        values["handoff_p99_ms"] = _percentile(handoffs, 99)
    return values


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(1e3 * np.percentile(np.asarray(values), percent))
