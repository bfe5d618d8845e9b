"""Events that say when a step's KV is in memory.

On a CPU it is there when the step's hook runs. On an accelerator the step is then only queued: an
event is recorded on the model's stream behind it, and the native thread asks the driver whether it
has completed. An event belongs to its pool; the native engine only borrows its handle, from the
call that gets it until `fences_passed()` has reached that call's number. Until then the pool
neither records it again nor lets it go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["CudaEvents", "HostEvents", "StepEvents"]

_MAX_EVENTS = 64
"""An engine is one or two steps ahead of its device; what comes beyond goes with a later step."""


class StepEvents(Protocol):
    """Used by the worker's main thread alone."""

    def record(self, passed: int) -> int | None:
        """An event behind all that was queued so far: its handle, 0 if nothing needs waiting for.

        None if all events are in use. `passed` is the native engine's fences_passed().
        """

    def lent(self, fence: int) -> None:
        """The event just recorded went out with the call of this number."""


class HostEvents:
    """The CPU computes: nothing to wait for."""

    def record(self, passed: int) -> int | None:
        """See the protocol."""
        del passed
        return 0

    def lent(self, fence: int) -> None:
        """See the protocol."""


class CudaEvents:
    """Events of `make_event` (torch.cuda.Event), recorded on the current stream and reused."""

    def __init__(self, make_event: Callable[[], Any], limit: int = _MAX_EVENTS) -> None:
        self._make_event = make_event
        self._limit = limit
        self._free: list[Any] = []
        self._lent: deque[tuple[int, Any]] = deque()
        self._recorded: Any = None

    def record(self, passed: int) -> int | None:
        """See the protocol."""
        while self._lent and self._lent[0][0] <= passed:
            self._free.append(self._lent.popleft()[1])
        if self._recorded is None:
            if len(self._lent) >= self._limit:
                return None
            self._recorded = self._free.pop() if self._free else self._make_event()
        self._recorded.record()
        return int(self._recorded.cuda_event)

    def lent(self, fence: int) -> None:
        """See the protocol."""
        self._lent.append((fence, self._recorded))
        self._recorded = None
