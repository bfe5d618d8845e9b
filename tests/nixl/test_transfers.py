"""What must arrive arrives, and nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.nixl.peer import Layout, Pair, Peer, part

IDS = list(range(10, 42))
OTHER_IDS = list(range(100, 132))
TOKENS = 32 * 16

MakePair = Callable[..., Pair]
MakePeer = Callable[..., Peer]


def scattered(seed: int, count: int = 32, pool: int = 256) -> list[int]:
    return random.Random(seed).sample(range(pool), count)


ARRANGEMENTS = {
    "same": (IDS, OTHER_IDS),
    "descending at the consumer": (IDS, OTHER_IDS[::-1]),
    "descending at the producer": (IDS[::-1], OTHER_IDS),
    "descending on both sides": (IDS[::-1], OTHER_IDS[::-1]),
    "scattered": (scattered(1), scattered(2)),
}


@pytest.mark.parametrize("offer_first", [True, False], ids=["offer first", "grant first"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_byte_arrives(pair: Pair, arrangement: str, offer_first: bool) -> None:
    producer, consumer = pair.producer, pair.consumer
    source, target = ARRANGEMENTS[arrangement]
    transfer = f"{arrangement}/{offer_first}"
    producer.fill(7, source, TOKENS)
    if offer_first:
        offer = producer.offer(transfer, source, TOKENS)
        producer.wait_counters(offers_live=1)
        grant = consumer.grant(transfer, target, TOKENS)
    else:
        grant = consumer.grant(transfer, target, TOKENS)
        producer.wait_counters(served_live=1)
        offer = producer.offer(transfer, source, TOKENS)
    assert consumer.wait(grant).kind == "received"
    sent = producer.wait(offer)
    assert (sent.kind, sent.reason) == ("sent", "none")
    assert sent.bytes == 4 * 2 * 2 * TOKENS * 64
    assert sent.descriptors <= sent.descriptors_before
    assert consumer.wrong_bytes((7, target, 0, TOKENS)) == 0


def test_contiguous_blocks_become_one_descriptor_per_layer(pair: Pair) -> None:
    offer = pair.producer.offer("coalesced", IDS, TOKENS)
    grant = pair.consumer.grant("coalesced", OTHER_IDS, TOKENS)
    assert pair.consumer.wait(grant).kind == "received"
    sent = pair.producer.wait(offer)
    assert sent.descriptors == pair.producer.layout.layers
    assert sent.descriptors_before > sent.descriptors


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 1), (0, 16), (0, 17), (0, TOKENS - 15), (64, TOKENS), (67, TOKENS - 3), (511, 512)],
)
def test_only_the_granted_tokens_are_written(pair: Pair, first: int, end: int) -> None:
    producer, consumer = pair.producer, pair.consumer
    producer.fill(8, IDS, TOKENS)
    target = scattered(3)
    offer = producer.offer(f"span {first} {end}", IDS, TOKENS)
    grant = consumer.grant(f"span {first} {end}", target, end, first_token=first)
    assert consumer.wait(grant).kind == "received"
    assert producer.wait(offer).kind == "sent"
    assert consumer.wrong_bytes((8, target, first, end)) == 0


def test_an_offer_that_grows_is_pushed_in_steps(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=64)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(9, IDS, TOKENS)
    grant = consumer.grant("grows", OTHER_IDS, TOKENS)
    producer.wait_counters(served_live=1)
    ticket = producer.offer("grows", IDS[:10], 150, final=False)
    per_token = 4 * 2 * 2 * 64
    # 150 tokens are two granules of 64.
    counters = producer.wait_counters(bytes_written=128 * per_token)
    assert counters["bytes_written"] == 128 * per_token
    assert not consumer.ended(grant)
    producer.offer("grows", IDS[10:20], 320, final=False, ticket=ticket, first_block=10)
    producer.wait_counters(bytes_written=320 * per_token)
    producer.offer("grows", IDS[20:], TOKENS, final=True, ticket=ticket, first_block=20)
    assert consumer.wait(grant).kind == "received"
    sent = producer.wait(ticket)
    assert (sent.kind, sent.bytes) == ("sent", TOKENS * per_token)
    assert consumer.wrong_bytes((9, OTHER_IDS, 0, TOKENS)) == 0
    pair.idle()


def test_without_granularity_nothing_is_written_before_the_last_piece(pair: Pair) -> None:
    producer, consumer = pair.producer, pair.consumer
    before = producer.counters()["bytes_written"]
    producer.fill(10, IDS, TOKENS)
    grant = consumer.grant("at the end", OTHER_IDS, TOKENS)
    producer.wait_counters(served_live=1)
    ticket = producer.offer("at the end", IDS[:16], 256, final=False)
    producer.wait_counters(offers_live=1)
    assert producer.counters()["bytes_written"] == before
    producer.offer("at the end", IDS[16:], TOKENS, ticket=ticket, first_block=16)
    assert consumer.wait(grant).kind == "received"
    assert producer.wait(ticket).kind == "sent"
    assert consumer.wrong_bytes((10, OTHER_IDS, 0, TOKENS)) == 0


@pytest.mark.parametrize("offer_first", [True, False])
def test_an_empty_span_ends_the_offer_at_once(pair: Pair, offer_first: bool) -> None:
    producer, consumer = pair.producer, pair.consumer
    transfer = f"nothing needed {offer_first}"
    offer = producer.offer(transfer, IDS, TOKENS) if offer_first else 0
    grant = consumer.grant(transfer, [], 0)
    assert consumer.wait(grant).kind == "received"
    offer = offer or producer.offer(transfer, IDS, TOKENS)
    sent = producer.wait(offer)
    assert (sent.kind, sent.bytes) == ("sent", 0)
    assert consumer.wrong_bytes() == 0


def test_two_hundred_transfers_at_once(pair: Pair) -> None:
    producer, consumer = pair.producer, pair.consumer
    before = producer.counters(), consumer.counters()
    source, target = scattered(4, 200), scattered(5, 200)
    per_token = 4 * 2 * 2 * 64
    lengths = [random.Random(i).randint(1, 16) for i in range(200)]
    for i in range(200):
        producer.fill(1000 + i, [source[i]], lengths[i])
    order = random.Random(6).sample(range(200), 200)
    offers = [producer.offer(f"many {i}", [source[i]], lengths[i]) for i in order[:100]]
    grants = [consumer.grant(f"many {i}", [target[i]], lengths[i]) for i in range(200)]
    offers += [producer.offer(f"many {i}", [source[i]], lengths[i]) for i in order[100:]]
    assert {e.kind for e in consumer.wait_all(grants)} == {"received"}
    sent = producer.wait_all(offers)
    assert {e.kind for e in sent} == {"sent"}
    assert sum(e.bytes for e in sent) == sum(lengths) * per_token
    assert consumer.wrong_bytes(*[(1000 + i, [target[i]], 0, lengths[i]) for i in range(200)]) == 0
    after = producer.idle(), consumer.idle()
    both = zip(after, before, strict=True)
    grown = [{name: now[name] - then[name] for name in now} for now, then in both]
    assert grown[0]["transfers_sent"] == grown[1]["transfers_received"] == 200
    assert grown[0]["bytes_written"] == sum(lengths) * per_token
    assert grown[0]["transfers_failed"] == grown[1]["transfers_failed"] == 0
    assert grown[0]["peers_lost"] == grown[1]["peers_lost"] == 0


def test_a_busy_interpreter_does_not_stop_the_engines(pair: Pair) -> None:
    producer, consumer = pair.producer, pair.consumer
    producer.call("spin")
    consumer.call("spin")
    try:
        for i in range(5):
            producer.fill(i, IDS, TOKENS)
            consumer.poison()
            offer = producer.offer(f"spinning {i}", IDS, TOKENS)
            grant = consumer.grant(f"spinning {i}", OTHER_IDS, TOKENS)
            assert consumer.wait(grant).kind == "received"
            assert producer.wait(offer).kind == "sent"
            assert consumer.wrong_bytes((i, OTHER_IDS, 0, TOKENS)) == 0
    finally:
        producer.call("stop_spinning")
        consumer.call("stop_spinning")


def test_three_hundred_thousand_scattered_blocks_in_one_grant(new_pair: MakePair) -> None:
    layout = Layout(
        layers=1, blocks=300_000, tokens_per_block=1, heads=1, total_heads=1, element_bytes=4
    )
    pair = new_pair(layout)
    producer, consumer = pair.producer, pair.consumer
    source = random.Random(1).sample(range(300_000), 300_000)
    target = random.Random(2).sample(range(300_000), 300_000)
    # Only a few of the tokens are asked for: the message is what is large here.
    producer.fill(3, source, 300_000)
    offer = producer.offer("huge", source, 300_000)
    ticket = consumer.ticket()
    consumer.call(
        "grant",
        ticket=ticket,
        transfer_id="huge",
        fingerprint=b"fingerprint 0001",
        attempt=5,
        sessions=consumer.sessions,
        span=(299_000, 300_000),
        blocks=[(0, target)],
        deadline_s=60.0,
    )
    assert consumer.wait(ticket).kind == "received"
    assert producer.wait(offer).kind == "sent"
    assert consumer.wrong_bytes((3, target, 299_000, 300_000)) == 0
    pair.idle()


FULL = Layout(heads=4, total_heads=4)
GEOMETRIES = {
    "16 to 32 tokens a block": (Layout(), Layout(tokens_per_block=32)),
    "32 to 16 tokens a block": (Layout(tokens_per_block=32), Layout()),
    "48 to 32 tokens a block": (Layout(tokens_per_block=48), Layout(tokens_per_block=32)),
    "HND to NHD": (Layout(), Layout(order="NHD")),
    "NHD to HND, other block size": (Layout(order="NHD"), Layout(tokens_per_block=32)),
    "NHD on both sides": (Layout(order="NHD"), Layout(order="NHD")),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_different_geometries(new_peer: MakePeer, geometry: str) -> None:
    from_layout, to_layout = GEOMETRIES[geometry]
    producer = new_peer("producer", from_layout)
    consumer = new_peer("consumer", to_layout).connect(producer)
    tokens = 300
    source = scattered(7, -(-tokens // from_layout.tokens_per_block), from_layout.blocks)
    target = scattered(8, -(-tokens // to_layout.tokens_per_block), to_layout.blocks)
    producer.fill(11, source, tokens)
    for first in (0, 100):
        consumer.poison()
        offer = producer.offer(f"from {first}", source, tokens)
        grant = consumer.grant(f"from {first}", target, tokens, first_token=first)
        assert consumer.wait(grant).kind == "received"
        assert producer.wait(offer).kind == "sent"
        assert consumer.wrong_bytes((11, target, first, tokens)) == 0
    Pair(producer, consumer).idle()


def test_two_producer_ranks_write_into_one_consumer_rank(new_peer: MakePeer) -> None:
    layouts = [part(FULL, rank, 2) for rank in range(2)]
    producers = [
        new_peer(f"producer {rank}", layouts[rank], engine_id="P", tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    consumer = new_peer("consumer", FULL).connect(*producers)
    assert len(consumer.sessions) == 2
    ids = scattered(9, 20, FULL.blocks)
    for producer in producers:
        producer.fill(12, ids, 320)
    offers = [producers[0].offer("fan-in", ids, 320)]
    grant = consumer.grant("fan-in", ids, 320)
    assert producers[0].wait(offers[0]).kind == "sent"
    assert not consumer.ended(grant), "one writer of two must not complete it"
    offers.append(producers[1].offer("fan-in", ids, 320))
    assert consumer.wait(grant).kind == "received"
    assert producers[1].wait(offers[1]).kind == "sent"
    assert consumer.wrong_bytes((12, ids, 0, 320)) == 0
    for peer in (*producers, consumer):
        peer.idle()


def test_one_producer_rank_writes_into_two_consumer_ranks(new_peer: MakePeer) -> None:
    producer = new_peer("producer", FULL)
    consumers = [
        new_peer(f"consumer {rank}", part(FULL, rank, 2), engine_id="D", tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    for consumer in consumers:
        consumer.connect(producer, consumers=consumers)
    ids = scattered(10, 20, FULL.blocks)
    producer.fill(13, ids, 320)
    offer = producer.offer("fan-out", ids, 320)
    grants = [consumers[0].grant("fan-out", ids, 320, attempt=77)]
    assert consumers[0].wait(grants[0]).kind == "received"
    assert not producer.ended(offer), "the other rank still needs it"
    grants.append(consumers[1].grant("fan-out", ids, 320, attempt=77))
    assert consumers[1].wait(grants[1]).kind == "received"
    assert producer.wait(offer).kind == "sent"
    for consumer in consumers:
        assert consumer.wrong_bytes((13, ids, 0, 320)) == 0
    for peer in (producer, *consumers):
        peer.idle()


def test_replicated_heads_are_written_once_per_consumer_rank(new_peer: MakePeer) -> None:
    latent = Layout(heads=1, total_heads=1, replicated=True)
    producers = [
        new_peer(f"producer {rank}", latent, engine_id="P", tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    consumers = [
        new_peer(f"consumer {rank}", latent, engine_id="D", tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    for consumer in consumers:
        consumer.connect(*producers, consumers=consumers)
    ids = scattered(11, 20, latent.blocks)
    for producer in producers:
        producer.fill(14, ids, 320)
    offers = [producer.offer("latent", ids, 320) for producer in producers]
    grants = [consumer.grant("latent", ids, 320, attempt=78) for consumer in consumers]
    for consumer, grant in zip(consumers, grants, strict=True):
        assert consumer.wait(grant).kind == "received"
        assert consumer.wrong_bytes((14, ids, 0, 320)) == 0
    events = [p.wait(o) for p, o in zip(producers, offers, strict=True)]
    assert {event.kind for event in events} == {"sent"}
    assert sum(event.bytes for event in events) == 2 * 320 * 4 * 2 * 64
    for peer in (*producers, *consumers):
        peer.idle()
