"""Runs the self-test: leads the two processes through the requests and gathers the figures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import kvpush
from kvpush._nixl import find_library
from kvpush.selftest import rank
from kvpush.selftest.cases import Case, Geometry, cases
from kvpush.selftest.child import Child, ChildTimeoutError, SelfTestError
from kvpush.selftest.report import Report, Row

__all__ = [
    "FAULTS",
    "FAULT_VARIABLE",
    "installed_versions",
    "new_report",
    "nixl_versions",
    "run_selftest",
]

FAULT_VARIABLE = "KVPUSH_SELFTEST_FAULT"
"""Environment variable that makes the self-test go wrong, in one of the ways of FAULTS."""
FAULTS = ("byte", "untouched-byte", "exit", "hang")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many requests are done, and of how many."""

_SEED = 20_231
_STEP_LIMIT_S = 60.0
"""The longest one transfer may take: some hundred megabytes take a second on a slow machine."""

_ZERO_AT_REST = (
    "grants_live",
    "offers_live",
    "served_live",
    "handles_in_flight",
    "posts_queued",
    "fences_waiting",
)


class _Pair:
    """Both processes and the time that is left."""

    def __init__(self, producer: Child, consumer: Child, limit_s: float) -> None:
        self.producer = producer
        self.consumer = consumer
        self.ticket = 0
        self.bare = False
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s

    def limit_s(self) -> float:
        """How long the next step may take."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise SelfTestError(f"the self-test took longer than {self._limit_s:g} s (--limit-s)")
        return min(_STEP_LIMIT_S, left_s)

    def receive(self, child: Child, method: str, limit_s: float) -> Any:
        """The end of a step, which the whole run's limit cuts short."""
        left_s = self._until - time.monotonic()
        try:
            return child.receive(method, max(min(limit_s, left_s), 0.0))
        except ChildTimeoutError as error:
            self.limit_s()  # raises if it is the whole run that took too long
            raise SelfTestError(str(error)) from error

    def call(self, child: Child, method: str, **arguments: Any) -> Any:
        """One step without a limit of its own."""
        child.send(method, **arguments)
        return self.receive(child, method, self.limit_s())

    def wait(self, child: Child, method: str, **arguments: Any) -> Any:
        """One step that waits for the other side and limits itself."""
        limit_s = self.limit_s()
        child.send(method, limit_s=limit_s, **arguments)
        return self.receive(child, method, 3 * limit_s)


def _open(pair: _Pair, geometry: Geometry) -> None:
    """Make both engines and, where possible, both bare agents, and let them meet."""
    both = (pair.producer, pair.consumer)
    for child in both:  # at the same time: filling memory takes a while
        child.send("open", geometry=geometry, seed=_SEED)
    producer, consumer = (pair.receive(child, "open", _STEP_LIMIT_S) for child in both)
    pair.wait(pair.consumer, "connect", producer=producer)
    blobs = [pair.call(child, "open_bare") for child in both]
    pair.bare = None not in blobs
    if pair.bare:
        pair.call(pair.producer, "meet_bare", metadata=blobs[1], consumer=consumer)


def _close(pair: _Pair) -> None:
    """Stop both engines; their tables must be empty."""
    for child in (pair.producer, pair.consumer):
        counters = pair.call(child, "close")
        left = {name: counters[name] for name in _ZERO_AT_REST if counters[name]}
        if left:
            raise SelfTestError(f"the {child.name} has live entries after the last request: {left}")


def _push(pair: _Pair, case: Case) -> tuple[dict[str, float], int, str]:
    """One transfer through kvpush. Returns its costs, the number of wrong bytes, the first."""
    pair.ticket += 1
    pair.call(pair.consumer, "poison")
    pair.wait(pair.producer, "offer", ticket=pair.ticket, case=case)
    took_s = pair.wait(pair.consumer, "receive", ticket=pair.ticket, case=case)
    costs: dict[str, float] = pair.wait(pair.producer, "sent", ticket=pair.ticket)
    costs["grant_to_received_us"] = took_s * 1e6
    wrong, first = pair.call(pair.consumer, "check", case=case)
    return costs, wrong, first


def _write_bare(pair: _Pair, case: Case) -> dict[str, float]:
    """The same bytes by a bare WRITE. Returns its costs."""
    pair.call(pair.consumer, "poison")
    limit_s = pair.limit_s()
    pair.consumer.send("bare_await", limit_s=limit_s)
    prepare_s, write_s = pair.wait(pair.producer, "bare_write", case=case)
    pair.receive(pair.consumer, "bare_await", 2 * limit_s)
    return {"bare_prepare_us": prepare_s * 1e6, "bare_write_us": write_s * 1e6}


def _measure(pair: _Pair, geometry: Geometry, case: Case, repetitions: int) -> tuple[Row, str]:
    """All repetitions of one request, kvpush and bare in turns after one of each to warm up."""
    pushes: list[dict[str, float]] = []
    wrong = 0
    first = ""
    for number in range(repetitions + 1):
        costs, bad, place = _push(pair, case)
        wrong += bad
        first = first or place
        if pair.bare:
            costs |= _write_bare(pair, case)
        if number > 0:
            pushes.append(costs)
    median = {name: statistics.median(push[name] for push in pushes) for name in pushes[0]}
    transfer_us = max(median["transfer_us"], 1e-3)
    best_us = max(min(push["transfer_us"] for push in pushes), 1e-3)
    bare_us = bare_best_us = None
    if pair.bare:
        bare_us = median["bare_prepare_us"] + median["bare_write_us"]
        bare_best_us = min(push["bare_prepare_us"] + push["bare_write_us"] for push in pushes)
    moved = int(median["bytes"])
    row = Row(
        request=case.name,
        layers=geometry.layers,
        blocks=case.blocks(geometry) - case.first_block(geometry),
        tokens=case.tokens - case.first_token,
        producer_blocks=case.producer_order,
        consumer_blocks=case.consumer_order,
        repetitions=repetitions,
        bytes=moved,
        descriptors_before=int(median["descriptors_before"]),
        descriptors=int(median["descriptors"]),
        plan_us=median["plan_us"],
        post_us=median["post_us"],
        transfer_us=median["transfer_us"],
        grant_to_received_us=median["grant_to_received_us"],
        transfer_gb_per_s=moved / transfer_us / 1e3,
        bare_prepare_us=median.get("bare_prepare_us"),
        bare_write_us=median.get("bare_write_us"),
        bare_ratio=None if bare_us is None else bare_us / transfer_us,
        transfer_best_us=best_us,
        bare_best_us=bare_best_us,
        bare_best_ratio=None if bare_best_us is None else bare_best_us / best_us,
        bytes_wrong=wrong,
    )
    if moved != case.payload_bytes(geometry):
        raise SelfTestError(
            f"'{case.name}' moved {moved} bytes, but has {case.payload_bytes(geometry)}"
        )
    return row, first


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def nixl_versions(library: str) -> dict[str, str]:
    """The versions of the installed distributions that `library` may come from."""
    inside = re.findall(r"nixl_cu\d+", library)
    names = [inside[-1].replace("_", "-")] if inside else ["nixl-cu13", "nixl-cu12", "nixl"]
    return installed_versions(names)


def new_report(backend: str) -> Report:
    """The report of a run that has not begun."""
    return Report(
        ok=False,
        mismatches=0,
        error="",
        first_mismatch="",
        backend=backend,
        nixl_library="",
        nixl_versions={},
        kvpush_version=kvpush.__version__,
        duration_s=0.0,
        rows=[],
    )


def run_selftest(
    report: Report, *, quick: bool, limit_s: float, progress: Progress | None = None
) -> None:
    """Run it all and fill `report`, as far as it goes.

    Raises:
        NixlNotFoundError: NIXL's library is not installed.
        SelfTestError: the run could not be finished; its message says why.
        ValueError: FAULT_VARIABLE is set to something else than a fault.
    """
    begin = time.monotonic()
    fault = os.environ.get(FAULT_VARIABLE, "")
    if fault and fault not in FAULTS:
        raise ValueError(f"{FAULT_VARIABLE} is {fault!r}; it may be one of {', '.join(FAULTS)}")
    library = str(find_library())
    report.nixl_library = library
    report.nixl_versions = nixl_versions(library)
    geometries = [Geometry(layers=16, pool_blocks=384)]
    largest_blocks = 256
    if not quick:
        geometries = [Geometry(layers=16, pool_blocks=1280), Geometry(layers=64, pool_blocks=1280)]
        largest_blocks = 1024
    work = [(geometry, case) for geometry in geometries for case in cases(geometry, largest_blocks)]
    with (
        Child("producer", rank.main, "producer", library, report.backend, fault) as producer,
        Child("consumer", rank.main, "consumer", library, report.backend, fault) as consumer,
    ):
        pair = _Pair(producer, consumer, limit_s)
        for number, (geometry, case) in enumerate(work):
            if progress is not None:
                progress(f"{case.name}, {geometry.layers} layers", number, len(work))
            if number == 0 or work[number - 1][0] != geometry:
                _open(pair, geometry)
            large = case.payload_bytes(geometry) > 1 << 24
            row, first = _measure(pair, geometry, case, 3 if quick else 5 if large else 9)
            report.rows.append(row)
            report.mismatches += row.bytes_wrong
            report.first_mismatch = report.first_mismatch or (first and f"'{case.name}': {first}")
            if number + 1 == len(work) or work[number + 1][0] != geometry:
                _close(pair)
    report.ok = report.mismatches == 0
    report.duration_s = time.monotonic() - begin
