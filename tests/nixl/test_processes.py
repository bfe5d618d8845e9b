"""Peers that die, stop, come back or leave: the other side lives on and nobody waits for ever."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from kvpush.selftest.child import ChildFailedError
from tests.nixl.peer import LIMIT_S, Pair, Peer
from tests.nixl.test_ends import (
    IDS,
    LONG,
    LONG_IDS,
    LONG_TOKENS,
    OTHER_IDS,
    POST_BYTES,
    SMALL_POSTS,
    TOKENS,
    assert_works,
    poison_at_end,
    start_long,
)

MakePair = Callable[..., Pair]
MakePeer = Callable[..., Peer]

# Short, but long enough for a busy machine.
QUICK = {
    "keepalive_s": 0.1,
    "peer_timeout_s": 2.0,
    "fence_margin_s": 0.5,
    "resend_s": 0.5,
    "revoke_patience_s": 2.0,
}
# Longer than any test may take: what ends all the same ends for another reason.
PATIENT = {"peer_timeout_s": 600.0, "fence_margin_s": 600.0}


def test_a_producer_that_is_dead_before_the_first_contact(new_peer: MakePeer) -> None:
    producer = new_peer("producer", **QUICK)
    consumer = new_peer("consumer", **QUICK)
    producer.kill()
    with pytest.raises(ChildFailedError) as caught:
        consumer.connect(producer, timeout_s=1.5)
    assert caught.value.kind == "TimeoutError"
    consumer.idle()
    replacement = new_peer("producer", **QUICK)
    consumer.connect(replacement)
    assert_works(Pair(replacement, consumer))


def test_a_stopped_producer_does_not_delay_the_meeting_with_another(new_peer: MakePeer) -> None:
    stopped = new_peer("stopped producer", **QUICK)
    living = new_peer("living producer", **QUICK)
    consumer = new_peer("consumer", **QUICK)
    stopped.signal(signal.SIGSTOP)
    try:
        with pytest.raises(ChildFailedError) as caught:
            consumer.connect(stopped, timeout_s=1.0)
        assert caught.value.kind == "TimeoutError"
        consumer.connect(living)
        assert_works(Pair(living, consumer))
    finally:
        stopped.signal(signal.SIGCONT)


def test_the_producer_is_killed_while_a_grant_waits(new_pair: MakePair, new_peer: MakePeer) -> None:
    pair = new_pair(**QUICK)
    consumer = pair.consumer
    session = pair.producer.session
    grant = consumer.grant("orphan", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    pair.producer.kill()
    failed = consumer.wait(grant)
    assert (failed.kind, failed.reason, failed.session) == ("receive_failed", "peer_lost", session)
    consumer.wait_peer_lost(session)
    assert consumer.idle()["peers"] == 0
    late = consumer.grant("after its death", OTHER_IDS, TOKENS)
    assert consumer.wait(late).reason == "peer_lost"

    replacement = new_peer("producer", **QUICK)
    consumer.connect(replacement)
    assert_works(Pair(replacement, consumer))


def test_blocks_stay_held_until_a_lost_writer_can_write_no_more(new_pair: MakePair) -> None:
    pair = new_pair(**PATIENT, keepalive_s=0.1)
    consumer = pair.consumer
    grant = consumer.grant("quarantine", OTHER_IDS, TOKENS)
    revoked = consumer.grant("quarantine too", IDS, TOKENS)
    pair.producer.wait_counters(served_live=2)
    session = pair.producer.session
    pair.producer.kill()
    consumer.wait_peer_lost(session)  # sending to it fails
    consumer.revoke(revoked)
    soon = consumer.grant("of another peer", [], 0, sessions=[])
    assert consumer.wait(soon).kind == "received"
    assert not consumer.ended(grant)
    assert not consumer.ended(revoked)
    assert consumer.counters()["grants_live"] == 2


def test_the_producer_is_killed_in_mid_transfer(new_pair: MakePair, new_peer: MakePeer) -> None:
    pair = new_pair(LONG, **QUICK, **SMALL_POSTS)
    _, grant = start_long(pair, "cut short")
    pair.producer.kill()
    event = poison_at_end(pair.consumer, grant)
    assert (event.kind, event.reason) == ("receive_failed", "peer_lost")
    pair.consumer.idle()
    assert pair.consumer.wrong_bytes() == 0
    replacement = new_peer("producer", LONG, **QUICK)
    pair.consumer.connect(replacement)
    assert_works(Pair(replacement, pair.consumer))


def test_the_consumer_is_killed_in_mid_transfer(new_pair: MakePair, new_peer: MakePeer) -> None:
    pair = new_pair(LONG, **QUICK, **SMALL_POSTS)
    offer, _ = start_long(pair, "to nowhere")
    pair.consumer.kill()
    event = pair.producer.wait(offer)
    assert event.kind == "send_failed"
    assert pair.producer.idle()["peers"] == 0
    replacement = new_peer("consumer", LONG, **QUICK).connect(pair.producer)
    assert_works(Pair(pair.producer, replacement))


def test_the_consumer_is_killed_while_its_grant_waits(
    new_pair: MakePair, new_peer: MakePeer
) -> None:
    pair = new_pair(**QUICK)
    pair.consumer.grant("abandoned", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    session = pair.consumer.session
    pair.consumer.kill()
    pair.producer.wait_peer_lost(session)
    pair.producer.idle()
    # The prefill that ends later is not held for somebody who is gone.
    offer = pair.producer.offer("abandoned", IDS, TOKENS)
    event = pair.producer.wait(offer)
    assert (event.kind, event.reason) == ("send_failed", "peer_lost")
    replacement = new_peer("consumer", **QUICK).connect(pair.producer)
    assert_works(Pair(pair.producer, replacement))


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_a_stopped_producer_does_not_write_after_it_was_given_up(
    new_pair: MakePair, transport: str
) -> None:
    env = {"UCX_TLS": transport} if transport else {}
    pair = new_pair(LONG, env=env, **QUICK, **SMALL_POSTS)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(1, LONG_IDS, LONG_TOKENS)
    waiting = consumer.grant("waiting", LONG_IDS[:10], 160)
    producer.wait_counters(served_live=1)
    offer, grant = start_long(pair, "interrupted")
    producer.signal(signal.SIGSTOP)
    event = poison_at_end(consumer, grant)
    failed = consumer.wait(waiting)
    consumer.poison()
    # What was asked of it while it could not hear is done as soon as it wakes.
    producer.child.send(
        "offer",
        ticket=producer.ticket(),
        transfer_id="waiting",
        fingerprint=b"fingerprint 0001",
        new_blocks=[(0, LONG_IDS[:10])],
        watermark=160,
        final=True,
    )
    producer.signal(signal.SIGCONT)
    producer.child.receive("offer", LIMIT_S)
    producer.wait(offer)
    producer.idle()
    consumer.idle()
    assert (event.kind, event.reason) == ("receive_failed", "peer_lost")
    assert (failed.kind, failed.reason) == ("receive_failed", "peer_lost")
    # The one post that was being made when the process stopped can't be taken back.
    wrong = consumer.wrong_bytes()
    assert wrong <= POST_BYTES, "written after the consumer had given up on it"
    # They can meet again.
    consumer.connect(producer)
    assert_works(pair)


def test_a_stopped_consumer_is_given_up_and_can_come_back(new_pair: MakePair) -> None:
    pair = new_pair(**QUICK)
    producer, consumer = pair.producer, pair.consumer
    session = consumer.session
    grant = consumer.grant("asleep", OTHER_IDS, TOKENS)
    producer.wait_counters(served_live=1)
    consumer.signal(signal.SIGSTOP)
    producer.wait_peer_lost(session)
    producer.idle()
    consumer.signal(signal.SIGCONT)
    assert consumer.wait(grant).kind == "receive_failed"
    consumer.idle()
    consumer.connect(producer)
    assert_works(pair)


def test_a_producer_that_leaves_says_so(new_pair: MakePair) -> None:
    pair = new_pair(**PATIENT)
    session = pair.producer.session
    grant = pair.consumer.grant("farewell", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    pair.producer.call("shutdown", drain_s=5.0)
    failed = pair.consumer.wait(grant)
    assert failed.kind == "receive_failed"
    assert failed.reason in {"shutdown", "peer_lost"}
    assert "goodbye" in pair.consumer.wait_peer_lost(session).detail
    pair.consumer.idle()


def test_a_consumer_that_leaves_says_so(new_pair: MakePair) -> None:
    pair = new_pair(**PATIENT)
    session = pair.consumer.session
    grant = pair.consumer.grant("farewell", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    counters = pair.consumer.call("shutdown", drain_s=5.0)
    assert counters["grants_live"] == 0
    assert pair.consumer.wait(grant).kind == "receive_revoked"
    assert "goodbye" in pair.producer.wait_peer_lost(session).detail
    pair.producer.idle()
    offer = pair.producer.offer("farewell", IDS, TOKENS)
    assert pair.producer.wait(offer).kind == "send_failed"


def test_shutdown_in_mid_transfer_leaves_nothing_in_flight(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **SMALL_POSTS, **PATIENT)
    pair.producer.fill(1, LONG_IDS, LONG_TOKENS)
    offer, grant = start_long(pair, "drained")
    counters = pair.producer.call("shutdown", drain_s=20.0)
    assert counters["handles_in_flight"] == counters["posts_queued"] == 0
    assert pair.producer.ended(offer)
    event = poison_at_end(pair.consumer, grant)
    assert event.kind in {"receive_failed", "received"}
    pair.consumer.idle()
    assert pair.consumer.wrong_bytes() == 0
