"""Requests that arrive at random, through two real engines: ours beside the stock connectors.

``python -m bench.replay`` serves the same Poisson arrivals in several modes on engines without HTTP
and a model that takes time but computes nothing (`bench.engines`); the connectors, the scheduler
and NIXL are real. Modes take turns, and the whole is repeated, so that a machine that drifts
decides nothing; ratios are of medians over the repetitions.

Modes: ``kvpush``, ``stock-push``, ``stock-pull``, ``none`` (the decode engine prefills itself) and
``decode-alone`` (prompts of 16 tokens, no connector: the floor of TPOT).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.engines.pair import EngineError, Mode, Pair, Timeline
from bench.engines.settings import KVPUSH, STOCK_PULL, STOCK_PUSH, ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE

console = Console(stderr=True)

MODES = {
    mode.name: mode
    for mode in (
        Mode("kvpush", KVPUSH, "together"),
        Mode("stock-push", STOCK_PUSH, "together"),
        Mode("stock-pull", STOCK_PULL, "sequence"),
        Mode("none", None, "decode"),
        Mode("decode-alone", None, "decode", prompt_tokens=16),
    )
}

STOCK = ("stock-push", "stock-pull")

_WARM_UP_REQUESTS = 3
_DRAIN_LIMIT_S = 120.0
# Tables are this wide where the output is no terminal.
_TABLE_WIDTH = 150


@dataclass(frozen=True)
class Point:
    """One load: how often requests come, and how long they are."""

    rate: float
    prompt_tokens: int
    output_tokens: int
    count: int


@dataclass(frozen=True)
class Engines:
    """How both engines are set up."""

    block_size: int
    num_blocks: int
    chunk: int
    prefix_caching: bool = False


@dataclass(frozen=True)
class Run:
    """One mode under one load, once."""

    mode: str
    point: Point
    engines: Engines
    repetition: int
    values: dict[str, float]
    load_average: float


def with_extra(mode: Mode, extra: dict[str, Any]) -> Mode:
    """The mode with more connector configuration, where the connector is ours."""
    if not extra or mode.connector is None or mode.name in STOCK:
        return mode
    return replace(mode, connector=replace(mode.connector, extra_config=extra))


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
    return ended + pair.drain(_DRAIN_LIMIT_S)


def measure(pair: Pair, point: Point, seed: int) -> dict[str, float]:
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
    return values


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


@contextlib.contextmanager
def started(mode: Mode, engines: Engines, model: ModelSettings, logs: Path) -> Iterator[Pair]:
    """A warm pair: engines that have met and served a few requests."""
    base = {
        "block_size": engines.block_size,
        "num_blocks": engines.num_blocks,
        "max_num_batched_tokens": engines.chunk,
        "prefix_caching": engines.prefix_caching,
    }
    with Pair.start(mode, logs, model=model, base=base) as pair:
        for number in range(_WARM_UP_REQUESTS):
            pair.submit(f"warm-{number}", list(range(100 + number)), 4)
            pair.drain(_DRAIN_LIMIT_S)
        yield pair


def replay(
    modes: Sequence[Mode],
    points: Sequence[Point],
    engines: Engines,
    model: ModelSettings,
    repetitions: int,
    logs: Path,
) -> list[Run]:
    """All runs; one pair of engines at a time, in another order in each repetition."""
    runs: list[Run] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replay", total=repetitions * len(modes) * len(points))
        for repetition in range(repetitions):
            turn = repetition % len(modes)
            for mode in [*modes[turn:], *modes[:turn]]:
                progress.update(task, description=f"{mode.name}, repetition {repetition + 1}")
                with started(mode, engines, model, logs / f"{repetition}-{mode.name}") as pair:
                    for index, point in enumerate(points):
                        values = measure(pair, point, 1000 * repetition + index)
                        load = os.getloadavg()[0]
                        runs.append(Run(mode.name, point, engines, repetition, values, load))
                        progress.advance(task)
    return runs


def medians(runs: Sequence[Run]) -> dict[tuple[Point, str], dict[str, float]]:
    """Over the repetitions, per load and mode."""
    grouped: dict[tuple[Point, str], list[dict[str, float]]] = {}
    for run in runs:
        grouped.setdefault((run.point, run.mode), []).append(run.values)
    return {
        key: {name: statistics.median(v[name] for v in values) for name in values[0]}
        for key, values in grouped.items()
    }


_SHOWN = (
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p99_ms", "TTFT p99"),
    ("handoff_p50_ms", "handoff p50"),
    ("handoff_p99_ms", "handoff p99"),
    ("tpot_mean_ms", "TPOT mean"),
    ("itl_p50_ms", "ITL p50"),
    ("itl_p99_ms", "ITL p99"),
    ("prefill_cpu_ms", "P CPU/req"),
    ("decode_cpu_ms", "D CPU/req"),
)


def value_table(runs: Sequence[Run]) -> Table:
    """Milliseconds, medians over the repetitions."""
    table = Table(title="milliseconds (medians over repetitions)")
    for name in ("req/s", "prompt", "mode", *(title for _, title in _SHOWN)):
        table.add_column(name, justify="left" if name == "mode" else "right")
    last: Point | None = None
    for (point, mode), values in sorted(medians(runs).items(), key=_by_point):
        if last is not None and point != last:
            table.add_section()
        last = point
        cells = [f"{values[key]:.1f}" if key in values else "" for key, _ in _SHOWN]
        table.add_row(f"{point.rate:g}", str(point.prompt_tokens), mode, *cells)
    return table


def _by_point(item: tuple[tuple[Point, str], Any]) -> tuple[int, float, int]:
    (point, mode), _ = item
    return point.prompt_tokens, point.rate, list(MODES).index(mode)


def ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Our medians divided by the others."""
    found = medians(runs)
    rows = []
    for point in sorted({point for point, _ in found}, key=lambda p: (p.prompt_tokens, p.rate)):
        ours = found.get((point, "kvpush"))
        if ours is None:
            continue
        for other in MODES:
            theirs = found.get((point, other))
            if other == "kvpush" or theirs is None:
                continue
            row: dict[str, Any] = {
                "rate": point.rate,
                "prompt_tokens": point.prompt_tokens,
                "against": other,
            }
            row |= {k: ours[k] / theirs[k] for k, _ in _SHOWN if k in ours and theirs.get(k)}
            rows.append(row)
    return rows


def ratio_table(runs: Sequence[Run]) -> Table:
    """Our medians as ratios of each other mode's."""
    table = Table(title="kvpush / other (ratio of medians)")
    for name in ("req/s", "prompt", "against", *(title for _, title in _SHOWN)):
        table.add_column(name, justify="left" if name == "against" else "right")
    for row in ratios(runs):
        cells = [f"{row[key]:.2f}" if key in row else "" for key, _ in _SHOWN]
        table.add_row(f"{row['rate']:g}", str(row["prompt_tokens"]), row["against"], *cells)
    return table


def plot(runs: Sequence[Run], folder: Path) -> list[Path]:
    """One chart of TTFT and one of TPOT over load, a panel per prompt length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = medians(runs)
    lengths = sorted({point.prompt_tokens for point, _ in found})
    written = []
    for key, title in (("ttft_p50_ms", "TTFT p50 (ms)"), ("tpot_mean_ms", "TPOT mean (ms)")):
        figure, panels = plt.subplots(
            1, len(lengths), figsize=(5 * len(lengths), 4), squeeze=False, layout="constrained"
        )
        for panel, length in zip(panels[0], lengths, strict=True):
            for mode in MODES:
                line = sorted(
                    (point.rate, values[key])
                    for (point, name), values in found.items()
                    if name == mode and point.prompt_tokens == length
                )
                if line:
                    panel.plot(*zip(*line, strict=True), marker="o", label=mode)
            panel.set_title(f"{length:,} prompt tokens")
            panel.set_xlabel("requests per second")
            panel.set_ylabel(title)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[0][0].legend()
        path = folder / f"{key.split('_')[0]}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def save(runs: Sequence[Run], folder: Path) -> None:
    """One JSON file per run, and one of the ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        name = (
            f"{run.mode}_qps{run.point.rate:g}_in{run.point.prompt_tokens}"
            f"_out{run.point.output_tokens}_iter{run.repetition}.json"
        )
        (folder / name).write_text(json.dumps(asdict(run), indent=1) + "\n")
    (folder / "ratios.json").write_text(json.dumps(ratios(runs), indent=1) + "\n")


def main(
    modes: Annotated[str, typer.Option(help=f"of {','.join(MODES)}")] = ",".join(MODES),
    rates: Annotated[str, typer.Option(help="requests per second, commas between")] = "4",
    prompts: Annotated[str, typer.Option(help="prompt tokens, commas between")] = "8000",
    output_tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 100,
    count: Annotated[int, typer.Option(help="requests per run")] = 40,
    repetitions: Annotated[int, typer.Option(help="times each run is made")] = 3,
    block_size: Annotated[int, typer.Option(help="tokens per KV cache block")] = 128,
    pool_tokens: Annotated[int, typer.Option(help="tokens the KV cache holds")] = 131072,
    chunk: Annotated[int, typer.Option(help="most tokens of one step")] = 32768,
    stamp: Annotated[str, typer.Option(help="check the KV: all or sampled")] = "",
    extra: Annotated[str, typer.Option(help="kvpush's kv_connector_extra_config, JSON")] = "{}",
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("build/bench/replay"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Replay Poisson arrivals in several modes and compare."""
    unknown = set(modes.split(",")) - set(MODES)
    if unknown:
        raise typer.BadParameter(f"unknown modes {sorted(unknown)}; there are {list(MODES)}")
    points = [
        Point(float(rate), int(length), output_tokens, count)
        for length in prompts.split(",")
        for rate in rates.split(",")
    ]
    engines = Engines(block_size, pool_tokens // block_size, chunk)
    logs = fresh_logs(DEFAULT_CACHE / "bench-logs")
    console.print(f"[dim]the engines' logs: {logs}[/]")
    runs = replay(
        [with_extra(MODES[name], json.loads(extra)) for name in modes.split(",")],
        points,
        engines,
        ModelSettings(stamp=stamp),
        repetitions,
        logs,
    )
    save(runs, out)
    plot(runs, out)
    console.print(f"[dim]results and charts: {out}[/]")
    if as_json:
        print(json.dumps({"runs": [asdict(run) for run in runs], "ratios": ratios(runs)}))
    else:
        shown = Console(width=max(_TABLE_WIDTH, console.width))
        shown.print(value_table(runs))
        shown.print(ratio_table(runs))
    wrong = sum(v for run in runs for k, v in run.values.items() if k.endswith("wrong_tokens"))
    if wrong:
        console.print(f"[red]{wrong:.0f} wrong stamps[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
