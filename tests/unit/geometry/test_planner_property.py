"""The planner against the oracle, over random pairs of engines, with real bytes.

Every producer rank plans for every consumer rank, the runs are carried out on real buffers, and
each consumer's whole buffer is compared: what had to come, and what had to stay. The runs are
counted too: where two layouts are alike there may be no more of them than the bytes need.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpush import _core

from .oracle import (
    HOLE,
    Addresses,
    Blocks,
    Memory,
    Model,
    copied_addresses,
    expected,
    fewest_runs,
    fill,
)
from .worlds import REAL_ORDERS, World, halves, worlds

Pairs: TypeAlias = list[tuple[int, int, int, int]]
Runs: TypeAlias = npt.NDArray[np.uint64]

FAST = settings(
    max_examples=500,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SOAK = settings(FAST, max_examples=12_000, derandomize=False, print_blob=True)


def table(blocks: list[Blocks]) -> list[tuple[int, list[int]]]:
    return [group.as_tuple() for group in blocks]


def make_plans(
    world: World, p: int, c: int, pairs: Pairs, *, push: bool
) -> tuple[_core.CopyPlan, _core.PatternPlan]:
    """The plan from rank p to rank c, as the producer (push) or the consumer makes it."""
    request = world.request
    local = (world.producers[p].regions, table(request.producer))
    remote = (world.consumers[c].regions, table(request.consumer))
    if not push:
        local, remote = remote, local
    planner = _core.CopyPlanner(local[0], remote[0], pairs, local_is_producer=push)
    span = (request.span.start, request.span.stop)
    return planner.plan(span, local[1], remote[1]), planner.plan_pattern(span, local[1], remote[1])


def make_plan(world: World, p: int, c: int, pairs: Pairs, *, push: bool) -> _core.CopyPlan:
    return make_plans(world, p, c, pairs, push=push)[0]


def joined(runs: Runs) -> list[list[int]]:
    """The runs, each with those behind it that go on where it ends on both sides."""
    out: list[list[int]] = []
    for local, remote, length in runs.tolist():
        if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2]) == (local, remote):
            out[-1][2] += length
        else:
            out.append([local, remote, length])
    return out


def check_parts(plan: _core.CopyPlan, pattern: _core.PatternPlan) -> None:
    """What is posted, part by part, is the plan, and no part is larger than it may be."""
    assert pattern.total_runs == len(plan.runs)
    assert (pattern.bytes, pattern.descriptors_before) == (plan.bytes, plan.descriptors_before)
    for max_runs, max_bytes in ((1, 1 << 40), (7, 50), (1 << 20, 1 << 40)):
        parts = pattern.parts(max_runs, max_bytes)
        for _, runs in parts:
            assert 0 < len(runs) <= max_runs
            assert runs[:, 2].sum() <= max_bytes
        every = np.concatenate([plan.runs[:0], *(runs for _, runs in parts)])
        assert joined(every) == joined(plan.runs)
    assert [kinds for kinds, _ in parts] == [batch[:4] for batch in plan.batches]


def reaches_both_ends(blocks: Blocks, num_blocks: int) -> bool:
    """Whether the first and the last block of a pool are listed."""
    return {0, num_blocks - 1} <= set(blocks.ids)


def is_whole_pool(blocks: Blocks, num_blocks: int) -> bool:
    """Whether all of a pool is listed, in order."""
    return [block for block in blocks.ids if block != HOLE] == list(range(num_blocks))


def check_merging(world: World, p: int, c: int, pairs: Pairs, runs: int) -> None:
    """Where blocks are alike, no fewer runs are possible; where all is alike, over all regions."""
    request = world.request
    source, sink = world.producers[p].regions, world.consumers[c].regions
    alike = True
    for group in {layer.group for layer in world.layers}:
        from_, to = world.producer.layouts[group], world.consumer.layouts[group]
        if (from_.tokens_per_block, from_.pages) != (to.tokens_per_block, to.pages):
            return
        cut = request.span.start % to.tokens_per_block or request.span.stop % to.tokens_per_block
        if not {from_.order, to.order} <= set(REAL_ORDERS):
            return  # no tensor has that
        for order in (from_.order, to.order):
            outside = order[order.index("block") :]
            if cut and ("head" in outside or "component" in outside):
                return  # the cut block may touch its neighbour in each head: not looked for
            page = order[order.index("token") : order.index("page")]
            if cut and from_.pages > 1 and ("head" in page or "component" in page):
                return  # the first head of a cut page may touch the page before: not looked for
        # Layers of a cut block, or behind a gap, may touch those of the next: by chance too.
        alike = alike and all(
            getattr(from_, trait) == getattr(to, trait)
            for trait in ("order", "padding", "transposed", "values_first")
        )
        alike = alike and not (to.joined and (cut or to.slots == "gap"))
    names = {sink[pair[1]].layer for pair in pairs}
    split = {name[: -len("/k")] for name in names if name.endswith(("/k", "/v"))}
    if any(f"{layer}/k" not in names or f"{layer}/v" not in names for layer in split):
        alike = False  # another rank sends the other half: what is left joins up by chance only
    copied: list[Addresses] = []
    for from_region, to_region, first_head, end_head in pairs:
        one, other = source[from_region], sink[to_region]
        tables = (request.producer[one.group], request.consumer[other.group])
        pools = list(zip(tables, (one.num_blocks, other.num_blocks), strict=True))
        if all(reaches_both_ends(*pool) for pool in pools):
            # The end of one head or layer may touch the next one's beginning: by chance, and not
            # looked for. In one region it is found where all of the pool is copied.
            alike = False
            if not all(is_whole_pool(*pool) for pool in pools):
                return
        heads = range(first_head, end_head)
        copied.append(copied_addresses(one, other, tables, heads, request.span))
    if alike and copied:
        assert runs <= fewest_runs(np.concatenate(copied, axis=1))
    assert runs <= sum(map(fewest_runs, copied))


def check_batches(plan: _core.CopyPlan, runs: Runs, source: Memory, sink: Memory) -> None:
    """Batches cover the runs in order, and name the memory that the runs are in."""
    assert [batch[4] for batch in plan.batches[1:]] == [batch[5] for batch in plan.batches[:-1]]
    assert (plan.batches[0][4] if plan.batches else 0) == 0
    assert (plan.batches[-1][5] if plan.batches else 0) == len(runs)
    kinds = [batch[:4] for batch in plan.batches]
    assert len(set(kinds)) == len(kinds)
    for local_kind, local_device, remote_kind, remote_device, begin, end in plan.batches:
        assert begin < end
        for memory, column, kind, device in (
            (source, 0, local_kind, local_device),
            (sink, 1, remote_kind, remote_device),
        ):
            # Regions of one memory lie one after the other, those of a group together.
            regions = sorted(memory.regions, key=lambda region: region.base)
            bases = np.array([region.base for region in regions], dtype=np.uint64)
            places = np.searchsorted(bases, runs[begin:end, column], side="right") - 1
            for place in np.unique(places).tolist():
                assert (regions[place].memory, regions[place].device) == (kind, device)


def carry_out(runs: Runs, source: Memory, sink: Memory, writes: np.ndarray) -> None:
    """Does the copies, and counts how often each byte of the sink is written."""
    for local, remote, length in runs.tolist():
        assert length > 0
        assert source.base <= local <= local + length <= source.end
        assert sink.base <= remote <= remote + length <= sink.end
        ctypes.memmove(remote, local, length)
        writes[remote - sink.base : remote - sink.base + length] += 1


def check_world(world: World) -> None:
    request = world.request
    model = Model(seed=1)
    for rank, memory in enumerate(world.producers):
        shard = rank % world.producer.tp
        fill(memory, request.producer, model, request.tokens, shard)
    assignment = _core.assign_writers(
        [memory.regions for memory in world.producers],
        [memory.regions for memory in world.consumers],
    )
    before = [memory.buffer.copy() for memory in world.producers]
    for c, sink in enumerate(world.consumers):
        wanted, written = expected(
            sink,
            request.consumer,
            model,
            request.tokens,
            request.span,
            c % world.consumer.tp,
        )
        writes = np.zeros(sink.buffer.size, dtype=np.int64)
        for p, source in enumerate(world.producers):
            pairs = assignment[p][c]
            plan, pattern = make_plans(world, p, c, pairs, push=True)
            runs = plan.runs
            check_parts(plan, pattern)
            check_merging(world, p, c, pairs, len(runs))
            pulled = make_plan(world, p, c, pairs, push=False).runs
            assert np.array_equal(runs, pulled[:, [1, 0, 2]])
            check_batches(plan, runs, source, sink)
            carry_out(runs, source, sink, writes)
            assert plan.bytes == int(runs[:, 2].sum())
        assert np.array_equal(writes, written.astype(np.int64)), f"consumer {c}: bytes written"
        assert np.array_equal(sink.buffer, wanted), f"consumer {c}: content"
    for memory, content in zip(world.producers, before, strict=True):
        assert np.array_equal(memory.buffer, content)


@FAST
@given(world=worlds())
def test_every_byte_arrives_once_and_no_other_changes(world: World) -> None:
    check_world(world)


@settings(FAST, max_examples=500)
@given(world=halves())
def test_keys_and_values_in_regions_of_their_own_join_up_where_they_touch(world: World) -> None:
    check_world(world)


@pytest.mark.parametrize("seed", range(4))
def test_long_lists_of_large_ids_are_merged_in_any_order(seed: int) -> None:
    """Lists of some thousand ids are sorted in another way than short ones."""
    rng = np.random.default_rng(seed)
    pool = 1 << 22
    starts = np.sort(rng.choice(pool // 8 - 1, 700, replace=False)) * 8
    pieces = [np.arange(start, start + rng.integers(1, 8)) for start in starts]
    rng.shuffle(pieces)
    consumer = np.concatenate(pieces)
    producer = consumer + 5
    sides = [
        _core.Region(
            layer="layer",
            dtype="x",
            base=base,
            block_stride=2,
            num_blocks=pool + 16,
            tokens_per_block=1,
            tokens_per_page=1,
            heads=1,
            total_heads=1,
            element_bytes=2,
        )
        for base in (1 << 40, 1 << 44)
    ]
    planner = _core.CopyPlanner([sides[0]], [sides[1]], [(0, 0, 0, 1)], local_is_producer=True)
    plan = planner.plan((0, len(consumer)), [(0, producer)], [(0, consumer)])
    assert len(plan.runs) == len(pieces)
    to = np.concatenate([np.arange(a, a + n, 2) for _, a, n in plan.runs.tolist()])
    from_ = np.concatenate([np.arange(a, a + n, 2) for a, _, n in plan.runs.tolist()])
    assert np.array_equal(to - sides[1].base, np.sort(consumer) * 2)
    assert np.array_equal(from_ - sides[0].base, (np.sort(consumer) + 5) * 2)


def test_a_whole_pool_is_one_run_even_with_keys_and_values_in_halves() -> None:
    blocks, size = 6, 16
    sides = [
        _core.Region(
            layer="layer",
            dtype="x",
            base=base,
            block_stride=size,
            num_blocks=blocks,
            tokens_per_block=4,
            tokens_per_page=4,
            token_stride=4,
            components=2,
            component_stride=blocks * size,
            heads=1,
            total_heads=1,
            element_bytes=4,
        )
        for base in (1 << 40, 1 << 44)
    ]
    planner = _core.CopyPlanner([sides[0]], [sides[1]], [(0, 0, 0, 1)], local_is_producer=True)
    ids = list(range(blocks))
    whole = planner.plan((0, 4 * blocks), [(0, ids)], [(0, ids)])
    assert whole.runs.tolist() == [[1 << 40, 1 << 44, 2 * blocks * size]]
    less = planner.plan((0, 4 * blocks - 4), [(0, ids)], [(0, ids)])
    assert less.runs[:, 2].tolist() == [(blocks - 1) * size] * 2


@st.composite
def overlapping_shares(draw: st.DrawFn, heads: int) -> list[tuple[int, int]]:
    """(first head, heads) of some producers that together hold all."""
    ends = st.tuples(st.integers(0, heads), st.integers(0, heads)).map(sorted)
    some = [(a, b - a) for a, b in draw(st.lists(ends, max_size=3)) if a < b]
    held = {head for first, count in some for head in range(first, first + count)}
    return some if len(held) == heads else [*some, (0, heads)]


@settings(FAST, max_examples=200)
@given(shares=overlapping_shares(heads=8))
def test_holders_of_a_head_share_its_layers(shares: list[tuple[int, int]]) -> None:
    layers, heads = 6, 8

    def rank(first: int, count: int) -> list[_core.Region]:
        return [
            _core.Region(
                layer=f"layer.{i}",
                dtype="x",
                base=4096 * (i + 1),
                block_stride=heads,
                num_blocks=4,
                tokens_per_block=1,
                tokens_per_page=1,
                first_head=first,
                heads=count,
                total_heads=heads,
                head_stride=1,
                element_bytes=1,
            )
            for i in range(layers)
        ]

    assignment = _core.assign_writers([rank(*share) for share in shares], [rank(0, heads)])
    senders = np.zeros((len(shares), layers, heads), dtype=int)
    for p, (first, count) in enumerate(shares):
        for producer_region, consumer_region, begin, end in assignment[p][0]:
            assert producer_region == consumer_region
            assert first <= begin < end <= first + count
            senders[p, consumer_region, begin:end] += 1
    assert (senders.sum(axis=0) == 1).all()
    for head in range(heads):
        holders = [p for p, (first, count) in enumerate(shares) if first <= head < first + count]
        busy = [p for p in holders if senders[p, :, head].any()]
        assert busy == holders, f"head {head}: some of its holders idle"


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@SOAK
@given(world=worlds())
def test_every_byte_arrives_once_in_many_worlds(world: World) -> None:
    check_world(world)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@SOAK
@given(world=halves())
def test_keys_and_values_join_up_in_many_worlds(world: World) -> None:
    check_world(world)
