"""How long a ready request waits before its KV moves: the native thread beside a Python writer.

``python -m bench.handoff`` runs two processes over host memory and real NIXL. The prefill side's
main thread hands over a request whose blocks on the decode side it knows, and then either sleeps or
computes in pure Python, as an engine's main thread does between two steps. From that moment on
it is measured until the first call to post begins, until the last one has returned, and until the
last byte is there, which the decode side watches. Compared are kvpush's engine and a writer that
works as the stock push connector's does: a Python thread that waits on an event and posts with
NIXL's Python API from prepared descriptor lists.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvpush._nixl import find_library, prepare_environment
from kvpush.selftest.bare import load_bindings
from kvpush.selftest.cases import POISON, Case, Geometry
from kvpush.selftest.child import Child, serve
from kvpush.selftest.rank import Rank

console = Console(stderr=True)

KINDS = ("kvpush", "python-writer")
MAINS = ("sleeping", "spinning")
# From the moment both sides' blocks are known to: the first call to post, the last one's return,
# the last byte's arrival.
STAGES = ("begun", "posted", "arrived")

_LIMIT_S = 30.0
# Longer than the slowest hand-over seen (about 50 ms), so that all of it happens while it lasts.
_HOLD_S = 0.1
_SETTLE_S = 0.003
# Between two looks of the watcher: with no sleep it would keep a core from those that are watched.
_WATCH_S = 20e-6
_FINGERPRINT = b"kvpush self-test"


class HandoffRank(Rank):
    """A self-test process with a writer thread of the other kind beside its engine."""

    def open_writer(self) -> bytes:
        """A NIXL agent over the same memory, through NIXL's Python API."""
        # Of the same distribution as the library that kvpush has opened.
        bindings = load_bindings(self._library)
        if bindings is None:
            raise RuntimeError(f"NIXL's Python package beside {self._library} can't be imported")
        api = importlib.import_module(bindings.__name__.replace("_bindings", "_api"))
        name = f"writer-{self._role}-{secrets.token_hex(8)}"
        self._nixl: Any = api.nixl_agent(name, api.nixl_agent_config(backends=[self._backend]))
        whole = [(self._address, self._geometry.total_bytes, 0, "")]
        self._nixl.register_memory(self._nixl.get_reg_descs(whole, "DRAM"))
        return bytes(self._nixl.get_agent_metadata())

    def meet_writer(self, metadata: bytes, address: int) -> None:
        """Prepare the lists of all blocks of both sides, and start the thread."""
        peer = self._nixl.add_remote_agent(metadata)
        peer = peer.decode() if isinstance(peer, bytes) else peer
        self._local = self._nixl.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._all_blocks(self._address), "DRAM"
        )
        self._remote = self._nixl.prep_xfer_dlist(peer, self._all_blocks(address), "DRAM")
        self._inbox: queue.Queue[tuple[list[int], list[int]]] = queue.Queue()
        self._wake = threading.Event()
        self._posted: queue.Queue[tuple[int, int]] = queue.Queue()
        threading.Thread(target=self._write_loop, name="writer", daemon=True).start()

    def address(self) -> int:
        """Where the memory begins."""
        return int(self._address)

    def _all_blocks(self, address: int) -> list[tuple[int, int, int]]:
        size = self._geometry.block_bytes
        count = self._geometry.layers * self._geometry.pool_blocks
        return [(address + number * size, size, 0) for number in range(count)]

    def _write_loop(self) -> None:
        handles = []
        while True:
            self._wake.wait()
            self._wake.clear()
            while True:
                try:
                    local_ids, remote_ids = self._inbox.get_nowait()
                except queue.Empty:
                    break
                begun = time.monotonic_ns()
                handle = self._nixl.make_prepped_xfer(
                    "WRITE",
                    self._local,
                    self._descriptors(local_ids),
                    self._remote,
                    self._descriptors(remote_ids),
                    notif_msg=b"written",
                )
                self._nixl.transfer(handle)
                self._posted.put((begun, time.monotonic_ns()))
                handles.append(handle)
            for handle in [h for h in handles if self._nixl.check_xfer_state(h) == "DONE"]:
                self._nixl.release_xfer_handle(handle)
                handles.remove(handle)

    def _descriptors(self, ids: Sequence[int]) -> Any:
        layers = np.arange(self._geometry.layers)[:, None] * self._geometry.pool_blocks
        return (layers + np.asarray(ids)[None, :]).ravel()

    def grant_and_wait(self, ticket: int, case: Case) -> None:
        """Grant, and wait for the producer's answer: from then on only the offer is missing."""
        engine = self._running()
        before = engine.counters()["messages_received"]
        engine.grant(
            ticket,
            f"handoff-{ticket}",
            _FINGERPRINT,
            secrets.randbits(63) | 1,
            self._sessions,
            (0, case.tokens),
            [(0, case.consumer_ids(self._geometry))],
            _LIMIT_S,
        )
        until = time.monotonic() + _LIMIT_S
        while engine.counters()["messages_received"] == before:
            if time.monotonic() > until:
                raise TimeoutError("the grant was not answered")
            time.sleep(_SETTLE_S)

    def hand_over(self, kind: str, main: str, ticket: int, case: Case) -> tuple[int, int, int]:
        """Hand over one request, then sleep or spin.

        Returns when it was known, when posting began and when it had ended, in ns.
        """
        ids = case.producer_ids(self._geometry)
        known = time.monotonic_ns()
        if kind == "kvpush":
            self._running().offer(
                ticket, f"handoff-{ticket}", _FINGERPRINT, [(0, ids)], case.tokens, True
            )
        else:
            self._inbox.put((ids, case.consumer_ids(self._geometry)))
            self._wake.set()
        if main == "sleeping":
            time.sleep(_HOLD_S)
        else:
            _spin(known + int(_HOLD_S * 1e9))
        if kind == "kvpush":
            event = self._await(ticket, "sent", _LIMIT_S)
            return known, event.first_post_ns, event.last_post_ns
        self._wake.set()  # as each step of an engine does: ended transfers are released
        return known, *self._posted.get(timeout=_LIMIT_S)

    def watch(self, case: Case) -> int:
        """Wait for the last byte of the request's last block. Returns when it came, in ns."""
        geometry = self._geometry
        block = (geometry.layers - 1) * geometry.pool_blocks + case.consumer_ids(geometry)[-1]
        place = (block + 1) * geometry.block_bytes - 1
        memory, limit = self._memory, time.monotonic_ns() + int(_LIMIT_S * 1e9)
        while memory[place] == POISON:
            if time.monotonic_ns() > limit:
                raise TimeoutError("nothing arrived")
            time.sleep(_WATCH_S)
        return time.monotonic_ns()

    def clean(self, case: Case) -> None:
        """Make the watched byte ready, and forget the engine's events."""
        geometry = self._geometry
        block = (geometry.layers - 1) * geometry.pool_blocks + case.consumer_ids(geometry)[-1]
        self._memory[(block + 1) * geometry.block_bytes - 1] = POISON
        self._running().poll()

    def mark(self, case: Case) -> None:
        """Put something else than the poison where the watched byte comes from."""
        geometry = self._geometry
        block = (geometry.layers - 1) * geometry.pool_blocks + case.producer_ids(geometry)[-1]
        self._memory[(block + 1) * geometry.block_bytes - 1] = POISON ^ 0xFF


def _spin(until_ns: int) -> None:
    count = 0
    while time.monotonic_ns() < until_ns:
        count += 1


def child_main(connection: Connection, *arguments: Any) -> None:
    """Entry of a child process."""
    prepare_environment()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # its Python package logs to stdout
    serve(connection, HandoffRank(*arguments))


class Bench:
    """Both processes, ready to hand over."""

    def __init__(self, geometry: Geometry, case: Case, producer: Child, consumer: Child) -> None:
        self._case = case
        self._producer = producer
        self._consumer = consumer
        self._ticket = 0
        info = producer.call("open", _LIMIT_S, geometry=geometry, seed=1)
        consumer.call("open", _LIMIT_S, geometry=geometry, seed=2)
        consumer.call("connect", _LIMIT_S, producer=info, limit_s=_LIMIT_S)
        producer.call("open_writer", _LIMIT_S)
        theirs = consumer.call("open_writer", _LIMIT_S)
        address = consumer.call("address", _LIMIT_S)
        producer.call("meet_writer", _LIMIT_S, metadata=theirs, address=address)
        producer.call("mark", _LIMIT_S, case=case)

    def once(self, kind: str, main: str) -> dict[str, float]:
        """Microseconds from known to each stage."""
        self._ticket += 1
        case, ticket = self._case, self._ticket
        self._consumer.call("clean", _LIMIT_S, case=case)
        if kind == "kvpush":
            self._consumer.call("grant_and_wait", _LIMIT_S, ticket=ticket, case=case)
        self._consumer.send("watch", case=case)
        time.sleep(_SETTLE_S)  # the watcher runs before anything is handed over
        self._producer.send("hand_over", kind=kind, main=main, ticket=ticket, case=case)
        arrived = self._consumer.receive("watch", _LIMIT_S)
        known, begun, posted = self._producer.receive("hand_over", _LIMIT_S)
        return {
            "begun": (begun - known) / 1e3,
            "posted": (posted - known) / 1e3,
            "arrived": (arrived - known) / 1e3,
        }


Samples: TypeAlias = dict[str, dict[str, list[dict[str, float]]]]
"""By kind and by what the main thread does."""


def run(geometry: Geometry, case: Case, count: int) -> Samples:
    """Microseconds; the combinations take turns."""
    library = str(find_library())
    found: Samples = {kind: {main: [] for main in MAINS} for kind in KINDS}
    with (
        Child("producer", child_main, "producer", library, "UCX", "") as producer,
        Child("consumer", child_main, "consumer", library, "UCX", "") as consumer,
        console.status("handing over") as status,
    ):
        bench = Bench(geometry, case, producer, consumer)
        for kind in KINDS:
            for main in MAINS:
                bench.once(kind, main)  # first contact of each path
        for number in range(count):
            status.update(f"handing over, {number + 1} of {count}")
            for main in MAINS:
                for kind in KINDS:
                    found[kind][main].append(bench.once(kind, main))
    return found


def summarize(found: Samples) -> list[dict[str, Any]]:
    """Percentiles in microseconds, and ours as a ratio."""
    rows = []
    for main in MAINS:
        for stage in STAGES:
            row: dict[str, Any] = {"main_thread": main, "stage": stage}
            for percent in (50, 99):
                values = {
                    kind: float(np.percentile([s[stage] for s in found[kind][main]], percent))
                    for kind in KINDS
                }
                row |= {f"{kind}_p{percent}_us": value for kind, value in values.items()}
                row[f"ratio_p{percent}"] = values["kvpush"] / values["python-writer"]
            rows.append(row)
    return rows


def main(
    layers: Annotated[int, typer.Option(help="layers of the KV cache")] = 64,
    blocks: Annotated[int, typer.Option(help="blocks of the request, scattered")] = 2,
    count: Annotated[int, typer.Option(help="hand-overs of each kind")] = 100,
    save: Annotated[
        Path | None, typer.Option(help="a file for the rows, e.g. bench/results/handoff.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure how long a ready request waits before its KV has moved."""
    geometry = Geometry(layers=layers, pool_blocks=max(64, 4 * blocks), tokens_per_block=32)
    case = Case(
        name="handoff",
        tokens=blocks * geometry.tokens_per_block,
        producer_order="random",
        consumer_order="random",
    )
    rows = summarize(run(geometry, case, count))
    found = {"layers": layers, "blocks": blocks, "count": count, "rows": rows}
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(found, indent=1) + "\n")
    if as_json:
        print(json.dumps(found))
        return
    table = Table(title=f"From known to each stage, {layers * blocks} descriptors (us)")
    titles = ("kvpush p50", "p99", "Python writer p50", "p99", "ratio p50", "p99")
    for title in ("main thread", "stage", *titles):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["main_thread"],
            row["stage"],
            *(f"{row[f'{kind}_p{p}_us']:,.0f}" for kind in KINDS for p in (50, 99)),
            *(f"{row[f'ratio_p{p}']:.4f}" for p in (50, 99)),
        )
    Console(width=max(110, console.width)).print(table)


if __name__ == "__main__":
    typer.run(main)
