"""Tells prefill servers of requests that were given up, so that they hold no KV for them.

Where the decode server has taken a request on, it says so itself. Where it never did (it refused a
field, could not be reached, was still busy when the client left), nobody else could tell. Sent in
the background, on a few threads, once: what is lost costs the prefill server its time to live.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from kvpush.auth import AuthKey
from kvpush.errors import KvPushError
from kvpush.proxy.config import PrefillBackend
from kvpush.proxy.stats import Counters
from kvpush.side_channel import cancel_transfer

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""With 8 threads and 2 s each at worst, a minute's worth; of more, the servers are not told."""
_THREADS = 8
_TIMEOUT_S = 2.0
"""A side channel answers within milliseconds."""


class Canceller:
    """Made and used on one event loop; `close` when done."""

    def __init__(self, counters: Counters, auth: AuthKey | None) -> None:
        self._counters = counters
        self._auth = auth
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpush-cancel")
        self._waiting: set[asyncio.Task[None]] = set()

    def cancel(self, prefill: PrefillBackend, transfer_id: str) -> None:
        """Tell a prefill server that nobody will ask for this transfer. Returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._counters.cancels_failed += 1
            return
        task = asyncio.create_task(self._run(prefill, transfer_id))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Give those under way a moment, and drop the rest."""
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=_TIMEOUT_S)
        for task in self._waiting:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, prefill: PrefillBackend, transfer_id: str) -> None:
        address = (prefill.side_channel_host, prefill.side_channel_port)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(
                self._threads, cancel_transfer, *address, transfer_id, _TIMEOUT_S, self._auth
            )
        except KvPushError as error:
            self._counters.cancels_failed += 1
            logger.info("%s could not be told that a request was given up: %s", prefill.url, error)
        else:
            self._counters.cancels += 1
