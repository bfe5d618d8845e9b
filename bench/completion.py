"""When a bare NIXL WRITE ends whose target does not look: ``python -m bench.completion``.

Two processes, no kvpush. The target begins to poll only after a while; the writer polls all the
time. If the handle ends with the copy, the delay does not show.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.replay.limit import BareSide, CacheShape, bare_pair

console = Console(stderr=True)

_LIMIT_S = 30.0
_SHAPE = CacheShape(layers=64, num_blocks=64, block_bytes=16384)


class LateSide(BareSide):
    """A side that can be late to look."""

    def look_late(self, delay_s: float) -> None:
        """Do not poll for a while, then wait for the WRITE."""
        time.sleep(delay_s)
        self.await_write()


def measure(delays_ms: list[float], repetitions: int) -> dict[float, float]:
    """Medians in milliseconds, from preparing the WRITE to its end on the writer, by delay."""
    ids = (list(range(0, 30, 2)), list(range(30, 15, -1)))
    found: dict[float, list[float]] = {delay: [] for delay in delays_ms}
    with bare_pair(_SHAPE, LateSide, _LIMIT_S) as (writer, target, address):
        for number in range(repetitions + 1):
            for delay in delays_ms:
                target.send("look_late", delay_s=delay / 1e3)
                took_ms, _ = writer.call("write", _LIMIT_S, address=address, ids=ids)
                target.receive("look_late", _LIMIT_S)
                if number > 0:
                    found[delay].append(took_ms)
    return {delay: statistics.median(times) for delay, times in found.items()}


def main(
    delays_ms: Annotated[str, typer.Option(help="commas between")] = "0,20,100,250",
    repetitions: Annotated[int, typer.Option(help="of each delay")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show how long a WRITE takes whose target begins to look after a while."""
    found = measure([float(text) for text in delays_ms.split(",")], repetitions)
    if as_json:
        print(json.dumps({str(delay): took for delay, took in found.items()}))
        return
    table = Table(title="a bare NIXL WRITE of 15 MB, 960 descriptors (ms)")
    table.add_column("the target looks after", justify="right")
    table.add_column("the handle ends after", justify="right")
    for delay, took_ms in found.items():
        table.add_row(f"{delay:g}", f"{took_ms:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
