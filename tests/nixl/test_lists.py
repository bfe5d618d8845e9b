"""Scattered blocks, posted from NIXL's prepared lists once a rank has found the time for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nixl.peer import Layout, Pair, Peer
from tests.nixl.test_transfers import scattered

MakePair = Callable[..., Pair]
MakePeer = Callable[..., Peer]

BLOCKS = 100
TOKENS = BLOCKS * 16
ALL_BLOCKS = 2 * 4 * 256
"""Of both sides: four layers of 256 blocks."""


def copy(producer: Peer, consumer: Peer, seed: int, first: int = 0, end: int = TOKENS) -> None:
    """One request on blocks of its own, compared byte by byte."""
    source, target = scattered(seed, BLOCKS), scattered(1000 + seed, BLOCKS)
    consumer.poison()
    producer.fill(seed, source, TOKENS)
    offer = producer.offer(f"lists {seed}", source, TOKENS)
    grant = consumer.grant(f"lists {seed}", target, end, first_token=first)
    assert consumer.wait(grant).kind == "received"
    assert producer.wait(offer).kind == "sent"
    assert consumer.wrong_bytes((seed, target, first, end)) == 0


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_what_comes_from_lists_is_what_came_without_them(
    new_pair: MakePair, mode: str, order: str
) -> None:
    pair = new_pair(Layout(order=order), mode=mode)
    mover = pair.producer if mode == "push" else pair.consumer
    copy(pair.producer, pair.consumer, 1)
    assert mover.wait_counters(prepared_blocks=ALL_BLOCKS)["posted_from_lists"] == 0
    copy(pair.producer, pair.consumer, 2)
    posted = mover.counters()["posted_from_lists"]
    assert posted > 0
    copy(pair.producer, pair.consumer, 3, first=37, end=TOKENS - 5)
    assert mover.counters()["posted_from_lists"] > posted
    pair.idle()


def test_none_are_prepared_where_the_limit_is_zero(new_pair: MakePair) -> None:
    pair = new_pair(max_prepared_blocks=0)
    for seed in (1, 2):
        copy(pair.producer, pair.consumer, seed)
    counters = pair.producer.idle()
    assert (counters["prepared_blocks"], counters["posted_from_lists"]) == (0, 0)


def test_a_consumer_that_is_killed_takes_its_lists_along(new_peer: MakePeer) -> None:
    producer = new_peer("producer", peer_timeout_s=2.0, keepalive_s=0.2)
    victim = new_peer("victim", peer_timeout_s=2.0, keepalive_s=0.2).connect(producer)
    copy(producer, victim, 1)
    producer.wait_counters(prepared_blocks=ALL_BLOCKS)
    copy(producer, victim, 2)
    session = victim.session
    victim.kill()
    producer.wait_peer_lost(session)
    assert producer.counters()["prepared_blocks"] == 0
    heir = new_peer("heir", peer_timeout_s=2.0, keepalive_s=0.2).connect(producer)
    copy(producer, heir, 3)
    before = producer.wait_counters(prepared_blocks=ALL_BLOCKS)["posted_from_lists"]
    copy(producer, heir, 4)
    assert producer.counters()["posted_from_lists"] > before
