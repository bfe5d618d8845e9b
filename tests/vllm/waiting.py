"""Waiting for conditions, with limits, and the time-outs that the servers under test have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from bench.harness.pair import Pair
from bench.harness.servers import Engine

LIMIT_S = 60.0

# A transfer's deadline, which some tests wait out. Long enough for forty requests at once on two
# busy cores, which is what it competes with.
DEADLINE_S = 20.0


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds; it may block and is asked on another thread."""
    end = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}"
        await asyncio.sleep(0.02)


def loading(pair: Pair, engine: Engine) -> int:
    """The number of requests whose KV a decode engine waits for."""
    return int(pair.stats(engine)["scheduler"]["loading"])


async def leave(task: asyncio.Task[object]) -> None:
    """Drop a request as a client does that closes its connection."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
