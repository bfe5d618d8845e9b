"""Who is not told a rank's session gets nothing from it and starts nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvpush import _core
from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError
from kvpush.selftest.child import ChildFailedError
from kvpush.side_channel import PROTOCOL, HelloReply, query_peers
from kvpush.vllm.handshake import SideChannel
from tests.nixl.peer import LIMIT_S, Pair, Peer
from tests.nixl.test_ends import IDS, TOKENS, assert_works

MakePeer = Callable[..., Peer]

HOST = "127.0.0.1"
KEY = AuthKey(b"the key of this deployment")
OTHER_KEY = AuthKey(b"the key of another one")
GUESSED = 0x5EED_5EED_5EED_5EED


@pytest.fixture
def producer(new_peer: MakePeer) -> Peer:
    return new_peer("producer")


@pytest.fixture
def channel(producer: Peer) -> Iterator[SideChannel]:
    hello = HelloReply(PROTOCOL, "engine", "push", 1, 1, [producer.blob])
    side = SideChannel(HOST, 0, dict, hello, auth=KEY)
    side.start()
    yield side
    side.stop()


def test_metadata_without_the_session_opens_no_door(producer: Peer, new_peer: MakePeer) -> None:
    """A stranger who has the producer's NIXL metadata from somewhere guesses the session."""
    true, guessed = (number.to_bytes(8, "little") for number in (producer.session, GUESSED))
    assert producer.blob.count(true) == 1
    stranger = new_peer("stranger", resend_s=0.2)
    known = producer.blob
    producer.blob = known.replace(true, guessed)
    assert _core.PeerInfo.decode(producer.blob).session == GUESSED
    offer = producer.offer("secret", IDS, TOKENS)
    with pytest.raises(ChildFailedError) as caught:
        stranger.connect(producer, timeout_s=1.0)
    assert caught.value.kind == "TimeoutError"
    counters = producer.wait_counters(messages_dropped=2)  # HELLO, and its repeats
    assert counters["messages_dropped"] == counters["messages_received"]
    assert counters["peers"] == counters["served_live"] == counters["writes_posted"] == 0
    assert not producer.ended(offer), "the stranger could do nothing to it"

    producer.withdraw(offer)
    producer.blob = known
    assert_works(Pair(producer, new_peer("consumer").connect(producer)))


@pytest.mark.parametrize("auth", [None, OTHER_KEY], ids=["no key", "another key"])
def test_the_key_is_the_way_to_the_metadata(
    producer: Peer, channel: SideChannel, new_peer: MakePeer, auth: AuthKey | None
) -> None:
    with pytest.raises(PeerIncompatibleError, match="wrong or missing auth key"):
        query_peers(HOST, channel.port, LIMIT_S, auth)
    assert producer.counters()["messages_received"] == 0
    (producer.blob,) = query_peers(HOST, channel.port, LIMIT_S, KEY).ranks
    assert_works(Pair(producer, new_peer("consumer").connect(producer)))
