"""``python -m bench.replay``: replay arrivals in several modes; tables and charts of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.engines.pair import Mode
from bench.engines.settings import ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE
from bench.replay.budget import budget_table, measure_budget, save_budget
from bench.replay.chart import plot
from bench.replay.load import Point
from bench.replay.modes import MODES, mode_named
from bench.replay.results import load, save_all, save_run
from bench.replay.rounds import Engines, Run, replay
from bench.replay.tables import limit_table, ratio_table, value_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)

RESULTS = Path("bench/results")
IMAGES = Path("docs/images")

# The KV cache holds at least this, or as many prompts as are ever in flight.
_LEAST_POOL_TOKENS = 131_072
_PROMPTS_IN_POOL = 16

# Tables are this wide where the output is no terminal.
_TABLE_WIDTH = 150

# What every command that replays takes.
_Count = Annotated[int, typer.Option(help="requests per run")]
_Rounds = Annotated[int, typer.Option(help="times each run is made")]
_Block = Annotated[int, typer.Option(help="tokens per KV cache block")]
_Chunk = Annotated[int, typer.Option(help="most tokens of one step")]
_Extra = Annotated[str, typer.Option(help="kvpush's kv_connector_extra_config, JSON")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise typer.BadParameter(f"{option} is {text!r}: positive numbers, commas between")
    return found


def _modes(names: str, extra: str) -> list[Mode]:
    try:
        return [mode_named(name, json.loads(extra)) for name in names.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _engines(block: int, chunk: int, pool_tokens: int, lengths: Sequence[int]) -> Engines:
    pool = pool_tokens or max(_LEAST_POOL_TOKENS, _PROMPTS_IN_POOL * max(lengths))
    return Engines(block, pool // block, chunk)


def _show(runs: Sequence[Run]) -> None:
    shown = Console(width=max(_TABLE_WIDTH, console.width))
    shown.print(value_table(runs))
    shown.print(ratio_table(runs))
    if any("limit_ms" in run.values for run in runs):
        shown.print(limit_table(runs))


def _check_stamps(runs: Sequence[Run]) -> None:
    """The reason of a stamped replay: no wrong byte, and some were looked at."""
    wrong = sum(v for run in runs for k, v in run.values.items() if k.endswith("wrong_tokens"))
    idle = [run.mode for run in runs if not run.values.get("decode_tokens_checked")]
    if wrong or idle:
        console.print(f"[red]{wrong:.0f} wrong stamps; nothing was checked in {idle}[/]")
        raise typer.Exit(1)
    checked = sum(run.values["decode_tokens_checked"] for run in runs)
    console.print(f"stamps of {checked:,.0f} tokens on D, none wrong")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    modes: Annotated[str, typer.Option(help=f"of {','.join(MODES)}")] = ",".join(MODES),
    rate: Annotated[str, typer.Option(help="requests per second, commas between")] = "4",
    prompt: Annotated[str, typer.Option(help="prompt tokens, commas between")] = "8000",
    output_tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 100,
    count: _Count = 40,
    rounds: _Rounds = 3,
    block: _Block = 128,
    chunk: _Chunk = 32768,
    pool_tokens: Annotated[
        int, typer.Option(help="tokens the KV cache holds; 0: by the longest prompt")
    ] = 0,
    stamped: Annotated[
        bool, typer.Option("--stamped", help="check the KV in each step; no limit is measured")
    ] = False,
    stamp_all: Annotated[
        bool, typer.Option("--stamp-all", help="the same, every block in every step (slow)")
    ] = False,
    extra: _Extra = "{}",
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("build/bench/replay"),
    save: Annotated[
        Path | None, typer.Option(help="one file with all runs, e.g. bench/results/load.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Replay Poisson arrivals in several modes and compare."""
    if context.invoked_subcommand is not None:
        return
    settings = {key: str(value) for key, value in context.params.items() if value is not None}
    lengths = [int(number) for number in _numbers("--prompt", prompt)]
    loads = [
        Point(number, length, output_tokens, count)
        for length in lengths
        for number in _numbers("--rate", rate)
    ]
    engines = _engines(block, chunk, pool_tokens, lengths)
    chosen = _modes(modes, extra)
    logs = fresh_logs(DEFAULT_CACHE / "bench-logs")
    console.print(f"[dim]the engines' logs: {logs}[/]")
    model = ModelSettings(stamp="all" if stamp_all else "sampled" if stamped else "")
    runs = []
    for run in replay(chosen, loads, engines, model, rounds, logs, console):
        save_run(run, out)
        runs.append(run)
    _finish(runs, settings, out, save, as_json=as_json)
    if model.stamp:
        _check_stamps(runs)


def _finish(
    runs: Sequence[Run], settings: dict[str, Any], out: Path, save: Path | None, *, as_json: bool
) -> None:
    save_all(runs, settings, save or out / "all.json")
    plot(runs, out)
    console.print(f"[dim]results and charts: {save or out / 'all.json'}, {out}[/]")
    if as_json:
        print(json.dumps([asdict(run) for run in runs]))
    else:
        _show(runs)


@app.command()
def budget(
    modes: Annotated[str, typer.Option(help="push modes")] = "kvpush-push,stock-push",
    rate: Annotated[float, typer.Option(help="requests per second")] = 4.0,
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 8000,
    count: _Count = 40,
    rounds: _Rounds = 3,
    block: _Block = 128,
    chunk: _Chunk = 32768,
    extra: _Extra = "{}",
    save: Annotated[
        Path | None, typer.Option(help="a file for percentiles, e.g. bench/results/budget.json")
    ] = None,
) -> None:
    """Show where the time of a handoff goes, stage by stage."""
    engines = _engines(block, chunk, 0, [prompt])
    found = measure_budget(
        _modes(modes, extra),
        Point(rate, prompt, 100, count),
        engines,
        ModelSettings(),
        rounds,
        fresh_logs(DEFAULT_CACHE / "bench-logs"),
        console,
    )
    if save is not None:
        settings = {"prompt": prompt, "block": block, "chunk": min(chunk, prompt), "rate": rate}
        save_budget(found, settings, save)
    Console(width=max(_TABLE_WIDTH, console.width)).print(budget_table(found))


@app.command()
def show(files: Annotated[list[Path], typer.Argument(help="files of --save, or all.json")]) -> None:
    """Print the tables of results that are there."""
    for path in files:
        _show(load(path))


@app.command()
def chart(
    file: Annotated[Path, typer.Argument(help="a file of --save")] = RESULTS / "load.json",
    out: Annotated[Path, typer.Option(help="folder for the images")] = IMAGES,
) -> None:
    """Draw TTFT and TPOT over load."""
    for path in plot(load(file), out):
        print(path)


if __name__ == "__main__":
    app()
