"""Tables and geometries that must be refused, whole, and what the refusal says."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpush import _core

from .oracle import HOLE, Blocks
from .test_planner_property import FAST, make_plan
from .worlds import World, worlds

FEW = settings(FAST, max_examples=100)


def region(**changes: object) -> _core.Region:
    """Four blocks of 16 tokens, 2 heads of 8 bytes, token-major."""
    facts: dict[str, object] = {
        "layer": "layers.0",
        "dtype": "bfloat16",
        "base": 1 << 20,
        "block_stride": 256,
        "num_blocks": 4,
        "tokens_per_block": 16,
        "tokens_per_page": 16,
        "token_stride": 16,
        "heads": 2,
        "total_heads": 2,
        "head_stride": 8,
        "element_bytes": 8,
    }
    return _core.Region(**(facts | changes))  # type: ignore[arg-type]


def needed_blocks(world: World, model_group: int) -> list[int]:
    """Places in the producer's list of blocks that hold tokens the consumer needs."""
    request = world.request
    kind = next(layer.kind for layer in world.layers if layer.group == model_group)
    consumer = request.consumer[world.consumer.groups[model_group]]
    producer = request.producer[world.producer.groups[model_group]]
    listed = range(consumer.first_block, consumer.first_block + len(consumer.ids))
    if kind == "state":
        indices = {index for index in listed if consumer.block(index) is not None}
    else:
        to_size = world.consumer.layouts[model_group].tokens_per_block
        from_size = world.producer.layouts[model_group].tokens_per_block
        indices = {
            token // from_size
            for token in request.span
            if consumer.block(token // to_size) is not None
        }
    return [index - producer.first_block for index in sorted(indices)]


def plans(world: World, *, group: int) -> int:
    """Plans every pair of ranks that shares layers of the group; how many were refused."""
    assignment = _core.assign_writers(
        [memory.regions for memory in world.producers],
        [memory.regions for memory in world.consumers],
    )
    own = world.producer.groups[group]
    refused = 0
    touched = 0
    for p, source in enumerate(world.producers):
        for c in range(len(world.consumers)):
            pairs = assignment[p][c]
            if not any(source.regions[pair[0]].group == own for pair in pairs):
                continue
            touched += 1
            for push in (True, False):
                try:
                    make_plan(world, p, c, pairs, push=push)
                except ValueError:
                    refused += 1
    assert touched
    assert refused in (0, 2 * touched)
    return refused


@FEW
@given(world=worlds(), data=st.data())
def test_a_producer_block_that_is_missing_under_a_needed_token_is_refused(
    world: World, data: st.DataObject
) -> None:
    group = data.draw(st.integers(0, len(world.producer.groups) - 1))
    needed = needed_blocks(world, group)
    assume(needed)
    place = data.draw(st.sampled_from(needed))
    blocks = world.request.producer[world.producer.groups[group]]
    cut = data.draw(st.sampled_from(["hole", "end", "start"]))
    if cut == "hole":
        blocks.ids[place] = HOLE
    elif cut == "end":
        del blocks.ids[place:]
    else:
        del blocks.ids[: place + 1]
        blocks.first_block += place + 1
    assert plans(world, group=group)


@FEW
@given(world=worlds(), data=st.data())
def test_a_block_id_out_of_range_is_refused_wherever_it_stands(
    world: World, data: st.DataObject
) -> None:
    group = data.draw(st.integers(0, len(world.producer.groups) - 1))
    side, table, memories = data.draw(
        st.sampled_from(
            [
                (world.producer, world.request.producer, world.producers),
                (world.consumer, world.request.consumer, world.consumers),
            ]
        )
    )
    blocks = table[side.groups[group]]
    assume(blocks.ids)
    pool = next(
        region.num_blocks
        for memory in memories
        for region in memory.regions
        if region.group == side.groups[group]
    )
    place = data.draw(st.integers(0, len(blocks.ids) - 1))
    blocks.ids[place] = pool + data.draw(st.sampled_from([0, 1, 1 << 20]))
    assert plans(world, group=group)


@FEW
@given(world=worlds(), data=st.data())
def test_a_consumer_list_that_ends_before_the_span_is_refused(
    world: World, data: st.DataObject
) -> None:
    kinds = {layer.group: layer.kind for layer in world.layers}
    attention = [group for group, kind in kinds.items() if kind != "state"]
    assume(attention and world.request.span)
    group = data.draw(st.sampled_from(attention))
    size = world.consumer.layouts[group].tokens_per_block
    blocks = world.request.consumer[world.consumer.groups[group]]
    del blocks.ids[(world.request.span.stop - 1) // size - blocks.first_block :]
    assert plans(world, group=group)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8_e4m3"}, "dtype is 'fp8_e4m3' on the producer and 'bfloat16'"),
        ({"total_heads": 4}, "total_heads is 4 on the producer and 2"),
        ({"element_bytes": 4}, "components x element_bytes is 1 x 4 on the producer and 1 x 8"),
        ({"heads": 1}, "no producer rank holds 1 to 1"),
        ({"layer": "draft.0"}, "1 on the consumer only: 'layers.0'"),
        ({"token_stride": 7}, "producer rank 0: region 0 (layer 'layers.0'): token_stride is 7"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_both_values(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core.assign_writers([[region(**changes)]], [[region()]])


def test_three_components_do_not_map_onto_two() -> None:
    three = region(components=3, component_stride=4096, element_bytes=4)
    two = region(components=2, component_stride=4096, element_bytes=6)
    with pytest.raises(ValueError, match="components is 3 on the producer and 2 on the consumer"):
        _core.assign_writers([[three]], [[two]])


def test_draft_layers_on_one_side_are_named() -> None:
    target, draft = region(), region(layer="draft.0", base=1 << 30)
    with pytest.raises(ValueError, match=r"^layers: 1 on the producer only: 'draft\.0'$"):
        _core.assign_writers([[target, draft]], [[target]])


def test_pairs_that_do_not_fit_their_regions_are_an_error_not_a_crash() -> None:
    for pair in [(1, 0, 0, 2), (0, 1, 0, 2), (0, 0, 0, 3), (0, 0, 1, 1)]:
        with pytest.raises(ValueError, match="pair"):
            _core.CopyPlanner([region()], [region()], [pair], local_is_producer=True)


def test_states_of_different_sizes_or_splits_are_refused() -> None:
    state = {"kind": "state", "state_bytes": 100}
    with pytest.raises(ValueError, match="state_bytes is 96 on the producer and 100"):
        _core.assign_writers([[region(**state | {"state_bytes": 96})]], [[region(**state)]])
    with pytest.raises(ValueError, match="ranks that share a state is 2 on the producer and 1"):
        _core.assign_writers([[region(**state)], [region(**state)]], [[region(**state)]])


def test_ids_may_be_lists_or_arrays() -> None:
    planner = _core.CopyPlanner([region()], [region()], [(0, 0, 0, 2)], local_is_producer=True)
    listed = planner.plan((0, 32), [(0, [2, 1])], [(0, [0, 3])])
    arrays = planner.plan(
        (0, 32),
        [(0, np.array([2, 1], dtype=np.uint32))],
        [(0, np.array([0, 3], dtype=np.uint32))],
    )
    assert np.array_equal(listed.runs, arrays.runs)
    assert listed.runs.shape == (2, 3)


def test_states_can_be_left_out() -> None:
    state = region(kind="state", layer="mamba", state_bytes=100, group=1)
    planner = _core.CopyPlanner(
        [region(), state], [region(), state], [(0, 0, 0, 2), (1, 1, 0, 0)], local_is_producer=True
    )
    tables = [(0, [1]), (0, [2])]
    assert planner.plan((0, 16), tables, copy.copy(tables)).bytes == 256 + 100
    assert planner.plan((0, 16), tables, tables, include_state=False).bytes == 256


def test_a_table_without_the_group_is_refused() -> None:
    planner = _core.CopyPlanner([region()], [region()], [(0, 0, 0, 2)], local_is_producer=True)
    with pytest.raises(ValueError, match="producer has 0 groups, group 0 is needed"):
        planner.plan((0, 16), [], [Blocks(0, [1]).as_tuple()])
