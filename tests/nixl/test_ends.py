"""Every way in which a transfer ends otherwise than complete, without harm to anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpush.selftest.child import ChildFailedError
from tests.nixl.peer import LIMIT_S, Event, Layout, Pair, Peer

IDS = list(range(10, 42))
OTHER_IDS = list(range(100, 132))
TOKENS = 32 * 16
PER_TOKEN = 4 * 2 * 2 * 64

MakePair = Callable[..., Pair]
MakePeer = Callable[..., Peer]


def assert_works(pair: Pair, transfer_id: str = "afterwards") -> None:
    """One more transfer between the two arrives whole."""
    pair.producer.poison()
    pair.consumer.poison()
    pair.producer.fill(99, IDS, TOKENS)
    offer = pair.producer.offer(transfer_id, IDS, TOKENS)
    grant = pair.consumer.grant(transfer_id, OTHER_IDS, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    assert pair.consumer.wrong_bytes((99, OTHER_IDS, 0, TOKENS)) == 0
    pair.idle()


# --- revoked -------------------------------------------------------------------------------------


def test_revoked_while_waiting(pair: Pair) -> None:
    grant = pair.consumer.grant("revoked", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    pair.consumer.revoke(grant)
    assert pair.consumer.wait(grant).kind == "receive_revoked"
    pair.idle()
    offer = pair.producer.offer("revoked", IDS, TOKENS)
    event = pair.producer.wait(offer)
    assert (event.kind, event.reason, event.bytes) == ("send_failed", "revoked", 0)
    assert pair.consumer.wrong_bytes() == 0


def test_revoked_after_the_end_and_revoked_twice(pair: Pair) -> None:
    offer = pair.producer.offer("over", IDS, TOKENS)
    grant = pair.consumer.grant("over", OTHER_IDS, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    pair.consumer.revoke(grant)
    pair.consumer.revoke(12345)
    waiting = pair.consumer.grant("twice", OTHER_IDS, TOKENS)
    pair.consumer.revoke(waiting)
    pair.consumer.revoke(waiting)
    assert pair.consumer.wait(waiting).kind == "receive_revoked"
    assert_works(pair)  # and a second event for a ticket would have been an error


def test_revoked_between_two_pieces(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=64)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(1, IDS, TOKENS)
    grant = consumer.grant("half", OTHER_IDS, TOKENS)
    producer.wait_counters(served_live=1)
    offer = producer.offer("half", IDS[:16], 256, final=False)
    producer.wait_counters(bytes_written=256 * PER_TOKEN)
    consumer.revoke(grant)
    event = consumer.call("wait_then_poison", ticket=grant, ids=OTHER_IDS, limit_s=30.0)
    assert event.kind == "receive_revoked"
    producer.offer("half", IDS[16:], TOKENS, ticket=offer)
    assert producer.wait(offer).kind == "send_failed"
    assert producer.idle()["bytes_written"] == 256 * PER_TOKEN
    assert consumer.wrong_bytes() == 0
    assert_works(pair)


# Some hundred thousand small posts: long enough to be interrupted in the middle.
LONG = Layout(layers=2, blocks=1024, element_bytes=128)
LONG_IDS = list(range(1024))
LONG_TOKENS = 1024 * 16
POST_BYTES = 128
SMALL_POSTS = {
    "max_batch_bytes": POST_BYTES,
    "max_batch_descriptors": 1,
    "max_handles_in_flight": 4,
}


def start_long(pair: Pair, transfer_id: str, *, pull: bool = False) -> tuple[int, int]:
    """A long transfer under way: the tickets of its offer and its grant."""
    mover, posts = (pair.consumer, "reads_posted") if pull else (pair.producer, "writes_posted")
    posted = mover.counters()[posts]
    offer = pair.producer.offer(transfer_id, LONG_IDS, LONG_TOKENS)
    pair.producer.wait_counters(offers_live=1)
    grant = pair.consumer.grant(transfer_id, LONG_IDS, LONG_TOKENS)
    mover.wait_counters(**{posts: posted + 20})
    return offer, grant


def poison_at_end(peer: Peer, ticket: int) -> Event:
    """The end of a long transfer, after which another owner of the blocks writes at once."""
    event: Event = peer.call("wait_then_poison", ticket=ticket, ids=LONG_IDS, limit_s=LIMIT_S)
    return event


def revoke_and_watch(pair: Pair, offer: int, grant: int) -> str:
    """Revoke, and check that nothing is written once the grant has ended; gives its end."""
    pair.consumer.revoke(grant)
    event = poison_at_end(pair.consumer, grant)
    pair.producer.wait(offer)
    pair.idle()
    assert pair.consumer.wrong_bytes() == 0, "written after the grant had ended"
    return str(event.kind)


def revoke_until_it_is_in_mid_transfer(pair: Pair, start: Callable[[int], tuple[int, int]]) -> None:
    """Revoke one transfer after the other, until three have been caught on the way."""
    caught = 0
    for number in range(30):
        offer, grant = start(number)
        caught += revoke_and_watch(pair, offer, grant) == "receive_revoked"
        if caught == 3:
            return
    pytest.fail(f"{caught} of 30 transfers were caught before their end")


def test_revoked_in_mid_transfer(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **SMALL_POSTS)
    pair.producer.fill(2, LONG_IDS, LONG_TOKENS)
    revoke_until_it_is_in_mid_transfer(pair, lambda number: start_long(pair, f"long {number}"))
    assert_works(pair)


def test_revoked_while_one_large_write_is_in_flight(new_pair: MakePair) -> None:
    """Over TCP a write goes on after it was posted: the end must wait for it."""
    layout = replace(LONG, layers=8)
    pair = new_pair(layout, env={"UCX_TLS": "tcp"}, max_batch_bytes=1 << 30)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(2, LONG_IDS, LONG_TOKENS)

    def start(number: int) -> tuple[int, int]:
        posted = producer.counters()["writes_posted"]
        offer = producer.offer(f"large {number}", LONG_IDS, LONG_TOKENS)
        producer.wait_counters(offers_live=1)
        grant = consumer.grant(f"large {number}", LONG_IDS, LONG_TOKENS)
        producer.wait_counters(writes_posted=posted + 1)
        return offer, grant

    revoke_until_it_is_in_mid_transfer(pair, start)
    assert_works(pair)


def test_deadline_in_mid_transfer(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **SMALL_POSTS)
    pair.producer.fill(2, LONG_IDS, LONG_TOKENS)
    offer = pair.producer.offer("late", LONG_IDS, LONG_TOKENS)
    grant = pair.consumer.grant("late", LONG_IDS, LONG_TOKENS, deadline_s=0.05)
    event = poison_at_end(pair.consumer, grant)
    assert (event.kind, event.reason) == ("receive_failed", "deadline")
    assert pair.producer.wait(offer).kind == "send_failed"
    pair.idle()
    assert pair.consumer.wrong_bytes() == 0, "written after the grant had ended"


def test_withdrawn_in_mid_transfer(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **SMALL_POSTS)
    pair.producer.fill(2, LONG_IDS, LONG_TOKENS)
    offer, grant = start_long(pair, "withdrawn")
    pair.producer.withdraw(offer)
    event = poison_at_end(pair.consumer, grant)
    assert (event.kind, event.reason) == ("receive_failed", "producer_aborted")
    assert pair.producer.wait(offer).reason == "producer_aborted"
    pair.idle()
    assert pair.consumer.wrong_bytes() == 0, "written after the grant had ended"


# --- given up by the producer --------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["producer_aborted", "producer_short", "bad_request"])
def test_withdrawn_offer(pair: Pair, reason: str) -> None:
    grant = pair.consumer.grant(f"withdrawn {reason}", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    offer = pair.producer.offer(f"withdrawn {reason}", IDS[:4], 64, final=False)
    pair.producer.withdraw(offer, reason)
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", reason)
    assert failed.session == pair.producer.session
    sent = pair.producer.wait(offer)
    assert (sent.kind, sent.reason) == ("send_failed", reason)
    assert pair.consumer.wrong_bytes() == 0


def test_withdrawn_before_it_was_offered(pair: Pair) -> None:
    grant = pair.consumer.grant("never offered", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    ticket = pair.producer.ticket()
    pair.producer.withdraw(ticket, "producer_aborted", "never offered", b"fingerprint 0001")
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "producer_aborted")
    pair.idle()
    assert not pair.producer.ended(ticket)


def test_a_grant_that_comes_after_the_prefill_was_given_up(new_pair: MakePair) -> None:
    pair = new_pair(retry_grace_s=0.2)
    pair.producer.withdraw(1, "producer_aborted", "too late", b"fingerprint 0001")
    grant = pair.consumer.grant("too late", OTHER_IDS, TOKENS)
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "producer_aborted")
    assert_works(pair)


def test_a_retry_of_a_prefill_that_was_given_up(new_pair: MakePair) -> None:
    pair = new_pair(retry_grace_s=60.0)
    pair.producer.withdraw(pair.producer.ticket(), "producer_aborted", "retry", b"fingerprint 0001")
    grant = pair.consumer.grant("retry", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    pair.producer.fill(3, IDS, TOKENS)
    offer = pair.producer.offer("retry", IDS, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    pair.idle()


def test_fewer_tokens_than_were_granted(pair: Pair) -> None:
    grant = pair.consumer.grant("short", OTHER_IDS, TOKENS)
    offer = pair.producer.offer("short", IDS, TOKENS - 1)
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "producer_short")
    assert str(TOKENS) in failed.detail
    assert str(TOKENS - 1) in failed.detail
    sent = pair.producer.wait(offer)
    assert (sent.kind, sent.reason) == ("send_failed", "producer_short")
    assert pair.consumer.wrong_bytes() == 0


# --- time ----------------------------------------------------------------------------------------


def test_a_grant_without_an_offer_ends_at_its_deadline(pair: Pair) -> None:
    grants = [
        pair.consumer.grant(f"nobody {i}", OTHER_IDS, TOKENS, deadline_s=0.2) for i in range(20)
    ]
    events = pair.consumer.wait_all(grants)
    assert {(e.kind, e.reason) for e in events} == {("receive_failed", "deadline")}
    pair.idle()
    # The prefill that comes later is told at once.
    offer = pair.producer.offer("nobody 0", IDS, TOKENS)
    assert pair.producer.wait(offer).kind == "send_failed"
    assert pair.consumer.wrong_bytes() == 0


def test_an_offer_that_nobody_asks_for_expires(new_pair: MakePair) -> None:
    pair = new_pair(offer_ttl_s=0.2)
    offer = pair.producer.offer("unclaimed", IDS, TOKENS)
    event = pair.producer.wait(offer)
    assert (event.kind, event.reason) == ("send_failed", "offer_expired")
    assert_works(pair)


def test_a_growing_offer_does_not_expire(new_pair: MakePair) -> None:
    pair = new_pair(offer_ttl_s=0.1)
    offer = pair.producer.offer("slow prefill", IDS[:1], 16, final=False)
    other = pair.producer.offer("expires", IDS, TOKENS)
    assert pair.producer.wait(other).reason == "offer_expired"
    assert not pair.producer.ended(offer)
    pair.producer.withdraw(offer)
    assert pair.producer.wait(offer).kind == "send_failed"
    pair.idle()


def test_the_producer_gives_up_waiting_for_a_prefill(new_pair: MakePair) -> None:
    pair = new_pair(grant_ttl_s=0.2)
    grant = pair.consumer.grant("no prefill", OTHER_IDS, TOKENS)
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "grant_expired")
    pair.idle()


# --- wrong requests ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (IDS, [*OTHER_IDS[:-1], 256]),
        (IDS, [*OTHER_IDS[:-1], 2**31]),
        ([*IDS[:-1], 256], OTHER_IDS),
        ([*IDS[:-1], -1], OTHER_IDS),
        (IDS, OTHER_IDS[:-1]),
        (IDS[:-1], OTHER_IDS),
    ],
    ids=[
        "granted out of range",
        "granted far out of range",
        "offered out of range",
        "hole offered",
        "too few granted",
        "too few offered",
    ],
)
def test_wrong_blocks_harm_only_their_request(
    pair: Pair, request: pytest.FixtureRequest, source: list[int], target: list[int]
) -> None:
    name = request.node.callspec.id
    pair.producer.fill(4, IDS, TOKENS)
    good_offer = pair.producer.offer(f"good {name}", IDS, TOKENS)
    bad_offer = pair.producer.offer(f"bad {name}", source, TOKENS)
    bad_grant = pair.consumer.grant(f"bad {name}", target, TOKENS)
    failed = pair.consumer.wait(bad_grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "bad_request")
    assert failed.detail
    assert pair.producer.wait(bad_offer).kind == "send_failed"
    assert pair.consumer.wrong_bytes() == 0
    good_grant = pair.consumer.grant(f"good {name}", OTHER_IDS, TOKENS)
    assert pair.consumer.wait(good_grant).kind == "received"
    assert pair.producer.wait(good_offer).kind == "sent"
    assert pair.consumer.wrong_bytes((4, OTHER_IDS, 0, TOKENS)) == 0


def test_holes_in_a_grant_are_left_out(pair: Pair) -> None:
    """A sliding window has given blocks back: their tokens are not wanted, the others are."""
    target = [-1, -1, *OTHER_IDS[2:8], -1, *OTHER_IDS[9:]]
    pair.producer.fill(5, IDS, TOKENS)
    offer = pair.producer.offer("holes", IDS, TOKENS)
    grant = pair.consumer.grant("holes", target, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(offer).bytes == 29 * 16 * PER_TOKEN
    assert pair.consumer.wrong_bytes((5, target, 0, TOKENS)) == 0


def test_a_grant_to_a_stranger_fails_at_once(pair: Pair) -> None:
    grant = pair.consumer.grant("stranger", OTHER_IDS, TOKENS, sessions=[4242])
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "peer_lost")


# --- identities ----------------------------------------------------------------------------------


def test_a_second_offer_of_the_same_prompt_is_refused(pair: Pair) -> None:
    pair.producer.fill(5, IDS, TOKENS)
    first = pair.producer.offer("same", IDS, TOKENS)
    second = pair.producer.offer("same", OTHER_IDS, TOKENS)
    refused = pair.producer.wait(second)
    assert (refused.kind, refused.reason) == ("send_failed", "ambiguous")
    grant = pair.consumer.grant("same", OTHER_IDS, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(first).kind == "sent"
    assert pair.consumer.wrong_bytes((5, OTHER_IDS, 0, TOKENS)) == 0


def test_the_same_id_with_another_prompt_is_another_transfer(pair: Pair) -> None:
    fingerprints = [b"prompt number 01", b"prompt number 02"]
    sources = (IDS, list(range(200, 232)))
    targets = (OTHER_IDS, list(range(150, 182)))
    for seed, ids in zip((6, 7), sources, strict=True):
        pair.producer.fill(seed, ids, TOKENS)
    offers = [
        pair.producer.offer("same id", ids, TOKENS, fingerprint=mark)
        for ids, mark in zip(sources, fingerprints, strict=True)
    ]
    grants = [
        pair.consumer.grant("same id", ids, TOKENS, fingerprint=mark)
        for ids, mark in zip(targets[::-1], fingerprints[::-1], strict=True)
    ]
    assert {e.kind for e in pair.consumer.wait_all(grants)} == {"received"}
    assert {e.kind for e in pair.producer.wait_all(offers)} == {"sent"}
    wanted = [(6, targets[0], 0, TOKENS), (7, targets[1], 0, TOKENS)]
    assert pair.consumer.wrong_bytes(*wanted) == 0


def test_an_id_can_be_used_again(pair: Pair) -> None:
    for seed in range(20, 24):
        pair.consumer.poison()
        pair.producer.fill(seed, IDS, TOKENS)
        offer = pair.producer.offer("again", IDS, TOKENS)
        grant = pair.consumer.grant("again", OTHER_IDS, TOKENS)
        assert pair.consumer.wait(grant).kind == "received"
        assert pair.producer.wait(offer).kind == "sent"
        assert pair.consumer.wrong_bytes((seed, OTHER_IDS, 0, TOKENS)) == 0


def test_a_newer_attempt_replaces_the_older_one(pair: Pair) -> None:
    older_ids = list(range(200, 232))
    older = pair.consumer.grant("retried", older_ids, TOKENS)
    pair.producer.wait_counters(served_live=1)
    newer = pair.consumer.grant("retried", OTHER_IDS, TOKENS)
    failed = pair.consumer.wait(older)
    assert (failed.kind, failed.reason) == ("receive_failed", "superseded")
    pair.producer.fill(8, IDS, TOKENS)
    offer = pair.producer.offer("retried", IDS, TOKENS)
    assert pair.consumer.wait(newer).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    assert pair.consumer.wrong_bytes((8, OTHER_IDS, 0, TOKENS)) == 0


def test_two_consumers_of_one_prompt_are_not_confused(pair: Pair, new_peer: MakePeer) -> None:
    other = new_peer("other consumer").connect(pair.producer)
    first = pair.consumer.grant("contested", OTHER_IDS, TOKENS)
    pair.producer.wait_counters(served_live=1)
    second = other.grant("contested", OTHER_IDS, TOKENS)
    refused = other.wait(second)
    assert (refused.kind, refused.reason) == ("receive_failed", "ambiguous")
    pair.producer.fill(9, IDS, TOKENS)
    offer = pair.producer.offer("contested", IDS, TOKENS)
    assert pair.consumer.wait(first).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    assert pair.consumer.wrong_bytes((9, OTHER_IDS, 0, TOKENS)) == 0
    assert other.wrong_bytes() == 0
    other.idle()


# --- peers that don't fit ------------------------------------------------------------------------


def test_facts_that_differ_are_named(new_peer: MakePeer) -> None:
    producer = new_peer("producer", facts=[("protocol", "1"), ("model", "one-model")])
    consumer = new_peer("consumer", facts=[("protocol", "1"), ("model", "another-model")])
    with pytest.raises(ChildFailedError) as caught:
        consumer.connect(producer)
    assert caught.value.kind == "ValueError"
    for part in ("model", "one-model", "another-model"):
        assert part in caught.value.message
    Pair(producer, consumer).idle()


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (Layout(dtype="float16"), Layout(dtype="float8"), ("float16", "float8")),
        (Layout(element_bytes=64), Layout(element_bytes=128), ("64", "128")),
        (Layout(layers=4), Layout(layers=5), ("layer.4",)),
        (Layout(layer_name="decoder"), Layout(layer_name="encoder"), ("encoder.0",)),
        (Layout(total_heads=4, heads=2), Layout(total_heads=4, heads=4), ("heads", "2 to 3")),
        (Layout(total_heads=2), Layout(total_heads=4, heads=4), ("2", "4")),
    ],
    ids=["dtype", "element size", "layers", "layer names", "heads missing", "heads in all"],
)
def test_geometry_that_differs_is_named(
    new_peer: MakePeer, theirs: Layout, ours: Layout, named: tuple[str, ...]
) -> None:
    producer = new_peer("producer", theirs)
    consumer = new_peer("consumer", ours)
    with pytest.raises(ChildFailedError) as caught:
        consumer.connect(producer)
    assert caught.value.kind == "ValueError"
    for part in named:
        assert part in caught.value.message, caught.value.message
    Pair(producer, consumer).idle()
    assert consumer.counters()["peers"] == 0


def test_an_unknown_backend_is_named(new_peer: MakePeer) -> None:
    with pytest.raises(ChildFailedError, match="NOSUCHBACKEND") as caught:
        new_peer("producer", backend="NOSUCHBACKEND")
    assert caught.value.kind == "RuntimeError"


def test_a_missing_library_is_named(new_peer: MakePeer) -> None:
    with pytest.raises(ChildFailedError, match=r"no-such-library\.so") as caught:
        new_peer("producer", nixl_library="/nowhere/no-such-library.so")
    assert caught.value.kind == "RuntimeError"
    with pytest.raises(ChildFailedError, match="KVPUSH_NIXL_LIBRARY") as caught:
        new_peer("producer", env={"KVPUSH_NIXL_LIBRARY": "/nowhere/libnixl_capi.so"})
    assert caught.value.kind == "NixlNotFoundError"
