"""Charts of a replay over load: TTFT and TPOT, a panel per prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.replay.modes import MODES
from bench.replay.results import points
from bench.replay.rounds import Run

CHARTS = (("ttft_p50_ms", "TTFT p50 (ms)", "ttft"), ("tpot_mean_ms", "TPOT mean (ms)", "tpot"))


def _line(runs: Sequence[Run], mode: str, length: int, key: str) -> dict[float, list[float]]:
    """By rate: one value for each round."""
    found: dict[float, list[float]] = {}
    for point in points(runs):
        if point.prompt_tokens != length:
            continue
        values = [r.values[key] for r in runs if (r.point, r.mode) == (point, mode)]
        if values:
            found[point.rate] = values
    return found


def plot(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw both charts; the line is the median over the rounds, the band their range."""
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    lengths = sorted({run.point.prompt_tokens for run in runs})
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, title, name in CHARTS:
        figure, panels = plt.subplots(
            1, len(lengths), figsize=(5 * len(lengths), 4), squeeze=False, layout="constrained"
        )
        for panel, length in zip(panels[0], lengths, strict=True):
            for number, mode in enumerate(MODES):
                line = _line(runs, mode, length, key)
                if not line:
                    continue
                middle = [float(np.median(values)) for values in line.values()]
                low, high = ([f(values) for values in line.values()] for f in (min, max))
                panel.plot(list(line), middle, marker="o", label=mode, color=f"C{number}")
                panel.fill_between(list(line), low, high, alpha=0.15, color=f"C{number}")
            panel.set_title(f"prompts of {length:,} tokens")
            panel.set_xlabel("requests per second")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel(title)
        lines, modes = panels[0][0].get_legend_handles_labels()
        figure.legend(lines, modes, loc="outside lower center", ncols=len(modes))
        path = folder / f"{name}.png"
        # Without metadata the same results make the same file.
        figure.savefig(path, dpi=120, metadata={"Software": None})
        plt.close(figure)
        written.append(path)
    return written
