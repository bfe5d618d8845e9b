"""Prefill and decode servers that belong together, an optional router, and ways to send requests.

Three ways, because users have three: both legs at once with a transfer id (what kvpush's router
does), one leg after the other handing on what the first returned (the stock example proxies), and
through the router.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bench.harness import client as http
from bench.harness.client import Answer, Client, Request
from bench.harness.servers import (
    HOST,
    KVPUSH,
    Connector,
    Engine,
    EngineSpec,
    Process,
    start_engines,
    start_router,
    stop_all,
)

# Time-outs of the servers under test are seconds; this is several of them.
REST_LIMIT_S = 60.0

_STATS_LIMIT_S = 10.0

# Counters of this prefix are table sizes; every other one is a total or a gauge.
_TABLE_PREFIX = "live_"


@dataclass(frozen=True)
class PairSpec:
    """What to start: a base for every engine, and what differs on either side."""

    model: Path
    connector: Connector = KVPUSH
    producers: int = 1
    consumers: int = 1
    base: Mapping[str, Any] | None = None
    producer: Mapping[str, Any] | None = None
    consumer: Mapping[str, Any] | None = None
    router: bool = False
    plain: bool = False

    @property
    def auth_key_file(self) -> str:
        """The file with the engines' auth key; empty: they have none from a file."""
        return str(self.connector.extra_config.get("auth_key_file", ""))

    def engines(self) -> list[EngineSpec]:
        """Return the engines to start: producers, consumers, then the plain one if wanted."""
        base = dict(self.base or {})

        def make(
            name: str, role: str, count: int, more: Mapping[str, Any] | None
        ) -> list[EngineSpec]:
            fields = {"connector": self.connector, **base, **(more or {})}
            return [
                EngineSpec(self.model, f"{name}{index}", role, **fields) for index in range(count)
            ]

        specs = make("prefill", "kv_producer", self.producers, self.producer)
        specs += make("decode", "kv_consumer", self.consumers, self.consumer)
        if self.plain:
            specs.append(EngineSpec(self.model, "plain"))
        return specs


@dataclass(frozen=True)
class Legs:
    """Both legs' answers of one request."""

    prefill: Answer
    decode: Answer


class Pair:
    """Running servers. Make with ``Pair.start``; end with ``stop`` (or use it as a context)."""

    def __init__(self, spec: PairSpec, engines: Sequence[Engine], router: Process | None) -> None:
        self.spec = spec
        self.router = router
        self.producers = [engine for engine in engines if engine.spec.role == "kv_producer"]
        self.consumers = [engine for engine in engines if engine.spec.role == "kv_consumer"]
        self.plain = next((engine for engine in engines if engine.spec.role is None), None)
        self._free_at_start: dict[str, int] = {}

    @classmethod
    def start(
        cls, spec: PairSpec, logs: Path, on_healthy: Callable[[str], None] | None = None
    ) -> Pair:
        """Start every server of ``spec`` and wait until all are healthy."""
        engines = start_engines(spec.engines(), logs, on_healthy=on_healthy)
        router = None
        try:
            if spec.router:
                router = start_router(
                    [engine for engine in engines if engine.spec.role == "kv_producer"],
                    [engine for engine in engines if engine.spec.role == "kv_consumer"],
                    logs,
                    extra_args=["--auth-key-file", spec.auth_key_file],
                )
                router.wait_healthy()
            pair = cls(spec, engines, router)
            if spec.connector.module_path == "kvpush.vllm":
                pair.remember_free_blocks()
        except BaseException:
            stop_all([*engines, *([router] if router else [])])
            raise
        return pair

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def engines(self) -> list[Engine]:
        """Every prefill and decode engine."""
        return [*self.producers, *self.consumers]

    def stop(self) -> None:
        """Stop every server, the router first."""
        if self.router is not None:
            self.router.stop()
        stop_all([*self.engines, *([self.plain] if self.plain else [])])

    def log_marks(self) -> dict[str, int]:
        """Return the present length of every engine's log."""
        return {engine.name: engine.log_size() for engine in self.engines}

    # --- sending -------------------------------------------------------------------------------

    def decode_params(self, producer: Engine, transfer_id: str) -> dict[str, Any]:
        """Return the decode leg's parameters, complete for kvpush and for the stock connectors."""
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_host": HOST,
            "remote_port": producer.side_port,
        }
        if self.spec.connector.module_path == "kvpush.vllm":
            return params | {"transfer_id": transfer_id}
        return params | {
            "do_remote_decode": False,
            "remote_engine_id": producer.engine_id,
            "remote_request_id": transfer_id,
            "remote_block_ids": [],
            "tp_size": producer.spec.tensor_parallel,
            "pp_size": 1,
        }

    async def prefill_leg(
        self,
        client: Client,
        request: Request,
        producer: Engine,
        *,
        request_id: str,
        params: Any = None,
    ) -> Answer:
        """Send the prefill leg alone: one token, not streamed."""
        if params is None:
            params = {"do_remote_decode": True, "do_remote_prefill": False}
        return await client.complete(
            producer.url,
            replace(request, max_tokens=1),
            request_id=request_id,
            kv_transfer_params=params,
            stream=False,
        )

    async def both_legs(
        self,
        client: Client,
        request: Request,
        producer: Engine | None = None,
        consumer: Engine | None = None,
        *,
        transfer_id: str | None = None,
        with_transfer_id: bool = True,
    ) -> Legs:
        """Send both legs at once.

        With ``with_transfer_id`` off they have only ``X-Request-Id`` in common.
        """
        producer = producer or self.producers[0]
        consumer = consumer or self.consumers[0]
        transfer_id = transfer_id or uuid.uuid4().hex
        prefill: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        decode = self.decode_params(producer, transfer_id)
        if with_transfer_id and "transfer_id" in decode:
            prefill["transfer_id"] = transfer_id
        else:
            decode.pop("transfer_id", None)
        answers = await asyncio.gather(
            self.prefill_leg(client, request, producer, request_id=transfer_id, params=prefill),
            client.complete(
                consumer.url, request, request_id=transfer_id, kv_transfer_params=decode
            ),
        )
        return Legs(*answers)

    async def one_after_the_other(
        self,
        client: Client,
        request: Request,
        producer: Engine | None = None,
        consumer: Engine | None = None,
        *,
        request_id: str | None = None,
    ) -> Legs:
        """Send the prefill leg, then the decode leg with the parameters the first returned."""
        producer = producer or self.producers[0]
        consumer = consumer or self.consumers[0]
        request_id = request_id or uuid.uuid4().hex
        # The fields the stock example proxy sends, empty ones included.
        first = await self.prefill_leg(
            client,
            request,
            producer,
            request_id=request_id,
            params={
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        )
        if not first.ok:
            return Legs(first, first)
        second = await client.complete(
            consumer.url,
            request,
            request_id=request_id,
            kv_transfer_params=first.kv_transfer_params or {},
        )
        return Legs(first, second)

    async def send_all(
        self,
        requests: Sequence[Request],
        *,
        at_once: int | None = None,
        how: str = "both",
        limit_s: float = http.DEFAULT_LIMIT_S,
    ) -> list[Answer]:
        """Send requests over all producers and consumers in turn; return the decode answers.

        ``how``: ``both`` legs at once, ``sequence``, ``request-id`` (both at once without a
        transfer id), or ``router``.
        """
        gate = asyncio.Semaphore(at_once or max(1, len(requests)))
        async with Client(limit_s) as client:

            async def one(index: int, request: Request) -> Answer:
                producer = self.producers[index % len(self.producers)]
                consumer = self.consumers[index % len(self.consumers)]
                async with gate:
                    if how == "router":
                        assert self.router is not None, "this pair has no router"
                        return await client.complete(self.router.url, request)
                    if how == "sequence":
                        legs = await self.one_after_the_other(client, request, producer, consumer)
                    else:
                        legs = await self.both_legs(
                            client, request, producer, consumer, with_transfer_id=how == "both"
                        )
                    return legs.decode

            jobs: list[Awaitable[Answer]] = [
                one(index, request) for index, request in enumerate(requests)
            ]
            return list(await asyncio.gather(*jobs))

    # --- counters ------------------------------------------------------------------------------

    def stats(self, engine: Engine) -> dict[str, Any]:
        """Ask one engine for its scheduler's and workers' counters (kvpush only)."""
        from kvpush.auth import load_auth_key
        from kvpush.side_channel import query_stats

        auth = load_auth_key(self.spec.auth_key_file)
        return dict(query_stats(HOST, engine.side_port, _STATS_LIMIT_S, auth))

    def counters(self, engines: Sequence[Engine] | None = None) -> dict[str, int]:
        """Sum the native counters over the workers of some engines (all of them by default).

        As of each worker's last step: call ``wait_at_rest`` first for those of work just done.
        """
        total: dict[str, int] = {}
        for engine in engines or self.engines:
            for worker in self.stats(engine)["workers"]:
                for name, value in worker.items():
                    if isinstance(value, int) and not isinstance(value, bool):
                        total[name] = total.get(name, 0) + value
        return total

    def remember_free_blocks(self) -> None:
        """Take the present free-block counts as the state of rest."""
        for engine in self.engines:
            self._free_at_start[engine.name] = int(self.stats(engine)["free_blocks"])

    def left_over(self, engine: Engine) -> list[str]:
        """Return what keeps one engine from rest, a line each; empty at rest."""
        stats = self.stats(engine)
        left: list[str] = []
        start = self._free_at_start[engine.name]
        if stats["free_blocks"] != start:
            left.append(f"free_blocks {stats['free_blocks']}, was {start}")
        left += [f"scheduler.{name} {count}" for name, count in stats["scheduler"].items() if count]
        for index, worker in enumerate(stats["workers"]):
            tables = {name: size for name, size in worker.items() if name.startswith(_TABLE_PREFIX)}
            left += [f"workers[{index}].{name} {size}" for name, size in tables.items() if size]
            if not tables:
                left.append(f"workers[{index}] reports no table")
        if not stats["workers"]:
            left.append("no worker reports")
        return [f"{engine.name}: {line}" for line in left]

    def wait_at_rest(
        self, engines: Sequence[Engine] | None = None, limit_s: float = REST_LIMIT_S
    ) -> None:
        """Wait until free blocks are back and every table is empty; raise saying what is left.

        An idle engine runs no step, and workers report in steps, so each round begins with a plain
        request of one token to every engine that is not known to be at rest.
        """
        end = time.monotonic() + limit_s
        waiting = list(engines or self.engines)
        while True:
            asyncio.run(_poke([engine.url for engine in waiting]))
            left = {engine: self.left_over(engine) for engine in waiting}
            waiting = [engine for engine, lines in left.items() if lines]
            if not waiting:
                return
            if time.monotonic() > end:
                lines = "".join(f"\n  {line}" for lines in left.values() for line in lines)
                raise AssertionError(f"not at rest after {limit_s:.0f} s:{lines}")
            time.sleep(0.1)


async def _poke(urls: Sequence[str]) -> None:
    # One block at most, freed at once: it cannot disturb the count for longer than a step or two.
    async with Client(limit_s=http.DEFAULT_LIMIT_S) as client:
        poke = Request([7, 8, 9], max_tokens=1)
        await asyncio.gather(*(client.complete(url, poke, stream=False) for url in urls))
