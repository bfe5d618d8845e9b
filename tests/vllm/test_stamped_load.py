"""A load of everything at once on engines whose KV is stamped: no wrong byte, nothing left over.

Two real engines without HTTP, few blocks on both sides, small prefill chunks, shared prefixes,
transfer ids used again, and legs aborted on either side at any moment. The model checks the whole
context of every request in every step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.engines.pair import Mode, Pair, Timeline
from bench.engines.settings import KVPUSH, ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE

REQUESTS = 300
IN_FLIGHT = 20
BLOCKS = 96
DEADLINE_S = 10.0
# A request that nobody helps ends at its deadline; the rest is a slow machine.
DRAIN_LIMIT_S = 120.0
REST_LIMIT_S = 60.0

CONNECTOR = replace(
    KVPUSH,
    extra_config={
        "receive_deadline_s": DEADLINE_S,
        "offer_ttl_s": DEADLINE_S,
        "grant_ttl_s": 1.5 * DEADLINE_S,
    },
)
MODEL = ModelSettings(
    layers=4, kv_heads=2, max_model_len=1024, prefill_us=1.0, step_ms=1.0, stamp="all"
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    engines = {
        "block_size": 32,
        "num_blocks": BLOCKS,
        "max_num_batched_tokens": 256,
        "prefix_caching": True,
    }
    logs = fresh_logs(DEFAULT_CACHE / "test-logs")
    mode = Mode("stamped", CONNECTOR, "together")
    with Pair.start(mode, logs, model=MODEL, base=engines) as pair:
        yield pair


class Load:
    """Draws requests and aborts from one seed."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self._pair = pair
        self._draw = random.Random(seed)
        self._prefixes = [self._tokens(400) for _ in range(4)]
        self._prompts: list[list[int]] = []
        self._count = 0
        self.aborted: set[str] = set()
        self.ended: list[Timeline] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1000) for _ in range(count)]

    def _prompt(self) -> list[int]:
        if self._prompts and self._draw.random() < 0.1:
            return self._draw.choice(self._prompts)  # whole prefix hits
        prefix = self._draw.choice(self._prefixes)[: self._draw.randrange(400)]
        prompt = prefix + self._tokens(self._draw.randrange(2, 200))
        self._prompts.append(prompt)
        return prompt

    def submit(self) -> None:
        draw = self._draw
        transfer_id = f"t{draw.randrange(8)}" if draw.random() < 0.2 else None
        name = f"r{self._count}"
        self._count += 1
        local = draw.random() < 0.05
        self._pair.submit(
            name, self._prompt(), draw.randrange(1, 60), transfer_id=transfer_id, local=local
        )

    def abort_some(self) -> None:
        for name in list(self._pair.live):
            if self._draw.random() < 0.004:
                sides: dict[str, Any] = self._draw.choice(
                    [{"prefill": True}, {"decode": True}, {"prefill": True, "decode": True}]
                )
                self.aborted.add(name)
                self._pair.abort(name, **sides)

    def run(self, count: int) -> None:
        while self._count < count:
            while len(self._pair.live) < IN_FLIGHT and self._count < count:
                self.submit()
            self.ended += self._pair.pump(0.01)
            self.abort_some()
        self.ended += self._pair.drain(DRAIN_LIMIT_S)


def leftovers(pair: Pair) -> dict[str, Any]:
    """What is not back at the start."""
    found: dict[str, Any] = {}
    for engine, report in zip(pair.engines, _reports(pair), strict=True):
        name = engine.settings.role
        if report["free_blocks"] != engine.facts["free_blocks"]:
            found[f"{name} blocks"] = engine.facts["free_blocks"] - report["free_blocks"]
        stats = report["connector"]
        tables = dict(stats["scheduler"])
        for worker in stats["workers"]:
            tables |= {key: value for key, value in worker.items() if key.startswith("live_")}
        found |= {f"{name} {key}": value for key, value in tables.items() if value}
    return found


def _reports(pair: Pair) -> list[dict[str, Any]]:
    report = pair.report()
    return [report["prefill"], report["decode"]]


def wait_at_rest(pair: Pair) -> None:
    deadline = time.monotonic() + REST_LIMIT_S
    while found := leftovers(pair):
        assert time.monotonic() < deadline, f"left over: {found}"
        pair.pump(0.05)


def test_no_wrong_byte_and_nothing_left(pair: Pair) -> None:
    load = Load(pair, seed=4)
    load.run(REQUESTS)
    wait_at_rest(pair)

    prefill, decode = _reports(pair)
    for side in (prefill, decode):
        assert side["stamps"]["wrong_tokens"] == 0, side["stamps"]["descriptions"]
        assert side["stamps"]["tokens_checked"] > 0
    served = [t for t in load.ended if t.decode_reason == "length"]
    failed = [t for t in load.ended if t.decode_reason == "error" and t.request not in load.aborted]
    # Twins of one transfer id are told apart by their prompts, so nothing but an abort may fail.
    assert not failed, [t.request for t in failed]
    assert len(served) > REQUESTS / 2
    assert all(len(t.tokens) == t.max_tokens for t in served)
    # The load was what it was meant to be.
    received = decode["connector"]["workers"][0]["transfers_received"]
    assert received > REQUESTS / 2, received
    assert load.aborted
