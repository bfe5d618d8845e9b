from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError
from kvpush.side_channel import PROTOCOL, HelloReply
from kvpush.vllm import endpoints as endpoints_module
from kvpush.vllm.device_events import StepEvents
from kvpush.vllm.handshake import SideChannel
from kvpush.vllm.messages import Grant, Offer, Refusal, StepOrders, Withdrawal
from kvpush.vllm.worker import WorkerFacts, WorkerSide
from tests.unit.vllm_adapter.fakes import BLOCK, FakeEngine, FakeEvent

HOST = "127.0.0.1"
LIMIT_S = 20.0


def eventually(condition: Callable[[], Any]) -> Any:
    """Wait for a condition, with a limit."""
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)
    return value


class Rig:
    """A worker side over a fake engine, with the side channel of a producer."""

    def __init__(
        self,
        events: StepEvents | None = None,
        auth: AuthKey | None = None,
        channel_auth: AuthKey | None = None,
        **facts: Any,
    ) -> None:
        self.engine = FakeEngine()
        defaults: dict[str, Any] = {
            "engine_id": "d",
            "rank": 0,
            "tokens_per_block": (BLOCK,),
            "whole_blocks": False,
            "mode": "push",
            "hello_timeout_s": 5.0,
            "discovery_timeout_s": 5.0,
            "retry_backoff_s": 0.0,
            "drain_s": 1.0,
        }
        self.side = WorkerSide(
            WorkerFacts(**{**defaults, **facts}), self.engine, [b"me"], 0, events, auth
        )
        self.step = 0
        hello = HelloReply(PROTOCOL, "p", facts.get("mode", "push"), 1, 1, [b"rank"])
        self.channel = SideChannel(HOST, 0, dict, hello, auth=channel_auth)
        self.channel.start()

    def orders(self, **orders: Any) -> StepOrders:
        self.step += 1
        made = StepOrders(step=self.step, **orders)
        self.side.begin_step(made)
        return made

    def grant(self, request_id: str = "r", **more: Any) -> Grant:
        values: dict[str, Any] = {
            "request_id": request_id,
            "transfer_id": "t",
            "fingerprint": b"f" * 16,
            "attempt": 5,
            "host": HOST,
            "port": self.channel.port,
            "begin_token": 0,
            "end_token": 39,
            "blocks": ((0, [11, -1, 13]),),
            "deadline_s": 9.0,
            "reports": True,
        }
        return Grant(**{**values, **more})

    def granted(self, request_id: str = "r", **more: Any) -> int:
        """Grant and wait until the engine has it; returns the ticket."""
        before = len(self.engine.grants)
        self.orders(grants=[self.grant(request_id, **more)])
        eventually(lambda: len(self.engine.grants) > before)
        return int(self.engine.grants[-1][0])

    def tables(self) -> dict[str, int]:
        counters = self.side.counters()
        return {k: v for k, v in counters.items() if k.startswith("live_") and v}


@pytest.fixture(autouse=True)
def no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake peer's description is no real one."""
    monkeypatch.setattr(endpoints_module, "_tokens_per_block", lambda hello: (BLOCK,))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.channel.stop()


def test_a_grant_leaves_as_soon_as_the_peer_was_met(rig: Rig) -> None:
    ticket = rig.granted()
    *grant, deadline_s = rig.engine.grants[0]
    assert grant == [ticket, "t", b"f" * 16, 5, [7], (0, 39), ((0, [11, -1, 13]),)]
    assert 0 < deadline_s <= 9.0, "meeting the peer is part of the wait"
    rig.engine.on_connect = pytest.fail
    rig.orders(grants=[rig.grant("again")])
    assert len(rig.engine.grants) == 2, "a known peer gets the grant in the step itself"


def test_orders_are_carried_out_once(rig: Rig) -> None:
    rig.granted("first")
    orders = rig.orders(grants=[rig.grant("r")])
    rig.side.begin_step(orders)
    assert len(rig.engine.grants) == 2


@pytest.mark.parametrize(
    ("kind", "reason", "failed"),
    [
        ("received", "none", False),
        ("receive_failed", "deadline", True),
        ("receive_revoked", "revoked", False),
    ],
)
def test_an_end_is_reported_once(rig: Rig, kind: str, reason: str, failed: bool) -> None:
    ticket = rig.granted()
    assert not rig.side.take_results().received
    rig.engine.events = [FakeEvent(kind, ticket, reason), FakeEvent(kind, ticket, reason)]
    results = rig.side.take_results()
    assert results.received == {"r"}
    assert results.failed == ({"r"} if failed else set())
    assert rig.side.failed_blocks("r") == ([11, 13] if failed else [])
    assert not rig.side.take_results().received
    assert not rig.tables()


def test_nothing_is_reported_where_the_scheduler_does_not_wait(rig: Rig) -> None:
    ticket = rig.granted(reports=False, end_token=0)
    rig.engine.events = [FakeEvent("receive_failed", ticket, "deadline")]
    results = rig.side.take_results()
    assert not results.received
    assert not results.failed
    assert not rig.tables()


def test_a_revoke_is_reported_when_the_engine_says_so(rig: Rig) -> None:
    ticket = rig.granted()
    rig.orders(revokes=["r"])
    assert rig.engine.revoked == [ticket]
    assert not rig.side.take_results().received, "a writer may still write"
    rig.engine.events = [FakeEvent("receive_revoked", ticket)]
    assert rig.side.take_results().received == {"r"}
    rig.orders(revokes=["r", "unknown"])
    assert rig.engine.revoked == [ticket]


def test_a_revoke_before_the_peer_was_met_needs_no_engine(rig: Rig) -> None:
    met = threading.Event()

    def slow() -> list[int]:
        met.wait(LIMIT_S)
        return [7]

    rig.engine.on_connect = slow
    rig.orders(grants=[rig.grant()])
    rig.orders(revokes=["r"])
    results = rig.side.take_results()
    assert results.received == {"r"}
    assert not results.failed
    met.set()
    rig.orders(grants=[rig.grant("next")])
    eventually(lambda: len(rig.engine.grants) == 2)
    # The prefill hears that nothing is needed for the one, and is granted the other's blocks.
    spans = {ticket: span for ticket, _, _, _, _, span, *_ in rig.engine.grants}
    assert list(spans.values()).count((0, 0)) == 1
    rig.engine.events = [FakeEvent("received", ticket) for ticket in spans]
    assert rig.side.take_results().received == {"next"}
    assert not rig.tables()


def failure(rig: Rig) -> str:
    """Wait for r to fail outside the engine; returns the reason."""
    seen: list[Any] = []

    def ended() -> bool:
        results = rig.side.take_results()
        seen.extend(results.failures)
        return bool(results.failed == {"r"} and results.received == {"r"})

    eventually(ended)
    assert not rig.tables()
    return str(seen[0])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("head_size: 64 here, 128 there"), "incompatible"),
        (TimeoutError("no answer"), "peer_unreachable"),
        (ConnectionResetError("it went away"), "peer_lost"),
        (ConnectionAbortedError("this engine stops"), "shutdown"),
        (ConnectionRefusedError("too many peers"), "table_full"),
        (RuntimeError("transport"), "peer_unreachable"),
    ],
)
def test_a_failed_meeting_fails_its_requests_and_is_tried_again(
    rig: Rig, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> list[int]:
        raise error

    rig.engine.on_connect = refuse
    rig.orders(grants=[rig.grant()])
    assert failure(rig) == reason
    assert str(error) in caplog.text
    rig.engine.on_connect = lambda: [8]
    rig.granted()
    assert rig.engine.grants[0][4] == [8]


def test_reads_reach_the_metrics_with_their_figures() -> None:
    rig = Rig(mode="pull")
    try:
        ticket = rig.granted()
        rig.engine.events.append(FakeEvent("received", ticket, bytes=4096, descriptors=2))
        results = rig.side.take_results()
        assert results.received == {"r"}
        assert [event.bytes for event in results.events] == [4096]
        assert results.delivered == 0  # it would be counted twice
    finally:
        rig.channel.stop()


def test_one_dead_peer_does_not_delay_another(rig: Rig) -> None:
    let_go = threading.Event()

    def connect(producers: Sequence[bytes], *_: Any) -> list[int]:
        if list(producers) == [b"dead"]:
            let_go.wait(LIMIT_S)
        return [7]

    rig.engine.connect = connect  # type: ignore[assignment,method-assign]
    dead = SideChannel(HOST, 0, dict, HelloReply(PROTOCOL, "p", "push", 1, 1, [b"dead"]))
    dead.start()
    try:
        rig.orders(grants=[rig.grant("dead", port=dead.port), rig.grant("alive")])
        eventually(lambda: rig.engine.grants)
        assert rig.side.counters()["live_waiting_for_peer"] == 1
        let_go.set()
        eventually(lambda: len(rig.engine.grants) == 2)
    finally:
        let_go.set()
        dead.stop()


def test_after_a_failure_the_next_requests_fail_at_once() -> None:
    rig = Rig(retry_backoff_s=60.0)

    def refuse() -> list[int]:
        raise ValueError("other model")

    rig.engine.on_connect = refuse
    try:
        rig.orders(grants=[rig.grant()])
        assert failure(rig) == "incompatible"
        rig.engine.on_connect = pytest.fail
        rig.orders(grants=[rig.grant()])
        assert rig.side.take_results().failed == {"r"}
    finally:
        rig.channel.stop()


def test_a_peer_in_another_mode_is_refused(rig: Rig) -> None:
    rig.channel.stop()
    hello = HelloReply(PROTOCOL, "p", "pull", 1, 1, [b"rank"])
    rig.channel = SideChannel(HOST, 0, dict, hello)
    rig.channel.start()
    rig.orders(grants=[rig.grant()])
    assert failure(rig) == "incompatible"


class WindowPeer:
    """What a peer's description is decoded to: one windowed layer."""

    def __init__(self, layer: str, tokens_per_block: int) -> None:
        self.regions = [SimpleNamespace(layer=layer, tokens_per_block=tokens_per_block)]


@pytest.mark.parametrize("layer", ["layers.0", "layers.0/k"])
@pytest.mark.parametrize(("theirs", "own"), [(32, 64), (96, 64)])
def test_block_sizes_that_a_window_forbids_are_refused(
    monkeypatch: pytest.MonkeyPatch, layer: str, theirs: int, own: int
) -> None:
    decoded = SimpleNamespace(decode=lambda data: WindowPeer(layer, theirs))
    monkeypatch.setattr(endpoints_module, "PeerInfo", decoded)
    hello = HelloReply(PROTOCOL, "p", "push", 1, 1, [b"rank"])
    words = f"layers.0: the block size is {theirs} on the producer and {own} on the consumer"
    with pytest.raises(PeerIncompatibleError, match=words):
        endpoints_module.check_windows({"layers.0": own}, hello)
    endpoints_module.check_windows({"layers.0": theirs, "layers.1": own}, hello)
    rig = Rig(windows={"layers.0": own})
    try:
        rig.orders(grants=[rig.grant()])
        assert failure(rig) == "incompatible"
    finally:
        rig.channel.stop()


@pytest.mark.parametrize(
    "loss",
    [FakeEvent("peer_lost", session=7), FakeEvent("receive_failed", 1, "peer_lost")],
)
def test_a_lost_peer_is_met_again(rig: Rig, loss: FakeEvent) -> None:
    assert rig.granted() == 1
    rig.engine.events = [loss, FakeEvent("receive_failed", 1, "deadline")]
    rig.side.take_results()
    rig.engine.on_connect = lambda: [9]
    rig.granted("next")
    assert rig.engine.grants[-1][4] == [9]


def test_wrong_parameters_fail_in_the_same_step(rig: Rig) -> None:
    rig.orders(refusals=[Refusal("r", [3, 4], "remote_port")])
    results = rig.side.take_results()
    assert results.failed == results.received == {"r"}
    assert results.failures == ["bad_request"]
    assert rig.side.failed_blocks("r") == [3, 4]
    assert rig.side.failed_blocks("r") == []


def test_offers_and_their_ends(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    first = Offer("a", "t", b"f" * 16, ((0, [1, 2]),), 20, True)
    second = Offer("b", "u", b"g" * 16, ((0, [3]),), 9, True)
    rig.orders(offers=[first, second])
    assert rig.engine.offers[0] == (1, "t", b"f" * 16, ((0, [1, 2]),), 20, True)
    rig.engine.events = [FakeEvent("sent", 1, bytes=5), FakeEvent("sent", 1)]
    assert rig.side.take_results().sent == {"a"}
    rig.engine.events = [FakeEvent("send_failed", 2, "offer_expired")]
    assert rig.side.take_results().sent == {"b"}
    assert "offer_expired" in caplog.text
    assert not rig.tables()


def test_an_offer_grows_under_one_ticket(rig: Rig) -> None:
    for watermark in (16, 32):
        rig.orders(offers=[Offer("a", "t", b"f" * 16, ((0, [1]),), watermark, False)])
    assert [offer[0] for offer in rig.engine.offers] == [1, 1]


def test_withdrawals_use_a_ticket_of_their_own(rig: Rig) -> None:
    rig.orders(withdrawals=[Withdrawal("t", b"f" * 16, "producer_aborted")])
    assert rig.engine.withdrawn == [(1, "producer_aborted", "t", b"f" * 16)]


def test_a_withdrawal_of_an_offer_uses_its_ticket(rig: Rig) -> None:
    rig.orders(offers=[Offer("a", "t", b"f" * 16, ((0, [1]),), 16, True)])
    rig.orders(withdrawals=[Withdrawal("t", b"f" * 16, "cancelled", "a")])
    assert rig.engine.withdrawn == [(1, "cancelled", "t", b"f" * 16)]
    assert rig.tables(), "held until the native engine says that nothing reads it any more"
    rig.engine.events = [FakeEvent("send_failed", 1, "cancelled")]
    assert rig.side.take_results().sent == {"a"}
    assert not rig.tables()


KEY = AuthKey(b"the key of this deployment")


def test_peers_with_one_auth_key_meet() -> None:
    rig = Rig(auth=KEY, channel_auth=KEY)
    try:
        assert rig.granted()
    finally:
        rig.channel.stop()


@pytest.mark.parametrize("auth", [None, AuthKey(b"the key of another one")])
def test_a_wrong_auth_key_fails_the_request_and_says_so(
    auth: AuthKey | None, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(auth=auth, channel_auth=KEY, discovery_timeout_s=100 * LIMIT_S)
    rig.engine.on_connect = pytest.fail
    try:
        rig.orders(grants=[rig.grant()])
        assert failure(rig) == "incompatible"
        assert "wrong or missing auth key" in caplog.text
    finally:
        rig.channel.stop()


def test_interleaved_tokens_move_as_whole_blocks() -> None:
    rig = Rig(whole_blocks=True)
    try:
        rig.granted()
        assert rig.engine.grants[0][5] == (0, 48)
        rig.orders(offers=[Offer("a", "t", b"f" * 16, ((0, [1, 2, 3]),), 40, True)])
        assert rig.engine.offers[0][4] == 48
        rig.orders(offers=[Offer("b", "t", b"f" * 16, ((0, [1, 2, 3]),), 40, False)])
        assert rig.engine.offers[1][4] == 40, "what is not final is not padded"
    finally:
        rig.channel.stop()


def test_other_block_sizes_get_exact_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "_tokens_per_block", lambda hello: (2 * BLOCK,))
    rig = Rig(whole_blocks=True)
    try:
        rig.granted()
        assert rig.engine.grants[0][5] == (0, 39)
    finally:
        rig.channel.stop()


def test_an_engine_that_refuses_arguments_fails_the_request_alone(rig: Rig) -> None:
    def refuse(*arguments: Any) -> None:
        raise TypeError("no")

    rig.engine.grant = refuse  # type: ignore[method-assign]
    rig.orders(grants=[rig.grant()])
    assert failure(rig) == "bad_request"


def test_shutdown_may_be_called_again(rig: Rig) -> None:
    rig.side.shutdown()
    rig.side.shutdown()
    assert rig.engine.closed == 2
    rig.orders(grants=[rig.grant()])
    assert failure(rig) == "shutdown"
