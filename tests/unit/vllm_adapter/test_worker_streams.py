"""Offers that grow while their prefill runs: the worker's half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpush.vllm.device_events import CudaEvents
from kvpush.vllm.messages import Close, Offer
from tests.unit.vllm_adapter.fakes import FakeEvent
from tests.unit.vllm_adapter.test_worker import Rig

KEY = ("t", b"f" * 16)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.channel.stop()


def piece(watermark: int, *, final: bool = False, request_id: str = "r", first: int = 0) -> Offer:
    return Offer(request_id, *KEY, ((first, [11]),), watermark, final)


def step(rig: Rig, *pieces: Offer, **orders: Any) -> None:
    rig.orders(progress=list(pieces), **orders)
    rig.side.end_step()


def close(rig: Rig, reason: str = "", request_id: str = "r") -> None:
    rig.orders(closes=[Close(request_id, *KEY, reason)])


def ended(rig: Rig, kind: str = "sent") -> None:
    rig.engine.events.append(FakeEvent(kind, ticket=rig.engine.offers[0][0]))


def sent(rig: Rig) -> set[str]:
    return rig.side.take_results().sent


def test_a_piece_is_offered_when_its_step_has_run(rig: Rig) -> None:
    rig.orders(progress=[piece(16)])
    assert not rig.engine.offers
    rig.side.end_step()
    rig.side.end_step()
    step(rig, piece(20, final=True, first=1))
    (ticket, *first), (again, *last) = rig.engine.offers
    assert first == [*KEY, ((0, [11]),), 16, False]
    assert last == [*KEY, ((1, [11]),), 20, True]
    assert ticket == again
    assert rig.engine.device_events == [0, 0]


def test_all_pieces_of_a_step_leave_in_one_call(rig: Rig) -> None:
    step(rig, piece(16), piece(32, request_id="s"))
    assert len(rig.engine.offers) == 2
    assert len(rig.engine.device_events) == 1


def test_the_report_waits_for_the_close(rig: Rig) -> None:
    step(rig, piece(16, final=True))
    ended(rig)
    assert sent(rig) == set(), "the scheduler does not know yet that the request has ended"
    close(rig)
    assert sent(rig) == {"r"}
    assert sent(rig) == set()
    assert not rig.tables()


def test_the_report_waits_for_the_end_of_the_writes(rig: Rig) -> None:
    step(rig, piece(16, final=True))
    close(rig)
    assert sent(rig) == set()
    ended(rig)
    assert sent(rig) == {"r"}
    assert not rig.tables()
    assert not rig.engine.withdrawn


def test_an_offer_that_ends_early_is_not_fed_any_more(rig: Rig) -> None:
    step(rig, piece(16))
    ended(rig, "send_failed")
    assert sent(rig) == set()
    ticket = rig.engine.offers[0][0]
    assert rig.engine.withdrawn == [(ticket, "revoked")], "else it is remembered for ever"
    step(rig, piece(32, final=True))
    assert len(rig.engine.offers) == 1
    close(rig)
    assert sent(rig) == {"r"}


def test_an_aborted_prefill_is_withdrawn_and_reported_at_its_end(rig: Rig) -> None:
    step(rig, piece(16))
    close(rig, "producer_aborted")
    ticket = rig.engine.offers[0][0]
    assert rig.engine.withdrawn == [(ticket, "producer_aborted", *KEY)]
    assert sent(rig) == set()
    ended(rig, "send_failed")
    assert sent(rig) == {"r"}
    assert not rig.tables()


def test_a_prefill_that_never_got_to_offer_anything_is_reported(rig: Rig) -> None:
    rig.orders(progress=[piece(16)])
    close(rig, "producer_aborted")
    rig.side.end_step()
    assert not rig.engine.offers
    assert [w[1:] for w in rig.engine.withdrawn] == [("producer_aborted", *KEY)]
    assert sent(rig) == {"r"}
    assert not rig.tables()


def test_preemption_waits_until_the_blocks_are_not_read(rig: Rig) -> None:
    step(rig, piece(16))
    ticket = rig.engine.offers[0][0]
    step(rig, rewinds=["r"])
    assert rig.engine.rewound == [[ticket]]
    step(rig, rewinds=["r"])
    assert rig.engine.rewound == [[ticket]], "nothing was offered since"
    step(rig, piece(24, final=True))
    assert rig.engine.offers[1][0] == ticket
    close(rig)
    ended(rig)
    assert sent(rig) == {"r"}


def test_what_was_not_yet_offered_is_forgotten_with_a_preemption(rig: Rig) -> None:
    rig.orders(progress=[piece(16)])
    rig.orders(rewinds=["r"], progress=[piece(8)])
    rig.side.end_step()
    assert not rig.engine.rewound
    assert [offer[4] for offer in rig.engine.offers] == [8]


@pytest.mark.parametrize("event", ["sent", "send_failed"])
def test_a_prefill_that_cannot_be_rewound_offers_nothing_more(rig: Rig, event: str) -> None:
    """It was written whole, or a writer was too slow: then it must not count as written."""
    step(rig, piece(16, final=True))
    ticket = rig.engine.offers[0][0]
    rig.engine.not_rewindable = {ticket}
    step(rig, rewinds=["r"])
    assert rig.engine.withdrawn == [(ticket, "producer_short")]
    step(rig, piece(16, final=True))
    assert len(rig.engine.offers) == 1
    close(rig, "producer_short")
    assert len(rig.engine.withdrawn) == 1
    ended(rig, event)
    assert sent(rig) == {"r"}
    assert not rig.tables()


class FakeCudaEvent:
    """Counts its recordings; its handle is its place among all."""

    made: list[FakeCudaEvent]

    def __init__(self) -> None:
        self.made.append(self)
        self.cuda_event = 100 + len(self.made)
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1


@pytest.fixture
def cuda_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(FakeCudaEvent, "made", [], raising=False)
    made = Rig(events=CudaEvents(FakeCudaEvent, limit=2))
    yield made
    made.channel.stop()


def test_an_event_goes_with_each_step_and_is_used_again(cuda_rig: Rig) -> None:
    step(cuda_rig, piece(16))
    step(cuda_rig)
    step(cuda_rig, piece(32))
    assert cuda_rig.engine.device_events == [101, 102]
    cuda_rig.engine.passed = 1
    step(cuda_rig, piece(48))
    assert cuda_rig.engine.device_events == [101, 102, 101]
    assert [event.recorded for event in FakeCudaEvent.made] == [2, 1]


def test_without_a_free_event_pieces_wait_for_a_later_step(cuda_rig: Rig) -> None:
    for watermark in (16, 32, 48):
        step(cuda_rig, piece(watermark))
    assert [offer[4] for offer in cuda_rig.engine.offers] == [16, 32]
    cuda_rig.engine.passed = 2
    step(cuda_rig, piece(64, final=True))
    assert [offer[4] for offer in cuda_rig.engine.offers] == [16, 32, 48, 64]
    assert len(FakeCudaEvent.made) == 2


def test_an_event_that_was_not_lent_is_recorded_anew(cuda_rig: Rig) -> None:
    step(cuda_rig, piece(16))
    ended(cuda_rig, "send_failed")
    sent(cuda_rig)
    step(cuda_rig, piece(32))
    step(cuda_rig, piece(16, request_id="s"))
    assert cuda_rig.engine.device_events == [101, 102]
    assert len(FakeCudaEvent.made) == 2
