"""Decode requests whose prefill never comes end at their deadline; nothing else suffers."""

from __future__ import annotations

import asyncio
import time

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.servers import free_port
from bench.harness.workload import distinct, tokens
from tests.vllm.waiting import DEADLINE_S

# Beyond the deadline: the fence, and steps of a busy machine.
SLACK_S = 20.0


async def _decode_alone(pair, request, transfer_id, **changed):
    params = pair.decode_params(pair.producers[0], transfer_id) | changed
    async with Client() as client:
        return await client.complete(pair.consumers[0].url, request, kv_transfer_params=params)


def test_prefill_that_never_comes_fails_at_the_deadline(default_pair, reference):
    pair = default_pair
    request = Request(tokens(200, seed=501))
    mark = pair.consumers[0].log_size()
    begin = time.monotonic()
    answer = asyncio.run(_decode_alone(pair, request, "never-1"))
    elapsed_s = time.monotonic() - begin
    assert not answer.ok
    assert 0.5 * DEADLINE_S < elapsed_s < DEADLINE_S + SLACK_S
    assert "never-1" in pair.consumers[0].log_since(mark)
    pair.wait_at_rest()
    after = distinct(4, 200, seed=502)
    require_equal(after, reference.answers(after), asyncio.run(pair.send_all(after)))


def test_others_are_served_while_one_waits_in_vain(default_pair, reference):
    pair = default_pair
    others = distinct(6, 300, seed=503)
    expected = reference.answers(others)

    async def scenario():
        alone = asyncio.create_task(_decode_alone(pair, Request(tokens(200, seed=504)), "never-2"))
        got = await pair.send_all(others)
        waits_still = not alone.done()
        return got, waits_still, await alone

    got, waits_still, answer = asyncio.run(scenario())
    require_equal(others, expected, got)
    assert waits_still
    assert not answer.ok


def test_no_prefill_engine_at_the_address(default_pair, reference):
    pair = default_pair
    others = distinct(4, 250, seed=505)
    expected = reference.answers(others)

    async def scenario():
        return await asyncio.gather(
            _decode_alone(pair, Request(tokens(200, seed=506)), "nobody", remote_port=free_port()),
            pair.send_all(others),
        )

    answer, got = asyncio.run(scenario())
    assert not answer.ok
    require_equal(others, expected, got)


def test_policy_recompute_computes_the_prompt_on_decode(small_pair, reference):
    pair = small_pair
    request = Request(tokens(300, seed=507))
    expected = reference.answers([request])
    require_equal([request], expected, [asyncio.run(_decode_alone(pair, request, "never-3"))])
    pair.wait_at_rest()
    after = distinct(3, 200, seed=508)
    require_equal(after, reference.answers(after), asyncio.run(pair.send_all(after)))
