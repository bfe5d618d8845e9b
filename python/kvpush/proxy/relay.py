"""Both legs of one request.

The legs start at the same moment. What the client gets is settled once, by whichever comes first:

    the decode server sends the first byte of a good answer  -> that answer, as it comes
    the decode server fails                                  -> its error; the prefill leg is ended
    the prefill server fails                                 -> its error; the decode leg is ended
    the client leaves, or the router is stopped              -> both legs are ended

The first BYTE settles it, not the status: vLLM sends the status of a stream before it knows whether
there will be one, and a client that has been told 200 can't be told otherwise. Ending a leg closes
its connection, which is what makes vLLM abort a request. Everything here runs on the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvpush.proxy.balance import Backend
from kvpush.proxy.cancel import Canceller
from kvpush.proxy.config import DecodeBackend, PrefillBackend
from kvpush.proxy.errors import RequestError, error_body
from kvpush.proxy.headers import client_headers
from kvpush.proxy.stats import Counters

logger = logging.getLogger(__name__)

# An error body is a few hundred bytes; 1 MiB keeps one that quotes a whole prompt.
MAX_ERROR_BYTES = 1024 * 1024
# A prefill leg that is still open when the answer is complete has nothing left to do but to report
# its end; ending it hard would cost the connection for nothing.
PREFILL_GRACE_S = 5.0
READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Leg:
    """What one leg sends."""

    path: str
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True)
class Call:
    """One client's request, ready to be sent; without a prefill leg the decode server works alone.

    `begun` turns true when the client has been sent a status, after which it can't be told of an
    error any more.
    """

    request: web.Request
    decode: Backend[DecodeBackend]
    decode_leg: Leg
    prefill: Backend[PrefillBackend] | None = None
    prefill_leg: Leg | None = None
    transfer_id: str = ""
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """How a leg failed, as the client is told it."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def response(self) -> web.Response:
        """Return it as the answer to the client."""
        return web.Response(status=self.status, headers=self.headers, body=self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer that has begun; `first` is its first bytes, empty if it has none at all."""

    response: aiohttp.ClientResponse
    first: bytes


DecodeTask: TypeAlias = asyncio.Task[Answer | Failure]
PrefillTask: TypeAlias = asyncio.Task[Failure | None]


class Relay:
    """Sends requests to their backends and the answers to the clients."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        counters: Counters,
        canceller: Canceller,
        *,
        idle_timeout_s: float,
    ) -> None:
        self._session = session
        self._counters = counters
        self._canceller = canceller
        self.idle_timeout_s = idle_timeout_s
        self._lingering: set[asyncio.Task[None]] = set()

    async def run(self, call: Call) -> web.StreamResponse:
        """Serve one request. Cancelling ends both legs at once."""
        with call.decode.use():
            decode: DecodeTask = asyncio.create_task(
                self._begin_decode(call.decode, call.decode_leg)
            )
            prefill: PrefillTask | None = None
            if call.prefill is not None and call.prefill_leg is not None:
                prefill = asyncio.create_task(self._run_prefill(call.prefill, call.prefill_leg))
            answered = False
            try:
                settled = await self._settle(decode, prefill)
                if isinstance(settled, Failure):
                    return settled.response()
                response, answered = await self._pass_on(call, settled)
                return response
            finally:
                _end_decode(decode)
                if prefill is not None:
                    self._end_prefill(prefill, linger=answered)
                if call.prefill is not None and not call.begun:
                    # The decode server may never have known of this request.
                    self._canceller.cancel(call.prefill.spec, call.transfer_id)

    async def close(self) -> None:
        """End the prefill legs that outlived their requests."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    async def _settle(self, decode: DecodeTask, prefill: PrefillTask | None) -> Answer | Failure:
        """Wait until it is settled what the client gets (see the top of this file)."""
        pending: set[asyncio.Task[Answer | Failure] | asyncio.Task[Failure | None]] = {decode}
        if prefill is not None:
            pending.add(prefill)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.idle_timeout_s
        while not decode.done():
            done, pending = await asyncio.wait(
                pending, timeout=until_s - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._counters.timeouts += 1
                raise RequestError(504, "The decode server did not answer in time.")
            if prefill is not None and prefill in done and not decode.done():
                failure = prefill.result()
                if failure is not None:
                    self._counters.prefill_errors += 1
                    return failure
        settled = decode.result()
        if isinstance(settled, Failure):
            # Both failed in the same turn: the prefill server's error is the cause more often than
            # not.
            if prefill is not None and prefill.done() and (failure := prefill.result()):
                self._counters.prefill_errors += 1
                return failure
            self._counters.decode_errors += 1
        return settled

    async def _begin_decode(self, backend: Backend[DecodeBackend], leg: Leg) -> Answer | Failure:
        """Send the decode leg and wait for the first bytes of its answer."""
        try:
            response = await self._send(backend, leg)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _unreachable("decode", backend, error)
        try:
            if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                return await _failure_of(response, "decode")
            return Answer(response, await response.content.readany())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            response.close()
            return _broken("decode", backend, error)
        except BaseException:
            response.close()
            raise

    async def _run_prefill(self, backend: Backend[PrefillBackend], leg: Leg) -> Failure | None:
        """Run the prefill leg to its end; only whether it failed is of interest."""
        with backend.use():
            try:
                response = await self._send(backend, leg)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return _unreachable("prefill", backend, error)
            try:
                if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                    return await _failure_of(response, "prefill")
                async for _ in response.content.iter_chunked(READ_BYTES):
                    pass
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return _broken("prefill", backend, error)
            finally:
                response.close()  # harmless if all was read: the connection is in its pool again
        return None

    async def _send(
        self, backend: Backend[PrefillBackend] | Backend[DecodeBackend], leg: Leg
    ) -> aiohttp.ClientResponse:
        try:
            response = await self._session.post(
                backend.url + leg.path, data=leg.body, headers=leg.headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            backend.connect_failed()
            raise
        backend.connected()
        return response

    async def _pass_on(self, call: Call, answer: Answer) -> tuple[web.StreamResponse, bool]:
        """Stream the answer to the client as it comes; true if all of it went through."""
        source = answer.response
        response = web.StreamResponse(
            status=source.status,
            reason=source.reason,
            headers=client_headers(source.headers, whole_body=False),
        )
        call.begun = True
        chunk = answer.first
        try:
            await response.prepare(call.request)
            while chunk:
                async with asyncio.timeout(self.idle_timeout_s):
                    await response.write(chunk)
                chunk = await self._next_chunk(source)
            await response.write_eof()
        except _CutAnswerError as error:
            logger.warning("the decode server at %s broke off: %r", source.url, error.__cause__)
            self._counters.cut_answers += 1
            cut(call.request)
            return response, False
        except (ConnectionError, TimeoutError):
            self._counters.client_left += 1
            cut(call.request)
            return response, False
        self._counters.answered += 1
        return response, True

    async def _next_chunk(self, source: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self.idle_timeout_s):
                return await source.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _CutAnswerError from error

    def _end_prefill(self, prefill: PrefillTask, *, linger: bool) -> None:
        """End a prefill leg: at once, or after a little while if its request is answered."""
        if not linger:
            prefill.cancel()
            return
        task = asyncio.create_task(self._watch(prefill))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _watch(self, prefill: PrefillTask) -> None:
        try:
            async with asyncio.timeout(PREFILL_GRACE_S):
                if await prefill is not None:
                    self._counters.late_prefill_errors += 1
        except TimeoutError:
            logger.info("a prefill leg was still open after its answer was complete: ended")


class _CutAnswerError(Exception):
    """The decode server broke off, or fell silent, in mid answer; its cause says how."""


def _end_decode(decode: DecodeTask) -> None:
    """End the decode leg and its connection. Nothing here waits, so nothing can interrupt it."""
    decode.cancel()
    decode.add_done_callback(_close_answer)  # at once for a task that is done


def _close_answer(decode: DecodeTask) -> None:
    if not decode.cancelled() and decode.exception() is None:
        answer = decode.result()
        if isinstance(answer, Answer):
            answer.response.close()


def cut(request: web.Request) -> None:
    """Close the client's connection in mid message: it must not take a part for the whole."""
    if request.transport is not None:
        request.transport.abort()


async def _failure_of(response: aiohttp.ClientResponse, kind: str) -> Failure:
    """Read a backend's error."""
    if response.status < HTTPStatus.BAD_REQUEST:
        response.close()
        return _own_failure(502, f"The {kind} server answered with status {response.status}.")
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            response.close()
            status = response.status
            return _own_failure(status, f"The {kind} server failed with an error too long to show.")
    return Failure(response.status, client_headers(response.headers, whole_body=True), bytes(body))


def _unreachable(
    kind: str, backend: Backend[PrefillBackend] | Backend[DecodeBackend], error: Exception
) -> Failure:
    logger.warning("the %s server at %s could not be asked: %r", kind, backend.url, error)
    return _own_failure(502, f"The {kind} server could not be reached.")


def _broken(
    kind: str, backend: Backend[PrefillBackend] | Backend[DecodeBackend], error: Exception
) -> Failure:
    logger.warning("the %s server at %s broke off: %r", kind, backend.url, error)
    return _own_failure(502, f"The {kind} server closed the connection in mid answer.")


def _own_failure(status: int, message: str) -> Failure:
    headers = CIMultiDict({"Content-Type": "application/json"})
    return Failure(status, headers, error_body(status, message))
