"""Tables of a replay: on the terminal, and in the pages of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from bench.replay.goals import standings
from bench.replay.load import Point
from bench.replay.modes import MODES, OURS
from bench.replay.results import load, medians, points, ratio
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

STOCK = ("stock-push", "stock-pull")

# Results with this name are loads that the pages have a row for.
SCENARIOS = "scenario_*.json"


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


# --- the documentation ----------------------------------------------------------------------------


def scenarios(folder: Path) -> list[list[Run]]:
    """The committed results that the pages show."""
    return [load(path) for path in sorted(folder.glob(SCENARIOS))]


def describe(run: Run) -> str:
    """A load in words."""
    point, engines = run.point, run.engines
    whole = engines.chunk >= point.prompt_tokens
    steps = "in one step" if whole else f"in chunks of {engines.chunk:,}"
    return (
        f"{point.prompt_tokens:,} tokens {steps}, block {engines.block_size}, {point.rate:g} req/s"
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stock_markdown(found: Sequence[Sequence[Run]]) -> str:
    """Ours as a ratio of both stock connectors, a row per load."""
    measures = (
        ("handoff_p50_ms", "handoff"),
        ("ttft_p50_ms", "TTFT"),
        ("tpot_mean_ms", "TPOT"),
        ("decode_cpu_ms", "D's CPU"),
    )
    header = ["kvpush push / stock"]
    header += [
        f"{title}, {stock.removeprefix('stock-')}" for _, title in measures for stock in STOCK
    ]
    rows = []
    for runs in found:
        for point in points(runs):
            row = [describe(next(run for run in runs if run.point == point))]
            for key, _ in measures:
                for stock in STOCK:
                    value = ratio(runs, point, key, "kvpush-push", stock)
                    row.append("-" if value is None else f"{value:.2f}")
            rows.append(row)
    return _markdown(header, rows) if rows else "No results yet."


def goals_markdown(found: Sequence[Sequence[Run]]) -> str:
    """Every goal that was measured, and what came of it."""
    rows = []
    for runs in found:
        for standing in standings(runs):
            goal = standing.goal
            rows.append(
                [
                    f"{goal.scenario.title}: {goal.what}, {goal.ours}",
                    goal.against,
                    f"{goal.at_most:g}",
                    f"{standing.value:.2f}",
                    "yes" if standing.met else "no",
                ]
            )
    header = ["measure", "against", "goal, at most", "measured", "met"]
    return _markdown(header, rows) if rows else "No results yet."


def parts(folder: Path) -> dict[str, str]:
    """The generated parts of the pages, by the name in their markers."""
    found = scenarios(folder)
    return {"replay-table": stock_markdown(found), "replay-goals": goals_markdown(found)}


def fill(page: str, generated: Mapping[str, str]) -> str:
    """The page with every marked part made anew. ValueError if a marker lacks its end."""
    for name, text in generated.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in page:
            continue
        head, _, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not closed:
            raise ValueError(f"{begin} has no {end} behind it")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page
