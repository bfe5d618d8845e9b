"""Which backend takes the next request.

A `Pool` knows the backends of one kind and how they fare; a `Strategy` picks among those that are
fit. Everything here runs on the event loop's thread and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from kvpush.proxy.config import DecodeBackend, PrefillBackend

SpecT = TypeVar("SpecT", PrefillBackend, DecodeBackend)


class Backend(Generic[SpecT]):
    """One server and what the router has seen of it. Strategies only read it."""

    def __init__(self, spec: SpecT, cool_off_s: float, now_s: Callable[[], float]) -> None:
        self.spec: SpecT = spec
        self.in_flight = 0
        self.requests = 0
        self.connect_failures = 0
        self._cool_off_s = cool_off_s
        self._now_s = now_s
        self._cooling_until_s = float("-inf")

    @property
    def url(self) -> str:
        """The server's base URL."""
        url: str = self.spec.url
        return url

    @property
    def cooling_left_s(self) -> float:
        """Seconds until the backend is tried again; 0 when it is fit."""
        return max(0.0, self._cooling_until_s - self._now_s())

    def connect_failed(self) -> None:
        """Note that no connection could be made: leave the backend alone for a while."""
        self.connect_failures += 1
        self._cooling_until_s = self._now_s() + self._cool_off_s

    def connected(self) -> None:
        """Note that the backend answered: it is fit at once."""
        self._cooling_until_s = float("-inf")

    @contextmanager
    def use(self) -> Iterator[None]:
        """Count one request as being on this backend."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Strategy(Protocol):
    """Picks one of the backends that are fit; `fit` is never empty."""

    def choose(self, fit: Sequence[Backend[SpecT]]) -> Backend[SpecT]:
        """Return one of `fit`."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, fit: Sequence[Backend[SpecT]]) -> Backend[SpecT]:
        """Return the backend whose turn it is."""
        chosen = fit[self._next % len(fit)]
        self._next += 1
        return chosen


class Pool(Generic[SpecT]):
    """The backends of one kind."""

    def __init__(
        self,
        specs: Sequence[SpecT],
        strategy: Strategy,
        *,
        cool_off_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backends: list[Backend[SpecT]] = [Backend(spec, cool_off_s, now_s) for spec in specs]
        self._strategy = strategy

    def pick(self) -> Backend[SpecT]:
        """Choose a backend.

        With all of them cooling off, the one that is due first is tried: a refusal would be
        certain, a try may succeed.
        """
        fit = [backend for backend in self.backends if backend.cooling_left_s == 0.0]
        if not fit:
            return min(self.backends, key=lambda backend: backend.cooling_left_s)
        return self._strategy.choose(fit)
