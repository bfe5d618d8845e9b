"""Prefill and decode servers that do as a test tells them, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from kvpush.proxy.config import DecodeBackend, PrefillBackend, RouterConfig
from kvpush.proxy.server import RunningRouter

# Bounds every wait of these tests; reached only if something hangs.
LIMIT_S = 20.0

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Seen:
    """One request as a fake server got it."""

    path: str
    headers: CIMultiDictProxy[str]
    body: dict[str, Any]

    @property
    def transfer(self) -> dict[str, Any]:
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict)
        return params


class FakeServer:
    """An OpenAI server that answers as its `behaviour` says; it notes who came and who left."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen: list[Seen] = []
        self.left = 0
        self.finished = 0
        self.healthy = True
        # Behaves only once this other server has a request too: what a test says of "both legs" is
        # then true of two legs that were both sent.
        self.after_seen_by: FakeServer | None = None
        self.name = "127.0.0.1"
        self.port = 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{path:.*}", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        # The same port on a second start: a server that comes back.
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, condition: Callable[[FakeServer], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def until_seen(self, count: int = 1) -> None:
        await self.until(lambda server: len(server.seen) >= count)

    async def until_left(self, count: int = 1) -> None:
        await self.until(lambda server: server.left >= count)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        await self._note(lambda: self.seen.append(Seen(request.path, request.headers, body)))
        try:
            if self.after_seen_by is not None:
                await self.after_seen_by.until_seen()
            response = await self.behaviour(request)
        except asyncio.CancelledError:
            self.left += 1
            # In a task of its own: this one is being cancelled.
            self._telling = asyncio.ensure_future(self._note(lambda: None))
            raise
        self.finished += 1
        return response

    async def _note(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def _models(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "")
        return web.json_response({"object": "list", "data": [{"id": "tiny"}], "key": key})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


def answers(text: str = "ok", *, after: asyncio.Event | None = None) -> Behaviour:
    """A whole JSON answer, sent once `after` is set."""

    async def behave(request: web.Request) -> web.StreamResponse:
        if after is not None:
            await after.wait()
        return web.json_response({"choices": [{"text": text}]}, headers={"X-Served": text})

    return behave


def streams(
    chunks: Sequence[bytes],
    gates: Sequence[asyncio.Event] = (),
    *,
    break_off: bool = False,
    status_sent: asyncio.Event | None = None,
) -> Behaviour:
    """An event stream: the status at once, chunk i once gate i (if there is one) is set."""

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        # As vLLM's server does; aiohttp's own would wait for the first chunk.
        request.writer.send_headers()
        if status_sent is not None:
            status_sent.set()
        for index, chunk in enumerate(chunks):
            if index < len(gates):
                await gates[index].wait()
            await response.write(chunk)
        if break_off:
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write_eof()
        return response

    return behave


def fails(
    status: int,
    body: bytes = b'{"error":{"message":"no"}}',
    content_type: str = "application/json",
    *,
    after: asyncio.Event | None = None,
) -> Behaviour:
    """An error answer, sent once `after` is set."""

    async def behave(request: web.Request) -> web.StreamResponse:
        if after is not None:
            await after.wait()
        return web.Response(status=status, body=body, content_type=content_type)

    return behave


def breaks_off() -> Behaviour:
    """Closes the connection without an answer."""

    async def behave(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return behave


def hangs() -> Behaviour:
    """Never answers."""

    async def behave(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return behave


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again, for what can't be waited for otherwise."""
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110  (what is asked is outside this process's events)
            await asyncio.sleep(0.005)


class Setup:
    """A router with its fake servers, and a client session for it."""

    def __init__(
        self,
        url: str,
        running: RunningRouter,
        prefill: list[FakeServer],
        decode: list[FakeServer],
        session: aiohttp.ClientSession,
    ) -> None:
        self.url = url
        self.running = running
        self.prefills = prefill
        self.decodes = decode
        self.session = session

    @property
    def p(self) -> FakeServer:
        return self.prefills[0]

    @property
    def d(self) -> FakeServer:
        return self.decodes[0]

    def post(self, body: object, path: str = COMPLETIONS, **kwargs: Any) -> Any:
        return self.session.post(self.url + path, json=body, **kwargs)

    async def stats(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/router/stats") as response:
            stats = await response.json()
            assert isinstance(stats, dict)
            return stats

    async def until_stats(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask until the condition holds: what follows a client's leaving has no other sign."""
        stats: dict[str, Any] = {}

        async def holds() -> bool:
            nonlocal stats
            stats = await self.stats()
            return condition(stats)

        await until(holds)
        return stats

    async def until_closed(self) -> None:
        """Wait until the router accepts no connection any more."""
        host, port = self.url.removeprefix("http://").split(":")

        async def refuses() -> bool:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return True
            writer.close()
            return False

        await until(refuses)


@asynccontextmanager
async def setup(
    prefill: Behaviour | Sequence[Behaviour],
    decode: Behaviour | Sequence[Behaviour],
    *,
    name: str = "127.0.0.1",
    **config: Any,
) -> AsyncIterator[Setup]:
    """Start servers with these behaviours, known by this host name, and a router before them."""
    prefills = [FakeServer(b) for b in ([prefill] if callable(prefill) else prefill)]
    decodes = [FakeServer(b) for b in ([decode] if callable(decode) else decode)]
    async with AsyncExitStack() as stack:
        for server in (*prefills, *decodes):
            server.name = name
            await server.start()
            stack.push_async_callback(server.stop)
        settings = {"port": 0, "drain_s": 0.0, "connect_timeout_s": LIMIT_S} | config
        running = RunningRouter(
            RouterConfig(
                prefill=tuple(
                    PrefillBackend(server.url, "kv.example", 5600 + index)
                    for index, server in enumerate(prefills)
                ),
                decode=tuple(DecodeBackend(server.url) for server in decodes),
                **settings,
            )
        )
        port = await running.start()
        stack.push_async_callback(running.stop)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Setup(f"http://127.0.0.1:{port}", running, prefills, decodes, session)


def ending(stats: dict[str, Any]) -> dict[str, int]:
    """The counters that are not zero; not those of what goes on in the background."""
    return {
        name: count
        for name, count in stats["counters"].items()
        if count and name not in {"cancels", "cancels_failed"}
    }
