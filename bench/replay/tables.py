"""Tables of a replay, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.replay.load import Point
from bench.replay.modes import MODES, OURS
from bench.replay.results import medians, points, ratio
from bench.replay.rounds import Run

SHOWN = (
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


def modes_of(runs: Sequence[Run], point: Point) -> list[str]:
    """The modes that were run under this load, in their usual order."""
    found = {run.mode for run in runs if run.point == point}
    return [mode for mode in MODES if mode in found]


def value_table(runs: Sequence[Run]) -> Table:
    """Milliseconds, medians over the rounds."""
    table = Table(title="milliseconds (medians over the rounds)")
    for name in ("req/s", "prompt", "mode", *(title for _, title in SHOWN)):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for point in points(runs):
        table.add_section()
        for mode in modes_of(runs, point):
            values = medians(runs, point, mode)
            cells = [f"{values[key]:.1f}" if key in values else "" for key, _ in SHOWN]
            table.add_row(f"{point.rate:g}", str(point.prompt_tokens), mode, *cells)
    return table


def ratio_table(runs: Sequence[Run]) -> Table:
    """Each mode of ours as a ratio of every other."""
    table = Table(title="ratios (medians of the rounds' ratios)")
    for name in ("req/s", "prompt", "mode", "against", *(title for _, title in SHOWN)):
        table.add_column(name, justify="left" if name in ("mode", "against") else "right")
    for point in points(runs):
        table.add_section()
        for ours, against in _pairs(runs, point):
            found = [ratio(runs, point, key, ours, against) for key, _ in SHOWN]
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            table.add_row(f"{point.rate:g}", str(point.prompt_tokens), ours, against, *cells)
    return table


def _pairs(runs: Sequence[Run], point: Point) -> Iterator[tuple[str, str]]:
    modes = modes_of(runs, point)
    for ours in modes:
        if ours in OURS:
            yield from ((ours, against) for against in modes if against != ours)


def limit_table(runs: Sequence[Run]) -> Table:
    """The handoff beside what it can't be faster than."""
    table = Table(title="the handoff's limit: a bare NIXL WRITE of the last chunk + 1.5 steps")
    titles = ("req/s", "prompt", "mode", "descriptors", "bare WRITE", "limit", "handoff p50", "/")
    for name in titles:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for point in points(runs):
        for mode in modes_of(runs, point):
            values = medians(runs, point, mode)
            if "limit_ms" not in values:
                continue
            table.add_row(
                f"{point.rate:g}",
                str(point.prompt_tokens),
                mode,
                f"{values['bare_descriptors']:.0f}",
                f"{values['bare_write_ms']:.1f} ms",
                f"{values['limit_ms']:.1f} ms",
                f"{values['handoff_p50_ms']:.1f} ms",
                f"{values['handoff_over_limit']:.2f}",
            )
    return table
