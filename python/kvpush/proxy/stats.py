"""The router's counters, and their JSON form at /router/stats."""

from __future__ import annotations

import msgspec


class BackendStats(msgspec.Struct, frozen=True):
    """One backend as /router/stats shows it."""

    url: str
    in_flight: int
    requests: int
    connect_failures: int
    cooling_left_s: float


class Counters(msgspec.Struct):
    """What has happened since the start. An accepted request ends in exactly one (end) line."""

    accepted: int = 0
    refused_busy: int = 0  # never accepted: the router was at its limit or stopping
    answered: int = 0  # (end) the decode server's answer was passed on whole
    bad_requests: int = 0  # (end) the router itself refused the body
    prefill_errors: int = 0  # (end) the prefill server's error went to the client
    decode_errors: int = 0  # (end) the decode server's error went to the client
    cut_answers: int = 0  # (end) the decode server broke off in mid answer
    timeouts: int = 0  # (end) the decode server was silent for too long
    client_left: int = 0  # (end) the client closed its connection first
    ended_by_stop: int = 0  # (end) the router was stopped
    router_faults: int = 0  # (end) an exception in the router itself
    cancels: int = 0  # requests given up of which their prefill server has been told
    cancels_failed: int = 0  # of which it could not be told; it holds their KV for a while
    plain: int = 0  # of the accepted: served by the decode server alone
    late_prefill_errors: int = (
        0  # the decode server was already answering, so the client did not see them
    )


class Stats(msgspec.Struct, frozen=True):
    """The body of /router/stats."""

    active: int
    counters: Counters
    prefill: list[BackendStats]
    decode: list[BackendStats]
