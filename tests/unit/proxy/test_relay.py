"""Both legs of a request, over real sockets: who is asked, who is answered what, who is ended."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import aiohappyeyeballs
import aiohttp
import pytest
from aiohttp import web

from tests.unit.proxy.fakes import (
    CHAT,
    COMPLETIONS,
    LIMIT_S,
    answers,
    breaks_off,
    ending,
    fails,
    hangs,
    setup,
    streams,
)

EVENTS = [b'data: {"t":1}\n\n', b'data: {"t":2}\n\n', b"data: [DONE]\n\n"]


async def test_legs_share_a_transfer_and_the_client_gets_the_decode_answer() -> None:
    async with setup(answers("from p"), answers("from d")) as s:
        async with s.post({"prompt": "hi", "max_tokens": 7, "x": [1]}) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert response.headers["X-Served"] == "from d"
            assert (await response.json())["choices"][0]["text"] == "from d"
        (p,), (d,) = s.p.seen, s.d.seen
        transfer_id = p.transfer["transfer_id"]
        assert re.fullmatch("[0-9a-f]{32}", transfer_id)
        assert p.transfer == {"do_remote_decode": True, "transfer_id": transfer_id}
        assert d.transfer == {
            "do_remote_prefill": True,
            "remote_host": "kv.example",
            "remote_port": 5600,
            "transfer_id": transfer_id,
        }
        assert (p.body["max_tokens"], d.body["max_tokens"]) == (1, 7)
        assert p.body["x"] == d.body["x"] == [1]
        assert p.path == d.path == COMPLETIONS
        stats = await s.stats()
        assert ending(stats) == {"accepted": 1, "answered": 1}


async def test_chat_goes_to_the_chat_path_of_both() -> None:
    async with setup(answers(), answers()) as s:
        async with s.post({"messages": [{"role": "user", "content": "hi"}]}, CHAT) as response:
            assert response.status == 200
        assert s.p.seen[0].path == s.d.seen[0].path == CHAT
        assert s.p.seen[0].body["max_completion_tokens"] == 1


async def test_every_request_has_a_transfer_id_of_its_own() -> None:
    async with setup(answers(), answers()) as s:
        for _ in range(3):
            async with s.post({"prompt": "hi"}) as response:
                assert response.status == 200
        assert len({seen.transfer["transfer_id"] for seen in s.d.seen}) == 3


@pytest.mark.parametrize("stuck", ["p", "d"])
async def test_neither_leg_waits_for_the_other(stuck: str) -> None:
    go = asyncio.Event()
    slow, quick = answers(after=go), answers()
    async with setup(slow if stuck == "p" else quick, slow if stuck == "d" else quick) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await asyncio.gather(s.p.until_seen(), s.d.until_seen())
        go.set()
        async with await post as response:
            assert response.status == 200


async def test_chunks_are_passed_on_as_they_come() -> None:
    gates = [asyncio.Event() for _ in EVENTS]
    async with setup(answers(), streams(EVENTS, gates)) as s:
        gates[0].set()
        async with s.post({"prompt": "hi", "stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await response.content.readany() == EVENTS[0]
            gates[1].set()
            assert await response.content.readany() == EVENTS[1]
            gates[2].set()
            assert await response.content.read() == EVENTS[2]
        assert s.p.seen[0].body["stream"] is False
        assert s.d.seen[0].body["stream"] is True


async def test_status_and_reason_are_the_decode_servers() -> None:
    async def accepted(request: web.Request) -> web.StreamResponse:
        return web.Response(status=202, reason="In Part", text="some")

    async with setup(answers(), accepted) as s, s.post({"prompt": "hi"}) as response:
        assert (response.status, response.reason) == (202, "In Part")
        assert response.content_type == "text/plain"
        assert await response.text() == "some"


async def test_an_empty_answer_is_an_answer() -> None:
    async with setup(answers(), streams([])) as s, s.post({"prompt": "hi"}) as response:
        assert response.status == 200
        assert await response.read() == b""


async def test_the_prefill_answer_is_read_and_dropped() -> None:
    async with setup(streams([b"x" * 1_000_000] * 5), answers("from d")) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert (await response.json())["choices"][0]["text"] == "from d"
        stats = await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
        assert ending(stats) == {"accepted": 1, "answered": 1}
        assert s.p.left == 0


# -- the prefill server fails ----------------------------------------------------------------------


async def test_a_prefill_error_reaches_the_client_and_ends_the_decode_leg() -> None:
    async with setup(fails(418, b"teapot <b>", "text/html"), hangs()) as s:
        s.p.after_seen_by = s.d
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 418
            assert response.content_type == "text/html"
            assert await response.read() == b"teapot <b>"
        await s.d.until_left()
        stats = await s.until_stats(lambda stats: stats["active"] == 0)
        assert ending(stats) == {"accepted": 1, "prefill_errors": 1}
        assert stats["decode"][0]["in_flight"] == stats["prefill"][0]["in_flight"] == 0


async def test_a_prefill_error_is_no_stream_of_200_though_the_decode_status_was() -> None:
    fail, sent = asyncio.Event(), asyncio.Event()
    decode = streams(EVENTS, [asyncio.Event()], status_sent=sent)
    async with setup(fails(500, after=fail), decode) as s:
        post = asyncio.create_task(s.post({"prompt": "hi", "stream": True}).__aenter__())
        async with asyncio.timeout(LIMIT_S):
            await sent.wait()
        fail.set()
        async with await post as response:
            assert response.status == 500
            assert response.content_type == "application/json"
        await s.d.until_left()


async def test_a_prefill_error_comes_too_late_for_an_answer_that_has_begun() -> None:
    gates = [asyncio.Event() for _ in EVENTS]
    fail = asyncio.Event()
    async with setup(fails(500, after=fail), streams(EVENTS, gates)) as s:
        gates[0].set()
        async with s.post({"prompt": "hi", "stream": True}) as response:
            assert response.status == 200
            assert await response.content.readany() == EVENTS[0]
            fail.set()
            await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
            gates[1].set()
            gates[2].set()
            assert await response.content.read() == EVENTS[1] + EVENTS[2]
        stats = await s.until_stats(lambda stats: stats["counters"]["late_prefill_errors"] == 1)
        assert ending(stats) == {"accepted": 1, "answered": 1, "late_prefill_errors": 1}


async def test_a_prefill_server_that_cannot_be_reached_is_an_error_at_once() -> None:
    async with setup(answers(), hangs()) as s:
        await s.p.stop()
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
            assert (
                "prefill server could not be reached" in (await response.json())["error"]["message"]
            )
        stats = await s.stats()
        assert stats["prefill"][0]["connect_failures"] == 1
        assert stats["prefill"][0]["cooling_left_s"] > 0


async def test_a_prefill_server_that_breaks_off_is_an_error() -> None:
    async with setup(breaks_off(), hangs()) as s:
        s.p.after_seen_by = s.d
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
        await s.d.until_left()


async def test_a_prefill_answer_that_breaks_off_is_an_error() -> None:
    async with setup(streams([b"half"], break_off=True), hangs()) as s:
        s.p.after_seen_by = s.d
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
            assert response.content_type == "application/json"
        await s.d.until_left()


async def test_an_endless_prefill_error_is_not_kept() -> None:
    endless = fails(500, b"x" * (2 << 20))
    async with setup(endless, hangs()) as s, s.post({"prompt": "hi"}) as response:
        assert response.status == 500
        assert "too long" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_redirect_is_neither_followed_nor_passed_on(side: str) -> None:

    async def moved(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/health"})

    prefill = moved if side == "prefill" else hangs()
    decode = moved if side == "decode" else hangs()
    async with setup(prefill, decode) as s, s.post({"prompt": "hi"}) as response:
        assert response.status == 502
        assert f"The {side} server answered with status 307" in await response.text()


# -- the decode server fails -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_error_reaches_the_client_and_ends_the_prefill_leg(stream: bool) -> None:
    async with setup(hangs(), fails(422, b"not so", "text/plain")) as s:
        s.d.after_seen_by = s.p
        async with s.post({"prompt": "hi", "stream": stream}) as response:
            assert response.status == 422
            assert response.content_type == "text/plain"
            assert await response.read() == b"not so"
        await s.p.until_left()
        stats = await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
        assert ending(stats) == {"accepted": 1, "decode_errors": 1}


async def test_a_decode_error_after_the_prefill_is_passed_on() -> None:
    fail = asyncio.Event()
    async with setup(answers(), fails(500, b"load failed", after=fail)) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await s.p.until(lambda server: server.finished == 1)
        fail.set()
        async with await post as response:
            assert response.status == 500
            assert await response.read() == b"load failed"


@pytest.mark.parametrize("how", ["stopped", "breaks off"])
async def test_a_decode_server_that_gives_no_answer_is_an_error(how: str) -> None:
    async with setup(hangs(), breaks_off()) as s:
        if how == "stopped":
            await s.d.stop()
        async with s.post({"prompt": "hi", "stream": True}) as response:
            assert response.status == 502
            assert response.content_type == "application/json"
        # The prefill leg may have been ended before it was sent; either way nothing of it is left.
        stats = await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
        assert ending(stats) == {"accepted": 1, "decode_errors": 1}


async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    async with setup(answers(), streams(EVENTS[:2], break_off=True)) as s:
        async with s.post({"prompt": "hi", "stream": True}) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        stats = await s.until_stats(lambda stats: stats["active"] == 0)
        assert ending(stats) == {"accepted": 1, "cut_answers": 1}


async def test_silence_before_an_answer_ends_both_legs() -> None:
    async with setup(hangs(), hangs(), idle_timeout_s=0.2) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 504
        for server in (s.p, s.d):
            await server.until(lambda server: server.left == len(server.seen))
        stats = await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
        assert ending(stats) == {"accepted": 1, "timeouts": 1}


async def test_silence_in_mid_answer_cuts_it() -> None:
    gates = [asyncio.Event() for _ in EVENTS]
    gates[0].set()
    async with setup(answers(), streams(EVENTS, gates)) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert await response.content.readany() == EVENTS[0]
            # Only now: a slow start of the answer is not what is tested.
            s.running.relay.idle_timeout_s = 0.05
            gates[1].set()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await s.d.until_left()


# -- the client leaves -----------------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_answer_ends_both_legs() -> None:
    async with setup(hangs(), hangs()) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await asyncio.gather(s.p.until_seen(), s.d.until_seen())
        post.cancel()
        await asyncio.gather(s.p.until_left(), s.d.until_left())
        stats = await s.until_stats(lambda stats: stats["active"] == 0)
        assert ending(stats) == {"accepted": 1, "client_left": 1}
        assert stats["decode"][0]["in_flight"] == stats["prefill"][0]["in_flight"] == 0


async def test_a_client_that_leaves_in_mid_stream_ends_both_legs() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    gates[0].set()
    async with setup(hangs(), streams(EVENTS, gates)) as s:
        response = await s.post({"prompt": "hi", "stream": True}).__aenter__()
        assert await response.content.readany() == EVENTS[0]
        response.close()
        await asyncio.gather(s.p.until_left(), s.d.until_left())
        stats = await s.until_stats(lambda stats: stats["active"] == 0)
        assert ending(stats) == {"accepted": 1, "client_left": 1}


# -- headers ---------------------------------------------------------------------------------------


async def test_one_request_id_twice_gives_four_different_ids() -> None:
    async with setup(answers(), answers()) as s:
        for _ in range(2):
            headers = {"X-Request-Id": "mine", "Authorization": "Bearer k", "X-Other": "o"}
            async with s.post({"prompt": "hi"}, headers=headers) as response:
                assert response.status == 200
        seen = [*s.p.seen, *s.d.seen]
        ids = {each.headers["X-Request-Id"] for each in seen}
        assert len(ids) == 4
        assert all(each.startswith("mine-") for each in ids)
        assert {each.headers["Authorization"] for each in seen} == {"Bearer k"}
        assert {each.headers["X-Other"] for each in seen} == {"o"}


async def test_a_cookie_of_one_client_is_not_sent_for_another() -> None:
    async def sets_cookie(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Set-Cookie": "who=first"})

    # By name: a cookie jar keeps no cookies of addresses.
    async with setup(answers(), sets_cookie, name="localhost") as s:
        async with s.post({"prompt": "hi"}) as response:
            assert response.headers["Set-Cookie"] == "who=first"
        s.session.cookie_jar.clear()
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 200
        assert all("Cookie" not in each.headers for each in s.d.seen)


async def test_a_compressed_answer_passes_as_it_is() -> None:
    async def compressed(request: web.Request) -> web.StreamResponse:
        assert "gzip" in request.headers["Accept-Encoding"]
        response = web.json_response({"text": "x" * 1000})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    headers = {"Accept-Encoding": "gzip"}
    body = {"prompt": "hi"}
    async with setup(answers(), compressed) as s, s.post(body, headers=headers) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert (await response.json())["text"] == "x" * 1000


# -- a server that is a black hole -----------------------------------------------------------------


async def test_a_connection_that_is_never_made_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = aiohappyeyeballs.start_connection

    async with setup(answers(), hangs(), connect_timeout_s=0.1) as s:

        async def connects(*, addr_infos: Any, **kwargs: Any) -> socket.socket:
            if addr_infos[0][4][1] == s.p.port:
                await asyncio.Event().wait()
            return await connect(addr_infos=addr_infos, **kwargs)

        monkeypatch.setattr("aiohappyeyeballs.start_connection", connects)
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
            assert "prefill server could not be reached" in await response.text()
        stats = await s.stats()
        assert stats["prefill"][0]["connect_failures"] == 1
        assert stats["prefill"][0]["cooling_left_s"] > 0


# -- requests that one transfer can't serve --------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [{"n": 2}, {"prompt": ["a", "b"]}, {"use_beam_search": True}, {"prompt_logprobs": 1}],
    ids=lambda extra: next(iter(extra)),
)
async def test_such_requests_go_to_a_decode_server_alone(extra: dict[str, object]) -> None:
    async with setup(hangs(), answers("alone")) as s:
        params = {"do_remote_prefill": True, "remote_host": "evil"}
        body = {"prompt": "hi", "kv_transfer_params": params} | extra
        async with s.post(body) as response:
            assert (await response.json())["choices"][0]["text"] == "alone"
        del body["kv_transfer_params"]
        assert s.d.seen[0].body == body
        assert not s.p.seen
        assert ending(await s.stats()) == {"accepted": 1, "answered": 1, "plain": 1}


async def test_a_client_that_leaves_such_a_request_ends_it() -> None:
    async with setup(answers(), hangs()) as s:
        post = asyncio.create_task(s.post({"prompt": "hi", "n": 2}).__aenter__())
        await s.d.until_seen()
        post.cancel()
        await s.d.until_left()


# -- balance ---------------------------------------------------------------------------------------


async def test_round_robin_over_both_kinds_and_the_side_channel_is_the_chosen_ones() -> None:
    async with setup([answers()] * 2, [answers()] * 3) as s:
        for _ in range(6):
            async with s.post({"prompt": "hi"}) as response:
                assert response.status == 200
        assert [len(server.seen) for server in s.prefills] == [3, 3]
        assert [len(server.seen) for server in s.decodes] == [2, 2, 2]
        at = {
            seen.transfer["transfer_id"]: index
            for index, p in enumerate(s.prefills)
            for seen in p.seen
        }
        for decode in s.decodes:
            for seen in decode.seen:
                assert seen.transfer["remote_port"] == 5600 + at[seen.transfer["transfer_id"]]


async def test_a_server_that_cannot_be_reached_is_left_alone_and_comes_back() -> None:
    async with setup([answers()] * 2, answers(), cool_off_s=3600.0) as s:
        await s.prefills[0].stop()
        statuses = []
        for _ in range(4):
            async with s.post({"prompt": "hi"}) as response:
                statuses.append(response.status)
        assert statuses == [502, 200, 200, 200]
        # With all of them cooling off, they are tried all the same.
        await s.prefills[1].stop()
        await s.prefills[0].start()
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 502
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 200
        # It answered, so it is fit at once.
        assert (await s.stats())["prefill"][0]["cooling_left_s"] == 0.0
