#!/usr/bin/env python3
"""Charts a sweep: TTFT or TPOT over request rate, a panel per prompt and answer length.

``python bench/sweep/plot.py --results-dir results --metric ttft``: medians over the iterations,
a line per mode, and where the iterations differ the range they cover.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

METRICS = ("ttft", "tpot")
# In the legend's order; a mode has one colour in all charts, whichever others are there.
MODES = ("stock-pull", "stock-push", "kvpush-pull", "kvpush-push")
STATISTICS = ("mean", "median", "p90", "p99")

_NAME = re.compile(r"(?P<mode>.+)_qps(?P<qps>[\d.]+)_in(?P<in>\d+)_out(?P<out>\d+)_iter\d+\.json")

Lengths: TypeAlias = tuple[int, int]
"""Tokens of each prompt and each answer."""
Lines: TypeAlias = Mapping[str, Mapping[float, list[float]]]
"""By mode and requests per second: one value for each iteration."""


def read(folder: Path, metric: str, statistic: str) -> dict[Lengths, Lines]:
    """All results of a sweep. ValueError naming the file that can't be used."""
    panels: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    key = f"{statistic}_{metric}_ms"
    for path in sorted(folder.glob("*.json")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            value = float(json.loads(path.read_text())[key])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has no usable {key}: {error!r}") from error
        lengths = int(name["in"]), int(name["out"])
        panels[lengths][name["mode"]][float(name["qps"])].append(value)
    return dict(sorted(panels.items()))


def in_order(panels: Mapping[Lengths, Lines]) -> dict[str, str]:
    """The modes that have results, in the legend's order, each with its colour."""
    found = {mode for lines in panels.values() for mode in lines}
    known = [*MODES, *sorted(found - set(MODES))]
    return {mode: f"C{number}" for number, mode in enumerate(known) if mode in found}


def draw(panels: Mapping[Lengths, Lines], title: str, path: Path) -> None:
    """One figure with a panel per pair of lengths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    colours = in_order(panels)
    for axis, ((prompt, answer), lines) in zip(axes[0], panels.items(), strict=True):
        for mode, colour in colours.items():
            rates = sorted(lines.get(mode, {}))
            if not rates:
                continue
            found = [lines[mode][rate] for rate in rates]
            middle = [statistics.median(values) for values in found]
            axis.plot(rates, middle, marker="o", label=mode, color=colour)
            low, high = [min(v) for v in found], [max(v) for v in found]
            axis.fill_between(rates, low, high, color=colour, alpha=0.15)
        axis.set_title(f"{prompt:,} tokens in, {answer:,} out")
        axis.set_xlabel("requests per second")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"{title} (ms)")
    # A panel of a sweep that is not complete may lack a mode.
    shown = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    axes[0][0].legend([shown[mode] for mode in colours], list(colours))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(
    metric: Annotated[str, typer.Option(help="ttft or tpot")] = "ttft",
    results_dir: Annotated[Path, typer.Option(help="what run_sweep.sh wrote")] = Path("results"),
    statistic: Annotated[str, typer.Option(help=", ".join(STATISTICS))] = "median",
    out: Annotated[
        Path | None, typer.Option(help="the chart's file; by default <results-dir>/<metric>.png")
    ] = None,
) -> None:
    """Draw one chart of a sweep's results."""
    if metric not in METRICS:
        raise typer.BadParameter(f"--metric is {metric!r}: it must be one of {', '.join(METRICS)}")
    if statistic not in STATISTICS:
        raise typer.BadParameter(
            f"--statistic is {statistic!r}: it must be one of {', '.join(STATISTICS)}"
        )
    try:
        panels = read(results_dir, metric, statistic)
    except ValueError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not panels:
        print(f"plot.py: {results_dir} has no results of a sweep", file=sys.stderr)
        raise typer.Exit(1)
    out = out or results_dir / f"{metric}.png"
    draw(panels, f"{metric.upper()}, {statistic}", out)
    print(out)


if __name__ == "__main__":
    typer.run(main)
