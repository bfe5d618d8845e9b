"""The self-test's two processes: each has KV memory and a real engine, and obeys its parent."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from kvpush import _core
from kvpush._nixl import prepare_environment
from kvpush.selftest.bare import BareAgent, load_bindings
from kvpush.selftest.cases import POISON, Case, Geometry, expected_memory, source_bytes
from kvpush.selftest.child import serve

__all__ = ["Rank", "main"]

_FINGERPRINT = b"kvpush self-test"
_NAP_S = 20e-6
"""Between two looks for an event: well below what is measured, and no full core."""
_NAP_SHARE = 0.02
"""Of the time waited so far: a long transfer is not slowed down by somebody who keeps asking."""
_DRAIN_S = 5.0
_CHUNK_BYTES = 1 << 16


class Rank:
    """Memory, an engine over it, and the commands of the parent."""

    def __init__(self, role: str, library: str, backend: str, fault: str) -> None:
        self._role = role
        self._library = library
        self._backend = backend
        self._fault = fault
        self._bindings = load_bindings(library)
        self._engine: _core.Engine | None = None
        self._bare: BareAgent | None = None
        self._planner: _core.CopyPlanner | None = None
        self._sessions: list[int] = []
        self._expected: tuple[Case, bytearray] | None = None
        self._source = b""

    def open(self, geometry: Geometry, seed: int) -> bytes:
        """Make memory and an engine. Returns the engine's description."""
        self._geometry = geometry
        self._memory = mmap.mmap(-1, geometry.total_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._source = source_bytes(geometry, seed)
        self._memory[:] = self._source if self._role == "producer" else self._poison()
        self._expected = None
        self._regions = [self._region(layer) for layer in range(geometry.layers)]
        session = secrets.randbits(63) | 1
        self._engine = _core.Engine(
            _core.EngineConfig(
                agent_name=f"kvpush-selftest-{self._role}-{session:016x}",
                session=session,
                engine_id=f"selftest-{self._role}-{session:016x}",
                nixl_library=self._library,
                backend=self._backend,
            )
        )
        memory = [(self._address, geometry.total_bytes, "host", 0)]
        self._engine.start(self._regions, memory)
        return self._engine.peer_info()

    def _region(self, layer: int) -> _core.Region:
        geometry = self._geometry
        row = geometry.tokens_per_block * geometry.element_bytes
        return _core.Region(
            layer=f"layer.{layer}",
            dtype="bytes",
            base=self._address + layer * geometry.layer_bytes,
            block_stride=geometry.block_bytes,
            num_blocks=geometry.pool_blocks,
            tokens_per_block=geometry.tokens_per_block,
            tokens_per_page=geometry.tokens_per_block,
            page_stride=geometry.block_bytes,
            token_stride=geometry.element_bytes,
            components=geometry.components,
            component_stride=geometry.heads * row,
            heads=geometry.heads,
            total_heads=geometry.heads,
            head_stride=row,
            element_bytes=geometry.element_bytes,
        )

    def _poison(self) -> bytes:
        return bytes([POISON]) * self._geometry.total_bytes

    def _running(self) -> _core.Engine:
        if self._engine is None:
            raise RuntimeError("the engine is not open")
        return self._engine

    def close(self) -> dict[str, int]:
        """Stop the engine. Returns its last counters."""
        counters = self._running().counters()
        self._running().shutdown(_DRAIN_S)
        self._engine = None
        self._bare = None
        return counters

    # --- kvpush ---

    def connect(self, producer: bytes, limit_s: float) -> None:
        """Meet the producer."""
        engine = self._running()
        self._sessions = engine.connect([producer], [engine.peer_info()], 0, limit_s)

    def offer(self, ticket: int, case: Case, limit_s: float) -> None:
        """Offer the whole prompt of `case`, and wait until the engine knows it."""
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "hang":
            time.sleep(3600)
        engine = self._running()
        ids = case.producer_ids(self._geometry)
        engine.offer(ticket, f"selftest-{ticket}", _FINGERPRINT, [(0, ids)], case.tokens, True)
        until = time.monotonic() + limit_s
        while engine.counters()["offers_live"] == 0:
            if time.monotonic() > until:
                raise TimeoutError("the engine did not take an offer")
            time.sleep(_NAP_S)

    def receive(self, ticket: int, case: Case, limit_s: float) -> float:
        """Grant the blocks of `case`. Returns seconds from the grant to the event."""
        engine = self._running()
        ids = case.consumer_ids(self._geometry)
        first = case.first_block(self._geometry)
        attempt = secrets.randbits(63) | 1
        begin = time.perf_counter()
        engine.grant(
            ticket,
            f"selftest-{ticket}",
            _FINGERPRINT,
            attempt,
            self._sessions,
            (case.first_token, case.tokens),
            [(first, ids[first:])],
            limit_s,
        )
        self._await(ticket, "received", limit_s)
        return time.perf_counter() - begin

    def sent(self, ticket: int, limit_s: float) -> dict[str, float]:
        """Wait for the end of an offer. Returns what its writes cost."""
        event = self._await(ticket, "sent", limit_s)
        names = ("bytes", "descriptors_before", "descriptors", "plan_us", "post_us", "transfer_us")
        return {name: getattr(event, name) for name in names}

    def _await(self, ticket: int, kind: str, limit_s: float) -> _core.Event:
        begin = time.monotonic()
        waited_s = 0.0
        while waited_s < 2 * limit_s:  # the engine gives up first and says why
            for event in self._running().poll():
                if event.ticket == ticket and event.kind == kind:
                    return event
                raise RuntimeError(
                    f"expected '{kind}' of {ticket}, got '{event.kind}' of {event.ticket}: "
                    f"{event.reason}: {event.detail}"
                )
            waited_s = time.monotonic() - begin
            time.sleep(max(_NAP_S, waited_s * _NAP_SHARE))
        raise TimeoutError(f"no '{kind}' of transfer {ticket} within {limit_s:g} s")

    # --- bytes ---

    def poison(self) -> None:
        """Fill the memory with what must not be there after a transfer."""
        self._memory[:] = self._poison()

    def check(self, case: Case) -> tuple[int, str]:
        """Compare all of the memory. Returns the number of wrong bytes and where the first is."""
        if self._expected is None or self._expected[0] != case:
            self._expected = (case, expected_memory(self._geometry, case, self._source))
        expected = self._expected[1]
        self._spoil(case)
        if expected == self._memory[:]:
            return 0, ""
        wrong = 0
        first = -1
        for start in range(0, len(expected), _CHUNK_BYTES):
            want = expected[start : start + _CHUNK_BYTES]
            have = self._memory[start : start + _CHUNK_BYTES]
            if want == have:
                continue
            places = [
                i for i, pair in enumerate(zip(want, have, strict=True)) if pair[0] != pair[1]
            ]
            wrong += len(places)
            if first < 0:
                first = start + places[0]
        return wrong, self._place(case, first, expected)

    def _place(self, case: Case, offset: int, expected: bytearray) -> str:
        geometry = self._geometry
        layer, rest = divmod(offset, geometry.layer_bytes)
        block, byte = divmod(rest, geometry.block_bytes)
        granted = case.consumer_ids(geometry)[case.first_block(geometry) :]
        whose = "granted" if block in granted else "not granted"
        return (
            f"layer {layer}, block {block} ({whose}), byte {byte}: "
            f"{self._memory[offset]:#04x}, should be {expected[offset]:#04x}"
        )

    def _spoil(self, case: Case) -> None:
        """The faults that show that a wrong byte is seen."""
        granted = case.consumer_ids(self._geometry)[case.first_block(self._geometry) :]
        block = granted[0]
        if self._fault == "untouched-byte":
            block = next(i for i in range(self._geometry.pool_blocks) if i not in granted)
        elif self._fault != "byte":
            return
        offset = (self._geometry.layers - 1) * self._geometry.layer_bytes
        self._memory[offset + block * self._geometry.block_bytes] ^= 0x01

    # --- bare NIXL ---

    def open_bare(self) -> bytes | None:
        """Make a bare agent over the same memory; None if NIXL's bindings are missing."""
        if self._bindings is None:
            return None
        name = f"selftest-bare-{self._role}-{secrets.token_hex(8)}"
        self._bare = BareAgent(
            self._bindings, name, self._backend, self._address, self._geometry.total_bytes
        )
        return self._bare.metadata()

    def meet_bare(self, metadata: bytes, consumer: bytes) -> None:
        """Load the other bare agent, and prepare to plan as kvpush does."""
        self._bare_agent().meet(metadata)
        regions = _core.PeerInfo.decode(consumer).regions
        pairs = _core.assign_writers([self._regions], [regions])[0][0]
        self._planner = _core.CopyPlanner(self._regions, regions, pairs, local_is_producer=True)

    def _bare_agent(self) -> BareAgent:
        if self._bare is None:
            raise RuntimeError("there is no bare agent")
        return self._bare

    def bare_write(self, case: Case, limit_s: float) -> tuple[float, float]:
        """Write the bytes of `case` with one bare NIXL WRITE of kvpush's own descriptors.

        Returns seconds to prepare it, and from posting to completion.
        """
        if self._planner is None:
            raise RuntimeError("the bare agents have not met")
        first = case.first_block(self._geometry)
        plan = self._planner.plan(
            (case.first_token, case.tokens),
            [(0, case.producer_ids(self._geometry))],
            [(first, case.consumer_ids(self._geometry)[first:])],
        )
        return self._bare_agent().write(plan, limit_s)

    def bare_await(self, limit_s: float) -> None:
        """Take part in the other side's bare WRITE."""
        self._bare_agent().await_write(limit_s)


def main(connection: Connection, *arguments: Any) -> None:
    """Entry of a child process."""
    # Whatever a library prints must not get between the parent's lines.
    os.dup2(sys.stderr.fileno(), 1)
    prepare_environment()
    serve(connection, Rank(*arguments))
