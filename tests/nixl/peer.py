"""One rank in a process of its own, led by the test.

`Peer` is what the test holds; `Host` is the object in the process: KV memory, an engine over it,
and the events it has seen. The test itself loads no NIXL, so it can kill, stop and restart ranks.
All waits have limits.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpush import _core
from kvpush._nixl import find_library, prepare_environment
from kvpush.selftest.child import Child, serve

LIMIT_S = 30.0
"""How long anything that should happen soon may take, on a machine that does much else."""

POISON = 0xA5
FINGERPRINT = b"fingerprint 0001"
TABLES = (
    "grants_live",
    "offers_live",
    "served_live",
    "handles_in_flight",
    "posts_queued",
    "fences_waiting",
)
ENDS = ("received", "receive_failed", "receive_revoked", "sent", "send_failed")

multiprocessing.set_forkserver_preload(["numpy", "kvpush._core", "tests.nixl.peer"])

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """KV memory of one rank. `order` is that within a block: HND (head, token) or NHD."""

    layers: int = 4
    blocks: int = 256
    tokens_per_block: int = 16
    heads: int = 2
    first_head: int = 0
    total_heads: int = 2
    element_bytes: int = 64
    order: str = "HND"
    dtype: str = "uint8"
    replicated: bool = False
    layer_name: str = "layer"

    @property
    def shape(self) -> tuple[int, ...]:
        inner = (self.heads, self.tokens_per_block)
        if self.order == "NHD":
            inner = inner[::-1]
        return (self.layers, self.blocks, 2, *inner, self.element_bytes)

    def logical(self, memory: Bytes) -> Bytes:
        """The memory as [layer, block, K or V, head, token, byte], whatever its order."""
        return memory if self.order == "HND" else memory.transpose(0, 1, 2, 4, 3, 5)

    def regions(self, memory: Bytes) -> list[_core.Region]:
        view = self.logical(memory)
        _, block, component, head, token, _ = view.strides
        return [
            _core.Region(
                layer=f"{self.layer_name}.{layer}",
                dtype=self.dtype,
                base=memory[layer].ctypes.data,
                block_stride=block,
                num_blocks=self.blocks,
                tokens_per_block=self.tokens_per_block,
                tokens_per_page=self.tokens_per_block,
                page_stride=block,
                token_stride=token,
                components=2,
                component_stride=component,
                first_head=self.first_head,
                heads=self.heads,
                total_heads=self.total_heads,
                head_stride=head,
                element_bytes=self.element_bytes,
                replicated=self.replicated,
            )
            for layer in range(self.layers)
        ]

    def pattern(self, seed: int, tokens: int) -> Bytes:
        """The KV of one prompt on this rank: [layer, K or V, head, token, byte].

        All ranks draw the same numbers for all heads and keep their own. A longer prompt of the
        same seed begins like a shorter one.
        """
        shape = (tokens, self.layers, 2, self.total_heads, self.element_bytes)
        drawn = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        own = drawn[:, :, :, self.first_head : self.first_head + self.heads]
        return own.transpose(1, 2, 3, 0, 4)


@dataclass(frozen=True)
class Event:
    """A copy of `_core.Event` that goes through a pipe."""

    kind: str
    ticket: int
    reason: str
    detail: str
    session: int
    bytes: int
    descriptors_before: int
    descriptors: int


class Host:
    """Lives in the child; every public method is a command of the test."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._events: list[Event] = []
        self._stop_spinning: threading.Event | None = None

    def open(self, layout: Layout, config: dict[str, Any], env: dict[str, str]) -> bytes:
        os.environ.update(env)
        prepare_environment(config.get("peer_timeout_s", 10.0))
        self._layout = layout
        size = int(np.prod(layout.shape))
        self._map = mmap.mmap(-1, size)
        self._memory: Bytes = np.frombuffer(self._map, np.uint8).reshape(layout.shape)
        self._view = layout.logical(self._memory)
        self._memory[...] = POISON
        values: dict[str, Any] = {
            "session": secrets.randbits(63) | 1,
            "engine_id": f"engine-{os.getpid()}",
            "nixl_library": str(find_library()),
        } | config
        values.setdefault("agent_name", f"{values['engine_id']}-{values['session']:x}")
        self._session: int = values["session"]
        self._engine = _core.Engine(_core.EngineConfig(**values))
        self._events = []
        memory = [(self._memory.ctypes.data, size, "host", 0)]
        self._engine.start(layout.regions(self._memory), memory)
        blob: bytes = self._engine.peer_info()
        return blob

    def shutdown(self, drain_s: float) -> dict[str, int]:
        self._engine.shutdown(drain_s)
        counters: dict[str, int] = self._engine.counters()
        return counters

    def pid(self) -> int:
        return os.getpid()

    def network(self, step: str, arguments: list[Any]) -> None:
        """Do something to this process's network; see tests.nixl.network."""
        from tests.nixl import network

        getattr(network, step)(*arguments)

    # --- the engine's methods ---

    def connect(
        self, producers: list[bytes], consumers: list[bytes], index: int, timeout_s: float
    ) -> list[int]:
        sessions: list[int] = self._engine.connect(producers, consumers, index, timeout_s)
        return sessions

    def grant(self, **arguments: Any) -> None:
        self._engine.grant(**arguments)

    def grant_many(self, grants: list[dict[str, Any]]) -> None:
        for grant in grants:
            self._engine.grant(**grant)

    def offer(self, **arguments: Any) -> None:
        self._engine.offer(**arguments)

    def cost_of_offer(self, limit_s: float, **arguments: Any) -> tuple[float, float]:
        """CPU seconds: of the thread that offers and polls once; of all until the offer ended."""
        whole, thread = time.process_time(), time.thread_time()
        self._engine.offer(**arguments)
        spent = time.thread_time() - thread
        until = time.monotonic() + limit_s
        while self.counters()["transfers_sent"] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        thread = time.thread_time()
        self._poll()
        spent += time.thread_time() - thread
        return spent, time.process_time() - whole

    def offer_all(self, offers: list[tuple[Any, ...]]) -> int:
        return int(self._engine.offer_all(offers))

    def fences_passed(self) -> int:
        return int(self._engine.fences_passed())

    def rewind(self, tickets: list[int], timeout_s: float) -> list[int]:
        return list(self._engine.rewind(tickets, timeout_s))

    def offer_many(self, offers: list[dict[str, Any]]) -> None:
        for offer in offers:
            self._engine.offer(**offer)

    def revoke(self, ticket: int) -> None:
        self._engine.revoke(ticket)

    def withdraw(self, **arguments: Any) -> None:
        self._engine.withdraw(**arguments)

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self._engine.counters()
        return counters

    # --- events ---

    def _poll(self) -> None:
        for event in self._engine.poll():
            plain = Event(
                event.kind,
                event.ticket,
                event.reason,
                event.detail,
                event.session,
                event.bytes,
                event.descriptors_before,
                event.descriptors,
            )
            if plain.kind in ENDS and any(
                e.ticket == plain.ticket and e.kind in ENDS for e in self._events
            ):
                raise AssertionError(f"two events for ticket {plain.ticket}: {plain}")
            self._events.append(plain)

    def events(self) -> list[Event]:
        self._poll()
        return self._events

    def forget_events(self) -> None:
        self._events = []

    def wait(self, tickets: list[int], limit_s: float) -> list[Event]:
        """The one event of each ticket."""
        until = time.monotonic() + limit_s
        missing = set(tickets)
        found: dict[int, Event] = {}
        while True:
            self._poll()
            found |= {e.ticket: e for e in self._events if e.kind in ENDS and e.ticket in missing}
            if missing == found.keys():
                return [found[ticket] for ticket in tickets]
            if time.monotonic() > until:
                left = sorted(missing - found.keys())
                raise TimeoutError(f"no event of {left[:5]} in {limit_s} s: {self.counters()}")
            time.sleep(0.0005)

    def wait_peer_lost(self, session: int, limit_s: float) -> Event:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self._poll()
            for event in self._events:
                if event.kind == "peer_lost" and event.session == session:
                    return event
            time.sleep(0.001)
        raise TimeoutError(f"peer not lost in {limit_s} s: {self.counters()}")

    def wait_counters(self, least: dict[str, int], limit_s: float) -> dict[str, int]:
        """Wait until each of these counters has at least this value."""
        until = time.monotonic() + limit_s
        while True:
            counters = self.counters()
            if all(counters[name] >= value for name, value in least.items()):
                return counters
            if time.monotonic() > until:
                raise TimeoutError(f"{least} not reached in {limit_s} s: {counters}")
            time.sleep(0.0002)

    def wait_idle(self, limit_s: float) -> dict[str, int]:
        """Wait until all tables are empty."""
        until = time.monotonic() + limit_s
        while True:
            self._poll()
            counters = self.counters()
            if not any(counters[name] for name in TABLES):
                return counters
            if time.monotonic() > until:
                raise TimeoutError(f"tables not empty after {limit_s} s: {counters}")
            time.sleep(0.002)

    def resources(self) -> dict[str, int]:
        """What the process holds now, and the engine's tables."""
        gc.collect()
        counters = self.counters()
        status = Path("/proc/self/status").read_text(encoding="ascii")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "resident_bytes": int(fields["VmRSS"].split()[0]) * 1024,
            "threads": int(fields["Threads"]),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        } | {name: counters[name] for name in (*TABLES, "peers")}

    # --- memory ---

    def fill(self, seed: int, ids: list[int], tokens: int, first_token: int = 0) -> None:
        """Put the KV of a prompt into its blocks."""
        per_block = self._layout.tokens_per_block
        kv = self._layout.pattern(seed, tokens)
        for index, block in enumerate(ids):
            begin, end = index * per_block, min((index + 1) * per_block, tokens)
            if end <= first_token:
                continue
            self._view[:, block, :, :, : end - begin] = kv[:, :, :, begin:end]

    def poison(self, ids: list[int] | None = None) -> None:
        self._view[:, slice(None) if ids is None else ids] = POISON

    def wrong_bytes(self, wanted: list[tuple[int, list[int], int, int]]) -> int:
        """Bytes of the WHOLE memory that are not as they should be.

        `wanted` lists (seed, ids of the prompt's blocks, first token, end token); whatever they
        leave out must be poison still. A block id of -1 is not held.
        """
        expected = np.full_like(self._memory, POISON)
        view = self._layout.logical(expected)
        per_block = self._layout.tokens_per_block
        for seed, ids, first, end in wanted:
            kv = self._layout.pattern(seed, end)
            for index, block in enumerate(ids):
                low, high = max(index * per_block, first), min((index + 1) * per_block, end)
                if block < 0 or low >= high:
                    continue
                place = slice(low - index * per_block, high - index * per_block)
                view[:, block, :, :, place] = kv[:, :, :, low:high]
        return int(np.count_nonzero(expected != self._memory))

    def wait_then_poison(self, ticket: int, ids: list[int], limit_s: float) -> Event:
        """Poison blocks the moment their grant has ended, as their next owner would."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self._poll()
            ended = [e for e in self._events if e.ticket == ticket and e.kind in ENDS]
            if ended:
                self.poison(ids)
                return ended[0]
        raise TimeoutError(f"no event of {ticket} in {limit_s} s: {self.counters()}")

    # --- Python's own load ---

    def spin(self) -> None:
        """Keep the interpreter busy on a thread of its own until stop_spinning()."""
        stop = threading.Event()
        self._stop_spinning = stop

        def burn() -> None:
            number = 0
            while not stop.is_set():
                number = (number * 31 + 7) % 1_000_003

        threading.Thread(target=burn, daemon=True).start()

    def stop_spinning(self) -> None:
        if self._stop_spinning is not None:
            self._stop_spinning.set()


def main(connection: Connection) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the test's process
    serve(connection, Host())


class Peer:
    """The test's side of one rank's process."""

    def __init__(self, name: str) -> None:
        self.child = Child(name, main, method="forkserver")
        self.layout = Layout()
        self.blob = b""
        self.sessions: list[int] = []
        self._tickets = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()

    def call(self, method: str, **arguments: Any) -> Any:
        return self.child.call(method, LIMIT_S + float(arguments.get("limit_s", 0)), **arguments)

    def open(
        self, layout: Layout | None = None, env: dict[str, str] | None = None, **config: Any
    ) -> Self:
        """Make the engine; `env` only works before the first one of the process."""
        self.layout = layout or Layout()
        self.blob = self.call("open", layout=self.layout, config=config, env=env or {})
        return self

    @property
    def session(self) -> int:
        return _core.PeerInfo.decode(self.blob).session

    def connect(
        self, *producers: Peer, consumers: Sequence[Peer] | None = None, timeout_s: float = 20.0
    ) -> Self:
        """Meet the ranks of one producer engine, as one of the ranks of a consumer engine."""
        ranks = list(consumers or [self])
        self.sessions = self.call(
            "connect",
            producers=[peer.blob for peer in producers],
            consumers=[peer.blob for peer in ranks],
            index=ranks.index(self),
            timeout_s=timeout_s,
        )
        return self

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def grant(
        self,
        transfer_id: str,
        ids: Sequence[int],
        tokens: int,
        *,
        first_token: int = 0,
        attempt: int = 0,
        fingerprint: bytes = FINGERPRINT,
        deadline_s: float = 60.0,
        sessions: Sequence[int] | None = None,
    ) -> int:
        """Grant the tokens [first_token, tokens) of a prompt whose blocks are `ids`."""
        ticket = self.ticket()
        first = first_token // self.layout.tokens_per_block
        self.call(
            "grant",
            ticket=ticket,
            transfer_id=transfer_id,
            fingerprint=fingerprint,
            attempt=attempt or secrets.randbits(63) | 1,
            sessions=self.sessions if sessions is None else sessions,
            span=(first_token, tokens),
            blocks=[(first, list(ids)[first:])],
            deadline_s=deadline_s,
        )
        return ticket

    def offer(
        self,
        transfer_id: str,
        ids: Sequence[int],
        tokens: int,
        *,
        final: bool = True,
        ticket: int = 0,
        first_block: int = 0,
        fingerprint: bytes = FINGERPRINT,
    ) -> int:
        ticket = ticket or self.ticket()
        self.call(
            "offer",
            ticket=ticket,
            transfer_id=transfer_id,
            fingerprint=fingerprint,
            new_blocks=[(first_block, list(ids))],
            watermark=tokens,
            final=final,
        )
        return ticket

    def withdraw(
        self,
        ticket: int,
        reason: str = "producer_aborted",
        transfer_id: str = "",
        fingerprint: bytes = b"",
    ) -> None:
        self.call(
            "withdraw",
            ticket=ticket,
            reason=reason,
            transfer_id=transfer_id,
            fingerprint=fingerprint,
        )

    def revoke(self, ticket: int) -> None:
        self.call("revoke", ticket=ticket)

    def wait(self, ticket: int, limit_s: float = LIMIT_S) -> Event:
        event: Event = self.call("wait", tickets=[ticket], limit_s=limit_s)[0]
        return event

    def wait_all(self, tickets: Sequence[int], limit_s: float = LIMIT_S) -> list[Event]:
        events: list[Event] = self.call("wait", tickets=list(tickets), limit_s=limit_s)
        return events

    def wait_peer_lost(self, session: int, limit_s: float = LIMIT_S) -> Event:
        event: Event = self.call("wait_peer_lost", session=session, limit_s=limit_s)
        return event

    def wait_counters(self, limit_s: float = LIMIT_S, **least: int) -> dict[str, int]:
        counters: dict[str, int] = self.call("wait_counters", least=least, limit_s=limit_s)
        return counters

    def idle(self, limit_s: float = LIMIT_S) -> dict[str, int]:
        """The counters, once all tables are empty."""
        counters: dict[str, int] = self.call("wait_idle", limit_s=limit_s)
        return counters

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.call("counters")
        return counters

    def resources(self) -> dict[str, int]:
        found: dict[str, int] = self.call("resources")
        return found

    def ended(self, ticket: int) -> bool:
        """Whether an event of the ticket has come."""
        return any(e.ticket == ticket and e.kind in ENDS for e in self.call("events"))

    def fill(self, seed: int, ids: Sequence[int], tokens: int, first_token: int = 0) -> None:
        self.call("fill", seed=seed, ids=list(ids), tokens=tokens, first_token=first_token)

    def poison(self) -> None:
        self.call("poison")

    def wrong_bytes(self, *wanted: tuple[int, Sequence[int], int, int]) -> int:
        count: int = self.call("wrong_bytes", wanted=[(s, list(i), f, e) for s, i, f, e in wanted])
        return count

    def network(self, step: str, *arguments: Any) -> None:
        self.call("network", step=step, arguments=list(arguments))

    def kill(self) -> None:
        self.child.process.kill()
        self.child.process.join(LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        self.child.signal(number)


@dataclass
class Pair:
    """A producer and a consumer that have met."""

    producer: Peer
    consumer: Peer
    started: dict[str, dict[str, int]] = field(default_factory=dict)

    def idle(self) -> None:
        """Both sides' tables are empty."""
        self.producer.idle()
        self.consumer.idle()


def part(layout: Layout, rank: int, ranks: int) -> Layout:
    """The layout of one of `ranks` ranks that share the heads of `layout`."""
    heads = layout.total_heads // ranks
    return replace(layout, heads=heads, first_head=rank * heads)
