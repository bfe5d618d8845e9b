"""Chunked prefill and preemption, with few blocks on both sides.

The first pair pushes each chunk when it has been computed, the second all of them at the end.
"""

from __future__ import annotations

import asyncio

from bench.harness.client import Client
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, mixed

PREEMPTIONS = "vllm:num_preemptions_total"

# A preemption on the prefill engine needs a decode there to grow at the right moment.
MOST_ROUNDS = 4


def test_chunked_prefill(small_pair, reference):
    check_chunked_prefill(small_pair, reference)


def test_chunked_prefill_pushed_at_its_end(at_end_pair, reference):
    check_chunked_prefill(at_end_pair, reference)


def check_chunked_prefill(pair, reference):
    # Up to seven chunks of 128 tokens.
    requests = mixed(16, shortest=100, longest=850, seed=901)
    received = pair.counters(pair.consumers)["transfers_received"]
    got = asyncio.run(pair.send_all(requests, at_once=2))
    require_equal(requests, reference.answers(requests), got)
    pair.wait_at_rest()
    received = pair.counters(pair.consumers)["transfers_received"] - received
    assert received == len(requests), "the decode engine computed prompts itself"


def test_chunked_prefill_one_leg_after_the_other(small_pair, reference):
    requests = mixed(8, shortest=100, longest=850, seed=902)
    got = asyncio.run(small_pair.send_all(requests, at_once=2, how="sequence"))
    require_equal(requests, reference.answers(requests), got)


def test_preemption_on_decode(small_pair, reference):
    # Eight times 350 tokens in a pool of 1,536.
    requests = distinct(8, 150, max_tokens=200, seed=903)
    expected = reference.answers(requests)
    consumer = small_pair.consumers[0]
    before = consumer.metric(PREEMPTIONS)
    got = asyncio.run(small_pair.send_all(requests))
    require_equal(requests, expected, got)
    assert consumer.metric(PREEMPTIONS) > before


def test_preemption_on_prefill(small_pair, reference):
    check_preemption_on_prefill(small_pair, reference)
    counters = small_pair.counters(small_pair.producers)
    assert counters["writes_posted"] > counters["transfers_sent"], "chunks were not pushed"


def test_preemption_on_prefill_pushed_at_its_end(at_end_pair, reference):
    check_preemption_on_prefill(at_end_pair, reference)


def check_preemption_on_prefill(pair, reference):
    producer = pair.producers[0]
    before = producer.metric(PREEMPTIONS)
    for turn in range(MOST_ROUNDS):
        # Decodes on the prefill engine grow until they hold nearly all of its pool, while prefills
        # of long prompts come and go.
        growing = distinct(3, 100, max_tokens=380, seed=910 + turn)
        waves = [distinct(6, 600, seed=930 + 10 * turn + wave) for wave in range(4)]
        expected = [reference.answers(requests) for requests in waves]

        async def prefills(waves=waves):
            return [await pair.send_all(requests) for requests in waves]

        async def scenario(growing=growing, prefills=prefills):
            async with Client() as client:
                return await asyncio.gather(prefills(), client.complete_all(producer.url, growing))

        got, _ = asyncio.run(scenario())
        for wave in zip(waves, expected, got, strict=True):
            require_equal(*wave)
        if producer.metric(PREEMPTIONS) > before:
            return
    raise AssertionError(f"no preemption on the prefill engine in {MOST_ROUNDS} rounds")


def test_more_requests_than_blocks(small_pair, reference):
    requests = mixed(30, shortest=60, longest=700, seed=940)
    got = asyncio.run(small_pair.send_all(requests))
    require_equal(requests, reference.answers(requests), got)
