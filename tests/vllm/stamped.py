"""A load on a pair of engines whose KV is stamped, drawn from one seed; and what is left after it.

The engines are real, without HTTP. The model checks the whole context of every request in every
step, so a wrong byte is seen wherever it comes from.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from bench.engines.pair import Mode, Pair, Timeline
from bench.engines.settings import KVPUSH, ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE

MODEL = ModelSettings(
    layers=4, kv_heads=2, max_model_len=1024, prefill_us=1.0, step_ms=1.0, stamp="all"
)
# Few blocks: some twenty requests of ten blocks each fight for them.
BLOCKS = 96
IN_FLIGHT = 20
REST_LIMIT_S = 60.0


def start(name: str, **extra_config: Any) -> Pair:
    """A pair with prefix caching, small prefill chunks and few blocks on both sides."""
    engines = {
        "block_size": 32,
        "num_blocks": BLOCKS,
        "max_num_batched_tokens": 256,
        "prefix_caching": True,
    }
    # Chunks of this model are small, and all are to be pushed.
    connector = replace(KVPUSH, extra_config={"min_push_bytes": 0, **extra_config})
    mode = Mode(name, connector, "together")
    logs = fresh_logs(DEFAULT_CACHE / "test-logs")
    return Pair.start(mode, logs, model=MODEL, base=engines)


class Load:
    """Draws requests, retries and aborts."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self._draw = random.Random(seed)
        self._prefixes = [self._tokens(400) for _ in range(4)]
        # Of each request so far: its transfer id and prompt, as another may take them up.
        self._past: list[tuple[str | None, list[int]]] = []
        self.requests: list[Timeline] = []
        self.aborted: set[str] = set()
        # Requests that had a twin, with the same id and prompt, live beside them. What is meant for
        # one may end the other: such a one may fail, in time, but gets no wrong byte.
        self.contested: set[str] = set()
        self._keys: dict[tuple[str, tuple[int, ...]], list[Timeline]] = {}
        self.retries = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1000) for _ in range(count)]

    def _next(self) -> tuple[str | None, list[int]]:
        """A transfer id, None for one of its own, and a prompt."""
        draw = self._draw.random()
        if self._past and draw < 0.05:  # whatever became of it
            self.retries += 1
            return self._draw.choice(self._past[-50:])
        transfer_id = f"t{self._draw.randrange(8)}" if draw < 0.25 else None
        if self._past and self._draw.random() < 0.1:
            return transfer_id, self._draw.choice(self._past)[1]  # whole prefix hits
        prefix = self._draw.choice(self._prefixes)[: self._draw.randrange(400)]
        return transfer_id, prefix + self._tokens(self._draw.randrange(2, 200))

    def submit(self) -> None:
        """One more request."""
        name = f"r{len(self.requests)}"
        transfer_id, prompt = self._next()
        self._past.append((transfer_id or name, prompt))
        local = self._draw.random() < 0.05
        request = self.pair.submit(
            name, prompt, self._draw.randrange(1, 60), transfer_id=transfer_id, local=local
        )
        self.requests.append(request)
        if not local:
            self._note_twins(transfer_id or name, prompt, request)

    def _note_twins(self, transfer_id: str, prompt: list[int], request: Timeline) -> None:
        same = self._keys.setdefault((transfer_id, tuple(prompt)), [])
        if any(not other.done or other.request in self.contested for other in same):
            self.contested |= {other.request for other in same} | {request.request}
        same.append(request)

    def abort_some(self, chance: float) -> None:
        """Abort legs of each live request with this probability."""
        for name in list(self.pair.live):
            if self._draw.random() < chance:
                sides: dict[str, Any] = self._draw.choice(
                    [{"prefill": True}, {"decode": True}, {"prefill": True, "decode": True}]
                )
                self.aborted.add(name)
                self.pair.abort(name, **sides)

    def run(self, count: int, *, abort_chance: float = 0.004) -> None:
        """Send this many more requests, some in flight at a time; leave the last ones in flight."""
        wanted = len(self.requests) + count
        while len(self.requests) < wanted:
            while len(self.pair.live) < IN_FLIGHT and len(self.requests) < wanted:
                self.submit()
            self.pair.pump(0.01)
            self.abort_some(abort_chance)

    def one_that_must_work(self, limit_s: float) -> None:
        """A request that nothing is wrong with, through both engines."""
        name = f"r{len(self.requests)}"
        request = self.pair.submit(name, self._tokens(300), 8)
        self.requests.append(request)
        self.pair.drain(limit_s)
        assert (request.prefill_reason, request.decode_reason) == ("length", "length"), request

    def served(self) -> list[Timeline]:
        """Requests that were answered whole."""
        return [request for request in self.requests if request.decode_reason == "length"]

    def failed(self) -> list[str]:
        """Requests that failed, but for those that were aborted or had a live twin."""
        excused = self.aborted | self.contested
        return [
            request.request
            for request in self.requests
            if request.decode_reason == "error" and request.request not in excused
        ]


def leftovers(pair: Pair) -> dict[str, Any]:
    """What is not back at the start, of the engines that are up."""
    found: dict[str, Any] = {}
    reports = pair.report()
    for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        report = reports.get(side)
        if report is None or engine is None:
            continue
        if report["free_blocks"] != engine.facts["free_blocks"]:
            found[f"{side} blocks"] = engine.facts["free_blocks"] - report["free_blocks"]
        stats = report["connector"]
        tables = dict(stats["scheduler"])
        for worker in stats["workers"]:
            tables |= {key: value for key, value in worker.items() if key.startswith("live_")}
        found |= {f"{side} {key}": value for key, value in tables.items() if value}
    return found


def wait_at_rest(pair: Pair) -> None:
    """Wait until every block is free and every table empty."""
    deadline = time.monotonic() + REST_LIMIT_S
    while found := leftovers(pair):
        assert time.monotonic() < deadline, f"left over: {found}"
        pair.pump(0.05)


def require_right_stamps(pair: Pair) -> None:
    """No engine that is up has ever seen a wrong byte."""
    for side, report in pair.report().items():
        stamps = report["stamps"]
        assert stamps["wrong_tokens"] == 0, (side, stamps["descriptions"])
