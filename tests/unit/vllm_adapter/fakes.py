"""Stand-ins for vLLM's requests and for the native engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvpush.vllm.scheduler import GroupShape, SchedulerFacts

BLOCK = 16


def make_request(
    request_id: str = "cmpl-a-0-0123abcd",
    tokens: int = 40,
    params: object = None,
    **more: Any,
) -> Any:
    """A request as vLLM's scheduler hands it to hooks."""
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=0,
        kv_transfer_params=params,
        status=SimpleNamespace(name="WAITING"),
        **more,
    )


def consume(**more: object) -> dict[str, object]:
    """A decode leg's parameters."""
    return {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "transfer_id": "t",
        **more,
    }


def produce(**more: object) -> dict[str, object]:
    """A prefill leg's parameters."""
    return {"do_remote_decode": True, "transfer_id": "t", **more}


def plan_step(
    new: dict[str, Sequence[Sequence[int]]] | None = None,
    cached: dict[str, Sequence[Sequence[int]] | None] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: Sequence[str] = (),
) -> Any:
    """What vLLM's scheduler has planned: blocks by request, and tokens by request."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request_id, block_ids=blocks)
            for request_id, blocks in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=list(cached.values()),
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
    )


def scheduler_facts(**more: Any) -> SchedulerFacts:
    defaults: dict[str, Any] = {
        "engine_id": "engine",
        "host": "127.0.0.1",
        "port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "groups": (GroupShape(BLOCK),),
        "can_produce": True,
        "can_consume": True,
        "receive_deadline_s": 60.0,
    }
    return SchedulerFacts(**{**defaults, **more})


@dataclass
class FakeEvent:
    """The fields of a native event that the adapter reads."""

    kind: str
    ticket: int = 0
    reason: str = "none"
    detail: str = ""
    session: int = 0
    bytes: int = 0
    descriptors_before: int = 0
    descriptors: int = 0
    plan_us: float = 0.0
    post_us: float = 0.0
    transfer_us: float = 0.0

    @property
    def moved(self) -> tuple[float, ...] | None:
        times = (self.plan_us, self.post_us, self.transfer_us)
        counts = (self.bytes, self.descriptors_before, self.descriptors)
        return (*counts, *(1e-6 * time for time in times)) if self.bytes else None


@dataclass
class FakeEngine:
    """Records the calls that the adapter makes; events are put in by the test."""

    grants: list[tuple[Any, ...]] = field(default_factory=list)
    revoked: list[int] = field(default_factory=list)
    offers: list[tuple[Any, ...]] = field(default_factory=list)
    withdrawn: list[tuple[Any, ...]] = field(default_factory=list)
    device_events: list[int] = field(default_factory=list)
    rewound: list[list[int]] = field(default_factory=list)
    not_rewindable: set[int] = field(default_factory=set)
    passed: int = 0
    events: list[FakeEvent] = field(default_factory=list)
    on_connect: Callable[[], list[int]] = lambda: [7]
    closed: int = 0
    corked: bool = False

    def connect(
        self,
        producers: Sequence[bytes],
        consumers: Sequence[bytes],
        consumer_index: int,
        timeout_s: float,
    ) -> list[int]:
        return self.on_connect()

    def grant(self, *arguments: Any) -> None:
        self.grants.append(arguments)

    def revoke(self, ticket: int) -> None:
        self.revoked.append(ticket)

    def offer(self, *arguments: Any) -> None:
        self.offers.append(arguments)

    def offer_all(self, offers: Sequence[tuple[Any, ...]], device_event: int = 0) -> int:
        self.offers += offers
        self.device_events.append(device_event)
        return len(self.device_events)

    def rewind(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
        self.rewound.append(list(tickets))
        return [ticket for ticket in tickets if ticket not in self.not_rewindable]

    def fences_passed(self) -> int:
        return self.passed

    def withdraw(self, *arguments: Any) -> None:
        self.withdrawn.append(arguments)

    def cork(self) -> None:
        assert not self.corked
        self.corked = True

    def uncork(self) -> None:
        self.corked = False

    def has_events(self) -> bool:
        return bool(self.events)

    def poll(self) -> list[FakeEvent]:
        events, self.events = self.events, []
        return events

    def counters(self) -> dict[str, int]:
        return {"grants_live": 0, "offers_live": 0}

    def shutdown(self, drain_s: float) -> None:
        self.closed += 1
