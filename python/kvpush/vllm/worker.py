"""The worker side of one rank: orders become calls of the native engine, its events reports.

Orders are carried out once per step, before the forward pass; what the step has computed is offered
right after it. Reports are taken once per step, last. A request is reported once, and only after
the native engine has said that its blocks may be reused; one that was offered while it ran also
waits for its close, for only then does the scheduler expect the report. Calls come from the
worker's main thread, except where a peer was met: then the meeting's thread grants at once, without
waiting for a step. One lock covers the tables; it is held for microseconds.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpush._core import Event
from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError
from kvpush.side_channel import HelloReply
from kvpush.vllm.device_events import HostEvents, StepEvents
from kvpush.vllm.endpoints import Address, Endpoints, Meeting, check_windows
from kvpush.vllm.log import get_logger
from kvpush.vllm.messages import Blocks, Close, Grant, Offer, Refusal, StepOrders, Withdrawal

__all__ = ["Results", "WorkerFacts", "WorkerSide"]

logger = get_logger("worker")

_LEAST_DEADLINE_S = 0.001
"""What a grant gets that has waited for its peer until its deadline: it then fails at once."""

_REWIND_LIMIT_S = 1.0
"""How long a step waits until nothing reads the blocks of preempted requests any more: writes on
their way take milliseconds. Those that take longer fail their transfer."""

_TABLES = {
    "grants_live": "live_grants",
    "offers_live": "live_offers",
    "served_live": "live_served",
    "handles_in_flight": "live_handles",
    "posts_queued": "live_posts",
    "fences_waiting": "live_fences",
}
"""The native engine's tables, under the names that all tables have in the stats."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker side knows of its rank."""

    engine_id: str
    rank: int
    tokens_per_block: tuple[int, ...]
    """Of each KV cache group; 0 where a block holds a state."""
    windows: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Tokens per block of each layer whose cache gives back what lies before a window."""
    whole_blocks: bool
    mode: str
    hello_timeout_s: float
    discovery_timeout_s: float
    retry_backoff_s: float
    drain_s: float


@dataclass(slots=True)
class Results:
    """What one rank reports in one step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    delivered: int = 0
    """Receives that ended well; they have no event below."""
    events: list[Event] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reasons of failures that never reached the native engine."""


@dataclass(slots=True, eq=False)
class _Receive:
    """A grant of this rank, until it was reported."""

    grant: Grant
    ticket: int
    begun_s: float = field(default_factory=time.monotonic)
    granted: bool = False

    @property
    def address(self) -> Address:
        return (self.grant.host, self.grant.port)


@dataclass(slots=True, eq=False)
class _Send:
    """An offer of this rank, until it was reported."""

    request_id: str
    transfer_id: str
    fingerprint: bytes
    ticket: int
    offered: bool = False
    final: bool = False
    ended: bool = False
    """Nothing more is offered: its event has come, or will after what it waits for."""
    event_taken: bool = False
    held: bool = False
    """The scheduler waits for the report."""


class WorkerSide:
    """See the module. `engine` is started; `consumers` are peer_info() of all ranks here."""

    def __init__(
        self,
        facts: WorkerFacts,
        engine: Any,
        consumers: Sequence[bytes],
        consumer_index: int,
        events: StepEvents | None = None,
        auth: AuthKey | None = None,
    ) -> None:
        self._facts = facts
        self._engine = engine
        self._consumers = list(consumers)
        self._consumer_index = consumer_index
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._last_step = 0
        self._receives: dict[str, _Receive] = {}
        self._receives_by_ticket: dict[int, _Receive] = {}
        self._events = events or HostEvents()
        self._sends: dict[str, _Send] = {}
        self._sends_by_ticket: dict[int, _Send] = {}
        # What steps have computed (or will have, when the one under way has run), not yet offered.
        self._progress: list[Offer] = []
        self._rewinds = 0
        # Held requests of which nothing is left to wait for.
        self._early_sent: list[str] = []
        # Ends found outside the native engine, with their reasons ("" for a revoked grant), to be
        # reported in the next step.
        self._early: list[tuple[str, str]] = []
        self._failed_blocks: dict[str, list[int]] = {}
        self._closed = False
        self._endpoints = Endpoints(
            lock=self._lock,
            connect=self._connect,
            mode=facts.mode,
            auth=auth,
            discovery_timeout_s=facts.discovery_timeout_s,
            retry_backoff_s=facts.retry_backoff_s,
            on_met=self._on_met,
        )

    # --- orders -----------------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out a step's orders. Hooks may call it again with the same orders: no effect."""
        if orders.step <= self._last_step:
            return
        self._last_step = orders.step
        if not orders:
            return
        if orders.rewinds:
            self._rewind(orders.rewinds)
        self._progress += orders.progress
        with self._lock:
            # All of a step wakes the native thread once.
            self._engine.cork()
            try:
                self._carry_out(orders)
            finally:
                self._engine.uncork()

    def _carry_out(self, orders: StepOrders) -> None:
        for offer in orders.offers:
            self._offer(offer)
        for close in orders.closes:
            self._close(close)
        for withdrawal in orders.withdrawals:
            self._withdraw(withdrawal)
        for grant in orders.grants:
            self._receive(grant)
        for refusal in orders.refusals:
            self._refuse(refusal)
        for request_id in orders.revokes:
            self._revoke(request_id)

    def end_step(self) -> None:
        """The forward pass of the step has run, or is queued on the device."""
        if not self._progress:
            return
        event = self._events.record(self._engine.fences_passed())
        if event is None:
            return  # with a later step
        progress, self._progress = self._progress, []
        with self._lock:
            offers = [ready for offer in progress if (ready := self._prepare(offer))]
        if offers:
            self._events.lent(self._engine.offer_all(offers, event))

    def _offer(self, offer: Offer) -> None:
        """A prefill that has finished."""
        prepared = self._prepare(offer)
        if prepared is not None:
            self._sends[offer.request_id].held = True
            self._engine.offer(*prepared)

    def _prepare(self, offer: Offer) -> tuple[int, str, bytes, Blocks, int, bool] | None:
        """What the native engine is told; None if it would not listen any more."""
        send = self._sends.get(offer.request_id)
        if send is None:
            send = _Send(
                offer.request_id, offer.transfer_id, offer.fingerprint, next(self._tickets)
            )
            self._sends[offer.request_id] = self._sends_by_ticket[send.ticket] = send
        elif send.ended:
            return None
        send.offered, send.final = True, offer.final
        watermark = offer.watermark
        if offer.final and self._facts.whole_blocks:
            watermark = _round_up(watermark, max(1, *self._facts.tokens_per_block))
        return (
            send.ticket,
            send.transfer_id,
            send.fingerprint,
            offer.blocks,
            watermark,
            offer.final,
        )

    def _rewind(self, request_ids: Sequence[str]) -> None:
        """Returns when nothing reads the blocks of these requests, which are others' from now on.

        Only the main thread changes what is looked at here, so the lock is free meanwhile.
        """
        gone = set(request_ids)
        self._progress = [offer for offer in self._progress if offer.request_id not in gone]
        sends = [send for id_ in request_ids if (send := self._sends.get(id_)) and send.offered]
        tickets = [send.ticket for send in sends if not send.ended]
        if not tickets:
            return
        self._rewinds += len(tickets)
        rewound = set(self._engine.rewind(tickets, _REWIND_LIMIT_S))
        for send in sends:
            if send.ended:
                continue
            if send.ticket in rewound:
                send.offered = send.final = False
            else:
                # Written whole, or failed, or too slow: then the decode side must not trust it.
                send.ended = True
                self._engine.withdraw(send.ticket, "producer_short")

    def _close(self, close: Close) -> None:
        send = self._sends.get(close.request_id)
        if send is None or not send.offered:
            # Nothing of it was ever offered, or it was all taken back.
            self._progress = [o for o in self._progress if o.request_id != close.request_id]
        if send is None:
            reason = close.reason or "producer_short"
            self._withdraw(Withdrawal(close.transfer_id, close.fingerprint, reason))
            self._early_sent.append(close.request_id)
            return
        send.held = True
        if send.event_taken:
            del self._sends[close.request_id]
            self._early_sent.append(close.request_id)
        elif close.reason and not send.ended:
            send.ended = True
            self._engine.withdraw(send.ticket, close.reason, close.transfer_id, close.fingerprint)

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        send = self._sends.get(withdrawal.request_id)
        self._engine.withdraw(
            send.ticket if send is not None else next(self._tickets),
            withdrawal.reason,
            withdrawal.transfer_id,
            withdrawal.fingerprint,
        )

    def _receive(self, grant: Grant) -> None:
        receive = _Receive(grant, next(self._tickets))
        if grant.reports:
            # Nobody waits for the others, so nothing is kept for them.
            self._receives[grant.request_id] = receive
            self._receives_by_ticket[receive.ticket] = receive
        self._endpoints.need(receive.address, receive)

    def _refuse(self, refusal: Refusal) -> None:
        self._failed_blocks[refusal.request_id] = refusal.block_ids
        self._early.append((refusal.request_id, "bad_request"))

    def _revoke(self, request_id: str) -> None:
        receive = self._receives.get(request_id)
        if receive is None:
            return  # reported already
        if receive.granted:
            self._engine.revoke(receive.ticket)
        elif self._endpoints.withdraw(receive.address, receive):
            # No peer was ever told of these blocks: they are free. But the prefill may be holding
            # its own for this request, and must hear that nothing is needed.
            self._forget(receive)
            self._early.append((request_id, ""))
            self._receive(_nothing_needed(receive.grant))

    # --- meeting peers ----------------------------------------------------------------------

    def _connect(self, hello: HelloReply) -> list[int]:
        """Runs in the meeting's thread, without the lock."""
        if self._facts.windows:
            check_windows(self._facts.windows, hello)
        sessions = self._engine.connect(
            hello.ranks, self._consumers, self._consumer_index, self._facts.hello_timeout_s
        )
        if not sessions:
            raise PeerIncompatibleError("none of its ranks has KV that this rank needs")
        return list(sessions)

    def _on_met(self, receive: _Receive, meeting: Meeting) -> None:
        """The peer of a grant is known, or can't be met. The lock is held."""
        if meeting.reason or self._closed:
            self._fail_early(receive, meeting.reason or "shutdown", meeting.detail)
            return
        grant = receive.grant
        receive.granted = True
        try:
            self._engine.grant(
                receive.ticket,
                grant.transfer_id,
                grant.fingerprint,
                grant.attempt,
                meeting.sessions,
                (grant.begin_token, self._end_token(grant, meeting)),
                grant.blocks,
                # Meeting the peer was part of the wait.
                max(_LEAST_DEADLINE_S, receive.begun_s + grant.deadline_s - time.monotonic()),
            )
        except Exception as error:
            logger.exception("Request %s: its grant was refused", grant.request_id)
            self._fail_early(receive, "bad_request", str(error))

    def _end_token(self, grant: Grant, meeting: Meeting) -> int:
        """Where the grant ends.

        Tokens that interleave inside a block move as a whole block, where both sides have the same
        blocks: one piece instead of one for each element. What then arrives behind the prompt is
        never read: decoding overwrites it first.
        """
        sizes = self._facts.tokens_per_block
        if not self._facts.whole_blocks or meeting.tokens_per_block != sizes:
            return grant.end_token
        return _round_up(grant.end_token, min((size for size in sizes if size), default=1))

    def _fail_early(self, receive: _Receive, reason: str, detail: str) -> None:
        self._forget(receive)
        if receive.grant.reports:
            self._log_failure(receive.grant, reason, detail)
            self._remember_blocks(receive.grant)
            self._early.append((receive.grant.request_id, reason))
        else:
            logger.debug("Transfer %s: can't say that nothing is needed", receive.grant.transfer_id)

    def _forget(self, receive: _Receive) -> None:
        self._receives_by_ticket.pop(receive.ticket, None)
        if self._receives.get(receive.grant.request_id) is receive:
            del self._receives[receive.grant.request_id]

    def _remember_blocks(self, grant: Grant) -> None:
        """Block ids for interfaces that take failures as blocks; they have one group."""
        self._failed_blocks[grant.request_id] = [b for b in grant.blocks[0][1] if b >= 0]

    # --- reports ----------------------------------------------------------------------------

    def has_results(self) -> bool:
        """Whether take_results() would find anything; costs next to nothing."""
        return bool(self._early or self._early_sent or self._engine.has_events())

    def take_results(self) -> Results:
        """What has ended since the last call."""
        results = Results()
        with self._lock:
            early, self._early = self._early, []
            for request_id, reason in early:
                results.received.add(request_id)
                if reason:
                    results.failed.add(request_id)
                    results.failures.append(reason)
            results.sent.update(self._early_sent)
            self._early_sent.clear()
            for event in self._engine.poll():
                self._take_event(event, results)
        return results

    def failed_blocks(self, request_id: str) -> list[int]:
        """The blocks of a failed request; forgotten with this call."""
        with self._lock:
            return self._failed_blocks.pop(request_id, [])

    def _take_event(self, event: Event, results: Results) -> None:
        kind = event.kind
        if kind == "received":  # nearly all on a decode engine
            if self._facts.mode == "pull":
                results.events.append(event)  # it was read here, and has figures
            else:
                results.delivered += 1
            self._end_receive(event, kind, results)
            return
        results.events.append(event)
        if kind == "peer_lost":
            logger.warning("A peer was lost (session %016x): %s", event.session, event.detail)
            self._endpoints.forget_session(event.session)
        elif kind in ("sent", "send_failed"):
            self._end_send(event, kind, results)
        else:
            self._end_receive(event, kind, results)

    def _end_send(self, event: Event, kind: str, results: Results) -> None:
        send = self._sends_by_ticket.pop(event.ticket, None)
        if send is None:
            return
        if kind == "send_failed":
            logger.warning(
                "Request %s (transfer %s): its KV was not handed over to %s: %s. %s",
                send.request_id,
                send.transfer_id,
                f"session {event.session:016x}" if event.session else "any decode engine",
                event.reason,
                event.detail,
            )
        if not send.final and not send.ended:
            # The native engine remembers an open offer until its owner is done with it.
            self._engine.withdraw(send.ticket, "revoked")
        send.ended = send.event_taken = True
        if send.held:
            del self._sends[send.request_id]
            results.sent.add(send.request_id)

    def _end_receive(self, event: Event, kind: str, results: Results) -> None:
        receive = self._receives_by_ticket.get(event.ticket)
        if receive is None:
            return
        self._forget(receive)
        grant = receive.grant
        results.received.add(grant.request_id)
        if kind == "receive_failed":
            if event.reason == "peer_lost":
                self._endpoints.forget(receive.address)
            self._log_failure(grant, event.reason, event.detail)
            self._remember_blocks(grant)
            results.failed.add(grant.request_id)

    def _log_failure(self, grant: Grant, reason: str, detail: str) -> None:
        logger.error(
            "Request %s (transfer %s) did not get its KV from %s:%d: %s. %s",
            grant.request_id,
            grant.transfer_id,
            grant.host,
            grant.port,
            reason,
            detail,
        )

    # --- the rest ---------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """The native counters, and table sizes (`live_...`, zero at rest)."""
        counters = dict(self._engine.counters())
        for name, table in _TABLES.items():
            counters[table] = counters.get(name, 0)
        with self._lock:
            counters["live_receives"] = len(self._receives_by_ticket)
            counters["live_sends"] = len(self._sends)
            counters["live_waiting_for_peer"] = self._endpoints.waiting()
            counters["rewinds"] = self._rewinds
        return counters

    def shutdown(self) -> None:
        """Stop the native engine; transfers in flight get a while to end. May be called again."""
        with self._lock:
            self._closed = True
        self._engine.shutdown(self._facts.drain_s)


def _nothing_needed(grant: Grant) -> Grant:
    return msgspec.structs.replace(
        grant,
        begin_token=0,
        end_token=0,
        blocks=tuple((0, []) for _ in grant.blocks),
        reports=False,
    )


def _round_up(tokens: int, step: int) -> int:
    return -(-tokens // step) * step
