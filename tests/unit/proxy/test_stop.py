"""Starting and stopping, in this process and as the command."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

import kvpush
from kvpush.cli import app
from tests.unit.proxy.fakes import LIMIT_S, FakeServer, answers, hangs, setup, streams


async def test_stopping_lets_requests_finish() -> None:
    go = asyncio.Event()
    async with setup(answers(), answers(after=go), drain_s=LIMIT_S) as s:
        kept = await s.session.get(f"{s.url}/router/stats")  # a connection that is kept open
        await kept.read()
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await s.d.until_seen()
        stop = asyncio.create_task(s.running.stop())
        await s.until_closed()
        go.set()
        async with await post as response:
            assert response.status == 200
        async with asyncio.timeout(LIMIT_S):
            await stop


async def test_stopping_refuses_new_requests_on_kept_connections() -> None:
    go = asyncio.Event()
    async with setup(answers(), answers(after=go), drain_s=LIMIT_S) as s:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as other:
            async with other.get(f"{s.url}/router/stats") as response:
                await response.read()
            post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
            await s.d.until_seen()
            stop = asyncio.create_task(s.running.stop())
            await s.until_closed()
            url = f"{s.url}/v1/completions"
            async with other.post(url, json={"prompt": "hi"}) as response:
                assert response.status == 503
                assert "stopping" in await response.text()
        go.set()
        async with await post as response:
            assert response.status == 200
        await stop


async def test_stopping_ends_what_does_not_finish_with_an_error() -> None:
    async with setup(hangs(), hangs(), drain_s=0.05) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await asyncio.gather(s.p.until_seen(), s.d.until_seen())
        await s.running.stop()
        async with await post as response:
            assert response.status == 503
        await asyncio.gather(s.p.until_left(), s.d.until_left())


async def test_stopping_cuts_a_stream_that_does_not_finish() -> None:
    first = asyncio.Event()
    first.set()
    async with setup(answers(), streams([b"a", b"b"], [first, asyncio.Event()])) as s:
        async with s.post({"prompt": "hi"}) as response:
            assert await response.content.readany() == b"a"
            await s.running.stop()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await s.d.until_left()


async def test_a_hurried_stop_waits_for_nothing() -> None:
    async with setup(hangs(), hangs(), drain_s=LIMIT_S * 10) as s:
        post = asyncio.create_task(s.post({"prompt": "hi"}).__aenter__())
        await s.d.until_seen()
        stop = asyncio.create_task(s.running.stop())
        s.running.hurry()
        async with asyncio.timeout(LIMIT_S):
            await stop
        async with await post as response:
            assert response.status == 503


# -- the command -----------------------------------------------------------------------------------


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `kvpush proxy`; killed at the end if it still runs."""
    package_parent = str(Path(kvpush.__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvpush", "proxy", *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": package_parent, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_until_a_signal_and_ends_its_legs(number: signal.Signals) -> None:
    prefill, decode = FakeServer(answers()), FakeServer(answers("from d"))
    await prefill.start()
    await decode.start()
    arguments = ("--prefill", f"{prefill.url},kv=:7", "--decode", decode.url, "--port", "0")
    async with (
        command(*arguments, "--drain-s", "0.05") as process,
        aiohttp.ClientSession() as session,
    ):
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = (await process.stdout.readline()).decode()
        assert "listens on" in line
        url = line.split()[4]
        async with session.post(f"{url}/v1/completions", json={"prompt": "hi"}) as response:
            assert (await response.json())["choices"][0]["text"] == "from d"
        assert decode.seen[0].transfer["remote_host"] == "127.0.0.1"
        assert decode.seen[0].transfer["remote_port"] == 7
        decode.behaviour = hangs()
        post = asyncio.create_task(session.post(f"{url}/v1/completions", json={"prompt": "hi"}))
        await decode.until_seen(2)
        process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors
        await decode.until_left()
        async with await post as response:
            assert response.status == 503
    await prefill.stop()
    await decode.stop()


async def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--prefill", "http://p", "--decode", "http://d", "--port", str(port))
        async with command(*arguments) as process:
            async with asyncio.timeout(LIMIT_S):
                _, errors = await process.communicate()
            assert process.returncode == 1
            assert f"can't listen on 127.0.0.1:{port}" in errors.decode()
            assert b"Traceback" not in errors


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prefill", "http://p"], ["--prefill", "p:1", "--decode", "http://d"]],
    ids=["nothing", "no decode", "no URL"],
)
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["proxy", *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
