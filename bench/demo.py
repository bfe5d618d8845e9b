"""The demo: one prefill and one decode engine behind the router, checked against a plain engine.

Run as ``python -m bench.demo``. From nothing to a table: makes a tiny model (once), starts the
servers, sends requests of mixed length at the same time through the router and to the plain
engine, and compares the answers token for token. Exit status 0 only if all are equal.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table
from rich.text import Text

from bench.harness.client import Answer, Client, Request
from bench.harness.equality import Difference, differences
from bench.harness.pair import Pair, PairSpec
from bench.harness.servers import ServerError, fresh_logs, runs_on_cpu
from bench.harness.tiny_model import DEFAULT_CACHE, make_model
from bench.harness.workload import mixed, prompt_tokens

# Left untouched by everything else, so that a first request does not pay for first contact.
_WARM_UP = Request([11, 12, 13, 14], max_tokens=2)

_MIB = 1 << 20

_INTERRUPTED = 128 + signal.SIGINT

console = Console()


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Elapsed(),
        console=console,
    )


def _start(model: Path, logs: Path) -> Pair:
    """Start prefill, decode and plain engines at once, then the router."""
    spec = PairSpec(model, router=True, plain=True)
    with _progress() as progress:
        tasks = {
            engine.name: progress.add_task(f"starting vLLM: {engine.name}", total=1)
            for engine in spec.engines()
        }
        return Pair.start(spec, logs, lambda name: progress.update(tasks[name], completed=1))


async def _send(
    url: str, requests: Sequence[Request], on_answer: Callable[[], None]
) -> list[Answer]:
    """Send all requests to one URL at the same time."""
    async with Client() as client:

        async def one(request: Request) -> Answer:
            answer = await client.complete(url, request)
            on_answer()
            return answer

        return list(await asyncio.gather(*(one(request) for request in requests)))


def _send_shown(what: str, url: str, requests: Sequence[Request]) -> list[Answer]:
    with _progress() as progress:
        task = progress.add_task(what, total=len(requests))
        return asyncio.run(_send(url, requests, lambda: progress.advance(task)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-int(share * 1000) * len(ordered) // 1000))
    return ordered[min(rank, len(ordered)) - 1]


def _times_row(name: str, values: Sequence[float | None]) -> tuple[str, str]:
    known = [value * 1e3 for value in values if value is not None]
    if not known:
        return name, "-"
    return name, f"{percentile(known, 0.5):.1f} / {percentile(known, 0.99):.1f} ms"


def _table(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    found: Sequence[Difference],
    pushed: Mapping[str, int],
) -> Table:
    equal = len(requests) - len(found)
    table = Table(title="kvpush demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    colour = "green" if not found else "red"
    table.add_row("answers equal", f"[{colour}]{equal} of {len(requests)}[/]")
    table.add_row("prompt tokens", f"{prompt_tokens(requests):,}")
    table.add_row("output tokens", f"{sum(len(answer.token_ids) for answer in answers):,}")
    table.add_row(*_times_row("TTFT p50 / p99", [answer.ttft_s for answer in answers]))
    table.add_row(*_times_row("TPOT p50 / p99", [answer.tpot_s for answer in answers]))
    table.add_section()
    table.add_row(
        "transfers", f"{pushed['transfers_sent']} done, {pushed['transfers_failed']} failed"
    )
    table.add_row("pushed", f"{pushed['bytes_written'] / _MIB:.2f} MiB")
    planned, posted = pushed["descriptors_planned"], pushed["descriptors_posted"]
    ratio = f" ({planned / posted:.1f} to 1)" if posted else ""
    table.add_row("descriptors before / after coalescing", f"{planned:,} / {posted:,}{ratio}")
    return table


_COUNTERS = (
    "transfers_sent",
    "transfers_failed",
    "bytes_written",
    "descriptors_planned",
    "descriptors_posted",
)


def _pushed(pair: Pair) -> dict[str, int]:
    counters = pair.counters(pair.producers)
    return {name: counters.get(name, 0) for name in _COUNTERS}


def _run(count: int, longest: int, cache: Path, logs: Path) -> int:
    with console.status("making a tiny model (once)"):
        model = make_model(cache=cache)
    console.print(f"model: {model}")
    console.print(f"logs:  {logs}")
    if runs_on_cpu():
        console.print("[dim]vLLM runs on the CPU here; three servers take about a minute[/]")
    requests = mixed(count, longest=longest)
    with _start(model, logs) as pair:
        assert pair.router is not None
        assert pair.plain is not None
        asyncio.run(_send(pair.router.url, [_WARM_UP], lambda: None))
        pair.wait_at_rest()
        before = _pushed(pair)
        answers = _send_shown("through the pair", pair.router.url, requests)
        expected = _send_shown("on one plain engine", pair.plain.url, requests)
        with console.status("waiting until both engines are at rest"):
            pair.wait_at_rest()
        pushed = {name: value - before[name] for name, value in _pushed(pair).items()}
    found = differences(requests, expected, answers)
    console.print(_table(requests, answers, found, pushed))
    for difference in found[:10]:
        console.print(Text(str(difference), style="red"))
    if found:
        return 1
    if pushed["transfers_sent"] < len(requests):
        # Equal answers prove nothing if the decode engine computed the prompts itself.
        console.print(f"[red]only {pushed['transfers_sent']} of {len(requests)} were pushed[/]")
        return 1
    return 0


def main(
    count: Annotated[int, typer.Option(help="requests")] = 40,
    longest: Annotated[int, typer.Option(help="tokens of the longest prompt")] = 1500,
    cache: Annotated[
        Path, typer.Option(help="where the model and the logs are kept")
    ] = DEFAULT_CACHE,
) -> None:
    """Serve requests through a prefill/decode pair and check every token of every answer."""
    begin = time.monotonic()
    logs = fresh_logs(cache / "demo-logs")
    try:
        status = _run(count, longest, cache, logs)
    except (ServerError, AssertionError) as error:
        console.print(Text(str(error), style="red"))
        status = 1
    except KeyboardInterrupt:
        console.print("interrupted; every server was stopped")
        status = _INTERRUPTED
    console.print(f"[dim]{time.monotonic() - begin:.0f} s; the servers' logs: {logs}[/]")
    raise typer.Exit(status)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
