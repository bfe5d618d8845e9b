"""Two ranks in network namespaces of their own, joined by a cable that is cut without a word."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvpush.selftest.child import ChildFailedError
from tests.nixl.peer import LIMIT_S, Pair, Peer
from tests.nixl.test_ends import (
    LONG,
    LONG_IDS,
    LONG_TOKENS,
    SMALL_POSTS,
    assert_works,
    poison_at_end,
)
from tests.nixl.test_processes import QUICK

ADDRESSES = ("10.213.0.1", "10.213.0.2")


@pytest.fixture
def apart() -> Iterator[Pair]:
    """Two processes with nothing but the cable between them, and no engines yet."""
    with Peer("producer") as producer, Peer("consumer") as consumer:
        try:
            for peer in (producer, consumer):
                peer.network("isolate")
            producer.network("lay_cable", consumer.call("pid"))
        except ChildFailedError as error:
            pytest.skip(f"no network namespaces with a cable on this machine: {error}")
        for peer, address in zip((producer, consumer), ADDRESSES, strict=True):
            peer.network("plug_in", address)
        yield Pair(producer, consumer)


def start(pair: Pair, **config: object) -> None:
    env = {"UCX_TLS": "tcp"}
    pair.producer.open(LONG, env, **config)
    pair.consumer.open(LONG, env, **config)
    pair.consumer.connect(pair.producer)


def cut(pair: Pair) -> None:
    pair.producer.network("cut", ADDRESSES[1])
    pair.consumer.network("cut", ADDRESSES[0])


def heal(pair: Pair) -> None:
    pair.producer.network("heal", ADDRESSES[1])
    pair.consumer.network("heal", ADDRESSES[0])


def meet_again(pair: Pair) -> None:
    """The peers may be lost to each other once more, for what lay in the cable's queues."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            pair.consumer.connect(pair.producer, timeout_s=3.0)
            break
        except ChildFailedError:
            if time.monotonic() > until:
                raise


def cut_after(apart: Pair, posts: int) -> None:
    start(apart, **QUICK, **SMALL_POSTS)
    producer, consumer = apart.producer, apart.consumer
    producer.fill(1, LONG_IDS, LONG_TOKENS)
    waiting = consumer.grant("waiting", LONG_IDS[:10], 160)
    producer.wait_counters(served_live=1)
    offer = producer.offer("cut", LONG_IDS, LONG_TOKENS)
    producer.wait_counters(offers_live=1)
    grant = consumer.grant("cut", LONG_IDS, LONG_TOKENS)
    producer.wait_counters(writes_posted=posts)
    cut(apart)
    event = poison_at_end(consumer, grant)
    assert (event.kind, event.reason) == ("receive_failed", "peer_lost")
    assert consumer.wait(waiting).reason == "peer_lost"
    consumer.poison()
    assert producer.wait(offer).kind == "send_failed"
    apart.producer.idle()
    apart.consumer.idle()
    heal(apart)
    meet_again(apart)
    assert consumer.wrong_bytes() == 0, "written after the consumer had given up on it"
    assert_works(apart)


def test_a_cut_in_mid_transfer(apart: Pair) -> None:
    cut_after(apart, 20)


@pytest.mark.soak
@pytest.mark.parametrize("posts", [1, 2, 5, 10, 50, 100, 200, 400, 700, 1000])
def test_a_cut_at_other_moments(apart: Pair, posts: int) -> None:
    cut_after(apart, posts)
