"""Pull: the consumer reads from the producer's blocks, over the same engine and protocol."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from kvpush.selftest.child import ChildFailedError
from tests.nixl.peer import Layout, Pair, Peer, part
from tests.nixl.test_ends import (
    IDS,
    LONG,
    LONG_IDS,
    LONG_TOKENS,
    OTHER_IDS,
    PER_TOKEN,
    SMALL_POSTS,
    TOKENS,
    assert_works,
    poison_at_end,
    start_long,
)
from tests.nixl.test_processes import PATIENT, QUICK
from tests.nixl.test_transfers import FULL, scattered

MakePair = Callable[..., Pair]
MakePeer = Callable[..., Peer]

PULL = {"mode": "pull"}


def start_long_read(pair: Pair, transfer_id: str) -> tuple[int, int]:
    """As `start_long`, for a pair that pulls."""
    return start_long(pair, transfer_id, pull=True)


def test_every_byte_is_read_whichever_leg_comes_first(new_pair: MakePair) -> None:
    pair = new_pair(**PULL)
    producer, consumer = pair.producer, pair.consumer
    arrangements = [(IDS, OTHER_IDS), (IDS, OTHER_IDS[::-1]), (scattered(1), scattered(2))]
    for number, (source, target) in enumerate(arrangements):
        for offer_first in (True, False):
            transfer = f"{number} {offer_first}"
            producer.poison()
            consumer.poison()
            producer.fill(7 + number, source, TOKENS)
            if offer_first:
                offer = producer.offer(transfer, source, TOKENS)
                producer.wait_counters(offers_live=1)
                grant = consumer.grant(transfer, target, TOKENS - 3, first_token=35)
            else:
                grant = consumer.grant(transfer, target, TOKENS - 3, first_token=35)
                producer.wait_counters(served_live=1)
                offer = producer.offer(transfer, source, TOKENS)
            received = consumer.wait(grant)
            assert received.kind == "received"
            assert received.bytes == (TOKENS - 38) * PER_TOKEN
            assert received.descriptors <= received.descriptors_before
            assert producer.wait(offer).kind == "sent"
            assert consumer.wrong_bytes((7 + number, target, 35, TOKENS - 3)) == 0
            assert producer.wrong_bytes((7 + number, source, 0, TOKENS)) == 0
    assert producer.counters()["bytes_written"] == 0
    pair.idle()


def test_an_offer_that_grows_is_read_when_it_is_final(new_pair: MakePair) -> None:
    pair = new_pair(**PULL, push_granularity_tokens=64)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(9, IDS, TOKENS)
    grant = consumer.grant("grows", OTHER_IDS, TOKENS)
    producer.wait_counters(served_live=1)
    ticket = producer.offer("grows", IDS[:16], 256, final=False)
    producer.offer("grows", IDS[16:], TOKENS, ticket=ticket, first_block=16)
    assert consumer.wait(grant).kind == "received"
    assert producer.wait(ticket).kind == "sent"
    assert consumer.wrong_bytes((9, OTHER_IDS, 0, TOKENS)) == 0
    pair.idle()


@pytest.mark.parametrize("offer_first", [True, False])
def test_nothing_is_read_for_an_empty_span(new_pair: MakePair, offer_first: bool) -> None:
    pair = new_pair(**PULL)
    if offer_first:
        offer = pair.producer.offer("nothing", IDS, TOKENS)
        pair.producer.wait_counters(offers_live=1)
    grant = pair.consumer.grant("nothing", [], 0)
    assert pair.consumer.wait(grant).kind == "received"
    if not offer_first:
        offer = pair.producer.offer("nothing", IDS, TOKENS)
    assert pair.producer.wait(offer).kind == "sent"
    assert pair.consumer.idle()["reads_posted"] == 0


def test_a_list_of_300000_scattered_blocks_arrives_whole(new_pair: MakePair) -> None:
    layout = Layout(
        layers=1, blocks=300_000, tokens_per_block=1, heads=1, total_heads=1, element_bytes=4
    )
    pair = new_pair(layout, **PULL)
    source = random.Random(1).sample(range(300_000), 300_000)
    target = random.Random(2).sample(range(300_000), 300_000)
    # Only a few of the tokens are asked for: the messages are what is large here.
    pair.producer.fill(3, source, 300_000)
    offer = pair.producer.offer("huge", source, 300_000)
    grant = pair.consumer.grant("huge", target, 300_000, first_token=299_000)
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(offer).kind == "sent"
    assert pair.consumer.wrong_bytes((3, target, 299_000, 300_000)) == 0
    pair.idle()


GEOMETRIES = {
    "16 to 32 tokens a block": (Layout(), Layout(tokens_per_block=32)),
    "NHD of 48 to HND of 32": (
        Layout(tokens_per_block=48, order="NHD"),
        Layout(tokens_per_block=32),
    ),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_different_geometries(new_peer: MakePeer, geometry: str) -> None:
    from_layout, to_layout = GEOMETRIES[geometry]
    producer = new_peer("producer", from_layout, **PULL)
    consumer = new_peer("consumer", to_layout, **PULL).connect(producer)
    source = scattered(7, -(-300 // from_layout.tokens_per_block), from_layout.blocks)
    target = scattered(8, -(-300 // to_layout.tokens_per_block), to_layout.blocks)
    producer.fill(11, source, 300)
    offer = producer.offer("mapped", source, 300)
    grant = consumer.grant("mapped", target, 300, first_token=100)
    assert consumer.wait(grant).kind == "received"
    assert producer.wait(offer).kind == "sent"
    assert consumer.wrong_bytes((11, target, 100, 300)) == 0
    Pair(producer, consumer).idle()


@pytest.mark.parametrize(("producers", "consumers"), [(2, 1), (1, 2)])
def test_tensor_parallel_sizes_that_differ(
    new_peer: MakePeer, producers: int, consumers: int
) -> None:
    def ranks(name: str, count: int) -> list[Peer]:
        return [
            new_peer(f"{name}{i}", part(FULL, i, count), engine_id=name, tp_rank=i, tp_size=count,
                     **PULL)
            for i in range(count)
        ]  # fmt: skip

    sources, targets = ranks("P", producers), ranks("D", consumers)
    for target in targets:
        target.connect(*sources, consumers=targets)
    ids = scattered(9, 20, FULL.blocks)
    for source in sources:
        source.fill(12, ids, 320)
    offers = [source.offer("parts", ids, 320) for source in sources[:1]]
    grants = [target.grant("parts", ids, 320, attempt=77) for target in targets[:1]]
    if len(sources) == 2:
        assert sources[0].wait(offers[0]).kind == "sent"
        assert not targets[0].ended(grants[0]), "half of it is still missing"
        offers.append(sources[1].offer("parts", ids, 320))
    else:
        assert targets[0].wait(grants[0]).kind == "received"
        assert not sources[0].ended(offers[0]), "the other rank still needs it"
        grants.append(targets[1].grant("parts", ids, 320, attempt=77))
    for target, grant in zip(targets, grants, strict=True):
        assert target.wait(grant).kind == "received"
        assert target.wrong_bytes((12, ids, 0, 320)) == 0
    for source, offer in zip(sources, offers, strict=True):
        assert source.wait(offer).kind == "sent"
    for peer in (*sources, *targets):
        peer.idle()


def test_both_modes_are_named_where_they_differ(new_peer: MakePeer) -> None:
    producer = new_peer("producer", facts=[("mode", "push")])
    consumer = new_peer("consumer", facts=[("mode", "pull")], **PULL)
    with pytest.raises(ChildFailedError) as caught:
        consumer.connect(producer)
    for part_of in ("mode", "push", "pull"):
        assert part_of in caught.value.message


# --- ends other than complete --------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_revoked_in_mid_transfer(new_pair: MakePair, transport: str) -> None:
    env = {"UCX_TLS": transport} if transport else {}
    pair = new_pair(LONG, env=env, **PULL, **SMALL_POSTS)
    pair.producer.fill(2, LONG_IDS, LONG_TOKENS)
    offer, grant = start_long_read(pair, "revoked")
    pair.consumer.revoke(grant)
    assert poison_at_end(pair.consumer, grant).kind == "receive_revoked"
    sent = pair.producer.wait(offer)
    assert (sent.kind, sent.reason) == ("send_failed", "revoked")
    pair.idle()
    assert pair.consumer.wrong_bytes() == 0, "read into blocks that had been given back"
    assert_works(pair)


def test_withdrawn_in_mid_transfer(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **PULL, **SMALL_POSTS)
    pair.producer.fill(2, LONG_IDS, LONG_TOKENS)
    offer, grant = start_long_read(pair, "withdrawn")
    pair.producer.withdraw(offer)
    assert poison_at_end(pair.producer, offer).reason == "producer_aborted"
    # The producer's blocks were its own again only when nothing was read from them any more.
    posted = pair.consumer.counters()
    assert posted["handles_in_flight"] == posted["posts_queued"] == 0
    failed = pair.consumer.wait(grant)
    assert (failed.kind, failed.reason) == ("receive_failed", "producer_aborted")
    assert pair.consumer.idle()["reads_posted"] == posted["reads_posted"]
    assert_works(pair)


def test_wrong_blocks_harm_only_their_request(new_pair: MakePair) -> None:
    pair = new_pair(**PULL)
    cases = [
        (IDS, [*OTHER_IDS[:-1], 256]),
        ([*IDS[:-1], 256], OTHER_IDS),
        ([*IDS[:-1], -1], OTHER_IDS),
        (IDS, OTHER_IDS[:-1]),
        (IDS[:-1], OTHER_IDS),
    ]
    for number, (source, target) in enumerate(cases):
        offer = pair.producer.offer(f"bad {number}", source, TOKENS)
        grant = pair.consumer.grant(f"bad {number}", target, TOKENS)
        failed = pair.consumer.wait(grant)
        assert (failed.kind, failed.reason) == ("receive_failed", "bad_request")
        assert failed.detail
        assert pair.producer.wait(offer).kind == "send_failed"
    assert pair.consumer.wrong_bytes() == 0
    assert_works(pair)


def test_the_producer_is_killed_in_mid_transfer(new_pair: MakePair, new_peer: MakePeer) -> None:
    pair = new_pair(LONG, **PULL, **QUICK, **SMALL_POSTS)
    _, grant = start_long_read(pair, "cut short")
    pair.producer.kill()
    event = poison_at_end(pair.consumer, grant)
    assert event.kind == "receive_failed"
    assert event.reason in {"peer_lost", "transport_error"}
    pair.consumer.idle()
    assert pair.consumer.wrong_bytes() == 0
    replacement = new_peer("producer", LONG, **PULL, **QUICK)
    pair.consumer.connect(replacement)
    assert_works(Pair(replacement, pair.consumer))


def test_the_consumer_is_killed_in_mid_transfer(new_pair: MakePair, new_peer: MakePeer) -> None:
    pair = new_pair(LONG, **PULL, **QUICK, **SMALL_POSTS)
    offer, _ = start_long_read(pair, "to nowhere")
    pair.consumer.kill()
    event = pair.producer.wait(offer)
    assert (event.kind, event.reason) == ("send_failed", "peer_lost")
    assert pair.producer.idle()["peers"] == 0
    replacement = new_peer("consumer", LONG, **PULL, **QUICK).connect(pair.producer)
    assert_works(Pair(pair.producer, replacement))


def test_a_consumer_stopped_in_mid_transfer_never_takes_what_it_read_for_the_prompt(
    new_pair: MakePair,
) -> None:
    pair = new_pair(LONG, **PULL, **QUICK, **SMALL_POSTS)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(1, LONG_IDS, LONG_TOKENS)
    offer, grant = start_long_read(pair, "asleep")
    consumer.signal(signal.SIGSTOP)
    # Lost, fenced, and its source given to another.
    event = poison_at_end(producer, offer)
    assert (event.kind, event.reason) == ("send_failed", "peer_lost")
    consumer.signal(signal.SIGCONT)
    assert consumer.wait(grant).kind == "receive_failed"
    consumer.idle()
    consumer.connect(producer)
    assert_works(pair)


def test_a_producer_stopped_in_mid_transfer_is_given_up(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **PULL, **QUICK, **SMALL_POSTS)
    producer, consumer = pair.producer, pair.consumer
    offer, grant = start_long_read(pair, "interrupted")
    producer.signal(signal.SIGSTOP)
    consumer.wait_peer_lost(producer.session)
    # READs may be waiting for the stopped process: until they end, the blocks are not given back.
    counters = consumer.counters()
    assert counters["handles_in_flight"] == 0 or not consumer.ended(grant)
    producer.signal(signal.SIGCONT)
    event = poison_at_end(consumer, grant)
    assert (event.kind, event.reason) == ("receive_failed", "peer_lost")
    assert consumer.counters()["reads_posted"] == counters["reads_posted"]
    assert producer.wait(offer).kind == "send_failed"
    pair.idle()
    assert consumer.wrong_bytes() == 0
    consumer.connect(producer)
    assert_works(pair)


def test_a_producer_that_leaves_calls_its_readers_back(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **PULL, **PATIENT, **SMALL_POSTS)
    offer, grant = start_long_read(pair, "farewell")
    counters = pair.producer.call("shutdown", drain_s=20.0)
    assert counters["served_live"] == 0
    assert pair.producer.ended(offer)
    assert pair.consumer.wait(grant).kind == "receive_failed"
    pair.consumer.idle()


def test_a_consumer_that_leaves_ends_its_reads_first(new_pair: MakePair) -> None:
    pair = new_pair(LONG, **PULL, **PATIENT, **SMALL_POSTS)
    offer, grant = start_long_read(pair, "farewell")
    counters = pair.consumer.call("shutdown", drain_s=20.0)
    assert counters["handles_in_flight"] == counters["grants_live"] == 0
    assert pair.consumer.ended(grant)
    assert pair.producer.wait(offer).kind == "send_failed"
    pair.producer.idle()
