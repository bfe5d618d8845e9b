"""An async client for OpenAI-style completions: token ids, times and errors of each request.

An error is a result here, not an exception, be it an error status, a broken connection or no
answer in time: tests ask what a client saw.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

# A request no server answers is a failure of the test, not of the machine's speed.
DEFAULT_LIMIT_S = 120.0

# The status of an answer that never came.
NO_ANSWER = 0


@dataclass(frozen=True)
class Request:
    """What to ask for: a prompt (token ids, text, or chat messages) and how many tokens."""

    prompt: Sequence[int] | str | Sequence[Mapping[str, str]]
    max_tokens: int = 16
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Say whether the prompt is a list of chat messages."""
        return (
            not isinstance(self.prompt, str)
            and len(self.prompt) > 0
            and not isinstance(self.prompt[0], int)
        )

    @property
    def path(self) -> str:
        """The endpoint this request goes to."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def payload(self, **more: Any) -> dict[str, Any]:
        """Return the JSON body: greedy, of fixed length, with token ids in the answer."""
        return {
            "model": "tiny",
            ("messages" if self.is_chat else "prompt"): (
                self.prompt if isinstance(self.prompt, str) else list(self.prompt)
            ),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.extra,
            **more,
        }


@dataclass
class Answer:
    """What came back. ``error`` is None exactly when the request was served to its end."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    @property
    def ok(self) -> bool:
        """Say whether the request was served to its end."""
        return self.error is None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, seconds."""
        if self.ttft_s is None or self.total_s is None or len(self.token_ids) < 2:
            return None
        return (self.total_s - self.ttft_s) / (len(self.token_ids) - 1)


class Client:
    """An aiohttp session with the few calls the harness needs. Use as ``async with Client()``."""

    def __init__(self, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._limit = aiohttp.ClientTimeout(total=limit_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No pool limit: the number of requests in flight is the caller's choice.
        self._session = aiohttp.ClientSession(
            timeout=self._limit, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("use the client as 'async with Client() as client'")
        return self._session

    async def complete(
        self,
        url: str,
        request: Request,
        *,
        request_id: str | None = None,
        kv_transfer_params: Any = None,
        stream: bool = True,
        **more: Any,
    ) -> Answer:
        """Send one request and read its whole answer."""
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = kv_transfer_params
        if stream:
            more["stream_options"] = {"include_usage": True}
        body = request.payload(stream=stream, **more)
        headers = {"X-Request-Id": request_id} if request_id else {}
        begin = time.perf_counter()
        answer = Answer(NO_ANSWER)
        try:
            async with self.session.post(
                f"{url}{request.path}", json=body, headers=headers
            ) as response:
                answer.status = response.status
                if response.status != 200 or not stream:
                    return _read_whole(response.status, await response.text(), begin)
                await _read_stream(answer, response, begin)
        except TimeoutError:
            answer.error = f"no answer within {self._limit.total:.0f} s"
        except aiohttp.ClientError as error:
            answer.error = f"connection: {error!r}"
        return answer

    async def complete_all(
        self, url: str, requests: Sequence[Request], *, at_once: int | None = None
    ) -> list[Answer]:
        """Send all requests to one URL, at most ``at_once`` in flight; answers in their order."""
        gate = asyncio.Semaphore(at_once or max(1, len(requests)))

        async def one(request: Request) -> Answer:
            async with gate:
                return await self.complete(url, request)

        return list(await asyncio.gather(*(one(request) for request in requests)))


def _read_whole(status: int, text: str, begin: float) -> Answer:
    total_s = time.perf_counter() - begin
    try:
        body = json.loads(text)
    except ValueError:
        return Answer(status, error=text[:2000] or f"status {status}", total_s=total_s)
    if status != 200 or not isinstance(body, dict) or "choices" not in body:
        return Answer(status, error=_message(body), total_s=total_s)
    answer = Answer(status, total_s=total_s, kv_transfer_params=body.get("kv_transfer_params"))
    _add_choice(answer, body["choices"][0])
    _add_usage(answer, body)
    return answer


async def _read_stream(answer: Answer, response: aiohttp.ClientResponse, begin: float) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            done = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = _message(chunk)
            continue
        _add_usage(answer, chunk)
        answer.kv_transfer_params = chunk.get("kv_transfer_params") or answer.kv_transfer_params
        if not chunk.get("choices"):
            continue
        if _add_choice(answer, chunk["choices"][0]) and answer.ttft_s is None:
            answer.ttft_s = time.perf_counter() - begin
        if answer.finish_reason is None or answer.total_s is None:
            answer.total_s = time.perf_counter() - begin
    if answer.error is None and not (done and answer.finish_reason):
        answer.error = "the stream ended without an end"
    if answer.error is None and answer.finish_reason == "error":
        answer.error = "finish_reason is error"


def _add_choice(answer: Answer, choice: Mapping[str, Any]) -> bool:
    """Add one choice or delta; say whether it brought any token."""
    tokens = choice.get("token_ids") or []
    answer.token_ids.extend(tokens)
    message = choice.get("delta") or choice.get("message") or {}
    answer.text += choice.get("text") or message.get("content") or ""
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return bool(tokens)


def _add_usage(answer: Answer, body: Mapping[str, Any]) -> None:
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        answer.cached_tokens = details["cached_tokens"]


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
