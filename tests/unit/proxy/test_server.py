"""The router's HTTP server: limits, errors of its own, health, models, stats."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.unit.proxy.fakes import CHAT, answers, ending, fails, hangs, setup

JSON = {"Content-Type": "application/json"}


async def error_of(response: aiohttp.ClientResponse, status: int) -> dict[str, Any]:
    """The error that the router answered with, in OpenAI's form."""
    assert response.status == status
    assert response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error, dict)
    return error


# -- requests that are refused ---------------------------------------------------------------------


async def test_bad_json_is_refused() -> None:
    async with setup(answers(), answers()) as s:
        url = f"{s.url}/v1/completions"
        async with s.session.post(url, data=b"{oops", headers=JSON) as response:
            error = await error_of(response, 400)
            assert error["type"] == "invalid_request_error"
            assert "not a JSON object" in error["message"]
        assert not s.p.seen
        assert not s.d.seen
        assert ending(await s.stats()) == {"accepted": 1, "bad_requests": 1}


async def test_a_body_that_does_not_call_itself_json_is_refused() -> None:
    async with setup(answers(), answers()) as s:
        url = f"{s.url}/v1/completions"
        headers = {"Content-Type": "text/plain"}
        async with s.session.post(url, data=b'{"prompt":"hi"}', headers=headers) as response:
            await error_of(response, 415)


@pytest.mark.parametrize(("path", "param"), [("/v1/completions", "prompt"), (CHAT, "messages")])
async def test_nothing_to_answer_is_refused(path: str, param: str) -> None:
    async with setup(answers(), answers()) as s, s.post({"max_tokens": 5}, path) as response:
        assert (await error_of(response, 400))["param"] == param


async def test_transfer_parameters_that_are_no_object_are_refused() -> None:
    body = {"prompt": "hi", "kv_transfer_params": "x"}
    async with setup(answers(), answers()) as s, s.post(body) as response:
        assert (await error_of(response, 400))["param"] == "kv_transfer_params"


async def test_an_unknown_path_is_refused() -> None:
    async with setup(answers(), answers()) as s, s.post({}, "/v1/nothing") as response:
        error = await error_of(response, 404)
        assert error["message"] == "No such path: POST /v1/nothing."
        assert error["type"] == "not_found_error"


async def test_a_wrong_method_is_refused() -> None:
    async with setup(answers(), answers()) as s:
        url = f"{s.url}/v1/completions"
        async with s.session.get(url) as response:
            assert "takes POST, not GET" in (await error_of(response, 405))["message"]
            assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_beyond_the_limit_is_refused(announced: bool) -> None:
    async def pieces() -> Any:
        for _ in range(4):
            yield b" " * 500

    async with setup(answers(), answers(), max_body_bytes=1000) as s:
        data = b" " * 2000 if announced else pieces()
        url = f"{s.url}/v1/completions"
        async with s.session.post(url, data=data, headers=JSON) as response:
            assert "1000 bytes" in (await error_of(response, 413))["message"]
        async with s.post({"prompt": "x" * 900}) as response:
            assert response.status == 200


async def test_a_body_that_never_arrives_is_refused() -> None:
    stop = asyncio.Event()

    async def pieces() -> Any:
        yield b"{"
        await stop.wait()

    async with setup(answers(), answers(), body_timeout_s=0.1) as s:
        url = f"{s.url}/v1/completions"
        async with s.session.post(url, data=pieces(), headers=JSON) as response:
            await error_of(response, 408)
        stop.set()


async def test_more_requests_than_the_limit_are_refused_and_the_others_go_on() -> None:
    go = asyncio.Event()
    async with setup(answers(), answers(after=go), max_concurrent=2) as s:
        posts = [asyncio.create_task(s.post({"prompt": "hi"}).__aenter__()) for _ in range(2)]
        await s.d.until_seen(2)
        async with s.post({"prompt": "hi"}) as response:
            assert "limit of 2 requests" in (await error_of(response, 503))["message"]
            assert response.headers["Retry-After"] == "1"
        go.set()
        for post in posts:
            async with await post as response:
                assert response.status == 200
        async with s.post({"prompt": "hi"}) as response:
            assert response.status == 200
        assert ending(await s.stats()) == {"accepted": 3, "answered": 3, "refused_busy": 1}


async def test_a_fault_in_the_router_is_an_error_and_ends_both_legs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvpush.proxy.relay.Relay._settle", broken)
    async with setup(hangs(), hangs()) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert (await error_of(response, 500))["type"] == "server_error"
        stats = await s.until_stats(lambda stats: stats["prefill"][0]["in_flight"] == 0)
        assert ending(stats) == {"accepted": 1, "router_faults": 1}


# -- health ----------------------------------------------------------------------------------------


async def test_health_needs_one_of_each_kind() -> None:
    async with setup([answers()] * 2, [answers()] * 2) as s:

        async def health() -> tuple[int, Any]:
            async with s.session.get(f"{s.url}/health") as response:
                return response.status, await response.json()

        assert await health() == (
            200,
            {
                "healthy": True,
                "prefill": {"healthy": 2, "all": 2},
                "decode": {"healthy": 2, "all": 2},
            },
        )
        s.prefills[0].healthy = False
        await s.decodes[1].stop()
        status, counts = await health()
        assert (status, counts["prefill"]["healthy"], counts["decode"]["healthy"]) == (200, 1, 1)
        s.prefills[1].healthy = False
        assert (await health())[0] == 503
        s.prefills[1].healthy = True
        await s.decodes[0].stop()
        assert (await health())[0] == 503


# -- models ----------------------------------------------------------------------------------------


async def test_models_are_a_decode_servers() -> None:
    async with setup(answers(), answers()) as s:
        headers = {"Authorization": "Bearer k"}
        async with s.session.get(f"{s.url}/v1/models", headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            body = await response.json()
        assert (body["data"][0]["id"], body["key"]) == ("tiny", "Bearer k")


async def test_models_of_the_next_decode_server_if_one_cannot_be_reached() -> None:
    async with setup(answers(), [answers()] * 2) as s:
        await s.decodes[0].stop()
        async with s.session.get(f"{s.url}/v1/models") as response:
            assert response.status == 200
        assert (await s.stats())["decode"][0]["connect_failures"] == 1
        await s.decodes[1].stop()
        async with s.session.get(f"{s.url}/v1/models") as response:
            await error_of(response, 502)


# -- stats -----------------------------------------------------------------------------------------


async def test_stats_show_what_is_under_way() -> None:
    go = asyncio.Event()
    async with setup(answers(after=go), answers(after=go)) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await asyncio.gather(s.p.until_seen(), s.d.until_seen())
        stats = await s.stats()
        assert stats["active"] == 1
        for kind, server in (("prefill", s.p), ("decode", s.d)):
            assert stats[kind] == [
                {
                    "url": server.url,
                    "in_flight": 1,
                    "requests": 1,
                    "connect_failures": 0,
                    "cooling_left_s": 0.0,
                }
            ]
        go.set()
        async with await post as response:
            assert response.status == 200


async def test_every_accepted_request_has_one_end() -> None:
    async with setup([answers(), fails(500), hangs()], [answers(), fails(400)]) as s:
        for index in range(12):
            body = {"prompt": "hi"} if index % 3 else {}
            async with s.post(body) as response:
                await response.read()
        counters = (await s.stats())["counters"]
        ends = {"answered", "bad_requests", "prefill_errors", "decode_errors"}
        assert counters["accepted"] == 12 == sum(counters[name] for name in ends)
