"""The prefill engines a decode rank knows, and the meeting of new ones.

Each address has at most one meeting under way, on a thread of its own, so a dead peer delays no
other. Requests for an address that is being met wait in its list; when the meeting ends, they are
handed to the callback at once, by the meeting's thread. The caller's lock guards every method and
is held when the callback runs.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpush._core import PeerInfo
from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError, PeerUnreachableError
from kvpush.side_channel import HelloReply, query_peers
from kvpush.vllm.log import get_logger

__all__ = ["Address", "Endpoints", "Meeting", "Waiting", "check_windows"]

logger = get_logger("endpoints")

Address = tuple[str, int]

MAX_MEETINGS = 64
"""Threads that meet peers at a time. Each lives for the discovery and hello time-outs at most."""


class Waiting(Protocol):
    """A request that needs a peer."""


@dataclass(slots=True)
class Meeting:
    """How a meeting ended: the sessions to grant to, or why there are none."""

    sessions: list[int] = field(default_factory=list)
    tokens_per_block: tuple[int, ...] = ()
    reason: str = ""
    detail: str = ""


class _State(enum.Enum):
    MEETING = enum.auto()
    MET = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class _Endpoint:
    state: _State = _State.MEETING
    result: Meeting = field(default_factory=Meeting)
    ended_s: float = 0.0
    waiting: list[Any] = field(default_factory=list)


class Endpoints:
    """See the module."""

    def __init__(
        self,
        *,
        lock: threading.Lock,
        connect: Callable[[HelloReply], list[int]],
        mode: str,
        auth: AuthKey | None = None,
        discovery_timeout_s: float,
        retry_backoff_s: float,
        on_met: Callable[[Any, Meeting], None],
    ) -> None:
        self._lock = lock
        self._connect = connect
        self._mode = mode
        self._auth = auth
        self._discovery_timeout_s = discovery_timeout_s
        self._retry_backoff_s = retry_backoff_s
        self._on_met = on_met
        self._endpoints: dict[Address, _Endpoint] = {}
        self._meetings = 0

    def need(self, address: Address, request: Any) -> None:
        """Hand `request` to the callback: now if the peer is known, else when it was met."""
        endpoint = self._endpoints.get(address)
        if endpoint is not None and endpoint.state is _State.FAILED:
            if time.monotonic() - endpoint.ended_s < self._retry_backoff_s:
                self._on_met(request, endpoint.result)
                return
            endpoint = None
        if endpoint is None:
            if self._meetings >= MAX_MEETINGS:
                detail = f"{MAX_MEETINGS} other engines are being met already"
                self._on_met(request, Meeting(reason="table_full", detail=detail))
                return
            endpoint = self._endpoints[address] = _Endpoint()
            self._meetings += 1
            threading.Thread(
                target=self._meet,
                args=(address, endpoint),
                name=f"kvpush-meet-{address[0]}:{address[1]}",
                daemon=True,
            ).start()
        if endpoint.state is _State.MET:
            self._on_met(request, endpoint.result)
        else:
            endpoint.waiting.append(request)

    def withdraw(self, address: Address, request: Any) -> bool:
        """Take a request out of a list it waits in. False: it is in none."""
        endpoint = self._endpoints.get(address)
        if endpoint is None or request not in endpoint.waiting:
            return False
        endpoint.waiting.remove(request)
        return True

    def forget_session(self, session: int) -> None:
        """A peer's session is gone: its engine must be met again."""
        for address in [a for a, e in self._endpoints.items() if session in e.result.sessions]:
            del self._endpoints[address]

    def forget(self, address: Address) -> None:
        """Meet this address again for the next request."""
        endpoint = self._endpoints.get(address)
        if endpoint is not None and endpoint.state is _State.MET:
            del self._endpoints[address]

    def waiting(self) -> int:
        """Requests that wait for a meeting to end."""
        return sum(len(endpoint.waiting) for endpoint in self._endpoints.values())

    def _meet(self, address: Address, endpoint: _Endpoint) -> None:
        result = self._attempt(address)
        with self._lock:
            self._meetings -= 1
            endpoint.result = result
            endpoint.ended_s = time.monotonic()
            endpoint.state = _State.FAILED if result.reason else _State.MET
            waiting, endpoint.waiting = endpoint.waiting, []
            for request in waiting:
                self._on_met(request, result)
            self._drop_old_failures()

    def _check_mode(self, address: Address, hello: HelloReply) -> None:
        if hello.mode != self._mode:
            raise PeerIncompatibleError(
                f"mode: the engine at {address[0]}:{address[1]} runs in {hello.mode!r}, this one "
                f"in {self._mode!r}."
            )

    def _drop_old_failures(self) -> None:
        """Addresses come from clients: failed ones must not pile up."""
        now = time.monotonic()
        for address, endpoint in list(self._endpoints.items()):
            age_s = now - endpoint.ended_s
            if endpoint.state is _State.FAILED and age_s > self._retry_backoff_s:
                del self._endpoints[address]

    def _attempt(self, address: Address) -> Meeting:
        """One meeting. Never raises: whatever goes wrong is the requests' reason."""
        host, port = address
        try:
            hello = query_peers(host, port, self._discovery_timeout_s, self._auth)
            self._check_mode(address, hello)
            sizes = _tokens_per_block(hello)
            return Meeting(sessions=self._connect(hello), tokens_per_block=sizes)
        except (PeerUnreachableError, TimeoutError) as error:
            return _failed(address, "peer_unreachable", error)
        except ConnectionRefusedError as error:
            return _failed(address, "table_full", error)
        except ConnectionResetError as error:
            return _failed(address, "peer_lost", error)
        except ConnectionAbortedError as error:
            return _failed(address, "shutdown", error)
        except (PeerIncompatibleError, ValueError) as error:
            return _failed(address, "incompatible", error)
        except Exception as error:
            logger.exception("Meeting the engine at %s:%d failed", host, port)
            return _failed(address, "peer_unreachable", error)


def _failed(address: Address, reason: str, error: Exception) -> Meeting:
    if reason == "shutdown":
        logger.info("The prefill engine at %s:%d is not met any more: %s", *address, error)
    elif reason == "table_full":
        logger.error("This engine can't meet the prefill engine at %s:%d: %s", *address, error)
    else:
        logger.error("The prefill engine at %s:%d can't be used: %s", *address, error)
    return Meeting(reason=reason, detail=str(error))


def _tokens_per_block(hello: HelloReply) -> tuple[int, ...]:
    """Block sizes of the peer's groups."""
    sizes = {
        (region.group, region.tokens_per_block)
        for region in PeerInfo.decode(hello.ranks[0]).regions
    }
    return tuple(size for _, size in sorted(sizes))


def check_windows(windows: Mapping[str, int], hello: HelloReply) -> None:
    """Refuse a peer that may have given back tokens of a block that this engine needs whole.

    Each side keeps the blocks that its window touches. The consumer's first one begins within what
    the producer still has only if the producer's blocks begin nowhere else than the consumer's do.

    Raises:
        PeerIncompatibleError: naming a layer and both block sizes.
    """
    for rank in hello.ranks:
        for region in PeerInfo.decode(rank).regions:
            layer = region.layer.removesuffix("/k").removesuffix("/v")
            own, theirs = windows.get(layer), region.tokens_per_block
            if own is not None and theirs % own != 0:
                raise PeerIncompatibleError(
                    f"layer {layer}: the block size is {theirs} on the producer and {own} on the "
                    "consumer; with a sliding window the consumer's must divide the producer's. "
                    "Start both with the same --block-size."
                )
