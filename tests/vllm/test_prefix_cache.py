"""Prefix caches on either side: only what is missing is pushed, into the right place."""

from __future__ import annotations

import asyncio

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import tokens

BLOCK = 32


def _one(pair, request):
    """Send one request over the first prefill engine; return its answer and the bytes pushed."""

    async def send():
        async with Client() as client:
            return (await pair.both_legs(client, request)).decode

    before = pair.counters(pair.producers)["bytes_written"]
    answer = asyncio.run(send())
    pair.wait_at_rest()
    return answer, pair.counters(pair.producers)["bytes_written"] - before


def test_partial_hit_on_decode_gets_only_the_tail(default_pair, reference):
    first = Request(tokens(10 * BLOCK, seed=301))
    # 230 tokens in common are 7 whole blocks and a part of the eighth, which is not shared.
    second = Request([*first.prompt[:230], *tokens(90, seed=302)])
    expected = reference.answers([first, second])
    one, all_bytes = _one(default_pair, first)
    other, tail_bytes = _one(default_pair, second)
    require_equal([first, second], expected, [one, other])
    assert 0 < tail_bytes <= all_bytes * 4 // 10


def test_full_hit_on_decode_needs_no_push(default_pair, reference):
    # One token more than whole blocks: everything but the token that is computed again is cached.
    request = Request(tokens(6 * BLOCK + 1, seed=303))
    expected = reference.answers([request])
    one, all_bytes = _one(default_pair, request)
    other, no_bytes = _one(default_pair, request)
    require_equal([request, request], [*expected, *expected], [one, other])
    assert all_bytes > 0
    assert no_bytes == 0


def test_prefix_hit_on_prefill_pushes_cached_blocks_too(default_pair, reference):
    request = Request(tokens(9 * BLOCK + 5, seed=304))
    expected = reference.answers([request])
    fresh = Request(tokens(9 * BLOCK + 5, seed=305))
    _, all_bytes = _one(default_pair, fresh)

    async def warm():
        async with Client() as client:
            return await client.complete(default_pair.producers[0].url, request)

    require_equal([request], expected, [asyncio.run(warm())])
    answer, pushed_bytes = _one(default_pair, request)
    require_equal([request], expected, [answer])
    assert pushed_bytes == all_bytes


def test_hits_of_different_length_on_both_sides(default_pair, reference):
    base = tokens(12 * BLOCK, seed=306)
    on_prefill = Request([*base[: 9 * BLOCK], *tokens(3, seed=307)], max_tokens=1)
    on_decode = Request([*base[: 4 * BLOCK], *tokens(3, seed=308)], max_tokens=1)
    request = Request([*base, *tokens(11, seed=309)])

    async def warm():
        async with Client() as client:
            await client.complete(default_pair.producers[0].url, on_prefill)
            await client.complete(default_pair.consumers[0].url, on_decode)

    asyncio.run(warm())
    answer, pushed_bytes = _one(default_pair, request)
    require_equal([request], reference.answers([request]), [answer])
    assert pushed_bytes > 0


def test_many_requests_share_a_prefix_at_the_same_time(default_pair, reference):
    base = tokens(500, seed=310)
    requests = [Request([*base, *tokens(20 + 7 * each, seed=320 + each)]) for each in range(16)]
    got = asyncio.run(default_pair.send_all(requests))
    require_equal(requests, reference.answers(requests), got)
