"""Ranks for the tests: shared ones, and ones of their own for tests that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.nixl.peer import Layout, Pair, Peer


class SharedPair:
    """One pair for all tests that leave it at rest; a new one after a test that did not."""

    def __init__(self) -> None:
        self._pair: Pair | None = None

    def get(self) -> Pair:
        if self._pair is None:
            pair = Pair(Peer("producer"), Peer("consumer"))
            self._pair = pair
            pair.producer.open()
            pair.consumer.open().connect(pair.producer)
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.producer.child.close()
            self._pair.consumer.child.close()
            self._pair = None


@pytest.fixture(scope="session")
def shared_pair() -> Iterator[SharedPair]:
    shared = SharedPair()
    yield shared
    shared.close()


@pytest.fixture
def pair(shared_pair: SharedPair) -> Iterator[Pair]:
    """A pair with default settings that is at rest before and after the test."""
    found = shared_pair.get()
    found.producer.poison()
    found.consumer.poison()
    yield found
    try:
        found.idle()
    except BaseException:
        shared_pair.close()
        raise


@pytest.fixture
def new_peer() -> Iterator[Callable[..., Peer]]:
    """Makes ranks that end with the test."""
    peers: list[Peer] = []

    def make(name: str, layout: Layout | None = None, **config: Any) -> Peer:
        peer = Peer(name)
        peers.append(peer)
        return peer.open(layout, **config)

    yield make
    for peer in peers:
        peer.child.close()


@pytest.fixture
def new_pair(new_peer: Callable[..., Peer]) -> Callable[..., Pair]:
    """Makes a pair of its own, with the same settings on both sides."""

    def make(layout: Layout | None = None, **config: Any) -> Pair:
        producer = new_peer("producer", layout, **config)
        consumer = new_peer("consumer", layout, **config)
        consumer.connect(producer)
        return Pair(producer, consumer)

    return make
