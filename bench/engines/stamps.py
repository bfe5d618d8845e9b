"""Stamps: a pattern of (prompt so far, position, layer, head, element) in place of computed KV.

Each step, for each request of the batch, the tokens that the step would compute are stamped, and
the engine's context before them is compared with the pattern. The value at a position depends on
all tokens up to it, as KV does, so shared prefixes have equal stamps and everything else differs;
each layer xors its own constant, so a layer's bytes in another layer's place are wrong in every
element.

Wrong bytes are counted and described, never repaired.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TRANSPOSED_KEYS_ISA = "vec"
"""This CPU attention keeps the keys of a block as [element][token], values as [token][element]."""

_MAX_DESCRIPTIONS = 20

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_A
    values = (values ^ (values >> np.uint64(27))) * _MIX_B
    return values ^ (values >> np.uint64(31))


class _Pattern:
    """What one request's KV must be, in the cache's own order, before the layer's constant."""

    def __init__(self, shape: tuple[int, int, int], *, transposed_keys: bool) -> None:
        self._heads, self._block, self._dim = shape
        self._transposed = transposed_keys
        self.filled = 0
        self._sum = np.uint64(0)
        self.blocks = np.zeros((0, self._heads, 2, self._block * self._dim), dtype=np.int16)

    def fill(self, tokens: NDArray[np.int32]) -> None:
        """Extend to these tokens; the ones already known come first."""
        count = len(tokens)
        if count <= self.filled:
            return
        positions = np.arange(self.filled, count, dtype=np.uint64)
        fresh = tokens[self.filled :].astype(np.uint64)
        sums = np.cumsum(_mixed(fresh + _SPREAD * (positions + np.uint64(1)))) + self._sum
        self._sum = sums[-1]
        words = self._heads * 2 * self._dim // 4
        factors = _mixed(np.arange(1, words + 1, dtype=np.uint64)) | np.uint64(1)
        elements = (_mixed(sums)[:, None] * factors[None, :]).view(np.int16)
        self._reserve(-(-count // self._block))
        self._place(elements.reshape(-1, self._heads, 2, self._dim), self.filled)
        self.filled = count

    def _reserve(self, blocks: int) -> None:
        if blocks > len(self.blocks):
            grown = np.zeros((blocks, *self.blocks.shape[1:]), dtype=np.int16)
            grown[: len(self.blocks)] = self.blocks
            self.blocks = grown

    def _place(self, elements: NDArray[np.int16], begin: int) -> None:
        done = 0
        for first, count, low, high in segments(begin, begin + len(elements), self._block):
            rows = count * (high - low)
            part = elements[done : done + rows].reshape(
                count, high - low, self._heads, 2, self._dim
            )
            done += rows
            keys, values = part[:, :, :, 0], part[:, :, :, 1]
            k_view, v_view = self.views(self.blocks[first : first + count])
            k_view[..., low:high] = keys.transpose(0, 2, 3, 1)
            v_view[..., low:high] = values.transpose(0, 2, 3, 1)

    def views(self, blocks: NDArray[np.int16]) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        """Keys and values as [block, head, element, token], of blocks in the cache's order."""
        count = len(blocks)
        keys, values = blocks[:, :, 0], blocks[:, :, 1]
        by_token = (count, self._heads, self._block, self._dim)
        by_element = (count, self._heads, self._dim, self._block)
        k_view = (
            keys.reshape(by_element)
            if self._transposed
            else keys.reshape(by_token).transpose(0, 1, 3, 2)
        )
        return k_view, values.reshape(by_token).transpose(0, 1, 3, 2)


def segments(begin: int, end: int, block: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut positions into (first block, blocks, low, high): whole blocks together, ends apart."""
    while begin < end:
        first, low = divmod(begin, block)
        if low or end - begin < block:
            high = min(block, low + end - begin)
            yield first, 1, low, high
            begin += high - low
        else:
            count = (end - begin) // block
            yield first, count, 0, block
            begin += count * block


class Stamper:
    """Called by the model in each forward pass, on the worker's main thread.

    `layers` are the attention layers, whose caches are read and written; `runner` is vLLM's model
    runner, which knows the tokens of the batch.
    """

    def __init__(self, runner: Any, layers: Sequence[Any], check: str, seed: int) -> None:
        if check not in ("all", "sampled"):
            raise ValueError(f"stamp is {check!r}: use 'all' or 'sampled'")
        self._runner = runner
        self._check_all = check == "all"
        first = layers[0]
        blocks, heads, self._block, width = first.kv_cache.shape
        self._shape = (heads, self._block, width // 2)
        self._transposed = getattr(first, "isa", None) == _TRANSPOSED_KEYS_ISA
        self._caches = [
            _memory(layer.kv_cache).reshape(blocks, heads, 2, self._block * width // 2)
            for layer in layers
        ]
        # Distinct, so that two layers differ in every element.
        draw = random.Random(20)
        self._constants = [np.int16(c) for c in draw.sample(range(1, 1 << 15), len(layers))]
        self._draw = random.Random(seed)
        self._patterns: dict[str, _Pattern] = {}
        self._ends: dict[str, int] = {}
        self.tokens_stamped = 0
        self.tokens_checked = 0
        self.wrong_tokens = 0
        self.descriptions: list[str] = []

    def step(self, metadata: Any) -> None:
        """Stamp the batch's new tokens and check its contexts.

        In this order, as each attention layer writes before it reads: a request may share the
        blocks that another one fills in the same step.
        """
        batch = self._runner.input_batch
        starts = np.asarray(metadata.query_start_loc)
        table = np.asarray(metadata.block_table)
        live = list(batch.req_ids)
        contexts = []
        for row, request in enumerate(live):
            begin = int(batch.num_computed_tokens_cpu[row])
            end = begin + int(starts[row + 1] - starts[row])
            pattern = self._patterns.get(request)
            if pattern is None:
                pattern = self._patterns[request] = _Pattern(
                    self._shape, transposed_keys=self._transposed
                )
            pattern.fill(np.asarray(batch.token_ids_cpu[row, :end]))
            self._stamp(pattern, table[row], begin, end)
            contexts.append((request, pattern, table[row], begin, end))
        for request, pattern, blocks, begin, end in contexts:
            for low, high in self._to_check(request, begin):
                self._check(request, pattern, blocks, low, high)
            self._ends[request] = end
        self._forget_all_but(live)

    def _to_check(self, request: str, begin: int) -> Iterator[tuple[int, int]]:
        if self._check_all or self._ends.get(request) != begin:
            yield 0, begin
        elif begin:
            block = self._draw.randrange(-(-begin // self._block)) * self._block
            yield block, min(begin, block + self._block)

    def _check(
        self, request: str, pattern: _Pattern, table: NDArray[Any], begin: int, end: int
    ) -> None:
        self.tokens_checked += end - begin
        for first, count, low, high in segments(begin, end, self._block):
            ids = table[first : first + count]
            wanted = pattern.blocks[first : first + count]
            for layer, (cache, constant) in enumerate(
                zip(self._caches, self._constants, strict=True)
            ):
                found = cache[ids] ^ constant
                if low == 0 and high == self._block and np.array_equal(found, wanted):
                    continue
                self._compare(request, pattern, (layer, first, ids), (low, high), found, wanted)

    def _compare(
        self,
        request: str,
        pattern: _Pattern,
        place: tuple[int, int, NDArray[Any]],
        span: tuple[int, int],
        found: NDArray[np.int16],
        wanted: NDArray[np.int16],
    ) -> None:
        """Element by element, where a block is partly filled or not as it should be."""
        layer, first, ids = place
        low, high = span
        wrong = np.zeros((len(ids), high - low), dtype=bool)
        for have, want in zip(pattern.views(found), pattern.views(wanted), strict=True):
            wrong |= (have[..., low:high] != want[..., low:high]).any(axis=(1, 2))
        bad = int(wrong.sum())
        if not bad:
            return
        self.wrong_tokens += bad
        if len(self.descriptions) < _MAX_DESCRIPTIONS:
            blocks = [f"{first + i} (id {ids[i]})" for i in np.flatnonzero(wrong.any(axis=1))]
            self.descriptions.append(
                f"{request}: layer {layer}, {bad} of {wrong.size} tokens, blocks "
                f"{', '.join(blocks[:8])}"
            )

    def _stamp(self, pattern: _Pattern, table: NDArray[Any], begin: int, end: int) -> None:
        self.tokens_stamped += end - begin
        for first, count, low, high in segments(begin, end, self._block):
            ids = table[first : first + count]
            wanted = pattern.blocks[first : first + count]
            for cache, constant in zip(self._caches, self._constants, strict=True):
                if low == 0 and high == self._block:
                    cache[ids] = wanted ^ constant
                    continue
                one = cache[ids[0] : ids[0] + 1]
                for have, want in zip(pattern.views(one), pattern.views(wanted), strict=True):
                    have[..., low:high] = want[..., low:high] ^ constant

    def _forget_all_but(self, live: Sequence[str]) -> None:
        """Patterns of requests that have left the batch; a preempted one's is made again."""
        if len(self._patterns) > 2 * len(live) + 8:
            kept = set(live)
            self._patterns = {k: v for k, v in self._patterns.items() if k in kept}
            self._ends = {k: v for k, v in self._ends.items() if k in kept}

    def report(self) -> dict[str, Any]:
        """The counts so far."""
        return {
            "tokens_stamped": self.tokens_stamped,
            "tokens_checked": self.tokens_checked,
            "wrong_tokens": self.wrong_tokens,
            "descriptions": list(self.descriptions),
        }


def _memory(cache: Any) -> NDArray[np.int16]:
    """A cache tensor's memory as 16-bit integers, sharing it."""
    import torch

    if cache.element_size() != 2 or not cache.is_contiguous():
        raise ValueError("stamps need a contiguous cache of 16-bit elements")
    return np.asarray(cache.view(torch.int16).numpy())
