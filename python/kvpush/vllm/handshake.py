"""The side channel: how engines find each other, and where operators read their counters.

A ZMQ ROUTER on `VLLM_NIXL_SIDE_CHANNEL_HOST/PORT` answers two questions in msgpack: `hello` (who
are you: every rank's description, to be loaded by the native engine) and `stats`. Anyone may send
anything: what is no question gets an error back or nothing, and the listener lives on. The client
functions open a socket of their own and may be called by any thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvpush.errors import PeerIncompatibleError, PeerUnreachableError, SideChannelError
from kvpush.vllm.log import get_logger

__all__ = [
    "PORT_VARIABLE",
    "PROTOCOL",
    "HelloReply",
    "SideChannel",
    "query_peers",
    "query_stats",
]

logger = get_logger("handshake")

PROTOCOL = 1
"""Version of what engines tell each other; both sides must have the same."""

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"

_MAX_QUESTION_BYTES = 4096
"""A question is a name and a number; ZMQ hangs up on who sends more."""
_MAX_ANSWER_BYTES = 256 << 20
"""1,024 ranks with 4,096 regions of about 60 bytes each."""
_MAX_RANKS = 1024
_POLL_MS = 200
"""How late a stop is noticed."""


class Question(msgspec.Struct, frozen=True):
    """What a client asks: "hello" or "stats"."""

    kind: str
    protocol: int = PROTOCOL


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


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Why a question was not answered."""

    error: str


_Reply = HelloReply | StatsReply | ErrorReply
_ENCODER = msgspec.msgpack.Encoder()


class SideChannel:
    """Answers questions on a thread of its own from `start()` to `stop()`."""

    def __init__(
        self,
        host: str,
        port: int,
        stats: Callable[[], dict[str, Any]],
        hello: HelloReply | None = None,
    ) -> None:
        self._address = (host, port)
        self._hello = _ENCODER.encode(hello or ErrorReply("this port tells only stats"))
        self._stats = stats
        self._decoder = msgspec.msgpack.Decoder(Question)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and listen.

        Raises:
            SideChannelError: naming the port and the variable that sets it.
        """
        context = zmq.Context()
        listener = context.socket(zmq.ROUTER)
        listener.setsockopt(zmq.LINGER, 0)
        listener.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        host, port = self._address
        try:
            numeric = _numeric(host)
            if port:
                listener.bind(_endpoint(numeric, port, listener))
            else:
                port = listener.bind_to_random_port(_endpoint(numeric, None, listener))
        except (zmq.ZMQError, OSError) as error:
            listener.close()
            context.term()
            raise SideChannelError(
                f"The side channel can't listen on {host}:{port} ({error}). Every engine on a host "
                f"needs a port of its own: set {PORT_VARIABLE} to a free one, and {HOST_VARIABLE} "
                "to an address of this host that the decode engines reach."
            ) from error
        self._address = (host, port)
        self._thread = threading.Thread(
            target=self._run, args=(context, listener), name="kvpush-side-channel", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens; chosen by `start()` if 0 was asked for."""
        return self._address[1]

    def stop(self) -> None:
        """Stop listening and wait for the thread. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _POLL_MS / 1000)
            self._thread = None

    def _run(self, context: zmq.Context[Any], listener: zmq.Socket[Any]) -> None:
        try:
            while not self._stop.is_set():
                if listener.poll(_POLL_MS):
                    self._serve(listener)
        finally:
            listener.close()
            context.term()

    def _serve(self, listener: zmq.Socket[Any]) -> None:
        """Answer one message; whatever it is, the next one is served too."""
        try:
            *envelope, body = listener.recv_multipart(flags=zmq.NOBLOCK)
            if envelope:
                listener.send_multipart([*envelope, self._answer(body)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("Side channel: a client went away (%s)", error)
        except Exception:
            logger.exception("Side channel: a question could not be answered")

    def _answer(self, body: bytes) -> bytes:
        try:
            question = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            return _ENCODER.encode(ErrorReply(f"not a question: {error}"))
        if question.kind == "hello":
            return self._hello
        if question.kind == "stats":
            return _ENCODER.encode(StatsReply(self._stats()))
        return _ENCODER.encode(ErrorReply(f"unknown question {question.kind!r}"))


def query_peers(host: str, port: int, timeout_s: float) -> HelloReply:
    """Ask the engine whose side channel is at host:port who it is.

    Raises:
        PeerUnreachableError: it does not answer in time.
        PeerIncompatibleError: it answers in another protocol.
    """
    reply = _ask(host, port, "hello", timeout_s)
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


def query_stats(host: str, port: int, timeout_s: float) -> dict[str, Any]:
    """Read an engine's counters.

    Keys: `engine_id`, `free_blocks`, `total_blocks`, `scheduler` (table sizes), `workers` (each
    rank's counters).

    Raises:
        PeerUnreachableError: it does not answer in time.
        PeerIncompatibleError: what answers is no kvpush side channel.
    """
    reply = _ask(host, port, "stats", timeout_s)
    if not isinstance(reply, StatsReply):
        raise PeerIncompatibleError(_what_came(host, port, reply))
    return reply.stats


def _what_came(host: str, port: int, reply: _Reply) -> str:
    said = reply.error if isinstance(reply, ErrorReply) else f"a {type(reply).__name__}"
    return f"{host}:{port} answered: {said}."


def _ask(host: str, port: int, kind: str, timeout_s: float) -> _Reply:
    deadline = time.monotonic() + timeout_s
    _knock(host, port, timeout_s)
    with _client_socket() as client:
        try:
            client.connect(_endpoint(host, port, client))
            client.send(_ENCODER.encode(Question(kind)))
        except (zmq.ZMQError, OSError) as error:
            raise PeerUnreachableError(f"{host}:{port} can't be reached: {error}.") from error
        while (left_s := deadline - time.monotonic()) > 0:
            if client.poll(max(1, int(left_s * 1000))):
                return _decode_reply(host, port, client.recv())
    raise PeerUnreachableError(
        f"{host}:{port} did not answer within {timeout_s:g} s. Is a kvpush engine running there "
        f"({HOST_VARIABLE}, {PORT_VARIABLE}), and is the way to it open?"
    )


def _knock(host: str, port: int, timeout_s: float) -> None:
    """Find out at once where nobody listens: ZMQ itself would try again until the time is up."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout_s).close()
    except OSError as error:
        raise PeerUnreachableError(
            f"{host}:{port} can't be reached: {error}. Is a kvpush engine running there "
            f"({HOST_VARIABLE}, {PORT_VARIABLE}), and is the way to it open?"
        ) from error


def _decode_reply(host: str, port: int, body: bytes) -> _Reply:
    try:
        return msgspec.msgpack.decode(body, type=_Reply)
    except msgspec.MsgspecError as error:
        raise PeerIncompatibleError(
            f"{host}:{port} is no kvpush side channel of this version ({error})."
        ) from error


@contextlib.contextmanager
def _client_socket() -> Any:
    """A socket that dies with its context, so that no thread or message outlives the call."""
    context = zmq.Context()
    client = context.socket(zmq.REQ)
    try:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        yield client
    finally:
        client.close()
        context.term()


def _numeric(host: str) -> str:
    """ZMQ binds to numeric addresses."""
    if host in ("", "*", "0.0.0.0"):
        return "0.0.0.0"
    return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])


def _endpoint(host: str, port: int | None, sock: zmq.Socket[Any]) -> str:
    if ":" in host:
        sock.setsockopt(zmq.IPV6, 1)
        host = f"[{host.strip('[]')}]"
    return f"tcp://{host}" if port is None else f"tcp://{host}:{port}"
