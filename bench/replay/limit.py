"""What a handoff can't be faster than: a bare NIXL WRITE of the blocks that come last.

Two processes with memory like the engines' write the very blocks that requests of a run had, from
the ids they had on the prefill engine to those on the decode engine, neighbours joined, with
nothing of kvpush around NIXL. Of a prompt only the last chunk counts: what was computed before can
have been sent before.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.settings import ModelSettings
from kvpush._nixl import find_library, prepare_environment
from kvpush.selftest.bare import BareAgent, load_bindings
from kvpush.selftest.child import Child, SelfTestError, serve

# After the last byte a request waits for the step under way and for its own: half a step on
# average, and one.
STEPS_AFTER = 1.5

_LIMIT_S = 60.0
_ELEMENT_BYTES = 2
# Enough for a median.
_MOST_REQUESTS = 15


@dataclass(frozen=True)
class CacheShape:
    """One engine's KV cache: layers, one after the other, of blocks."""

    layers: int
    num_blocks: int
    block_bytes: int

    @classmethod
    def of(cls, model: ModelSettings, block_size: int, num_blocks: int) -> CacheShape:
        """As vLLM lays it out for the model that takes time."""
        token_bytes = 2 * model.kv_heads * model.head_dim * _ELEMENT_BYTES
        return cls(model.layers, num_blocks, block_size * token_bytes)

    @property
    def total_bytes(self) -> int:
        return self.layers * self.num_blocks * self.block_bytes


def last_blocks(
    blocks: tuple[Sequence[int], Sequence[int]], prompt_tokens: int, block_size: int, chunk: int
) -> tuple[list[int], list[int]]:
    """The blocks that hold tokens of the prompt's last chunk, on either side."""
    first = (prompt_tokens - 1) // chunk * chunk // block_size
    end = -(-prompt_tokens // block_size)
    return list(blocks[0][first:end]), list(blocks[1][first:end])


def runs_of(
    shape: CacheShape, bases: tuple[int, int], ids: tuple[Sequence[int], Sequence[int]]
) -> NDArray[np.uint64]:
    """[n, 3]: local address, remote address, length; blocks that lie together are joined."""
    local = np.asarray(ids[0], dtype=np.uint64)
    remote = np.asarray(ids[1], dtype=np.uint64)
    order = np.argsort(local)
    local, remote = local[order], remote[order]
    one = np.uint64(1)
    breaks = np.flatnonzero((local[1:] != local[:-1] + one) | (remote[1:] != remote[:-1] + one)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((begins, [len(local)]))).astype(np.uint64)
    size = np.uint64(shape.block_bytes)
    layers = np.arange(shape.layers, dtype=np.uint64)[:, None] * np.uint64(shape.num_blocks)
    return np.stack(
        [
            (np.uint64(bases[0]) + (layers + local[begins][None, :]) * size).ravel(),
            (np.uint64(bases[1]) + (layers + remote[begins][None, :]) * size).ravel(),
            np.tile(counts * size, shape.layers),
        ],
        axis=1,
    )


class BareSide:
    """One process: memory, and a NIXL agent over it."""

    def __init__(self, role: str, library: str) -> None:
        self._role = role
        self._library = library

    def open(self, shape: CacheShape) -> tuple[bytes, int]:
        """Returns the agent's metadata and where the memory begins."""
        bindings = load_bindings(self._library)
        if bindings is None:
            raise RuntimeError(f"NIXL's Python bindings beside {self._library} can't be imported")
        self._shape = shape
        self._memory = mmap.mmap(-1, shape.total_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 1, shape.total_bytes)  # resident, as a KV cache is
        name = f"limit-{self._role}-{secrets.token_hex(8)}"
        self._agent = BareAgent(bindings, name, "UCX", self._address, shape.total_bytes)
        return self._agent.metadata(), self._address

    def meet(self, metadata: bytes) -> None:
        self._agent.meet(metadata)

    def write(self, address: int, ids: tuple[list[int], list[int]]) -> tuple[float, int]:
        """One WRITE. Returns its milliseconds, preparation included, and its descriptors."""
        runs = runs_of(self._shape, (self._address, address), ids)
        prepare_s, write_s = self._agent.write_runs(runs, _LIMIT_S)
        return 1e3 * (prepare_s + write_s), len(runs)

    def await_write(self) -> None:
        self._agent.await_write(_LIMIT_S)


def child_main(connection: Connection, side: type[BareSide], *arguments: Any) -> None:
    """Entry of a child process."""
    prepare_environment()
    serve(connection, side(*arguments))


@contextlib.contextmanager
def bare_pair(
    shape: CacheShape, side: type[BareSide] = BareSide, limit_s: float = _LIMIT_S
) -> Iterator[tuple[Child, Child, int]]:
    """A writer and a target that have met, and where the target's memory begins."""
    library = str(find_library())
    with (
        Child("writer", child_main, side, "writer", library) as writer,
        Child("target", child_main, side, "target", library) as target,
    ):
        for child in (writer, target):
            child.send("open", shape=shape)
        _, (metadata, address) = (child.receive("open", limit_s) for child in (writer, target))
        writer.call("meet", limit_s, metadata=metadata)
        yield writer, target, address


def bare_write_ms(
    shape: CacheShape, requests: Sequence[tuple[list[int], list[int]]]
) -> tuple[float, float]:
    """Medians over the requests, after one to warm up: milliseconds of a WRITE, descriptors."""
    if not requests:
        raise SelfTestError("there are no requests whose blocks are known on both sides")
    chosen = requests[-_MOST_REQUESTS:]
    with bare_pair(shape) as (writer, target, address):
        found = []
        for ids in (chosen[0], *chosen):
            target.send("await_write")
            found.append(writer.call("write", _LIMIT_S, address=address, ids=ids))
            target.receive("await_write", _LIMIT_S)
    times, descriptors = zip(*found[1:], strict=True)
    return statistics.median(times), statistics.median(descriptors)
