"""Requests that are given up: their prefill server is told, and no other is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest

from kvpush.auth import AuthKey
from kvpush.errors import PeerUnreachableError
from kvpush.proxy import cancel
from kvpush.proxy.cancel import MAX_WAITING, Canceller
from kvpush.proxy.config import PrefillBackend
from kvpush.proxy.stats import Counters
from tests.unit.proxy.fakes import (
    LIMIT_S,
    Setup,
    answers,
    breaks_off,
    fails,
    hangs,
    setup,
    streams,
)

Told = list[tuple[str, int, str]]
PREFILL = PrefillBackend("http://p", "kv.example", 5600)


async def until_told(s: Setup, name: str = "cancels") -> None:
    async with asyncio.timeout(LIMIT_S):
        while not (await s.stats())["counters"][name]:  # noqa: ASYNC110 (the router's own count)
            await asyncio.sleep(0.01)


async def test_a_request_that_decode_refuses_is_cancelled_on_its_prefill_server(
    cancelled: Told,
) -> None:
    async with setup(answers(), fails(400)) as s:
        s.d.after_seen_by = s.p
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 400
        await until_told(s)
        transfer_id = s.p.seen[0].transfer["transfer_id"]
        assert cancelled == [("kv.example", 5600, transfer_id)]


async def test_a_client_that_leaves_before_the_answer(cancelled: Told) -> None:
    async with setup(answers(), hangs()) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await asyncio.gather(s.p.until_seen(), s.d.until_seen())
        post.cancel()
        await until_told(s)
        assert len(cancelled) == 1


async def test_a_decode_server_that_breaks_off_before_the_answer(cancelled: Told) -> None:
    async with setup(answers(), breaks_off()) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
        await until_told(s)
        assert len(cancelled) == 1


async def test_an_answer_that_has_begun_is_not_cancelled(cancelled: Told) -> None:
    async with setup(answers(), streams([b"data: 1\n\n"], break_off=True)) as s:
        with pytest.raises(aiohttp.ClientError):
            async with s.post({"prompt": "hi", "stream": True}) as response:
                await response.read()
    assert not cancelled  # the router is closed: nothing is under way any more


async def test_good_requests_and_those_without_a_prefill_are_not_cancelled(cancelled: Told) -> None:
    async with setup(answers(), [answers()]) as s:
        async with s.post({"prompt": "hi"}) as response:
            await response.read()
        s.d.behaviour = fails(400)
        async with s.post({"prompt": "hi", "n": 2}) as response:
            assert response.status == 400
    assert not cancelled


async def test_a_prefill_server_that_cannot_be_told_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_arguments: Any) -> None:
        raise PeerUnreachableError("gone")

    monkeypatch.setattr(cancel, "cancel_transfer", unreachable)
    async with setup(answers(), fails(400)) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 400
        await until_told(s, "cancels_failed")


async def test_prefill_servers_that_hang_cost_a_bounded_number_of_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()
    monkeypatch.setattr(cancel, "cancel_transfer", lambda *_: go.wait(LIMIT_S))
    counters = Counters()
    canceller = Canceller(counters, AuthKey(b"0123456789abcdef"))
    for number in range(MAX_WAITING + 3):
        canceller.cancel(PREFILL, str(number))
    assert counters.cancels_failed == 3
    go.set()
    await canceller.close()
    assert counters.cancels == MAX_WAITING
