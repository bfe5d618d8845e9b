"""The stamping model's own check: it must see every kind of wrong byte, and no right one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.engines.stamps import Stamper, segments

BLOCK = 32
LAYERS = 3


class World:
    """A runner with a batch of one, and caches of a few layers."""

    def __init__(self, *, isa: str = "vec", heads: int = 2, check: str = "all") -> None:
        self.layers = [
            SimpleNamespace(
                isa=isa, kv_cache=torch.zeros(12, heads, BLOCK, 64, dtype=torch.bfloat16)
            )
            for _ in range(LAYERS)
        ]
        self.batch = SimpleNamespace(
            req_ids=["a"],
            num_computed_tokens_cpu=np.zeros(1, dtype=np.int32),
            token_ids_cpu=np.zeros((1, 256), dtype=np.int32),
        )
        runner = SimpleNamespace(input_batch=self.batch)
        self.stamper = Stamper(runner, self.layers, check, seed=1)

    def step(self, tokens: list[int], computed: int, blocks: list[int], name: str = "a") -> int:
        """Run all tokens behind `computed`; returns the wrong tokens that this step found."""
        before = self.stamper.wrong_tokens
        self.batch.req_ids = [name]
        self.batch.num_computed_tokens_cpu[0] = computed
        self.batch.token_ids_cpu[0, : len(tokens)] = tokens
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor([0, len(tokens) - computed]),
            block_table=torch.tensor([blocks]),
        )
        self.stamper.step(metadata)
        return self.stamper.wrong_tokens - before

    def bytes_of(self, layer: int) -> Any:
        return self.layers[layer].kv_cache.view(torch.int16)


PROMPT = [(7 * n) % 1000 for n in range(100)]
BLOCKS = [3, 4, 9, 1]


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_what_was_stamped_is_found_right(isa: str) -> None:
    world = World(isa=isa)
    assert world.step(PROMPT[:50], 0, BLOCKS) == 0
    assert world.step(PROMPT, 50, BLOCKS) == 0
    for length in range(101, 140):
        assert world.step([*PROMPT, *[0] * (length - 100)], length - 1, [*BLOCKS[:4], 6]) == 0
    assert world.stamper.tokens_checked > 3000


def test_equal_prefixes_have_equal_stamps_wherever_they_lie() -> None:
    world = World()
    world.step(PROMPT, 0, BLOCKS)
    for layer in range(LAYERS):
        memory = world.bytes_of(layer)
        memory[[5, 7]] = memory[[3, 4]].clone()
    assert world.step([*PROMPT[:64], 5, 6, 7], 64, [5, 7, 8], name="b") == 0


def test_another_prompt_is_wrong_in_every_token_behind_the_first_difference() -> None:
    world = World()
    world.step(PROMPT, 0, BLOCKS)
    other = [*PROMPT[:10], 999, *PROMPT[11:]]
    assert world.step([*other, 1], 100, BLOCKS, name="b") == LAYERS * 90


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("element", [0, 63])
@pytest.mark.parametrize("head", [0, 1])
def test_one_wrong_element_is_seen(layer: int, element: int, head: int) -> None:
    world = World()
    world.step(PROMPT, 0, BLOCKS)
    # The keys are transposed: where an element of the tensor's view lies does not matter here.
    world.bytes_of(layer)[4, head, 5, element] ^= 1
    assert world.step([*PROMPT, 1], 100, BLOCKS) == 1


def test_blocks_swapped_between_layers_or_places_are_seen() -> None:
    world = World()
    world.step(PROMPT, 0, BLOCKS)
    first, second = world.bytes_of(0), world.bytes_of(1)
    first[3] = second[3].clone()
    assert world.step([*PROMPT, 1], 100, BLOCKS) == BLOCK
    world = World()
    world.step(PROMPT, 0, BLOCKS)
    assert world.step([*PROMPT, 1], 100, [4, 3, 9, 1]) == 2 * BLOCK * LAYERS


def test_bytes_behind_the_context_are_nobodys() -> None:
    world = World(isa="amx")
    world.step(PROMPT, 0, BLOCKS)
    # Not transposed: keys of token t are the 32 elements from 32 t on.
    flat = world.bytes_of(2).reshape(12, 2, 2, BLOCK * 32)
    flat[1, :, :, 4 * 32 :] = -1
    assert world.step([*PROMPT, 1], 100, BLOCKS) == 0
    flat[1, :, :, 3 * 32 :] = -1
    assert world.step([*PROMPT, 1], 100, BLOCKS) == 1


def test_blocks_filled_in_the_same_step_may_be_shared_in_any_order() -> None:
    world = World()
    world.batch.req_ids = ["hit", "filler"]
    world.batch.num_computed_tokens_cpu = np.array([64, 0], dtype=np.int32)
    world.batch.token_ids_cpu = np.zeros((2, 256), dtype=np.int32)
    world.batch.token_ids_cpu[0, :70] = [*PROMPT[:64], *range(6)]
    world.batch.token_ids_cpu[1, :100] = PROMPT
    world.stamper.step(
        SimpleNamespace(
            query_start_loc=torch.tensor([0, 6, 106]),
            block_table=torch.tensor([[3, 4, 7, 0], BLOCKS]),
        )
    )
    assert world.stamper.wrong_tokens == 0


def test_sampling_checks_all_that_is_new_and_a_block_of_what_is_not() -> None:
    world = World(check="sampled")
    world.step(PROMPT, 0, BLOCKS)
    world.step([*PROMPT, 1], 100, BLOCKS)
    assert 0 < world.stamper.tokens_checked <= BLOCK
    # A context that this engine did not compute itself is checked whole.
    assert world.step([*PROMPT, 1], 100, [8, 8, 8, 8], name="b") == LAYERS * 100


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 64, [(0, 2, 0, 32)]),
        (0, 5, [(0, 1, 0, 5)]),
        (30, 100, [(0, 1, 30, 32), (1, 2, 0, 32), (3, 1, 0, 4)]),
        (33, 35, [(1, 1, 1, 3)]),
        (7, 7, []),
    ],
)
def test_segments(begin: int, end: int, expected: list[tuple[int, int, int, int]]) -> None:
    assert list(segments(begin, end, BLOCK)) == expected
