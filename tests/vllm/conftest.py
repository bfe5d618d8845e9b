"""Real servers for the end-to-end tests: one pair at a time, one plain engine for all.

Starting a pair takes most of a minute, so a pair serves every test that asks for it; tests are
sorted by the pair they use, and the next pair replaces the one before. After each test both
engines have to be at rest: free blocks back at the start, every table empty.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.harness.client import Answer, Client, Request
from bench.harness.pair import Pair, PairSpec
from bench.harness.servers import (
    KVPUSH,
    KVPUSH_PULL,
    Connector,
    Engine,
    EngineSpec,
    fresh_logs,
    start_engines,
    stop_all,
)
from bench.harness.tiny_model import DEFAULT_CACHE, make_model
from tests.vllm.waiting import DEADLINE_S

_TIMEOUTS = {
    "receive_deadline_s": DEADLINE_S,
    "offer_ttl_s": DEADLINE_S,
    "grant_ttl_s": 1.5 * DEADLINE_S,
}

_FAIL = Connector(KVPUSH.name, KVPUSH.module_path, _TIMEOUTS, load_failure_policy="fail")
_PULL = Connector(KVPUSH_PULL.name, KVPUSH_PULL.module_path, _TIMEOUTS)

# This model's chunks are small, and all are to be pushed.
_STREAMED = Connector(
    KVPUSH.name,
    KVPUSH.module_path,
    {**_TIMEOUTS, "push_when": "step", "min_push_bytes": 0},
    load_failure_policy="recompute",
)
_AT_END = Connector(
    KVPUSH.name,
    KVPUSH.module_path,
    {**_TIMEOUTS, "push_when": "end"},
    load_failure_policy="recompute",
)

# 48 blocks of 32 are 1,536 tokens: a few requests fill them.
SMALL_POOL_BLOCKS = 48
SMALL_CHUNK_TOKENS = 128

# In the order in which they run.
PAIRS = ("default_pair", "small_pair", "at_end_pair", "pull_pair")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a pair next to each other; leave all other tests where they are."""

    def order(item: pytest.Item) -> tuple[int, str]:
        names = getattr(item, "fixturenames", ())
        place = next((1 + place for place, pair in enumerate(PAIRS) if pair in names), 0)
        callspec = getattr(item, "callspec", None)
        # A parameter that says which engines to start.
        case = callspec.params.get("running") if callspec is not None else None
        return place, getattr(case, "name", "")

    items.sort(key=order)


class Fleet:
    """The pair that runs now. Asking for another, or for one that has died, starts afresh."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._name = ""
        self._started = 0
        self._pair: Pair | None = None

    def pair(self, name: str, start: PairSpec | Callable[[Path], Pair]) -> Pair:
        broken = self._pair is None or not all(engine.alive() for engine in self._pair.engines)
        if self._pair is None or broken or self._name != name:
            self.stop()
            self._started += 1
            logs = self._logs / f"{self._started}-{name}"
            self._pair = start(logs) if callable(start) else Pair.start(start, logs)
            self._name = name
        return self._pair

    def stop(self) -> None:
        if self._pair is not None:
            self._pair.stop()
            self._pair = None


class Reference:
    """A plain engine's answers, each asked for once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[str, Answer] = {}

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the plain engine's answers, in the requests' order."""
        missing = {repr(request): request for request in requests}
        for key in self._known:
            missing.pop(key, None)
        fresh = asyncio.run(self._ask(list(missing.values())))
        self._known.update(zip(missing, fresh, strict=True))
        return [self._known[repr(request)] for request in requests]

    async def _ask(self, requests: Sequence[Request]) -> list[Answer]:
        async with Client() as client:
            return await client.complete_all(self.engine.url, requests, at_once=16)


@pytest.fixture(scope="session")
def model() -> Path:
    return make_model()


@pytest.fixture(scope="session")
def server_logs() -> Path:
    return fresh_logs(DEFAULT_CACHE / "test-logs")


@pytest.fixture(scope="session")
def fleet(server_logs: Path) -> Iterator[Fleet]:
    fleet = Fleet(server_logs)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def reference(model: Path, server_logs: Path) -> Iterator[Reference]:
    engines = start_engines([EngineSpec(model, "plain")], server_logs)
    yield Reference(engines[0])
    stop_all(engines)


def _checked(pair: Pair) -> Iterator[Pair]:
    """Lend a pair to one test; its servers must be alive and at rest afterwards."""
    yield pair
    for engine in pair.engines:
        assert engine.alive(), f"{engine.name} died{engine.tail()}"
    pair.wait_at_rest()


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auth") / "key"
    path.write_text(secrets.token_hex())
    path.chmod(0o600)
    return path


@pytest.fixture
def default_pair(fleet: Fleet, model: Path, key_file: Path) -> Iterator[Pair]:
    """Two prefill engines, one decode engine and the router, with an auth key.

    Failed loads fail the request.
    """
    connector = _FAIL.with_extra(auth_key_file=str(key_file))
    spec = PairSpec(model, connector, producers=2, router=True)
    yield from _checked(fleet.pair("default_pair", spec))


_SMALL = {
    "num_blocks": SMALL_POOL_BLOCKS,
    "max_num_batched_tokens": SMALL_CHUNK_TOKENS,
    "max_model_len": 1024,
}


@pytest.fixture
def small_pair(fleet: Fleet, model: Path) -> Iterator[Pair]:
    """Few blocks and small prefill chunks on both sides, each of which is pushed.

    Failed loads are recomputed.
    """
    yield from _checked(fleet.pair("small_pair", PairSpec(model, _STREAMED, base=_SMALL)))


@pytest.fixture
def at_end_pair(fleet: Fleet, model: Path) -> Iterator[Pair]:
    """The same, but prefills are pushed at their end."""
    yield from _checked(fleet.pair("at_end_pair", PairSpec(model, _AT_END, base=_SMALL)))


@pytest.fixture
def pull_pair(fleet: Fleet, model: Path) -> Iterator[Pair]:
    """A prefill and a decode engine that reads; failed loads fail the request."""
    yield from _checked(fleet.pair("pull_pair", PairSpec(model, _PULL)))
