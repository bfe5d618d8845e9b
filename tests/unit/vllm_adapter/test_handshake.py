from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvpush.auth import AuthKey
from kvpush.errors import PeerIncompatibleError, PeerUnreachableError, SideChannelError
from kvpush.side_channel import (
    PROTOCOL,
    HelloReply,
    Question,
    cancel_transfer,
    query_peers,
    query_stats,
)
from kvpush.vllm import handshake
from kvpush.vllm.handshake import SideChannel

HOST = "127.0.0.1"
LONG_S = 20.0
SHORT_S = 0.2

HELLO = HelloReply(PROTOCOL, "engine", "push", 2, 1, [b"rank 0", b"rank 1" * 1000])


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    side = SideChannel(HOST, 0, lambda: {"free_blocks": 3}, HELLO)
    side.start()
    yield side
    side.stop()


def raw(port: int, *frames: bytes, wait_s: float = LONG_S) -> bytes | None:
    """Send frames as any program may; the answer, if one comes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://{HOST}:{port}")
        client.send_multipart(frames)
        return client.recv_multipart()[-1] if client.poll(int(1000 * wait_s)) else None


def test_hello_and_stats(channel: SideChannel) -> None:
    assert query_peers(HOST, channel.port, LONG_S) == HELLO
    assert query_peers("localhost", channel.port, LONG_S) == HELLO
    assert query_stats(HOST, channel.port, LONG_S) == {"free_blocks": 3}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"get_meta_msg",
        os.urandom(3000),
        msgspec.msgpack.encode({"kind": 5}),
        msgspec.msgpack.encode({"kind": "nonsense"}),
        msgspec.msgpack.encode([[[]]] * 100),
    ],
)
def test_garbage_gets_an_error_and_the_listener_lives(channel: SideChannel, body: bytes) -> None:
    answer = raw(channel.port, b"", body)
    assert answer is not None
    assert b"error" in answer
    assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_oversized_input_gets_nothing_and_the_listener_lives(channel: SideChannel) -> None:
    assert raw(channel.port, b"", b"x" * 100_000, wait_s=SHORT_S) is None
    assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_bytes_of_another_protocol_and_the_listener_lives(channel: SideChannel) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b""):
        with socket.create_connection((HOST, channel.port), LONG_S) as plain:
            plain.sendall(data)
    assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_a_failing_counter_does_not_end_the_listener() -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("counter")

    side = SideChannel(HOST, 0, fail, HELLO)
    side.start()
    try:
        with pytest.raises(PeerUnreachableError):
            query_stats(HOST, side.port, SHORT_S)
        assert query_peers(HOST, side.port, LONG_S) == HELLO
    finally:
        side.stop()


def test_a_taken_port_is_named_with_its_variable(channel: SideChannel) -> None:
    with pytest.raises(SideChannelError, match=f"{channel.port}.*VLLM_NIXL_SIDE_CHANNEL_PORT"):
        SideChannel(HOST, channel.port, dict, HELLO).start()


def test_stop_ends_the_thread_and_frees_the_port(channel: SideChannel) -> None:
    channel.stop()
    channel.stop()
    assert "kvpush-side-channel" not in {thread.name for thread in threading.enumerate()}
    again = SideChannel(HOST, channel.port, dict, HELLO)
    again.start()
    again.stop()


def test_nobody_there() -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PeerUnreachableError, match=f"{HOST}:{port} can't be reached"):
        query_peers(HOST, port, 100 * LONG_S)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(PeerUnreachableError, match="can't be reached"):
        query_peers("no-such-host.invalid", 5600, LONG_S)


def test_a_black_hole() -> None:
    with (
        socket.create_server((HOST, 0)) as silent,
        pytest.raises(PeerUnreachableError, match="did not answer"),
    ):
        query_peers(HOST, silent.getsockname()[1], SHORT_S)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"\x93\x01\x02\x03", "no kvpush side channel"),
        (msgspec.msgpack.encode(msgspec.structs.replace(HELLO, protocol=99)), "version 99"),
        (msgspec.msgpack.encode(msgspec.structs.replace(HELLO, ranks=[])), "0 ranks"),
    ],
)
def test_what_answers_is_something_else(reply: bytes, said: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port(f"tcp://{HOST}")

        def answer() -> None:
            *envelope, _ = other.recv_multipart()
            other.send_multipart([*envelope, reply])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(PeerIncompatibleError, match=said):
                query_peers(HOST, port, LONG_S)
        finally:
            thread.join()


def test_a_rank_tells_only_stats() -> None:
    side = SideChannel(HOST, 0, lambda: {"live_grants": 0})
    side.start()
    try:
        with pytest.raises(PeerIncompatibleError, match="only stats"):
            query_peers(HOST, side.port, LONG_S)
        assert query_stats(HOST, side.port, LONG_S) == {"live_grants": 0}
    finally:
        side.stop()


# --- bounds -----------------------------------------------------------------------------------


def eventually(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_slow_and_silent_clients_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # They stay for longer than anybody is waited for here.
    monkeypatch.setattr(handshake, "_HANDSHAKE_MS", int(100_000 * LONG_S))
    channel = SideChannel(HOST, 0, dict, HELLO)
    channel.start()
    with contextlib.ExitStack() as stack:
        stack.callback(channel.stop)
        for said in (b"", b"\xff\x00\x00", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"):
            for _ in range(20):  # connected, and in the middle of ZMQ's greeting
                slow = stack.enter_context(socket.create_connection((HOST, channel.port), LONG_S))
                slow.sendall(said)
        eventually(lambda: channel.counters()["connections"] >= 60)
        assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_a_client_that_asks_and_never_reads_holds_nobody_up(
    channel: SideChannel,
) -> None:
    question = msgspec.msgpack.encode(Question("hello"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.SNDTIMEO, int(1000 * LONG_S))):
            greedy.setsockopt(option, value)
        greedy.connect(f"tcp://{HOST}:{channel.port}")
        for _ in range(2000):
            greedy.send_multipart([b"", question])
        assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_who_says_nothing_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HANDSHAKE_MS", 100)
    side = SideChannel(HOST, 0, dict, HELLO)
    side.start()
    try:
        with socket.create_connection((HOST, side.port), LONG_S) as silent:
            silent.settimeout(LONG_S)
            while silent.recv(4096):  # its own greeting, then the end
                pass
        eventually(lambda: side.counters()["connections"] == 0)
    finally:
        side.stop()


def test_connections_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_CONNECTIONS", 8)
    side = SideChannel(HOST, 0, dict, HELLO)
    side.start()
    try:
        with contextlib.ExitStack() as stack:
            clients: list[socket.socket] = []
            while len(clients) < 100:
                with contextlib.suppress(ConnectionError):  # while it begins anew
                    client = socket.create_connection((HOST, side.port), LONG_S)
                    clients.append(stack.enter_context(client))
            eventually(lambda: side.counters()["hung_up"] >= 1)
            eventually(lambda: _answers(side.port))
        eventually(lambda: side.counters()["connections"] == 0)
    finally:
        side.stop()


def test_a_question_that_is_lost_with_its_connection_is_asked_again() -> None:
    # The kernel goes on listening while ZMQ's listener begins anew, so nobody is turned away.
    with socket.create_server((HOST, 0)) as listening, ThreadPoolExecutor() as pool:
        port = listening.getsockname()[1]
        address = f"tcp://{HOST}:{port}"

        def lose_one_and_answer_the_next() -> None:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
                listener.setsockopt(zmq.LINGER, int(1000 * LONG_S))
                listener.setsockopt(zmq.RCVTIMEO, int(1000 * LONG_S))
                for is_lost in (True, False):
                    listener.setsockopt(zmq.USE_FD, os.dup(listening.fileno()))
                    listener.bind(address)
                    *envelope, _ = listener.recv_multipart()
                    if is_lost:
                        listener.unbind(address)
                listener.send_multipart([*envelope, msgspec.msgpack.encode(HELLO)])

        loser = pool.submit(lose_one_and_answer_the_next)
        assert query_peers(HOST, port, LONG_S) == HELLO
        loser.result()


def _says(listening: socket.socket, said: bytes) -> None:
    """A listener of another kind: it greets whoever comes, and hangs up."""
    with contextlib.suppress(OSError):  # closed: the test is over
        while True:
            client, _ = listening.accept()
            with client:
                client.sendall(said)


@pytest.mark.parametrize("auth", [None, AuthKey(b"the key of a test")], ids=["no key", "a key"])
@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b""])
def test_a_listener_of_another_kind_is_given_up(said: bytes, auth: AuthKey | None) -> None:
    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=_says, args=(listening, said), daemon=True)
        thread.start()
        begin = time.monotonic()
        with pytest.raises((PeerIncompatibleError, PeerUnreachableError)):
            query_peers(HOST, listening.getsockname()[1], LONG_S / 10, auth)
        assert time.monotonic() - begin < LONG_S
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_an_answer_without_its_envelope_is_given_up() -> None:
    def answer_badly(listener: zmq.Socket[Any]) -> None:
        while listener.poll(int(1000 * LONG_S)):
            name, *_ = listener.recv_multipart()
            if name == b"over":
                return
            listener.send_multipart([name, b"no envelope"])

    with zmq.Context() as context, ThreadPoolExecutor() as pool:
        listener = context.socket(zmq.ROUTER)
        port = listener.bind_to_random_port(f"tcp://{HOST}")
        answering = pool.submit(answer_badly, listener)
        try:
            with pytest.raises((PeerIncompatibleError, PeerUnreachableError)):
                query_peers(HOST, port, LONG_S / 10)
        finally:
            with context.socket(zmq.DEALER) as last:
                last.setsockopt(zmq.IDENTITY, b"over")
                last.connect(f"tcp://{HOST}:{port}")
                last.send(b"")
                answering.result()
            listener.close()


def test_connections_that_end_are_not_counted_any_more(channel: SideChannel) -> None:
    for _ in range(50):
        with socket.create_connection((HOST, channel.port), LONG_S) as client:
            client.sendall(os.urandom(100))
        assert query_peers(HOST, channel.port, LONG_S) == HELLO
    eventually(lambda: channel.counters()["connections"] == 0)


def _answers(port: int) -> bool:
    try:
        return query_peers(HOST, port, LONG_S / 10) == HELLO
    except (PeerUnreachableError, PeerIncompatibleError):  # hung up on, again and again
        return False


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1"])
def test_it_listens_on_the_configured_address_alone(host: str) -> None:
    side = SideChannel(host, 0, dict, HELLO)
    side.start()
    try:
        listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        addresses = re.findall(rf": ([0-9A-F]+):{side.port:04X} [0-9A-F:]+ 0A", listening)
        assert addresses
        assert all(int(address, 16) != 0 for address in addresses)
    finally:
        side.stop()


def test_a_cancel_reaches_the_engine() -> None:
    told: list[str] = []
    side = SideChannel(HOST, 0, dict, HELLO, cancel=told.append)
    side.start()
    try:
        cancel_transfer(HOST, side.port, "t", LONG_S)
        assert told == ["t"]
        with pytest.raises(PeerIncompatibleError, match="unknown question"):
            cancel_transfer(HOST, side.port, "", LONG_S)
    finally:
        side.stop()


def test_a_rank_takes_no_cancel(channel: SideChannel) -> None:
    with pytest.raises(PeerIncompatibleError, match="unknown question"):
        cancel_transfer(HOST, channel.port, "t", LONG_S)


# --- with an auth key -------------------------------------------------------------------------

KEY = AuthKey(b"the key of this deployment")
OTHER_KEY = AuthKey(b"the key of another one")


@pytest.fixture
def guarded() -> Iterator[tuple[SideChannel, list[str]]]:
    told: list[str] = []
    side = SideChannel(HOST, 0, lambda: {"free": 1}, HELLO, auth=KEY, cancel=told.append)
    side.start()
    yield side, told
    side.stop()


Guarded = tuple[SideChannel, list[str]]


def test_who_holds_the_key_is_served_again_and_again(guarded: Guarded) -> None:
    side, told = guarded
    for _ in range(3):
        assert query_peers(HOST, side.port, LONG_S, KEY) == HELLO
        assert query_stats(HOST, side.port, LONG_S, KEY) == {"free": 1}
    cancel_transfer(HOST, side.port, "t", LONG_S, KEY)
    assert told == ["t"]
    side.stop()
    again = SideChannel(HOST, side.port, dict, HELLO, auth=KEY)
    again.start()
    try:
        assert query_peers(HOST, side.port, LONG_S, KEY) == HELLO
    finally:
        again.stop()


@pytest.mark.parametrize("auth", [None, OTHER_KEY], ids=["no key", "another key"])
def test_a_stranger_gets_nothing_starts_nothing_and_is_counted(
    guarded: Guarded, auth: AuthKey | None
) -> None:
    side, told = guarded
    asks: list[Callable[[], object]] = [
        lambda: query_peers(HOST, side.port, 100 * LONG_S, auth),
        lambda: query_stats(HOST, side.port, 100 * LONG_S, auth),
        lambda: cancel_transfer(HOST, side.port, "t", 100 * LONG_S, auth),
    ]
    for ask in asks:
        with pytest.raises(PeerIncompatibleError, match="wrong or missing auth key"):
            ask()
    assert not told
    eventually(lambda: side.counters()["refused"] >= 3)
    assert side.counters()["questions"] == 0
    assert query_peers(HOST, side.port, LONG_S, KEY) == HELLO


def test_a_key_on_the_asking_side_alone(channel: SideChannel) -> None:
    with pytest.raises(PeerIncompatibleError, match="wrong or missing auth key"):
        query_peers(HOST, channel.port, 100 * LONG_S, KEY)
    assert query_peers(HOST, channel.port, LONG_S) == HELLO


def test_the_right_listener_but_a_key_pair_of_ones_own(guarded: Guarded) -> None:
    """Who has found out the listener's public key has still not the key."""
    side, _ = guarded
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        KEY.guard_client(client)
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.connect(f"tcp://{HOST}:{side.port}")
        client.send_multipart([b"", msgspec.msgpack.encode(Question("hello"))])
        eventually(lambda: side.counters()["refused"] >= 1)  # it tries again and again
        assert not client.poll(0)
    assert side.counters()["questions"] == 0


def test_bytes_of_another_protocol_at_a_guarded_listener(guarded: Guarded) -> None:
    side, _ = guarded
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"", b"\xff" + b"\x00" * 63):
        with socket.create_connection((HOST, side.port), LONG_S) as plain:
            plain.sendall(data)
    assert query_peers(HOST, side.port, LONG_S, KEY) == HELLO
