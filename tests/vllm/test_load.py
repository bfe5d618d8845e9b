"""Mixed loads through a pair, in each way a router may send the two legs."""

from __future__ import annotations

import asyncio

import pytest

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, mixed

# A seed for each, so that no load finds another's prompts in a prefix cache.
WAYS = {"both": 100, "request-id": 101, "sequence": 102, "router": 103}


@pytest.mark.parametrize("how", WAYS)
def test_mixed_load_equals_the_plain_engine(default_pair, reference, how):
    requests = mixed(40, longest=1500, seed=WAYS[how])
    expected = reference.answers(requests)
    received = default_pair.counters(default_pair.consumers)["transfers_received"]
    got = asyncio.run(default_pair.send_all(requests, how=how))
    require_equal(requests, expected, got)
    default_pair.wait_at_rest()
    received = default_pair.counters(default_pair.consumers)["transfers_received"] - received
    assert received == len(requests), "the decode engine computed prompts itself"


def test_two_prefill_engines_serve_one_decode_engine(default_pair, reference):
    requests = distinct(12, 150, seed=21)
    before = [
        default_pair.counters([engine])["transfers_sent"] for engine in default_pair.producers
    ]
    got = asyncio.run(default_pair.send_all(requests))
    require_equal(requests, reference.answers(requests), got)
    default_pair.wait_at_rest()
    after = [default_pair.counters([engine])["transfers_sent"] for engine in default_pair.producers]
    assert [late - early for early, late in zip(before, after, strict=True)] == [6, 6]


def test_shortest_prompts(default_pair, reference):
    requests = [
        Request([40 + length, *range(50, 49 + length)]) for length in (1, 2, 3, 31, 32, 33, 64)
    ]
    got = asyncio.run(default_pair.send_all(requests))
    require_equal(requests, reference.answers(requests), got)


def test_chat_and_text_through_the_router(default_pair, reference):
    requests = [
        Request([{"role": "user", "content": f"def f{number}(x): return x * {number}"}])
        for number in range(4)
    ]
    requests += [Request("import os, sys\nclass Reader:\n    pass\n" * 6)]

    async def ask(url):
        async with Client() as client:
            streamed = await asyncio.gather(*(client.complete(url, each) for each in requests))
            whole = await asyncio.gather(
                *(client.complete(url, each, stream=False) for each in requests)
            )
        return [*streamed, *whole]

    got = asyncio.run(ask(default_pair.router.url))
    expected = asyncio.run(ask(reference.engine.url))
    require_equal([*requests, *requests], expected, got)
    assert [answer.text for answer in got] == [answer.text for answer in expected]
