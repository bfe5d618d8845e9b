"""What joins up and what must not, in layouts too rare for the random worlds to meet them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvpush import _core

ELEMENT = 4
TOKENS = 4  # a block
CONSUMER, PRODUCER = 1 << 40, 1 << 44

Table = list[tuple[int, list[int]]]


def region(base: int, layer: str = "layer", **fields: Any) -> _core.Region:
    """One head, blocks of four tokens that lie one after the other, unless told otherwise."""
    plain = {
        "dtype": "x",
        "block_stride": TOKENS * ELEMENT,
        "num_blocks": 8,
        "tokens_per_block": TOKENS,
        "tokens_per_page": TOKENS,
        "token_stride": ELEMENT,
        "heads": 1,
        "total_heads": 1,
        "element_bytes": ELEMENT,
    }
    return _core.Region(layer=layer, base=base, **{**plain, **fields})


def make_plan(
    producer: list[_core.Region], consumer: list[_core.Region], span: tuple[int, int], table: Table
) -> _core.CopyPlan:
    """Each region to the one of its place, blocks of the same ids on both sides."""
    pairs = [(i, i, 0, 1) for i in range(len(producer))]
    planner = _core.CopyPlanner(producer, consumer, pairs, local_is_producer=True)
    return planner.plan(span, table, table)


@pytest.mark.parametrize("times", [1, 2], ids=["equal blocks", "larger blocks"])
def test_layers_inside_the_tokens_are_one_run_in_blocks_that_are_cut_short(times: int) -> None:
    """The producer's blocks are `times` those of the consumer."""
    layers = 3
    size = layers * ELEMENT  # of a token
    producer, consumer = (
        [
            region(
                base + i * ELEMENT,
                f"layer.{i}",
                token_stride=size,
                block_stride=tokens * size,
                tokens_per_block=tokens,
                tokens_per_page=tokens,
            )
            for i in range(layers)
        ]
        for base, tokens in ((PRODUCER, times * TOKENS), (CONSUMER, TOKENS))
    )
    pairs = [(i, i, 0, 1) for i in range(layers)]
    planner = _core.CopyPlanner(producer, consumer, pairs, local_is_producer=True)
    plan = planner.plan((1, 6), [(0, [2, 3][: 2 // times])], [(0, [2, 3])])
    from_, to = (PRODUCER + (2 * times * TOKENS + 1) * size, CONSUMER + (2 * TOKENS + 1) * size)
    assert plan.runs.tolist() == [[from_, to, 5 * size]]


def test_groups_that_alternate_in_memory_keep_their_own_blocks() -> None:
    size = TOKENS * ELEMENT
    producer, consumer = (
        [region(base + i * size, f"layer.{i}", group=i, block_stride=2 * size) for i in range(2)]
        for base in (PRODUCER, CONSUMER)
    )
    plan = make_plan(producer, consumer, (0, TOKENS), [(0, [1]), (0, [3])])
    at = [2 * size, 7 * size]
    assert sorted(plan.runs.tolist()) == [[PRODUCER + a, CONSUMER + a, size] for a in at]


def test_groups_are_not_one_run_where_the_blocks_of_one_go_on_from_those_of_the_other() -> None:
    size = TOKENS * ELEMENT
    producer, consumer = (
        [region(base + i * (1 << 20), f"layer.{i}", group=i) for i in range(2)]
        for base in (PRODUCER, CONSUMER)
    )
    for one, other in ((1, 2), (2, 1)):
        plan = make_plan(producer, consumer, (0, TOKENS), [(0, [one]), (0, [other])])
        at = [one * size, (1 << 20) + other * size]
        assert sorted(plan.runs.tolist()) == [[PRODUCER + a, CONSUMER + a, size] for a in at]


# Words for four tokens one after the other.
WORDS: dict[str, dict[str, int]] = {
    "no pages": {},
    "pages of two": {"tokens_per_page": 2, "page_stride": 2 * ELEMENT},
    "pages of one": {"tokens_per_page": 1, "page_stride": ELEMENT, "token_stride": 0},
}


@pytest.mark.parametrize(("ours", "theirs"), list(product(WORDS, WORDS)))
def test_keys_and_values_join_up_whatever_the_words_for_their_layout(
    ours: str, theirs: str
) -> None:
    size = TOKENS * ELEMENT
    producer, consumer = (
        [
            region(base + i * size, f"layer/{half}", block_stride=2 * size, **WORDS[words])
            for i, half in enumerate("kv")
        ]
        for base, words in ((PRODUCER, ours), (CONSUMER, theirs))
    )
    plan = make_plan(producer, consumer, (0, 2 * TOKENS), [(0, [1, 2])])
    begin = 2 * size
    assert plan.runs.tolist() == [[PRODUCER + begin, CONSUMER + begin, 4 * size]]


@pytest.mark.parametrize(
    "words", [{}, {"tokens_per_page": 1, "page_stride": 3 * ELEMENT, "token_stride": 0}]
)
def test_pages_of_one_token_are_no_pages_to_the_other_sides_pages(words: dict[str, int]) -> None:
    """A token's V, the wider, lies behind its K; the consumer's pages have a gap behind them."""
    token = 3 * ELEMENT
    page = 2 * token + 8
    gaps = {"tokens_per_page": 2, "page_stride": page, "block_stride": 2 * page}
    dense = {"block_stride": TOKENS * token}
    producer, consumer = (
        [
            region(
                base + i * ELEMENT,
                f"layer/{half}",
                **{"token_stride": token, "element_bytes": (1 + i) * ELEMENT, **fields},
            )
            for i, half in enumerate("kv")
        ]
        for base, fields in ((PRODUCER, {**dense, **words}), (CONSUMER, gaps))
    )
    plan = make_plan(producer, consumer, (0, TOKENS), [(0, [0])])
    assert plan.runs.tolist() == [
        [PRODUCER + i * 2 * token, CONSUMER + i * page, 2 * token] for i in range(2)
    ]


def test_layers_join_up_whose_keys_and_values_alternate_by_token() -> None:
    layers, token = 3, 3 * ELEMENT
    strides = {"token_stride": token, "block_stride": layers * TOKENS * token}
    producer, consumer = (
        [
            region(
                base + i * TOKENS * token + j * ELEMENT,
                f"layer.{i}/{half}",
                element_bytes=(1 + j) * ELEMENT,  # values are wider
                **strides,
            )
            for i in range(layers)
            for j, half in enumerate("kv")
        ]
        for base in (PRODUCER, CONSUMER)
    )
    plan = make_plan(producer, consumer, (0, TOKENS), [(0, [0])])
    assert plan.runs.tolist() == [[PRODUCER, CONSUMER, layers * TOKENS * token]]


def test_transposed_keys_count_as_one_descriptor_a_block() -> None:
    size = TOKENS * ELEMENT
    transposed = {
        "components": ELEMENT,
        "component_stride": TOKENS,
        "token_stride": 1,
        "element_bytes": 1,
    }
    producer, consumer = (
        [
            region(base, "layer/k", block_stride=2 * size, **keys),
            region(base + size, "layer/v", block_stride=2 * size),
        ]
        for base, keys in ((PRODUCER, transposed), (CONSUMER, {}))
    )
    plan = make_plan(producer, consumer, (0, 3 * TOKENS), [(0, [1, 2, 3])])
    assert plan.descriptors_before == 3 * 2
