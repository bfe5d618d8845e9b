"""What a copy must do, written from the definition of a region and from nothing else.

No merging, no cleverness: every byte of every (token, head) is looked up on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpush import _core

Addresses: TypeAlias = npt.NDArray[np.int64]
Content: TypeAlias = npt.NDArray[np.uint8]

HOLE = -1


@dataclass
class Blocks:
    """One request's blocks in one group: ids[i] is its (first_block + i)-th block."""

    first_block: int
    ids: list[int]

    def block(self, index: int) -> int | None:
        """The id of the request's block of this index, None for a hole or a missing one."""
        place = index - self.first_block
        if not 0 <= place < len(self.ids) or self.ids[place] == HOLE:
            return None
        return self.ids[place]

    def as_tuple(self) -> tuple[int, list[int]]:
        return self.first_block, self.ids


def content_bytes(region: _core.Region) -> int:
    """Bytes of one (token, head): all components, one after the other."""
    return region.components * region.element_bytes


def token_addresses(region: _core.Region, block: int, token: int, heads: range) -> Addresses:
    """Addresses of one token's bytes, [head, byte of content]."""
    byte = np.arange(content_bytes(region))
    head = np.array(heads)[:, None]
    addresses: Addresses = (
        region.base
        + block * region.block_stride
        + (token // region.tokens_per_page) * region.page_stride
        + (token % region.tokens_per_page) * region.token_stride
        + (byte // region.element_bytes) * region.component_stride
        + (head - region.first_head) * region.head_stride
        + byte % region.element_bytes
    )
    return addresses


def held_heads(region: _core.Region) -> range:
    return range(region.first_head, region.first_head + region.heads)


def request_addresses(
    region: _core.Region, blocks: Blocks, tokens: range
) -> list[tuple[int, Addresses]]:
    """(token, addresses) of each token in the range that has a block here."""
    found = []
    for token in tokens:
        block = blocks.block(token // region.tokens_per_block)
        if block is not None:
            place = token % region.tokens_per_block
            found.append((token, token_addresses(region, block, place, held_heads(region))))
    return found


def state_addresses(region: _core.Region, block: int) -> Addresses:
    start = region.base + block * region.block_stride
    return np.arange(start, start + region.state_bytes)


def copied_addresses(
    source: _core.Region,
    sink: _core.Region,
    tables: tuple[Blocks, Blocks],
    heads: range,
    span: range,
) -> Addresses:
    """[2, byte]: where each byte goes to, and where it comes from. `tables`: source's, sink's."""
    pieces = [np.zeros((2, 0), dtype=np.int64)]
    if sink.kind == "state":
        listed = range(tables[1].first_block, tables[1].first_block + len(tables[1].ids))
        for index in listed:
            to, from_ = tables[1].block(index), tables[0].block(index)
            if to is not None and from_ is not None:
                pieces.append(np.stack([state_addresses(sink, to), state_addresses(source, from_)]))
        return np.concatenate(pieces, axis=1)
    for token in span:
        to = tables[1].block(token // sink.tokens_per_block)
        from_ = tables[0].block(token // source.tokens_per_block)
        if to is not None and from_ is not None:
            ends = (
                token_addresses(sink, to, token % sink.tokens_per_block, heads),
                token_addresses(source, from_, token % source.tokens_per_block, heads),
            )
            pieces.append(np.stack([end.ravel() for end in ends]))
    return np.concatenate(pieces, axis=1)


def fewest_runs(copied: Addresses) -> int:
    """Into how few runs, contiguous on both sides, these bytes can be put."""
    if copied.shape[1] == 0:
        return 0
    rising = copied[:, np.argsort(copied[0])]
    return 1 + int((np.diff(rising, axis=1) != 1).any(axis=0).sum())


@dataclass
class Memory:
    """One rank's memory: a real buffer, and its regions in it."""

    buffer: Content
    regions: list[_core.Region] = field(default_factory=list)

    @cached_property
    def base(self) -> int:
        return int(self.buffer.ctypes.data)

    @cached_property
    def end(self) -> int:
        return self.base + self.buffer.size

    def index(self, addresses: Addresses) -> Addresses:
        index = addresses - self.base
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.buffer.size)
        return index


class Model:
    """The KV of one prompt, as it should be everywhere: by (layer, token, head, byte)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._layers: dict[str, Content] = {}

    def layer(self, name: str, shape: tuple[int, ...]) -> Content:
        """The layer's true content; the shape must be the same in each call."""
        if name not in self._layers:
            rng = np.random.default_rng([self._seed, len(self._layers)])
            self._layers[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        assert self._layers[name].shape == shape
        return self._layers[name]


def fill(memory: Memory, table: list[Blocks], model: Model, tokens: int, shard: int) -> None:
    """Writes the prompt's KV into a producer's blocks."""
    for region in memory.regions:
        blocks = table[region.group]
        if region.kind == "state":
            for index in range(blocks.first_block, blocks.first_block + len(blocks.ids)):
                block = blocks.block(index)
                if block is not None:
                    at = memory.index(state_addresses(region, block))
                    memory.buffer[at] = state_content(model, region, index, shard)
            continue
        truth = model.layer(region.layer, (tokens, region.total_heads, content_bytes(region)))
        for token, addresses in request_addresses(region, blocks, range(tokens)):
            heads = held_heads(region)
            memory.buffer[memory.index(addresses)] = truth[token, heads.start : heads.stop]


def state_content(model: Model, region: _core.Region, index: int, shard: int) -> Content:
    part = 0 if region.replicated else shard
    return model.layer(f"{region.layer}#{part}#{index}", (region.state_bytes,))


def expected(
    memory: Memory, table: list[Blocks], model: Model, tokens: int, span: range, shard: int
) -> tuple[Content, npt.NDArray[np.bool_]]:
    """A consumer's buffer after the copy, and which of its bytes are written."""
    after = memory.buffer.copy()
    written = np.zeros(after.size, dtype=bool)
    for region in memory.regions:
        blocks = table[region.group]
        if region.kind == "state":
            for index in range(blocks.first_block, blocks.first_block + len(blocks.ids)):
                block = blocks.block(index)
                if block is not None:
                    at = memory.index(state_addresses(region, block))
                    after[at] = state_content(model, region, index, shard)
                    written[at] = True
            continue
        truth = model.layer(region.layer, (tokens, region.total_heads, content_bytes(region)))
        for token, addresses in request_addresses(region, blocks, span):
            at = memory.index(addresses)
            heads = held_heads(region)
            after[at] = truth[token, heads.start : heads.stop]
            written[at] = True
    return after, written
