"""GPU memory to GPU memory between two processes, gated by events that the native thread asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpush.selftest.child import Child
from tests.gpu.device_peer import BLOCKS, ELEMENT_BYTES, LAYERS, LIMIT_S, TOKENS, main

BLOCK_BYTES = LAYERS * 2 * TOKENS * ELEMENT_BYTES
# About a second on any GPU: long enough to be seen not to have finished.
SLOW_CYCLES = 2_000_000_000


@pytest.fixture
def ranks() -> Iterator[tuple[Child, Child]]:
    with Child("gpu-producer", main) as producer, Child("gpu-consumer", main) as consumer:
        yield producer, consumer
        for rank in (consumer, producer):
            rank.call("close", LIMIT_S)


def test_each_step_is_pushed_when_its_event_has_completed(ranks: tuple[Child, Child]) -> None:
    producer, consumer = ranks
    blob = producer.call("open", LIMIT_S)
    consumer.call("open", LIMIT_S)
    sessions = consumer.call("connect", 2 * LIMIT_S, producer=blob)
    source, target = list(range(8)), list(range(BLOCKS - 1, BLOCKS - 9, -1))
    consumer.call("grant", LIMIT_S, sessions=sessions, ids=target, tokens=8 * TOKENS)

    first = producer.call(
        "compute",
        LIMIT_S,
        ids=source[:4],
        value=1,
        watermark=4 * TOKENS,
        final=False,
        cycles=SLOW_CYCLES,
    )
    assert producer.call("fences_passed", LIMIT_S) < first, "the step has not finished yet"
    written = producer.call("wait_bytes_written", LIMIT_S, least=1)
    assert written == 4 * BLOCK_BYTES
    assert producer.call("fences_passed", LIMIT_S) >= first

    producer.call(
        "compute",
        LIMIT_S,
        ids=source[4:],
        value=2,
        watermark=8 * TOKENS,
        final=True,
        cycles=SLOW_CYCLES,
    )
    assert consumer.call("wait", LIMIT_S) == "received none"
    assert producer.call("wait", LIMIT_S) == "sent none"
    assert consumer.call("values", LIMIT_S, ids=target) == [[1]] * 4 + [[2]] * 4
    assert consumer.call("values", LIMIT_S, ids=[0, 20]) == [[0xA5], [0xA5]]
