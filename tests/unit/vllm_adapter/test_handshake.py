from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvpush.errors import PeerIncompatibleError, PeerUnreachableError, SideChannelError
from kvpush.vllm.handshake import (
    PROTOCOL,
    HelloReply,
    SideChannel,
    query_peers,
    query_stats,
)

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
