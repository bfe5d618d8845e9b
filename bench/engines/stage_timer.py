"""When each request passed the stages of its handoff, in one engine.

Marks are nanoseconds of the machine's monotonic clock, so those of two engines can be compared.
kvpush's and the stock push connector's objects are followed where they do the same thing: other
connectors have only the marks that vLLM's own hooks give.

    finished   P's scheduler learns that the prefill has ended
    given      P's worker hands the blocks to whoever writes them (the last of them, if in pieces)
    begun      the first call to post begins
    posted     the last one returns
    received   D's worker reports the request
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

_ID_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM's engine makes a request's id unique with it."""


class StageTimer:
    """Collects marks by request. Marks may come from any thread: each is one dict operation."""

    def __init__(self) -> None:
        self.marks: dict[str, dict[str, int]] = {}

    def _mark(self, request: str, stage: str, at_ns: int | None = None) -> None:
        name = _ID_SUFFIX.sub("", request)
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        self.marks.setdefault(name, {})[stage] = at_ns

    def follow(self, scheduler_connector: Any, worker_connector: Any) -> None:
        """Follow both connector objects of an engine."""
        for name in ("request_finished", "request_finished_all_groups"):
            self._before(
                scheduler_connector, name, lambda r, *_: self._mark(r.request_id, "finished")
            )
        self._follow_reports(worker_connector)
        if getattr(worker_connector, "connector_worker", None) is not None:
            self._follow_stock(worker_connector.connector_worker)
        elif getattr(worker_connector, "_worker", None) is not None:
            self._follow_ours(worker_connector._worker.side)

    @staticmethod
    def _before(target: Any, name: str, note: Callable[..., None]) -> None:
        call = getattr(target, name, None)
        if call is None:
            return

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args)
            return call(*args, **kwargs)

        setattr(target, name, noted)

    def _follow_reports(self, connector: Any) -> None:
        call = connector.get_transfer_results

        def noted(*args: Any, **kwargs: Any) -> Any:
            results = call(*args, **kwargs)
            for request in results.finished_recving if results is not None else ():
                self._mark(request, "received")
            return results

        connector.get_transfer_results = noted

    def _follow_ours(self, side: Any) -> None:
        # In pieces, where the prefill is streamed: the last one's mark stays.
        self._before(side, "_prepare", lambda offer: self._mark(offer.request_id, "given"))

        def ended(event: Any, _: Any) -> None:
            send = side._sends_by_ticket.get(event.ticket)
            if event.kind == "sent" and send is not None:
                self._mark(send.request_id, "begun", event.first_post_ns)
                self._mark(send.request_id, "posted", event.last_post_ns)

        self._before(side, "_take_event", ended)

    def _follow_stock(self, worker: Any) -> None:
        inbox = getattr(worker, "_finished_blocks_inbox", None)
        write = getattr(worker, "_xfer_blocks", None)
        if inbox is None or write is None:
            return  # the pull connector
        self._before(inbox, "put", lambda item: self._mark(item[0], "given"))

        def noted(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic_ns()
            handle = write(*args, **kwargs)
            request = kwargs["request_id"]
            self._mark(request, "begun", begun)
            self._mark(request, "posted")
            return handle

        worker._xfer_blocks = noted
