"""Offers that grow while the prefill runs, and are taken back when it is preempted."""

from __future__ import annotations

from collections.abc import Callable

from tests.nixl.peer import FINGERPRINT, LIMIT_S, Pair, Peer

SOURCE = list(range(10, 42))
ELSEWHERE = list(range(60, 92))
TARGET = list(range(100, 132))
TOKENS = 32 * 16
TOKEN_BYTES = 4 * 2 * 2 * 64

MakePair = Callable[..., Pair]


def rewind(producer: Peer, *tickets: int) -> list[int]:
    rewound: list[int] = producer.call("rewind", tickets=list(tickets), timeout_s=LIMIT_S)
    return rewound


def test_after_a_preemption_the_new_bytes_arrive(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=16)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(1, SOURCE, TOKENS)
    grant = consumer.grant("r", TARGET, TOKENS)
    producer.wait_counters(served_live=1)
    ticket = producer.offer("r", SOURCE[:20], 320, final=False)
    assert rewind(producer, ticket, 999) == [ticket]
    written = producer.counters()["bytes_written"]
    producer.fill(2, SOURCE, TOKENS)  # these blocks are another request's now
    producer.fill(3, ELSEWHERE, TOKENS)
    producer.offer("r", ELSEWHERE[:8], 128, final=False, ticket=ticket)
    producer.offer("r", ELSEWHERE[8:], TOKENS, ticket=ticket, first_block=8)
    assert consumer.wait(grant).kind == "received"
    sent = producer.wait(ticket)
    assert (sent.kind, sent.bytes) == ("sent", written + TOKENS * TOKEN_BYTES)
    assert consumer.wrong_bytes((3, TARGET, 0, TOKENS)) == 0
    pair.idle()


def test_nothing_is_read_any_more_when_rewind_returns(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=16, max_batch_descriptors=1)
    producer, consumer = pair.producer, pair.consumer
    for turn in range(10):
        consumer.poison()
        producer.fill(turn, SOURCE, TOKENS)
        grant = consumer.grant(f"r{turn}", TARGET, TOKENS)
        producer.wait_counters(served_live=1)
        ticket = producer.offer(f"r{turn}", SOURCE, TOKENS)
        rewound = rewind(producer, ticket)
        producer.fill(100 + turn, SOURCE, TOKENS)
        if rewound:
            producer.fill(turn, ELSEWHERE, TOKENS)
            producer.offer(f"r{turn}", ELSEWHERE, TOKENS, ticket=ticket)
        assert consumer.wait(grant).kind == "received"
        assert producer.wait(ticket).kind == "sent"
        assert consumer.wrong_bytes((turn, TARGET, 0, TOKENS)) == 0
        producer.withdraw(ticket)
    pair.idle()


def test_small_pieces_wait_for_more(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=16, min_push_tokens=100)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(5, SOURCE, TOKENS)
    grant = consumer.grant("r", TARGET, TOKENS)
    producer.wait_counters(served_live=1)
    ticket = producer.offer("r", SOURCE[:6], 96, final=False)
    producer.offer("r", SOURCE[6:8], 128, final=False, ticket=ticket, first_block=6)
    counters = producer.wait_counters(bytes_written=1)
    assert counters["bytes_written"] == 128 * TOKEN_BYTES
    producer.offer("r", SOURCE[8:], TOKENS, ticket=ticket, first_block=8)
    assert consumer.wait(grant).kind == "received"
    assert consumer.wrong_bytes((5, TARGET, 0, TOKENS)) == 0
    pair.idle()


def test_the_offers_of_a_step_leave_together(new_pair: MakePair) -> None:
    pair = new_pair(push_granularity_tokens=16)
    producer, consumer = pair.producer, pair.consumer
    producer.fill(6, SOURCE, TOKENS)
    grants = [consumer.grant(f"r{i}", TARGET[i : i + 1], 16) for i in range(8)]
    tickets = [producer.ticket() for _ in range(8)]
    offers = [
        (tickets[i], f"r{i}", FINGERPRINT, [(0, SOURCE[i : i + 1])], 16, True) for i in range(8)
    ]
    fence = producer.call("offer_all", offers=offers)
    assert {event.kind for event in consumer.wait_all(grants)} == {"received"}
    assert {event.kind for event in producer.wait_all(tickets)} == {"sent"}
    assert producer.call("fences_passed") == fence
    assert consumer.wrong_bytes((6, TARGET[:8], 0, 128)) == 0
    pair.idle()
