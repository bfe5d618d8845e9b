"""A proxy for pairs with a stock connector, whose parameters `kvpush proxy` does not send.

One prefill and one decode server. With ``--legs pull`` the prefill leg goes first, and what it
returns goes to the decode server; with ``--legs push`` both go at once and share a request id.
For benchmarks: an error of either leg ends both, nothing more.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
import typer
from aiohttp import web

_PATHS = ("/v1/completions", "/v1/chat/completions")
# A probe's answer, on a server that computes a long prompt meanwhile.
_HEALTH_LIMIT_S = 10.0


@dataclass(frozen=True)
class Stock:
    """The pair, and how its legs are sent."""

    legs: str
    prefill: str
    decode: str
    side_host: str
    side_port: int
    engine_id: str
    tp: int

    def prefill_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same prompt for one token, which nobody reads."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        one = {"max_tokens": 1, "min_tokens": 0, "stream": False, "kv_transfer_params": params}
        if "max_completion_tokens" in body:
            one["max_completion_tokens"] = 1
        dropped = ("stream_options", "logprobs", "top_logprobs")
        return {key: value for key, value in body.items() if key not in dropped} | one

    def push_params(self, request_id: str) -> dict[str, Any]:
        """What the decode leg of the push connector has to know beforehand."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": [],
            "remote_host": self.side_host,
            "remote_port": self.side_port,
            "tp_size": self.tp,
            "pp_size": 1,
        }


class Proxy:
    """The HTTP server's handlers; made and used on one event loop."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._session: Any = None

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 << 20)
        for path in _PATHS:
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._with_session)
        return app

    async def _with_session(self, _: web.Application) -> Any:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        yield
        await self._session.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_id = uuid.uuid4().hex
        if self._stock.legs == "pull":
            params = await self._prefill(request, body, request_id)
            return await self._decode(request, body | {"kv_transfer_params": params}, request_id)
        body["kv_transfer_params"] = self._stock.push_params(request_id)
        prefill = asyncio.create_task(self._prefill(request, body, request_id))
        decode = asyncio.create_task(self._decode(request, body, request_id))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            # Without its prefill the decode server would wait without end.
            if prefill.done():
                prefill.result()
            return await decode
        finally:
            for leg in (prefill, decode):
                leg.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _prefill(self, request: web.Request, body: dict[str, Any], request_id: str) -> Any:
        """The prefill leg; returns the parameters for the decode leg."""
        async with self._session.post(
            self._stock.prefill + request.path,
            json=self._stock.prefill_body(body),
            headers={"X-Request-Id": request_id},
        ) as answer:
            if answer.status != 200:
                raise web.HTTPBadGateway(text=f"prefill server: {await answer.text()}")
            return (await answer.json())["kv_transfer_params"]

    async def _decode(
        self, request: web.Request, body: dict[str, Any], request_id: str
    ) -> web.StreamResponse:
        """The decode leg, passed on as it comes."""
        async with self._session.post(
            self._stock.decode + request.path, json=body, headers={"X-Request-Id": request_id}
        ) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            reply = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await reply.prepare(request)
            async for piece in answer.content.iter_any():
                await reply.write(piece)
            await reply.write_eof()
            return reply

    async def _models(self, request: web.Request) -> web.Response:
        async with self._session.get(self._stock.decode + request.path) as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def _health(self, _: web.Request) -> web.Response:
        limit = aiohttp.ClientTimeout(total=_HEALTH_LIMIT_S)
        for url in (self._stock.prefill, self._stock.decode):
            try:
                async with self._session.get(f"{url}/health", timeout=limit) as answer:
                    healthy = answer.status == 200
            except (aiohttp.ClientError, TimeoutError):
                healthy = False
            if not healthy:
                return web.Response(status=503, text=f"{url} is not healthy")
        return web.Response(text="ok")


def main(
    legs: Annotated[str, typer.Option(help="pull or push")],
    prefill: Annotated[str, typer.Option(help="the prefill server's URL")],
    decode: Annotated[str, typer.Option(help="the decode server's URL")],
    side_channel: Annotated[str, typer.Option(help="of the prefill server, HOST:PORT")],
    engine_id: Annotated[str, typer.Option(help="the prefill engine's, for push")],
    tp: Annotated[int, typer.Option(help="the prefill engine's tensor-parallel size")] = 1,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
) -> None:
    """Serve an OpenAI API in front of a pair with a stock connector."""
    if legs not in ("pull", "push"):
        raise typer.BadParameter(f"--legs is {legs!r}: it must be pull or push")
    side_host, _, side_port = side_channel.rpartition(":")
    if not side_host or not side_port.isdigit():
        raise typer.BadParameter(f"--side-channel is {side_channel!r}: it must be HOST:PORT")
    stock = Stock(legs, prefill, decode, side_host, int(side_port), engine_id, tp)
    web.run_app(
        Proxy(stock).application(),
        host=host,
        port=port,
        print=None,
        access_log=None,
        # A client that leaves ends both legs.
        handler_cancellation=True,
    )


if __name__ == "__main__":
    typer.run(main)
