"""Rounds: every mode in turn, each with fresh engines, and all of it several times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.engines.pair import Mode, Pair
from bench.engines.settings import ModelSettings
from bench.replay.limit import STEPS_AFTER, CacheShape, bare_write_ms, last_blocks
from bench.replay.load import DRAIN_LIMIT_S, Measured, Point, measure
from bench.replay.modes import OURS

_WARM_UP_REQUESTS = 3


@dataclass(frozen=True)
class Engines:
    """How both engines are set up."""

    block_size: int
    num_blocks: int
    chunk: int
    prefix_caching: bool = False


@dataclass(frozen=True)
class Run:
    """One mode under one load, once. Values are milliseconds unless their name says otherwise."""

    mode: str
    point: Point
    engines: Engines
    round: int
    values: dict[str, float]
    load_average: float


@contextlib.contextmanager
def started(
    mode: Mode, engines: Engines, model: ModelSettings, logs: Path, **more: Any
) -> Iterator[Pair]:
    """A warm pair: engines that have met and served a few requests."""
    base = {
        "block_size": engines.block_size,
        "num_blocks": engines.num_blocks,
        "max_num_batched_tokens": engines.chunk,
        "prefix_caching": engines.prefix_caching,
        "resident_cache": True,
        "record_blocks": True,
        **more,
    }
    with Pair.start(mode, logs, model=model, base=base) as pair:
        for number in range(_WARM_UP_REQUESTS):
            pair.submit(f"warm-{number}", list(range(100 + number)), 4)
            pair.drain(DRAIN_LIMIT_S)
        yield pair


def add_limit(measured: Measured, point: Point, engines: Engines, model: ModelSettings) -> None:
    """Measure the bare WRITE of these requests, and hold the handoff against it."""
    shape = CacheShape.of(model, engines.block_size, engines.num_blocks)
    chunk = engines.chunk
    requests = [
        last_blocks(blocks, point.prompt_tokens, engines.block_size, chunk)
        for blocks in measured.blocks
    ]
    values = measured.values
    values["bare_write_ms"], values["bare_descriptors"] = bare_write_ms(shape, requests)
    values["limit_ms"] = values["bare_write_ms"] + STEPS_AFTER * values["itl_p50_ms"]
    values["handoff_over_limit"] = values["handoff_p50_ms"] / values["limit_ms"]


def replay(
    modes: Sequence[Mode],
    points: Sequence[Point],
    engines: Engines,
    model: ModelSettings,
    rounds: int,
    logs: Path,
    console: Console,
) -> Iterator[Run]:
    """All runs, each as soon as it is made; one pair of engines at a time."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replay", total=rounds * len(modes) * len(points))
        for number in range(rounds):
            turn = number % len(modes)
            for mode in [*modes[turn:], *modes[:turn]]:
                progress.update(task, description=f"{mode.name}, round {number + 1}")
                folder = logs / f"{number}-{mode.name}"
                found = []
                with started(mode, engines, model, folder) as pair:
                    for index, point in enumerate(points):
                        measured = measure(pair, point, 1000 * number + index)
                        found.append((point, measured, os.getloadavg()[0]))
                        progress.advance(task)
                for point, measured, load in found:
                    if mode.name in OURS and not model.stamp:
                        add_limit(measured, point, engines, model)
                    yield Run(mode.name, point, engines, number, measured.values, load)
