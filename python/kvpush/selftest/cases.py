"""What the self-test transfers, and what memory must look like afterwards. Pure: no NIXL here.

Both processes make the same bytes from a seed, so the receiving one knows every byte that must
arrive without being told, and every byte that must stay as it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

__all__ = ["POISON", "Case", "Geometry", "Order", "cases", "expected_memory", "source_bytes"]

Order = Literal["ascending", "descending", "random"]

POISON = 0xA5
"""What the receiver's memory is filled with before each transfer."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one rank: `layers` layers, one after the other, of `pool_blocks` blocks.

    A block holds keys, then values; of each, `heads` heads; of each, the tokens. One head of 128
    bytes is what a rank holds of a large model whose KV heads are spread over eight ranks.
    """

    layers: int
    pool_blocks: int
    tokens_per_block: int = 16
    components: int = 2
    heads: int = 1
    element_bytes: int = 128

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.components * self.heads * self.tokens_per_block * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.pool_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return self.layers * self.layer_bytes


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the tokens [first_token, tokens) go from one list of blocks to another."""

    name: str
    tokens: int
    first_token: int = 0
    producer_order: Order = "ascending"
    consumer_order: Order = "ascending"

    def blocks(self, geometry: Geometry) -> int:
        """Blocks that hold the tokens from the first one on."""
        return -(-self.tokens // geometry.tokens_per_block)

    def producer_ids(self, geometry: Geometry) -> list[int]:
        """Block ids of the whole prompt on the producer."""
        return _block_ids(geometry, self.blocks(geometry), self.producer_order, seed=1)

    def consumer_ids(self, geometry: Geometry) -> list[int]:
        """Block ids of the whole prompt on the consumer; only those of the span are granted."""
        return _block_ids(geometry, self.blocks(geometry), self.consumer_order, seed=2)

    def first_block(self, geometry: Geometry) -> int:
        """Place of the first block that is granted."""
        return self.first_token // geometry.tokens_per_block

    def payload_bytes(self, geometry: Geometry) -> int:
        """Bytes that must arrive."""
        per_token = geometry.block_bytes // geometry.tokens_per_block
        return (self.tokens - self.first_token) * per_token * geometry.layers


def _block_ids(geometry: Geometry, count: int, order: Order, seed: int) -> list[int]:
    """`count` different ids; in a pool with room they start somewhere inside."""
    draw = random.Random(seed * 1_000_003 + count)  # noqa: S311 - not a secret
    if order == "random":
        return draw.sample(range(geometry.pool_blocks), count)
    first = draw.randrange(geometry.pool_blocks - count + 1)
    ids = list(range(first, first + count))
    return ids if order == "ascending" else ids[::-1]


def cases(geometry: Geometry, largest_blocks: int) -> list[Case]:
    """The requests of one round: from a single token to `largest_blocks` blocks."""
    per_block = geometry.tokens_per_block
    found = [
        Case(name="one token", tokens=1),
        Case(name="one block", tokens=per_block),
        Case(name="16 blocks", tokens=16 * per_block),
        Case(name="16 blocks, scattered", tokens=16 * per_block, producer_order="random"),
        Case(name="prefix hit", tokens=48 * per_block, first_token=32 * per_block),
        Case(
            name="prefix hit within a block, scattered",
            tokens=48 * per_block - 5,
            first_token=32 * per_block + 3,
            consumer_order="random",
        ),
    ]
    for blocks in (256, 1024):
        if blocks > largest_blocks:
            continue
        found += _large(blocks, per_block)
    return found


def _large(blocks: int, per_block: int) -> Iterator[Case]:
    """A long prompt in each arrangement of blocks."""
    tokens = blocks * per_block
    tail = tokens - per_block + 1  # the last block holds a single token
    yield Case(name=f"{blocks} blocks", tokens=tokens)
    yield Case(name=f"{blocks} blocks, one token in the last", tokens=tail)
    yield Case(name=f"{blocks} blocks, reversed", tokens=tokens, consumer_order="descending")
    yield Case(
        name=f"{blocks} blocks, both reversed",
        tokens=tokens,
        producer_order="descending",
        consumer_order="descending",
    )
    yield Case(
        name=f"{blocks} blocks, scattered",
        tokens=tail,
        producer_order="random",
        consumer_order="random",
    )


def source_bytes(geometry: Geometry, seed: int) -> bytes:
    """What the producer's memory holds: the same for the same seed in every process."""
    draw = random.Random(seed)  # noqa: S311 - not a secret
    return b"".join(draw.randbytes(geometry.layer_bytes) for _ in range(geometry.layers))


def expected_memory(geometry: Geometry, case: Case, source: bytes) -> bytearray:
    """The consumer's memory after `case`, every byte of it."""
    expected = bytearray([POISON]) * geometry.total_bytes
    from_ids = case.producer_ids(geometry)
    to_ids = case.consumer_ids(geometry)
    for layer in range(geometry.layers):
        base = layer * geometry.layer_bytes
        for index in range(case.first_block(geometry), len(to_ids)):
            from_block = base + from_ids[index] * geometry.block_bytes
            to_block = base + to_ids[index] * geometry.block_bytes
            for offset, length in _pieces(geometry, case, index):
                start = from_block + offset
                expected[to_block + offset : to_block + offset + length] = source[
                    start : start + length
                ]
    return expected


def _pieces(geometry: Geometry, case: Case, index: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what the span has of the prompt's block number `index`."""
    first = index * geometry.tokens_per_block
    begin = max(case.first_token - first, 0)
    end = min(case.tokens - first, geometry.tokens_per_block)
    if begin == 0 and end == geometry.tokens_per_block:
        yield 0, geometry.block_bytes
        return
    row = geometry.tokens_per_block * geometry.element_bytes
    for number in range(geometry.components * geometry.heads):
        yield number * row + begin * geometry.element_bytes, (end - begin) * geometry.element_bytes
