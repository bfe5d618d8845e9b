"""Requests that their decode engine never knew of, and strangers at the side channel."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace

import pytest

from bench.harness.client import Client, Request
from bench.harness.servers import HOST
from bench.harness.workload import distinct, tokens
from kvpush.auth import AuthKey, load_auth_key
from kvpush.errors import PeerIncompatibleError
from kvpush.side_channel import cancel_transfer, query_peers
from tests.vllm.waiting import LIMIT_S, until


def _held(pair, engine):
    return pair.stats(engine)["scheduler"]["held"]


def _router_counters(pair):
    with urllib.request.urlopen(f"{pair.router.url}/router/stats", timeout=LIMIT_S) as response:
        return json.load(response)["counters"]


def test_a_prefill_that_nobody_will_ask_for_is_let_go_at_once(default_pair):
    pair = default_pair
    producer = pair.producers[0]
    mark = producer.log_size()
    request = Request(tokens(400, seed=801))
    params = {"do_remote_decode": True, "transfer_id": "given-up"}

    async def scenario():
        async with Client() as client:
            await pair.prefill_leg(client, request, producer, request_id="given-up", params=params)
        assert await asyncio.to_thread(_held, pair, producer) == 1
        auth = load_auth_key(pair.spec.auth_key_file)
        cancel_transfer(HOST, producer.side_port, "given-up", LIMIT_S, auth)
        await until(lambda: _held(pair, producer) == 0, "its blocks are free again")

    asyncio.run(scenario())
    said = producer.log_since(mark)
    assert "given-up" in said
    assert "cancelled" in said
    assert "offer_expired" not in said


def test_a_request_that_decode_rejects_leaves_nothing_behind(default_pair):
    pair = default_pair
    before = _router_counters(pair)
    # The prefill leg has no such field; the decode engine's API server refuses it.
    bad = [replace(r, extra={"top_p": 7}) for r in distinct(4, 300, seed=802)]

    async def scenario():
        async with Client() as client:
            answers = await client.complete_all(pair.router.url, bad, at_once=4)
        assert [answer.status for answer in answers] == [400] * 4
        await until(
            lambda: _router_counters(pair)["cancels"] - before["cancels"] == 4,
            "the prefill engines have been told",
        )

    asyncio.run(scenario())
    pair.wait_at_rest()
    assert _router_counters(pair)["cancels_failed"] == before["cancels_failed"]
    after = distinct(2, 100, seed=803)
    assert all(answer.ok for answer in asyncio.run(pair.send_all(after)))


def test_a_stranger_at_the_side_channel_gets_nothing_and_is_counted(default_pair):
    pair = default_pair
    producer = pair.producers[0]
    questions = pair.stats(producer)["side_channel"]["questions"]
    for auth in (None, AuthKey(b"the key of another deployment")):
        with pytest.raises(PeerIncompatibleError, match="wrong or missing auth key"):
            query_peers(HOST, producer.side_port, LIMIT_S, auth)
    counters = pair.stats(producer)["side_channel"]
    assert counters["refused"] >= 2
    assert counters["questions"] == questions + 1, "its own"
