"""The side channel: how engines find each other, and where operators read their counters.

A ZMQ ROUTER on `VLLM_NIXL_SIDE_CHANNEL_HOST/PORT` answers the questions of `kvpush.side_channel`.
Anyone may send anything: what is no question gets an error back or nothing, and the listener lives
on. With an auth key, who does not hold it gets no answer at all, and is counted.

One thread does all of it, so everything that a client can make it keep or wait for has a bound:
messages by size and number, a handshake by its time, connections by their number.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpush.auth import AuthKey
from kvpush.errors import SideChannelError
from kvpush.side_channel import (
    HOST_VARIABLE,
    PORT_VARIABLE,
    REFUSALS,
    CancelReply,
    ErrorReply,
    HelloReply,
    Question,
    StatsReply,
    endpoint,
)
from kvpush.vllm.log import get_logger

__all__ = ["SideChannel"]

logger = get_logger("handshake")

MAX_CONNECTIONS = 1024
"""As many decode ranks may ask at once. With more the listener hangs up on all of them and begins
anew: each costs a file descriptor, and a vLLM engine that runs out of those dies."""

_MAX_QUESTION_BYTES = 4096
"""A question is a name, a number and a transfer id; ZMQ hangs up on who sends more."""
_HANDSHAKE_MS = 5_000
"""Who has connected and says nothing is thrown out: 100 times what a busy host needs."""
_HEARTBEAT_MS = 10_000
"""A client that is gone without a word is found out."""
_MAX_QUEUED_QUESTIONS = 16
_MAX_QUEUED_ANSWERS = 4
"""Per client. One that asks and does not read gets no more answers; nobody else is held up."""
_POLL_MS = 200
"""How late a stop is noticed."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"

_CAME, _LEFT = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_CLOSED = zmq.Event.CLOSED

_ENCODER = msgspec.msgpack.Encoder()


class SideChannel:
    """Answers questions on a thread of its own from `start()` to `stop()`."""

    def __init__(
        self,
        host: str,
        port: int,
        stats: Callable[[], dict[str, Any]],
        hello: HelloReply | None = None,
        *,
        auth: AuthKey | None = None,
        cancel: Callable[[str], None] | None = None,
    ) -> None:
        """See the class. `stats` and `cancel` are called by the channel's thread."""
        self._address = (host, port)
        self._hello = _ENCODER.encode(hello or ErrorReply("this port tells only stats"))
        self._stats = stats
        self._auth = auth
        self._cancel = cancel
        self._decoder = msgspec.msgpack.Decoder(Question)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._endpoint = ""
        self._is_open = True
        self._is_closing = False
        self._connections = 0
        self._questions = 0
        self._bad_questions = 0
        self._refused = 0
        self._hung_up = 0

    def start(self) -> None:
        """Bind and listen.

        Raises:
            SideChannelError: naming the port and the variable that sets it.
        """
        context: zmq.Context[Any] = zmq.Context()
        zap = context.socket(zmq.REP)
        zap.bind(_ZAP_ADDRESS)
        listener = self._make_listener(context)
        monitor = listener.get_monitor_socket(_CAME | _LEFT | _CLOSED | REFUSALS)
        host, port = self._address
        try:
            numeric = _numeric(host)
            if port:
                listener.bind(endpoint(numeric, port, listener))
            else:
                port = listener.bind_to_random_port(endpoint(numeric, None, listener))
        except (zmq.ZMQError, OSError) as error:
            listener.disable_monitor()
            context.destroy(linger=0)
            raise SideChannelError(
                f"The side channel can't listen on {host}:{port} ({error}). Every engine on a host "
                f"needs a port of its own: set {PORT_VARIABLE} to a free one, and {HOST_VARIABLE} "
                "to an address of this host that the decode engines reach."
            ) from error
        self._address = (host, port)
        self._endpoint = endpoint(numeric, port, listener)
        self._thread = threading.Thread(
            target=self._run,
            args=(context, listener, monitor, zap),
            name="kvpush-side-channel",
            daemon=True,
        )
        self._thread.start()

    def _make_listener(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        listener: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS),
            (zmq.RCVHWM, _MAX_QUEUED_QUESTIONS),
            (zmq.SNDHWM, _MAX_QUEUED_ANSWERS),
        ):
            listener.setsockopt(option, value)
        if self._auth is not None:
            self._auth.guard_listener(listener)
        return listener

    @property
    def port(self) -> int:
        """Where it listens; chosen by `start()` if 0 was asked for."""
        return self._address[1]

    def counters(self) -> dict[str, int]:
        """Connections now, and totals since the start. Any thread."""
        return {
            "connections": self._connections,
            "questions": self._questions,
            "bad_questions": self._bad_questions,
            "refused": self._refused,
            "hung_up": self._hung_up,
        }

    def stop(self) -> None:
        """Stop listening and wait for the thread. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _POLL_MS / 1000)
            self._thread = None

    # --- the thread -------------------------------------------------------------------------

    def _run(
        self,
        context: zmq.Context[Any],
        listener: zmq.Socket[Any],
        monitor: zmq.Socket[Any],
        zap: zmq.Socket[Any],
    ) -> None:
        poller = zmq.Poller()
        for sock in (listener, monitor, zap):
            poller.register(sock, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if zap in ready:
                    self._judge(zap)
                if monitor in ready:
                    self._watch(monitor)
                if listener in ready:
                    self._serve(listener)
                self._limit_connections(listener)
        finally:
            listener.disable_monitor()
            context.destroy(linger=0)

    def _judge(self, zap: zmq.Socket[Any]) -> None:
        """Answer ZMQ's question (ZAP) whether a client may come in."""
        frames = zap.recv_multipart()
        request, credentials = frames[1], frames[6:]
        good = self._auth is None or (len(credentials) == 1 and self._auth.admits(credentials[0]))
        zap.send_multipart([_ZAP_VERSION, request, b"200" if good else b"400", b"", b"", b""])

    def _watch(self, monitor: zmq.Socket[Any]) -> None:
        """Count who comes, goes, and is refused."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(monitor.recv_multipart(flags=zmq.NOBLOCK))["event"]
                if event == _CAME:
                    self._connections += 1
                elif event == _LEFT:
                    # Of a client hung up on, this may come after the listener's own end.
                    self._connections = max(0, self._connections - 1)
                elif event == _CLOSED:
                    self._connections = 0  # ZMQ hangs up on the clients of a closed listener
                    self._is_open = False
                else:
                    # Also of clients that hung up first, or were thrown out for their silence.
                    self._count_refusal()

    def _count_refusal(self) -> None:
        self._refused += 1
        if self._refused == 1:
            logger.warning(
                "The side channel on %s:%d has refused a client that %s. Further ones are only "
                "counted.",
                *self._address,
                "has not this engine's auth key"
                if self._auth is not None
                else "speaks another protocol, says nothing, or uses an auth key",
            )

    def _limit_connections(self, listener: zmq.Socket[Any]) -> None:
        """Begin anew where there are too many; bind again once ZMQ has closed the listener."""
        try:
            if not self._is_open:
                listener.bind(self._endpoint)
                self._is_open = True
                self._is_closing = False
            elif self._connections >= MAX_CONNECTIONS and not self._is_closing:
                logger.warning(
                    "The side channel has %d connections and hangs up on all of them",
                    self._connections,
                )
                self._is_closing = True
                self._hung_up += 1
                listener.unbind(self._endpoint)
        except zmq.ZMQError as error:
            logger.debug("Side channel: %s", error)  # tried again at the next look

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
        self._questions += 1
        try:
            question = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            self._bad_questions += 1
            return _ENCODER.encode(ErrorReply(f"not a question: {error}"))
        if question.kind == "hello":
            return self._hello
        if question.kind == "stats":
            return _ENCODER.encode(StatsReply(self._stats()))
        if question.kind == "cancel" and self._cancel is not None and question.transfer_id:
            self._cancel(question.transfer_id)
            return _ENCODER.encode(CancelReply())
        self._bad_questions += 1
        return _ENCODER.encode(ErrorReply(f"unknown question {question.kind[:40]!r}"))


def _numeric(host: str) -> str:
    """ZMQ binds to numeric addresses. All interfaces only where they are asked for by name."""
    if host in ("*", "0.0.0.0"):
        return "0.0.0.0"
    name = host.strip("[]") or "localhost"
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
