"""Engines that are killed or stopped in the middle of a load, and come back.

The other engine stays healthy, every request ends in time, what is asked afterwards works, and
no byte is wrong: every context is checked in every step, and blocks are short, so that whatever
is written late hits somebody.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator

import pytest

from bench.engines.pair import Pair
from tests.vllm.stamped import IN_FLIGHT, Load, require_right_stamps, start, wait_at_rest

DEADLINE_S = 6.0
TIMES = {
    "receive_deadline_s": DEADLINE_S,
    "offer_ttl_s": DEADLINE_S,
    "grant_ttl_s": 1.5 * DEADLINE_S,
    "keepalive_s": 0.2,
    "peer_timeout_s": 2.0,
    "fence_margin_s": 0.5,
    "resend_s": 0.5,
    "revoke_patience_s": 2.0,
    "hello_timeout_s": 5.0,
    "discovery_timeout_s": 5.0,
    "retry_backoff_s": 0.1,
}
# The longest way to an end: deadline, REVOKE unanswered, fence.
LONGEST_S = DEADLINE_S + 2.0 + 2.0 + 0.5
# That, and the steps of engines on a machine that does much else.
END_LIMIT_S = LONGEST_S + 30.0


@pytest.fixture(scope="module")
def running() -> Iterator[list[Pair]]:
    """One pair for the module, in a list: a test that can't go on with it replaces it."""
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.stop()


@pytest.fixture
def pair(running: list[Pair], request: pytest.FixtureRequest) -> Iterator[Pair]:
    if not running:
        running.append(start("faults", **TIMES))
    failed_before = request.session.testsfailed
    yield running[0]
    if request.session.testsfailed > failed_before:
        running.pop().stop()


def crash(pair: Pair, load: Load, side: str, draw: random.Random) -> None:
    """Kill an engine in mid load, go on while it is down, and start it again."""
    load.run(IN_FLIGHT + draw.randrange(20))
    until = time.monotonic() + draw.random() * 0.3
    while time.monotonic() < until:
        pair.pump(0.005)
    require_right_stamps(pair)
    victim = pair.prefill if side == "prefill" else pair.decode
    assert victim is not None
    pair.kill(victim)
    load.run(10)
    pair.restart(victim)
    pair.drain(END_LIMIT_S)
    wait_at_rest(pair)
    load.one_that_must_work(END_LIMIT_S)
    load.run(IN_FLIGHT)  # and a whole load again
    pair.drain(END_LIMIT_S)
    wait_at_rest(pair)
    require_right_stamps(pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_is_killed_in_mid_load(pair: Pair, side: str) -> None:
    crash(pair, Load(pair, seed=1), side, random.Random(1))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_is_killed_twenty_times(pair: Pair, side: str, seed: int) -> None:
    crash(pair, Load(pair, seed=100 + seed), side, random.Random(seed))


def fill_decode(pair: Pair, load: Load, prefix: str) -> list[str]:
    """Requests that decode computes itself, enough to use every block of its pool."""
    names = [f"{prefix}-{place}" for place in range(24)]
    for place, name in enumerate(names):
        prompt = [(7 * place + token) % 1000 for token in range(120)]
        load.requests.append(pair.submit(name, prompt, 40, local=True))
    return names


def stop_and_go_on(pair: Pair, seed: int) -> None:
    load = Load(pair, seed)
    load.run(2 * IN_FLIGHT, abort_chance=0.0)
    assert pair.prefill is not None
    stopped = pair.prefill
    stopped.signal(signal.SIGSTOP)
    try:
        # What it has been asked to do and has not done yet comes late, when it wakes.
        for _ in range(IN_FLIGHT):
            load.submit()
        in_flight = list(pair.live.values())
        begin = time.monotonic()
        while not all(request.decode_reason for request in in_flight):
            assert time.monotonic() - begin < END_LIMIT_S, "a decode leg waits for ever"
            pair.pump(0.05)
        while time.monotonic() - begin < LONGEST_S:
            pair.pump(0.05)
        assert not all(request.prefill_reason for request in in_flight)
        # All its blocks belong to others now, and are read in every step.
        fill_decode(pair, load, "others")
        pair.pump(0.05)
    finally:
        stopped.signal(signal.SIGCONT)
    fill_decode(pair, load, "more")
    pair.drain(END_LIMIT_S)
    wait_at_rest(pair)
    require_right_stamps(pair)
    load.one_that_must_work(END_LIMIT_S)
    load.run(IN_FLIGHT)
    pair.drain(END_LIMIT_S)
    wait_at_rest(pair)
    require_right_stamps(pair)


def test_a_prefill_engine_stops_for_longer_than_every_time_out(pair: Pair) -> None:
    stop_and_go_on(pair, seed=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200, 205))
def test_a_prefill_engine_stops_again_and_again(pair: Pair, seed: int) -> None:
    stop_and_go_on(pair, seed)


def tell_to_end(pair: Pair, seed: int) -> None:
    load = Load(pair, seed)
    load.run(2 * IN_FLIGHT, abort_chance=0.0)
    assert pair.prefill is not None
    told = pair.prefill
    mark = pair.decode.log.stat().st_size
    # It finds these when it is told to end, so they can't have been prefilled before.
    told.signal(signal.SIGSTOP)
    for _ in range(IN_FLIGHT):
        load.submit()
    assert pair.terminate(told, END_LIMIT_S) == 0
    pair.drain(END_LIMIT_S)
    wait_at_rest(pair)
    # Nobody had to wait for a time-out: what could not be handed over any more was said so.
    log = pair.decode.log.read_bytes()[mark:].decode()
    reasons = re.findall(r"did not get its KV from \S+: (\w+)", log)
    assert reasons
    assert set(reasons) <= {"producer_aborted", "shutdown", "peer_lost", "peer_unreachable"}
    assert "it said goodbye" in log
    assert "it was silent" not in log
    require_right_stamps(pair)
    pair.restart(told)
    load.one_that_must_work(END_LIMIT_S)
    wait_at_rest(pair)
    require_right_stamps(pair)


def test_a_prefill_engine_that_is_told_to_end_tells_the_decode_engine(pair: Pair) -> None:
    tell_to_end(pair, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(300, 305))
def test_a_prefill_engine_is_told_to_end_again_and_again(pair: Pair, seed: int) -> None:
    tell_to_end(pair, seed)
