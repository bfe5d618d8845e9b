"""The planner against the oracle, over random pairs of engines, with real bytes.

Every producer rank plans for every consumer rank, the runs are carried out on real buffers, and
each consumer's whole buffer is compared: what had to come, and what had to stay.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvpush import _core

from .oracle import Blocks, Memory, Model, expected, fill
from .worlds import World, worlds

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


def make_plan(
    world: World, p: int, c: int, pairs: list[tuple[int, int, int, int]], *, push: bool
) -> _core.CopyPlan:
    """The plan from rank p to rank c, as the producer (push) or the consumer makes it."""
    request = world.request
    local = (world.producers[p].regions, table(request.producer))
    remote = (world.consumers[c].regions, table(request.consumer))
    if not push:
        local, remote = remote, local
    planner = _core.CopyPlanner(local[0], remote[0], pairs, local_is_producer=push)
    return planner.plan((request.span.start, request.span.stop), local[1], remote[1])


def check_batches(plan: _core.CopyPlan, runs: np.ndarray, source: Memory, sink: Memory) -> None:
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
            for address in runs[begin:end, column].tolist():
                # Regions of one memory lie one after the other, those of a group together.
                region = max(
                    (region for region in memory.regions if region.base <= address),
                    key=lambda region: region.base,
                )
                assert (region.memory, region.device) == (kind, device)


def carry_out(runs: np.ndarray, source: Memory, sink: Memory, writes: np.ndarray) -> None:
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
            plan = make_plan(world, p, c, pairs, push=True)
            runs = plan.runs
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


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@SOAK
@given(world=worlds())
def test_every_byte_arrives_once_in_many_worlds(world: World) -> None:
    check_world(world)
