"""Writes the measured parts of README.md and two pages of docs from the committed results.

``python -m bench.pages``: each part stands between two markers, and is made anew from files in
bench/results; a test checks that the pages are as this makes them.

    scenario_*.json   python -m bench.replay ... --save FILE
    load.json         the same over several rates; its charts go to docs/images
    budget.json       python -m bench.replay budget --save FILE
    handoff.json      python -m bench.handoff --save FILE
    hooks.json        python -m bench.hooks --save FILE
    selftest.json     kvpush selftest --json, without its "nixl_library": that is a place
    desc_prep.json    python -m bench.desc_prep --save FILE
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.desc_prep import COSTS, costs_ns
from bench.replay.budget import STAGES
from bench.replay.chart import plot
from bench.replay.goals import standings
from bench.replay.modes import MODES, OURS
from bench.replay.results import load, medians, points, ratio
from bench.replay.rounds import Run

RESULTS = Path("bench/results")
IMAGES = Path("docs/images")
PAGES = (Path("README.md"), Path("docs/performance.md"), Path("docs/benchmarks.md"))

_NOTHING = "No results yet."
_STOCK = ("stock-push", "stock-pull")

# Goals of the benchmarks that are not replays.
HANDOFF_AT_MOST = 0.02
HOOKS_AT_MOST = 0.1
_HOOKS_IN_FLIGHT = 64
SELFTEST_AT_LEAST = 0.97
PLAN_AT_LEAST = 10.0
PLAN_AND_MAKE_AT_LEAST = 1.0
_LARGE_REQUEST = "1024 blocks"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return _NOTHING
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _json(path: Path) -> Any:
    """The content of a result; None if there is none. ValueError naming a file that is no JSON."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def describe(run: Run) -> str:
    """A load in words."""
    point, engines = run.point, run.engines
    whole = engines.chunk >= point.prompt_tokens
    steps = "in one step" if whole else f"in chunks of {engines.chunk:,}"
    return (
        f"{point.prompt_tokens:,} tokens {steps}, block {engines.block_size}, {point.rate:g} req/s"
    )


def stock_part(found: Sequence[Sequence[Run]]) -> str:
    """Ours as a ratio of both stock connectors, a row per load and mode."""
    measures = (
        ("handoff_p50_ms", "handoff"),
        ("ttft_p50_ms", "TTFT"),
        ("tpot_mean_ms", "TPOT"),
        ("decode_cpu_ms", "D's CPU"),
    )
    header = ["load", "mode"]
    header += [f"{title} / {stock.replace('-', ' ')}" for _, title in measures for stock in _STOCK]
    rows = []
    for runs in found:
        for point in points(runs):
            for mode in OURS:
                same = [run for run in runs if (run.point, run.mode) == (point, mode)]
                if not same:
                    continue
                row = [describe(same[0]), mode]
                for key, _ in measures:
                    for stock in _STOCK:
                        value = ratio(runs, point, key, mode, stock)
                        row.append("-" if value is None else f"{value:.2f}")
                rows.append(row)
    return _markdown(header, rows)


def values_part(found: Sequence[Sequence[Run]]) -> str:
    """Milliseconds of every mode."""
    keys = (
        *("ttft_p50_ms", "handoff_p50_ms", "tpot_mean_ms"),
        *("itl_p99_ms", "prefill_cpu_ms", "decode_cpu_ms"),
    )
    rows = []
    for runs in found:
        for point in points(runs):
            for mode in MODES:
                values = medians(runs, point, mode)
                if values:
                    cells = [f"{values[key]:.1f}" if key in values else "-" for key in keys]
                    rows.append([describe(next(r for r in runs if r.point == point)), mode, *cells])
    titles = ("TTFT p50", "handoff p50", "TPOT mean", "ITL p99", "P's CPU", "D's CPU")
    return _markdown(["load", "mode", *titles], rows)


def limit_part(found: Sequence[Sequence[Run]]) -> str:
    """The handoff beside what it can't be faster than."""
    rows = []
    for runs in found:
        for point in points(runs):
            for mode in OURS:
                values = medians(runs, point, mode)
                if "limit_ms" not in values:
                    continue
                rows.append(
                    [
                        describe(next(run for run in runs if run.point == point)),
                        mode,
                        f"{values['bare_descriptors']:,.0f}",
                        f"{values['bare_write_ms']:.1f}",
                        f"{values['limit_ms']:.1f}",
                        f"{values['handoff_p50_ms']:.1f}",
                        f"{values['handoff_over_limit']:.2f}",
                    ]
                )
    titles = ("descriptors", "bare WRITE, ms", "limit, ms", "handoff p50, ms", "handoff / limit")
    return _markdown(["load", "mode", *titles], rows)


def goals_part(
    found: Sequence[Sequence[Run]], handoff: Any, hooks: Any, selftest: Any, desc_prep: Any = None
) -> str:
    """Every goal that was measured, and what came of it."""
    rows = []
    for runs in found:
        for standing in standings(runs):
            goal = standing.goal
            what = f"{goal.scenario.title}: {goal.what}, {goal.ours}"
            bound = f"at most {goal.at_most:g}"
            rows.append([what, goal.against, bound, f"{standing.value:.2f}", _yes(standing.met)])
    for row in handoff["rows"] if handoff else ():
        if (row["main_thread"], row["stage"]) == ("spinning", "posted"):
            value, bound = row["ratio_p99"], f"at most {HANDOFF_AT_MOST:g}"
            what = "both known to posted, Python spinning, p99"
            met = _yes(value <= HANDOFF_AT_MOST)
            rows.append([what, "stock-like writer", bound, f"{value:.4f}", met])
    for row in hooks["summary"] if hooks else ():
        if row["in_flight"] == _HOOKS_IN_FLIGHT:
            value, bound = row["ratio mean"], f"at most {HOOKS_AT_MOST:g}"
            what = f"hook time per {row['per']}, {_HOOKS_IN_FLIGHT} in flight, mean"
            rows.append([what, "stock-push", bound, f"{value:.3f}", _yes(value <= HOOKS_AT_MOST)])
    for row in selftest["rows"] if selftest else ():
        if row["request"] == _LARGE_REQUEST and row["layers"] == _most_layers(selftest):
            value, bound = row["bare_ratio"], f"at least {SELFTEST_AT_LEAST:g}"
            what = f"selftest, {row['request']} in a row, {row['layers']} layers"
            met = _yes(round(value, 2) >= SELFTEST_AT_LEAST)
            rows.append([what, "bare NIXL WRITE", bound, f"{value:.2f}", met])
    rows += _desc_prep_goals(desc_prep["rows"] if desc_prep else ())
    return _markdown(["measure", "against", "goal", "measured", "met"], rows)


def _desc_prep_goals(measured: Sequence[Any]) -> list[list[str]]:
    """The worst over the patterns, of planning and of planning and making."""
    planned = [_times_faster(row, "plan") for row in measured if row["pattern"] != "random"]
    made = [_times_faster(row, "plan", "make") for row in measured]
    rows = []
    for what, values, goal in (
        ("planning, ids contiguous or recorded, worst", planned, PLAN_AT_LEAST),
        ("planning and making handles, any ids, worst", made, PLAN_AND_MAKE_AT_LEAST),
    ):
        if values:
            worst = min(values)
            bound = f"at least {goal:g} times as fast"
            rows.append([what, "stock", bound, f"{worst:.2f}", _yes(worst >= goal)])
    return rows


def _times_faster(row: Any, *stages: str) -> float:
    stock, ours = (sum(row[side][stage] for stage in stages) for side in ("stock", "ours"))
    return float(stock / ours)


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def _most_layers(selftest: Any) -> int:
    return max(int(row["layers"]) for row in selftest["rows"])


def budget_part(budget: Any) -> str:
    """The stages of a handoff in microseconds."""
    if not budget:
        return _NOTHING
    modes = budget["stages"]
    rows = []
    for title, _, _ in STAGES:
        cells = []
        for stages in modes.values():
            values = stages.get(title, {})
            cells += [f"{values[p]:,.0f}" if p in values else "-" for p in ("p50", "p90")]
        rows.append([title, *cells])
    header = ["stage", *(f"{mode}, {percent}" for mode in modes for percent in ("p50", "p90"))]
    load_text = "{prompt:,} tokens, block {block}, chunks of {chunk:,}, {rate:g} req/s"
    return load_text.format(**budget["settings"]) + " (us):\n\n" + _markdown(header, rows)


def handoff_part(handoff: Any) -> str:
    """From both known to each stage, ours and the stock-like writer."""
    rows = []
    for row in handoff["rows"] if handoff else ():
        cells = [f"{row[f'{k}_{p}_us']:,.0f}" for k in ("kvpush", "python-writer") for p in _P]
        cells.append(f"{row['ratio_p99']:.4f}")
        rows.append([row["main_thread"], row["stage"], *cells])
    titles = ("kvpush p50", "p99", "stock-like writer p50", "p99", "ratio of p99")
    return _markdown(["main thread", "stage", *titles], rows)


_P = ("p50", "p99")


def hooks_part(hooks: Any) -> str:
    """Hook time of the main thread, ours and the stock push connector's."""
    rows = []
    for row in hooks["summary"] if hooks else ():
        cells = [str(row["in_flight"]), row["per"]]
        for kind, digits in (("kvpush", 0), ("stock-push", 0), ("ratio", 2)):
            for statistic in ("mean", "p50", "p99"):
                value = row.get(f"{kind} {statistic}")
                cells.append("-" if value is None else f"{value:,.{digits}f}")
        rows.append(cells)
    kinds = ("kvpush", "stock push", "ratio")
    titles = [f"{kind} {statistic}" for kind in kinds for statistic in ("mean", "p50", "p99")]
    return _markdown(["in flight", "per", *titles], rows)


def selftest_part(selftest: Any) -> str:
    """Large transfers beside a bare NIXL WRITE."""
    rows = [
        [
            f"{row['request']}, {row['layers']} layers",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['descriptors']:,}",
            f"{row['transfer_us'] / 1e3:.1f}",
            f"{(row['bare_prepare_us'] + row['bare_write_us']) / 1e3:.1f}",
            f"{row['bare_ratio']:.2f}",
            f"{row['bare_best_ratio']:.2f}",
        ]
        for row in (selftest["rows"] if selftest else ())
        if row["request"].startswith(_LARGE_REQUEST) and row["bare_ratio"] is not None
    ]
    titles = ("MB", "descriptors", "kvpush, ms", "bare WRITE, ms", "bare / kvpush", "at best")
    return _markdown(["request", *titles], rows)


def desc_prep_part(desc_prep: Any) -> str:
    """From block ids to handles: stock's time divided by ours."""
    rows = []
    for row in desc_prep["rows"] if desc_prep else ():
        in_core = row["stock"]["plan"] / row["ours"]["core"]
        cells = [f"{_times_faster(row, 'plan'):.1f}", f"{in_core:.1f}"]
        cells += [f"{_times_faster(row, *stages):.2f}" for stages in (("make",), ("plan", "make"))]
        counts = [f"{row['descriptors']:,}", f"{row['runs']:,}"]
        rows.append([str(row["regions"]), f"{row['blocks']:,}", row["pattern"], *counts, *cells])
    titles = ("descriptors", "runs", "plan", "plan, in C++", "make", "plan + make")
    return _markdown(["regions", "blocks", "ids", *titles], rows)


def make_part(desc_prep: Any) -> str:
    """What a descriptor costs: ours from runs step by step, as the engine makes it, and posted."""
    rows = []
    for row in desc_prep["rows"] if desc_prep else ():
        if row["runs"] == row["regions"]:
            continue  # one run for each region: nothing that grows
        costs = costs_ns(row)
        cells = ["lists" if row["ours"]["listed"] else "runs"]
        cells += [f"{ns:,.1f}" if ns is not None else "-" for ns in costs.values()]
        stock_ns = 1e3 * row["stock"]["make"] / row["runs"]
        post = costs["post"]
        share = f"{costs['make'] / post:.2%}" if costs["make"] and post else "-"
        ids = [str(row["regions"]), f"{row['blocks']:,}", row["pattern"]]
        rows.append([*ids, *cells, f"{stock_ns:.1f}", share])
    header = ["regions", "blocks", "ids", "from", *COSTS, "stock's make", "make / post"]
    return _markdown(header, rows)


def prepared_part(desc_prep: Any) -> str:
    """What preparing lists takes."""
    if not desc_prep:
        return _NOTHING
    took = desc_prep["prepared"]
    return (
        f"Preparing lists of {took['descriptors']:,} descriptors for a peer, both sides counted: "
        f"{took['seconds']:.2f} s and {took['mb']:,.0f} MB, at most {took['longest'] * 1e3:.1f} "
        f"ms at a time; {took['stock_s']:.2f} s as the stock connector does it."
    )


def charts_part(results: Path) -> str:
    """Both charts over load, for a page in the repository's root."""
    if not results.exists():
        return _NOTHING
    names = (("TTFT", "ttft"), ("TPOT", "tpot"))
    return "\n".join(f"![{title} over load]({IMAGES}/{name}.png)" for title, name in names)


def parts(folder: Path) -> dict[str, str]:
    """The generated parts of the pages, by the name in their markers."""
    found = [load(path) for path in sorted(folder.glob("scenario_*.json"))]
    handoff, hooks = _json(folder / "handoff.json"), _json(folder / "hooks.json")
    selftest, desc_prep = _json(folder / "selftest.json"), _json(folder / "desc_prep.json")
    return {
        "charts": charts_part(folder / "load.json"),
        "stock": stock_part(found),
        "values": values_part(found),
        "limit": limit_part(found),
        "goals": goals_part(found, handoff, hooks, selftest, desc_prep),
        "budget": budget_part(_json(folder / "budget.json")),
        "handoff": handoff_part(handoff),
        "hooks": hooks_part(hooks),
        "selftest": selftest_part(selftest),
        "desc_prep": desc_prep_part(desc_prep),
        "make": make_part(desc_prep),
        "prepared": prepared_part(desc_prep),
    }


def fill(page: str, generated: Mapping[str, str]) -> str:
    """The page with every marked part made anew. ValueError if a marker lacks its end."""
    for name, text in generated.items():
        begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
        if begin not in page:
            continue
        head, _, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not closed:
            raise ValueError(f"{begin} has no {end} behind it")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def main(
    results: Annotated[Path, typer.Option(help="the folder of committed results")] = RESULTS,
) -> None:
    """Write the measured parts of the pages, and the charts."""
    generated = parts(results)
    for path in PAGES:
        before = path.read_text()
        after = fill(before, generated)
        if after != before:
            path.write_text(after)
        print(f"{path}: {'written' if after != before else 'as it was'}")
    if (results / "load.json").exists():
        for path in plot(load(results / "load.json"), IMAGES):
            print(path)


if __name__ == "__main__":
    typer.run(main)
