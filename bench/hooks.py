"""What a KV connector's hooks cost the engine's main thread: ours beside the stock push connector.

``python -m bench.hooks`` runs real engines (a model that only takes time, `bench.engines`) under a
steady load of 0, 1, 16 and 64 requests in flight and times every hook of the connector on both
sides. The connectors take turns, each round with fresh engines; medians over the rounds are shown.
With 0 in flight the decode engine serves one request of its own, without a transfer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.engines.pair import Mode, Pair
from bench.engines.settings import KVPUSH, STOCK_PUSH, ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE

console = Console(stderr=True)

OURS = Mode("kvpush", KVPUSH, "together")
STOCK = Mode("stock-push", STOCK_PUSH, "together")

SIDES = ("prefill", "decode")

# Tables are this wide where the output is no terminal.
_TABLE_WIDTH = 150

_WARM_UP_S = 1.0
_DRAIN_LIMIT_S = 60.0


@dataclass(frozen=True)
class Load:
    """What is sent in each measurement."""

    prompt_tokens: int
    output_tokens: int
    duration_s: float


class ClosedLoop:
    """Keeps a number of requests in flight."""

    def __init__(self, pair: Pair, load: Load, seed: int) -> None:
        self._pair = pair
        self._load = load
        self._names = itertools.count()
        self._draw = random.Random(seed)
        self._prefix = f"s{seed}"

    def run(self, in_flight: int, duration_s: float) -> int:
        """Hold the load for a while; returns how many requests ended."""
        ended = 0
        until = time.monotonic() + duration_s
        while (left := until - time.monotonic()) > 0:
            while len(self._pair.live) < max(1, in_flight):
                self._submit(local=in_flight == 0)
            for timeline in self._pair.pump(min(left, 0.05)):
                if timeline.decode_reason != "length":
                    raise RuntimeError(f"{timeline.request} ended with {timeline.decode_reason}")
                ended += 1
        return ended

    def _submit(self, *, local: bool) -> None:
        prompt = [self._draw.randrange(1000) for _ in range(self._load.prompt_tokens)]
        name = f"{self._prefix}-{next(self._names)}"
        self._pair.submit(name, prompt, self._load.output_tokens, local=local)


def measure(pair: Pair, load: Load, levels: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Run every level on a started pair; one row per level."""
    rows = []
    for level in levels:
        loop = ClosedLoop(pair, load, seed * 1000 + level)
        loop.run(level, _WARM_UP_S)
        pair.reset()
        ended = loop.run(level, load.duration_s)
        report = pair.report()
        pair.drain(_DRAIN_LIMIT_S)
        sides = {side: report[side] for side in SIDES}
        load_average = os.getloadavg()[0]
        rows.append(
            {"in_flight": level, "requests": ended, "sides": sides, "load_average": load_average}
        )
    return rows


# What the summary shows of a step's hook time.
_COLUMNS = (
    ("mean", "model_steps", "mean_us"),
    ("p50", "model_steps", "p50_us"),
    ("p99", "model_steps", "p99_us"),
    ("cpu", "model_steps_cpu", "mean_us"),
)
_TITLES = tuple(title for title, _, _ in _COLUMNS)


def _request_us(row: dict[str, Any]) -> float:
    """All hook time on both sides, steps without a model run included, per request."""
    spent = sum(
        row["sides"][side]["hooks"][kind]["sum_us"]
        for side in SIDES
        for kind in ("model_steps", "idle_steps")
    )
    return float(spent / max(1, row["requests"]))


def summarize(
    results: dict[str, list[list[dict[str, Any]]]], levels: Sequence[int]
) -> list[dict[str, Any]]:
    """Medians over the rounds, and ours as a ratio of stock's."""
    rows: list[dict[str, Any]] = []
    for place, level in enumerate(levels):
        for side in SIDES:
            if level == 0 and side == "prefill":
                continue
            row: dict[str, Any] = {"in_flight": level, "per": f"{side} step"}
            for name, runs in results.items():
                for title, kind, statistic in _COLUMNS:
                    row[f"{name} {title}"] = statistics.median(
                        run[place]["sides"][side]["hooks"][kind][statistic] for run in runs
                    )
            rows.append(row)
        if level:
            total: dict[str, Any] = {"in_flight": level, "per": "request"}
            for name, runs in results.items():
                total[f"{name} mean"] = statistics.median(_request_us(run[place]) for run in runs)
            rows.append(total)
    for row in rows:
        for title in _TITLES:
            ours, stock = row.get(f"{OURS.name} {title}"), row.get(f"{STOCK.name} {title}")
            if ours is not None and stock:
                row[f"ratio {title}"] = ours / stock
    return rows


def _summary_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Hook time on the main thread, us (medians; ratio: kvpush / stock push)")
    table.add_column("in flight")
    table.add_column("per")
    for name in (OURS.name, STOCK.name, "ratio"):
        for title in _TITLES:
            table.add_column(f"{name}\n{title}", justify="right")
    for row in rows:
        cells = [str(row["in_flight"]), row["per"]]
        for name, form in ((OURS.name, ".1f"), (STOCK.name, ".1f"), ("ratio", ".3f")):
            cells += [_cell(row.get(f"{name} {title}"), form) for title in _TITLES]
        table.add_row(*cells)
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _hook_table(results: dict[str, list[list[dict[str, Any]]]], place: int, level: int) -> Table:
    table = Table(title=f"Each hook, {level} in flight (calls per step with a model run; us)")
    for column in ("side", "hook"):
        table.add_column(column)
    for name in results:
        for statistic in ("calls/step", "mean", "p99"):
            table.add_column(f"{name}\n{statistic}", justify="right")
    for side in SIDES:
        reports = {
            name: [run[place]["sides"][side] for run in runs] for name, runs in results.items()
        }
        labels = sorted(
            {label for rs in reports.values() for r in rs for label in r["hooks"]["hooks"]}
        )
        for label in labels:
            cells, called = [side, label], False
            for found in reports.values():
                hooks = [r["hooks"]["hooks"].get(label) for r in found]
                if any(h is None or not h["calls"] for h in hooks):
                    cells += ["", "", ""]
                    continue
                called = True
                steps = [max(1, r["model_steps"]) for r in found]
                per_step = (h["calls"] / n for h, n in zip(hooks, steps, strict=True))
                cells.append(f"{statistics.median(per_step):.2f}")
                cells += [
                    f"{statistics.median(h[s] for h in hooks):.1f}" for s in ("mean_us", "p99_us")
                ]
            if called:
                table.add_row(*cells)
        table.add_section()
    return table


def run_benchmark(
    rounds: int, levels: Sequence[int], load: Load, logs: Path, model: ModelSettings
) -> dict[str, list[list[dict[str, Any]]]]:
    """All rounds; one pair of engines runs at a time."""
    results: dict[str, list[list[dict[str, Any]]]] = {OURS.name: [], STOCK.name: []}
    for number in range(rounds):
        order = (OURS, STOCK) if number % 2 == 0 else (STOCK, OURS)
        for mode in order:
            with (
                console.status(f"round {number + 1} of {rounds}: {mode.name}"),
                Pair.start(
                    mode, logs / f"{number}-{mode.name}", model=model, base={"time_hooks": True}
                ) as pair,
            ):
                results[mode.name].append(measure(pair, load, levels, number + 1))
    return results


def main(
    rounds: Annotated[int, typer.Option(help="times each connector is measured")] = 3,
    in_flight: Annotated[
        str, typer.Option(help="requests in flight, comma separated")
    ] = "0,1,16,64",
    prompt_tokens: Annotated[int, typer.Option(help="length of each prompt")] = 512,
    output_tokens: Annotated[int, typer.Option(help="length of each answer")] = 16,
    duration_s: Annotated[float, typer.Option(help="time of each measurement")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    details: Annotated[bool, typer.Option(help="also show every hook")] = True,
    save: Annotated[Path | None, typer.Option(help="a file for the summary")] = None,
) -> None:
    """Time every connector hook in real engines, ours and the stock push connector's."""
    levels = [int(level) for level in in_flight.split(",")]
    load = Load(prompt_tokens, output_tokens, duration_s)
    logs = fresh_logs(DEFAULT_CACHE / "bench-logs")
    console.print(f"[dim]the engines' logs: {logs}[/]")
    results = run_benchmark(rounds, levels, load, logs, ModelSettings())
    rows = summarize(results, levels)
    if save is not None:
        loads = [row["load_average"] for runs in results.values() for run in runs for row in run]
        facts = {"rounds": rounds, "load": asdict(load), "load_average": max(loads)}
        save.write_text(json.dumps({"settings": facts, "summary": rows}, indent=1) + "\n")
    if as_json:
        print(json.dumps({"summary": rows, "runs": results}))
        return
    shown = Console(width=max(_TABLE_WIDTH, console.width))
    shown.print(_summary_table(rows))
    if details:
        shown.print(_hook_table(results, len(levels) - 1, levels[-1]))


if __name__ == "__main__":
    typer.run(main)
