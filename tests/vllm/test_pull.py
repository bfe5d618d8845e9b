"""`KvPullConnector` between real engines: the tokens of one engine, whichever leg comes first."""

from __future__ import annotations

import asyncio

import pytest

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, mixed, tokens
from tests.vllm.waiting import DEADLINE_S

WAYS = {"both": 900, "request-id": 901, "sequence": 902}
BLOCK = 32


@pytest.mark.parametrize("how", WAYS)
def test_mixed_load_equals_the_plain_engine(pull_pair, reference, how):
    requests = mixed(30, longest=1500, seed=WAYS[how])
    expected = reference.answers(requests)
    before = pull_pair.counters()
    got = asyncio.run(pull_pair.send_all(requests, how=how))
    require_equal(requests, expected, got)
    pull_pair.wait_at_rest()
    after = pull_pair.counters()
    received = after["transfers_received"] - before["transfers_received"]
    assert received == len(requests), "the decode engine computed prompts itself"
    assert after["reads_posted"] > before["reads_posted"]
    assert after["writes_posted"] == 0


def test_only_what_the_prefix_cache_lacks_is_read(pull_pair, reference):
    first = Request(tokens(10 * BLOCK, seed=911))
    second = Request([*first.prompt[:230], *tokens(90, seed=912)])
    requests = [first, second, second]
    expected = reference.answers(requests)
    read_bytes = []
    for request, answer in zip(requests, expected, strict=True):
        before = pull_pair.counters()["bytes_read"]
        require_equal([request], [answer], asyncio.run(pull_pair.send_all([request])))
        pull_pair.wait_at_rest()
        read_bytes.append(pull_pair.counters()["bytes_read"] - before)
    assert 0 < read_bytes[1] <= read_bytes[0] * 4 // 10
    assert read_bytes[2] <= read_bytes[1]


def test_a_client_that_leaves_and_a_prefill_that_never_comes(pull_pair, reference):
    others = distinct(6, 300, seed=913)
    expected = reference.answers(others)

    async def decode_alone(transfer_id, limit_s):
        params = pull_pair.decode_params(pull_pair.producers[0], transfer_id)
        async with Client(limit_s) as client:
            return await client.complete(
                pull_pair.consumers[0].url,
                Request(tokens(200, seed=914)),
                kv_transfer_params=params,
            )

    async def scenario():
        leaves = asyncio.create_task(decode_alone("leaves", DEADLINE_S * 3))
        never = asyncio.create_task(decode_alone("never", DEADLINE_S * 3))
        got = await pull_pair.send_all(others)
        leaves.cancel()
        return got, await never

    got, never = asyncio.run(scenario())
    require_equal(others, expected, got)
    assert not never.ok
    pull_pair.wait_at_rest()
