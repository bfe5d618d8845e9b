"""The router's HTTP server: admission, routes, errors, start and stop, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvpush.proxy.balance import Backend, Pool, RoundRobin
from kvpush.proxy.cancel import Canceller
from kvpush.proxy.config import DecodeBackend, PrefillBackend, RouterConfig
from kvpush.proxy.errors import RequestError, error_body
from kvpush.proxy.headers import client_headers, leg_headers, plain_headers
from kvpush.proxy.legs import (
    Endpoint,
    decode_body,
    parse_body,
    plain_body,
    plain_reason,
    prefill_body,
)
from kvpush.proxy.relay import Call, Leg, Relay, cut
from kvpush.proxy.stats import BackendStats, Counters, Stats

logger = logging.getLogger(__name__)

# vLLM's server closes a connection after 5 s without a request. A request sent on one that is just
# being closed is lost, and a POST may not be sent twice, so the router gives idle connections up
# well before.
BACKEND_KEEPALIVE_S = 2.0
# A list of models with their permissions is some KiB per model.
MAX_MODELS_BYTES = 4 * 1024 * 1024
# After the drain time every request has been ended; what is left is a few turns of the event loop.
CLEANUP_S = 1.0
# Client, P and D, and some for listening, logging and idle connections.
SOCKETS_PER_REQUEST = 3
SPARE_DESCRIPTORS = 200
RETRY_AFTER_S = 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """All that one router holds. Made and used on one event loop; `close` when done."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._counters = Counters()
        self._active: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._prefill = Pool(config.prefill, RoundRobin(), cool_off_s=config.cool_off_s)
        self._decode = Pool(config.decode, RoundRobin(), cool_off_s=config.cool_off_s)
        self._session = aiohttp.ClientSession(
            # Bounded by max_concurrent, not here: a leg must never wait for another request's
            # connection.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=BACKEND_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Bodies pass as they are; the client said itself which encodings it understands.
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        self._canceller = Canceller(self._counters, config.auth)
        self.relay = Relay(
            self._session,
            self._counters,
            self._canceller,
            idle_timeout_s=config.idle_timeout_s,
        )

    def application(self) -> web.Application:
        """Return the application that serves this router."""
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[_errors_as_json]
        )
        for endpoint in Endpoint:
            app.router.add_post(endpoint.value, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/router/stats", self._stats)
        return app

    async def drain(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Refuse new requests; end those under way after `limit_s` or at `hurry`."""
        self._stopping = True
        waits = [asyncio.create_task(self._idle.wait()), asyncio.create_task(hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._active:
            logger.warning("ending %d requests that are still under way", len(self._active))
        for task in list(self._active):
            task.cancel()
        await self._idle.wait()

    async def close(self) -> None:
        """End what is left and give all connections back."""
        await self.relay.close()
        await self._canceller.close()
        await self._session.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._admit()
        task = cast("asyncio.Task[object]", asyncio.current_task())  # a handler always has one
        self._active.add(task)
        self._idle.clear()
        call: Call | None = None
        try:
            call = await self._call_of(request)
            return await self.relay.run(call)
        except asyncio.CancelledError:
            if not self._stopping:
                self._counters.client_left += 1
                raise
            self._counters.ended_by_stop += 1
            if call is not None and call.begun:
                cut(request)
                raise
            task.uncancel()
            raise _stopping_error() from None
        except RequestError:
            raise
        except Exception:
            self._counters.router_faults += 1
            if call is not None and call.begun:
                cut(request)
            raise
        finally:
            self._active.discard(task)
            if not self._active:
                self._idle.set()

    def _admit(self) -> None:
        if self._stopping:
            self._counters.refused_busy += 1
            raise _stopping_error()
        if len(self._active) >= self._config.max_concurrent:
            self._counters.refused_busy += 1
            raise RequestError(
                503,
                f"The router is at its limit of {self._config.max_concurrent} requests; try again.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._counters.accepted += 1

    async def _call_of(self, request: web.Request) -> Call:
        """Read a request and make both legs of it."""
        endpoint = Endpoint(request.path)
        try:
            body = parse_body(await self._read_body(request), endpoint)
            reason = plain_reason(body, endpoint)
        except RequestError:
            self._counters.bad_requests += 1
            raise
        transfer_id = uuid.uuid4().hex
        decode = self._decode.pick()
        decode_headers = leg_headers(request.headers, transfer_id, leg="d")
        if reason is not None:
            self._counters.plain += 1
            logger.debug("served by a decode server alone: %s", reason)
            return Call(request, decode, Leg(endpoint.value, decode_headers, plain_body(body)))
        prefill = self._prefill.pick()
        prefill_headers = leg_headers(request.headers, transfer_id, leg="p")
        return Call(
            request,
            decode,
            Leg(endpoint.value, decode_headers, decode_body(body, prefill.spec, transfer_id)),
            prefill,
            Leg(endpoint.value, prefill_headers, prefill_body(body, endpoint, transfer_id)),
            transfer_id,
        )

    async def _read_body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise RequestError(415, "The body must be JSON, with Content-Type: application/json.")
        too_large = RequestError(
            413, f"The body is larger than the limit of {self._config.max_body_bytes} bytes."
        )
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except TimeoutError:
            raise RequestError(408, "The body did not arrive in time.") from None
        except aiohttp.web.RequestPayloadError as error:
            raise RequestError(400, f"The body could not be read: {error}.") from error

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Pass the question on to a decode server; to the next one if that can't be reached."""
        headers = plain_headers(request.headers)
        for _ in self._decode.backends:
            backend = self._decode.pick()
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    return await self._get_models(backend, headers)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.warning("the decode server at %s could not be asked: %r", backend.url, error)
                backend.connect_failed()
        raise RequestError(502, "No decode server could be reached.")

    async def _get_models(
        self, backend: Backend[DecodeBackend], headers: CIMultiDict[str]
    ) -> web.Response:
        url = f"{backend.url}/v1/models"
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_MODELS_BYTES:
                    raise RequestError(502, "The decode server's list of models is too long.")
            passed_on = client_headers(response.headers, whole_body=True)
            return web.Response(status=response.status, headers=passed_on, body=bytes(body))

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        """200 if at least one prefill and one decode server are healthy, else 503."""
        prefill, decode = await asyncio.gather(
            asyncio.gather(*(self._is_healthy(backend) for backend in self._prefill.backends)),
            asyncio.gather(*(self._is_healthy(backend) for backend in self._decode.backends)),
        )
        healthy = any(prefill) and any(decode) and not self._stopping
        counts = {
            "healthy": healthy,
            "prefill": {"healthy": sum(prefill), "all": len(prefill)},
            "decode": {"healthy": sum(decode), "all": len(decode)},
        }
        return _json(counts, status=200 if healthy else 503)

    async def _is_healthy(self, backend: Backend[PrefillBackend] | Backend[DecodeBackend]) -> bool:
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                url = f"{backend.url}/health"
                async with self._session.get(url, allow_redirects=False) as response:
                    return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _stats(self, _request: web.Request) -> web.StreamResponse:
        return _json(
            Stats(
                active=len(self._active),
                counters=self._counters,
                prefill=[_backend_stats(backend) for backend in self._prefill.backends],
                decode=[_backend_stats(backend) for backend in self._decode.backends],
            )
        )


class RunningRouter:
    """A router that listens. `start`, then `stop`; a second `stop` does nothing."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._router = Router(config)
        self._hurry = asyncio.Event()
        self._runner = web.AppRunner(
            self._router.application(),
            # A client that leaves cancels its handler, and with it both legs.
            handler_cancellation=True,
            shutdown_timeout=CLEANUP_S,
            access_log=logger if config.access_log else None,
        )
        self._site: web.TCPSite | None = None

    @property
    def relay(self) -> Relay:
        """The relay that serves the requests."""
        return self._router.relay

    async def start(self) -> int:
        """Listen; return the port. OSError if the address can't be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            await self._router.close()
            raise
        self._site = site
        return int(self._runner.addresses[0][1])

    def hurry(self) -> None:
        """Make `stop` wait for nothing any more."""
        self._hurry.set()

    async def stop(self) -> None:
        """Stop accepting, let requests finish for the drain time, end the rest."""
        if self._site is None:
            return
        site, self._site = self._site, None
        await site.stop()
        await self._router.drain(self._config.drain_s, self._hurry)
        await self._runner.cleanup()
        await self._router.close()


async def serve(config: RouterConfig, on_ready: Callable[[int], None]) -> None:
    """Run a router until SIGTERM or SIGINT; a second signal ends requests under way at once.

    `on_ready` is called with the port once connections are accepted. OSError if the address can't
    be had.
    """
    _raise_descriptor_limit(config.max_concurrent * SOCKETS_PER_REQUEST + SPARE_DESCRIPTORS)
    stop = asyncio.Event()
    running = RunningRouter(config)

    def on_signal() -> None:
        if stop.is_set():
            running.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    port = await running.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        on_ready(port)
        await stop.wait()
        logger.info("stopping")
    finally:
        await running.stop()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error_response(error)
    except web.HTTPException as error:
        return _http_error_response(request, error)
    except Exception:
        logger.exception("a fault in the router while serving %s", request.path)
        return _error_response(RequestError(500, "The router failed; its log says how."))


def _error_response(error: RequestError) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.status, headers=headers, body=error.body())


def _http_error_response(request: web.Request, error: web.HTTPException) -> web.Response:
    message = error.reason
    if error.status == HTTPStatus.NOT_FOUND:
        message = f"No such path: {request.method} {request.path}."
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}."
    headers = {name: value for name, value in error.headers.items() if name == "Allow"}
    headers["Content-Type"] = "application/json"
    return web.Response(
        status=error.status, headers=headers, body=error_body(error.status, message)
    )


def _stopping_error() -> RequestError:
    return RequestError(503, "The router is stopping.", retry_after_s=RETRY_AFTER_S)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


def _backend_stats(backend: Backend[PrefillBackend] | Backend[DecodeBackend]) -> BackendStats:
    return BackendStats(
        url=backend.url,
        in_flight=backend.in_flight,
        requests=backend.requests,
        connect_failures=backend.connect_failures,
        cooling_left_s=round(backend.cooling_left_s, 3),
    )


def _raise_descriptor_limit(wanted: int) -> None:
    """Raise the soft limit of file descriptors as far as is wanted and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    if soft != resource.RLIM_INFINITY and max(soft, ceiling) < wanted:
        logger.warning(
            "only %d file descriptors are allowed; %d are needed at full load: raise `ulimit -n` "
            "or lower --max-concurrent",
            max(soft, ceiling),
            wanted,
        )
