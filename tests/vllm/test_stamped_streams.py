"""Prefills pushed step by step while blocks run out: stamped KV shows every wrong byte.

The prefill engine has few blocks and also decodes requests of its own, which grow until prefills
under way lose their blocks; the next step writes another request's KV into them. Its decode engine
checks the whole context of every request in every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.engines.pair import Mode, Pair, Timeline
from bench.engines.settings import KVPUSH, ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE

REQUESTS = 80
IN_FLIGHT = 6
GROWING = 4
DRAIN_LIMIT_S = 120.0

MODEL = ModelSettings(
    layers=8, kv_heads=2, max_model_len=1024, prefill_us=1.0, step_ms=1.0, stamp="all"
)
CONNECTOR = replace(KVPUSH, extra_config={"min_push_bytes": 0})


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    logs = fresh_logs(DEFAULT_CACHE / "test-logs")
    with Pair.start(
        Mode("streams", CONNECTOR, "together"),
        logs,
        model=MODEL,
        base={"block_size": 32, "max_num_batched_tokens": 128},
        prefill={"num_blocks": 64, "prefix_caching": True},
        decode={"num_blocks": 512},
    ) as pair:
        yield pair


def tokens(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(1000) for _ in range(draw.randint(least, most))]


def run(pair: Pair, draw: random.Random) -> list[Timeline]:
    assert pair.prefill is not None
    ended: list[Timeline] = []
    for number in range(REQUESTS):
        if number % GROWING == 0:
            pair.prefill.send("add", f"grows-{number}", tokens(draw, 60, 120), 400, None)
        while len(pair.live) >= IN_FLIGHT:
            ended += pair.pump(0.05)
        pair.submit(f"r{number}", tokens(draw, 300, 900), 4)
        if draw.random() < 0.1:
            pair.abort(draw.choice(list(pair.live)), prefill=True, decode=True)
    return ended + pair.drain(DRAIN_LIMIT_S)


def worker_counters(report: dict[str, Any]) -> dict[str, int]:
    counters: dict[str, int] = report["connector"]["workers"][0]
    return counters


def test_preempted_streams_deliver_the_bytes_of_their_prompts(pair: Pair) -> None:
    ended = run(pair, random.Random(7))
    report = pair.report()
    for side in ("prefill", "decode"):
        stamps = report[side]["stamps"]
        assert stamps["wrong_tokens"] == 0, stamps["descriptions"]
        assert stamps["tokens_checked"] > 0
    aborted = [t for t in ended if t.decode_reason == "abort"]
    assert {t.decode_reason for t in ended} - {"abort"} == {"length"}
    counters = worker_counters(report["prefill"])
    received = worker_counters(report["decode"])["transfers_received"]
    assert received >= REQUESTS - len(aborted)
    # It was what it was meant to be: several pieces a prompt, and blocks that were taken away.
    assert counters["writes_posted"] > 2 * counters["transfers_sent"]
    assert counters["rewinds"] > 0
