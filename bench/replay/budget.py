"""Where the time of a handoff goes: each stage of the push connectors, from marks in engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.engines.pair import Mode, Timeline
from bench.engines.settings import ModelSettings
from bench.replay.load import Point, serve
from bench.replay.rounds import Engines, started

# (what is shown, from, to)
STAGES = (
    ("P's scheduler to its worker's writer", "finished", "given"),
    ("to the first post", "given", "begun"),
    ("posting", "begun", "posted"),
    ("last post to D's worker", "posted", "received"),
    ("D's worker to the first token", "received", "token"),
    ("all: prefill's end to the first token", "finished", "token"),
)


def marks_of(ended: Sequence[Timeline], reports: Mapping[str, Any]) -> list[dict[str, int]]:
    """The marks of each request on both engines, in ns; the first token's with them."""
    found = []
    for timeline in ended:
        # perf_counter and the monotonic clock are the same one on Linux.
        marks = {"token": int(1e9 * timeline.tokens[0])}
        for side in ("prefill", "decode"):
            own = reports[side]["stages"].get(timeline.request, {})
            marks |= {k: v for k, v in own.items() if (k == "received") == (side == "decode")}
        if "begun" in marks and "given" in marks:
            # What was streamed before the prefill's end is no part of the handoff.
            marks["begun"] = max(marks["begun"], marks["given"])
        found.append(marks)
    return found


def stages_us(marks: Sequence[Mapping[str, int]]) -> dict[str, list[float]]:
    """Microseconds of each stage, of the requests that have both of its marks."""
    found = {
        title: [(m[end] - m[begin]) / 1e3 for m in marks if begin in m and end in m]
        for title, begin, end in STAGES
    }
    return {title: values for title, values in found.items() if values}


def measure_budget(
    modes: Sequence[Mode],
    point: Point,
    engines: Engines,
    model: ModelSettings,
    rounds: int,
    logs: Path,
    console: Console,
) -> dict[str, dict[str, list[float]]]:
    """By mode and stage; the modes take turns."""
    found: dict[str, dict[str, list[float]]] = {mode.name: {} for mode in modes}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("budget", total=rounds * len(modes))
        for number in range(rounds):
            for mode in modes if number % 2 == 0 else reversed(modes):
                progress.update(task, description=f"{mode.name}, round {number + 1}")
                folder = logs / f"{number}-{mode.name}"
                with started(mode, engines, model, folder, time_stages=True) as pair:
                    pair.reset()
                    ended = serve(pair, point, 1000 * number)
                    stages = stages_us(marks_of(ended, pair.report()))
                for title, values in stages.items():
                    found[mode.name].setdefault(title, []).extend(values)
                progress.advance(task)
    return found


def budget_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Median and 90th percentile of each stage, a pair of columns per mode."""
    table = Table(title="a handoff's stages (us)")
    table.add_column("stage")
    for mode in found:
        for percent in (50, 90):
            table.add_column(f"{mode} p{percent}", justify="right")
    for title, _, _ in STAGES:
        cells = []
        for stages in found.values():
            values = stages.get(title, ())
            found_us = np.percentile(values, [50, 90]) if values else ()
            cells += [f"{value:,.0f}" for value in found_us] or ["", ""]
        table.add_row(title, *cells)
    return table


def save_budget(
    found: Mapping[str, Mapping[str, Sequence[float]]], settings: dict[str, Any], path: Path
) -> None:
    """Percentiles of each mode's stages, microseconds: what can be committed."""
    stages = {
        mode: {
            title: {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 90)}
            for title, values in by_stage.items()
        }
        for mode, by_stage in found.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "stages": stages}, indent=1) + "\n")
