"""The client's end of the side channel: questions to an engine, in msgpack over ZMQ.

`hello` (who are you: every rank's description), `stats` (counters) and `cancel` (a request that was
given up; its KV need not be held). `kvpush.vllm.handshake` answers them. The functions open a
socket of their own and may be called by any thread.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError, PeerUnreachableError

__all__ = [
    "HOST_VARIABLE",
    "PORT_VARIABLE",
    "PROTOCOL",
    "REFUSALS",
    "CancelReply",
    "ErrorReply",
    "HelloReply",
    "Question",
    "StatsReply",
    "cancel_transfer",
    "endpoint",
    "query_peers",
    "query_stats",
]

PROTOCOL = 1
"""Version of what engines tell each other; both sides must have the same."""

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"

_MAX_ANSWER_BYTES = 256 << 20
"""1,024 ranks with 4,096 regions of about 60 bytes each."""
_MAX_RANKS = 1024

_HUNG_UP = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""The other side has hung up in the handshake: it does not like us, or it is being started anew,
or it has too many connections. ZMQ tries again after a tenth of a second."""
REFUSALS = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | _HUNG_UP
"""Handshakes that have failed, as either end sees them."""
_MOST_REFUSALS = 3

_LOST = zmq.Event.DISCONNECTED
"""A connection has ended, and with it perhaps the question: a listener with too many connections
hangs up on all. ZMQ connects again, but does not say again what it had already sent."""

_NOBODY = zmq.Event.CLOSED
"""An attempt to connect has failed: ZMQ itself would try again until the time is up."""


class Question(msgspec.Struct, frozen=True):
    """What a client asks: "hello", "stats" or "cancel"."""

    kind: str
    protocol: int = PROTOCOL
    transfer_id: str = ""
    """Of "cancel"."""


class HelloReply(msgspec.Struct, frozen=True, tag="hello"):
    """An engine's identity; `ranks` are `Engine.peer_info()` of all its ranks, PP-major."""

    protocol: int
    engine_id: str
    mode: str
    tp_size: int
    pp_size: int
    ranks: list[bytes]


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """An engine's counters, as a plain dictionary."""

    stats: dict[str, Any]


class CancelReply(msgspec.Struct, frozen=True, tag="cancel"):
    """The engine has taken note."""


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Why a question was not answered."""

    error: str


_Reply = HelloReply | StatsReply | CancelReply | ErrorReply
_ENCODER = msgspec.msgpack.Encoder()


def query_peers(host: str, port: int, timeout_s: float, auth: AuthKey | None = None) -> HelloReply:
    """Ask the engine whose side channel is at host:port who it is.

    Raises:
        PeerUnreachableError: it does not answer in time.
        PeerIncompatibleError: it answers in another protocol, or one of the two has no auth key or
            another one.
    """
    reply = _ask(host, port, Question("hello"), timeout_s, auth)
    if not isinstance(reply, HelloReply):
        raise PeerIncompatibleError(_what_came(host, port, reply))
    if reply.protocol != PROTOCOL:
        raise PeerIncompatibleError(
            f"{host}:{port} speaks protocol version {reply.protocol}, this engine {PROTOCOL}: run "
            "the same kvpush on both sides."
        )
    if not 0 < len(reply.ranks) <= _MAX_RANKS:
        raise PeerIncompatibleError(f"{host}:{port} claims to have {len(reply.ranks)} ranks.")
    return reply


def query_stats(
    host: str, port: int, timeout_s: float, auth: AuthKey | None = None
) -> dict[str, Any]:
    """Read an engine's counters.

    Keys: `engine_id`, `free_blocks`, `total_blocks`, `scheduler` (table sizes), `side_channel`
    (questions and refusals), `workers` (each rank's counters).

    Raises:
        PeerUnreachableError: it does not answer in time.
        PeerIncompatibleError: what answers is no kvpush side channel, or it has another auth key.
    """
    reply = _ask(host, port, Question("stats"), timeout_s, auth)
    if not isinstance(reply, StatsReply):
        raise PeerIncompatibleError(_what_came(host, port, reply))
    return reply.stats


def cancel_transfer(
    host: str, port: int, transfer_id: str, timeout_s: float, auth: AuthKey | None = None
) -> None:
    """Tell a prefill engine that nobody will ask for the KV of this transfer.

    Raises:
        PeerUnreachableError: it does not answer in time.
        PeerIncompatibleError: it does not take this, or has another auth key.
    """
    question = Question("cancel", transfer_id=transfer_id)
    reply = _ask(host, port, question, timeout_s, auth)
    if not isinstance(reply, CancelReply):
        raise PeerIncompatibleError(_what_came(host, port, reply))


def _what_came(host: str, port: int, reply: _Reply) -> str:
    said = reply.error if isinstance(reply, ErrorReply) else f"a {type(reply).__name__}"
    return f"{host}:{port} answered: {said}."


def _ask(
    host: str, port: int, question: Question, timeout_s: float, auth: AuthKey | None
) -> _Reply:
    deadline = time.monotonic() + timeout_s
    body = _ENCODER.encode(question)
    refusals = lost = 0
    with _client_socket(auth) as (client, monitor):
        try:
            socket.getaddrinfo(host.strip("[]"), port)  # of names ZMQ says nothing
            client.connect(endpoint(host, port, client))
            client.send(body)
        except (zmq.ZMQError, OSError) as error:
            raise _unreachable(host, port, f"can't be reached: {error}") from error
        poller = zmq.Poller()
        poller.register(client, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(left_s * 1000))))
            if client in ready:
                return _decode_reply(host, port, client.recv())
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event == _NOBODY:
                    raise _unreachable(host, port, "can't be reached: nobody listens there")
                if event == _LOST:
                    lost += 1
                    # In the handshake it was not sent yet, and is still waiting in the socket.
                    if lost > refusals and not client.poll(0):
                        _ask_again(host, port, client, body, auth)
                else:
                    refusals += 1 if event == _HUNG_UP else _MOST_REFUSALS
                if max(lost, refusals) >= _MOST_REFUSALS:
                    raise PeerIncompatibleError(_refusal(host, port, auth))
    raise _unreachable(host, port, f"did not answer within {timeout_s:g} s")


def _ask_again(
    host: str, port: int, client: zmq.Socket[Any], body: bytes, auth: AuthKey | None
) -> None:
    """Every question may be asked twice."""
    try:
        client.send(body, zmq.NOBLOCK)
    except zmq.Again:  # ZMQ does not connect again to who breaks its protocol
        raise PeerIncompatibleError(_refusal(host, port, auth)) from None


def _refusal(host: str, port: int, auth: AuthKey | None) -> str:
    own = "has one" if auth is not None else "has none"
    return (
        f"{host}:{port} refuses the connection: wrong or missing auth key (this side {own}). Give "
        "all engines and routers the same key (auth_key_file or KVPUSH_AUTH_KEY), or none of them; "
        "or something else than a kvpush side channel listens there."
    )


def _unreachable(host: str, port: int, why: object) -> PeerUnreachableError:
    return PeerUnreachableError(
        f"{host}:{port} {why}. Is a kvpush engine running there ({HOST_VARIABLE}, "
        f"{PORT_VARIABLE}), and is the way to it open?"
    )


def _decode_reply(host: str, port: int, body: bytes) -> _Reply:
    try:
        return msgspec.msgpack.decode(body, type=_Reply)
    except msgspec.MsgspecError as error:
        raise PeerIncompatibleError(
            f"{host}:{port} is no kvpush side channel of this version ({error})."
        ) from error


@contextlib.contextmanager
def _client_socket(auth: AuthKey | None) -> Iterator[tuple[zmq.Socket[Any], zmq.Socket[Any]]]:
    """A socket and its monitor, which die with their context: nothing outlives the call."""
    context: zmq.Context[Any] = zmq.Context()
    client = context.socket(zmq.REQ)
    try:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        client.setsockopt(zmq.REQ_RELAXED, 1)  # the same question again,
        client.setsockopt(zmq.REQ_CORRELATE, 1)  # and an answer to the last one alone
        if auth is not None:
            auth.guard_client(client)
        yield client, client.get_monitor_socket(REFUSALS | _LOST | _NOBODY)
    finally:
        client.disable_monitor()
        context.destroy(linger=0)


def endpoint(host: str, port: int | None, sock: zmq.Socket[Any]) -> str:
    """The address as ZMQ wants it; the socket is told if it is one of IPv6."""
    if ":" in host:
        sock.setsockopt(zmq.IPV6, 1)
        host = f"[{host.strip('[]')}]"
    return f"tcp://{host}" if port is None else f"tcp://{host}:{port}"
