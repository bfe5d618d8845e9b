"""What transfers cost: thousands leave nothing behind, and the caller's thread does no work."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.nixl.peer import FINGERPRINT, Layout, Pair, Peer

MakePair = Callable[..., Pair]

SMALL = Layout(layers=2, blocks=256, element_bytes=16)
IDS = list(range(8))
TOKENS = 8 * 16
BATCH = 100
# Where caches and allocators have filled up, and how much they may still move. A producer remembers
# attempts that have ended, some 200 bytes each and up to 65,536 of them.
WARM_UP = 1000
BYTES_PER_TRANSFER = 250
SLACK_BYTES = 1 << 18


class Batches:
    """Transfers in batches; of ten, one is revoked, one withdrawn and one ends short."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.begun = 0
        self.kinds: dict[str, int] = {}

    def _numbered(self, peer: Peer, index: int, **more: Any) -> dict[str, Any]:
        transfer = f"flat {self.begun + index}"
        return {"ticket": peer.ticket(), "transfer_id": transfer, "fingerprint": FINGERPRINT} | more

    def run(self) -> None:
        """One batch, until all of it has ended."""
        producer, consumer = self.pair.producer, self.pair.consumer
        grants: list[dict[str, Any]] = []
        offers: list[dict[str, Any]] = []
        for index in range(BATCH):
            target = [(index * 2 + block) % SMALL.blocks for block in range(8)]
            grant: dict[str, Any] = {
                "attempt": self.begun + index + 1,
                "sessions": consumer.sessions,
                "span": (0, TOKENS),
                "blocks": [(0, target)],
                "deadline_s": 60.0,
            }
            grants.append(self._numbered(consumer, index, **grant))
            short = index % 10 == 7
            kv = {"watermark": TOKENS - short, "final": True, "new_blocks": [(0, IDS)]}
            offers.append(self._numbered(producer, index, **kv))
        consumer.call("grant_many", grants=grants)
        for grant in grants[::10]:
            consumer.revoke(grant["ticket"])
        producer.call("offer_many", offers=offers)
        for offer in offers[3::10]:
            producer.withdraw(offer["ticket"])
        for peer, commands in ((consumer, grants), (producer, offers)):
            for event in peer.wait_all([command["ticket"] for command in commands]):
                self.kinds[event.kind] = self.kinds.get(event.kind, 0) + 1
            peer.call("forget_events")
        self.begun += BATCH
        self.pair.idle()

    def run_to(self, count: int) -> None:
        while self.begun < count:
            self.run()


def require_flat(pair: Pair, transfers: int) -> None:
    batches = Batches(pair)
    batches.run_to(WARM_UP)
    peers = (pair.producer, pair.consumer)
    before = [peer.resources() for peer in peers]
    batches.run_to(WARM_UP + transfers)
    for peer, at_first in zip(peers, before, strict=True):
        now = peer.resources()
        grown = now.pop("resident_bytes") - at_first.pop("resident_bytes")
        assert grown < SLACK_BYTES + BYTES_PER_TRANSFER * transfers, (peer.child.name, grown)
        # Descriptors, threads, peers, handles and tables.
        assert now == at_first, peer.child.name
    assert min(batches.kinds["received"], batches.kinds["sent"]) > 0.5 * batches.begun
    assert batches.kinds["receive_failed"] >= 0.1 * batches.begun


def test_a_thousand_transfers_leave_nothing_behind(new_pair: MakePair) -> None:
    require_flat(new_pair(SMALL), 1_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_thousand_transfers_leave_nothing_behind(new_pair: MakePair) -> None:
    require_flat(new_pair(SMALL), 10_000)


def test_a_thousand_grants_without_a_prefill_are_forgotten(new_pair: MakePair) -> None:
    """Of requests whose prefill leg was lost on the way: P remembers nothing of them."""
    pair = new_pair(SMALL, grant_ttl_s=0.5)
    consumer = pair.consumer
    grown = []
    for round_ in range(3):
        grants: list[dict[str, Any]] = [
            {
                "ticket": consumer.ticket(),
                "transfer_id": f"lost {round_} {index}",
                "fingerprint": FINGERPRINT,
                "attempt": 1000 * round_ + index + 1,
                "sessions": consumer.sessions,
                "span": (0, TOKENS),
                "blocks": [(0, IDS)],
                "deadline_s": 60.0,
            }
            for index in range(1000)
        ]
        consumer.call("grant_many", grants=grants)
        events = consumer.wait_all([grant["ticket"] for grant in grants])
        assert {(event.kind, event.reason) for event in events} == {
            ("receive_failed", "grant_expired")
        }
        pair.idle()
        consumer.call("forget_events")
        grown.append(pair.producer.resources()["resident_bytes"])
    assert grown[2] - grown[1] < SLACK_BYTES + 1000 * BYTES_PER_TRANSFER


def test_the_callers_thread_does_none_of_the_work(new_pair: MakePair) -> None:
    """18,880 scattered descriptors are the native thread's to post."""
    pair = new_pair(Layout(layers=32, blocks=2048, element_bytes=16))
    tokens = 590 * 16
    draw = random.Random(1)
    source, target = (draw.sample(range(2048), 590) for _ in range(2))
    grant = pair.consumer.grant("many", target, tokens)
    pair.producer.wait_counters(served_live=1)
    ticket = pair.producer.ticket()
    callers, whole = pair.producer.call(
        "cost_of_offer",
        limit_s=30.0,
        ticket=ticket,
        transfer_id="many",
        fingerprint=FINGERPRINT,
        new_blocks=[(0, source)],
        watermark=tokens,
        final=True,
    )
    assert pair.consumer.wait(grant).kind == "received"
    assert pair.producer.wait(ticket).descriptors > 18_000
    assert callers < 0.1 * whole, (callers, whole)
