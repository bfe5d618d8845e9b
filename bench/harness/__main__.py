"""Starts a pair, sends a mixed load, compares with a plain engine: a quick check by hand.

``python -m bench.harness --connector kvpush --count 20`` (or ``kvpush-pull``, ``stock-push``,
``stock-pull``, ``module:Class``). With ``--serve`` the pair stays up until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import typer

from bench.harness.client import Answer, Client, Request
from bench.harness.equality import differences
from bench.harness.pair import Pair, PairSpec
from bench.harness.servers import connector_named, fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE, make_model
from bench.harness.workload import mixed


async def _plain(url: str, requests: list[Request], at_once: int) -> list[Answer]:
    async with Client() as client:
        return await client.complete_all(url, requests, at_once=at_once)


def main(
    connector: Annotated[
        str, typer.Option(help="kvpush, kvpush-pull, stock-push, stock-pull, module:Class")
    ] = "kvpush",
    count: Annotated[int, typer.Option(help="requests")] = 20,
    longest: Annotated[int, typer.Option(help="tokens of the longest prompt")] = 1500,
    at_once: Annotated[int, typer.Option(help="requests in flight")] = 8,
    how: Annotated[str, typer.Option(help="both, sequence, request-id, router")] = "sequence",
    extra: Annotated[str, typer.Option(help="kv_connector_extra_config, JSON")] = "{}",
    chunk: Annotated[int, typer.Option(help="max-num-batched-tokens, 0: vLLM's own")] = 0,
    rounds: Annotated[int, typer.Option(help="times the load is sent")] = 1,
    limit_s: Annotated[float, typer.Option(help="time for one request")] = 60.0,
    serve: Annotated[bool, typer.Option(help="stay up and print the addresses")] = False,
    debug: Annotated[bool, typer.Option(help="VLLM_LOGGING_LEVEL=DEBUG")] = False,
) -> None:
    """Start prefill, decode and plain engines and compare their answers."""
    logs = fresh_logs(DEFAULT_CACHE / "harness-logs")
    print("logs:", logs)
    base = {
        "max_num_batched_tokens": chunk or None,
        "env": {"VLLM_LOGGING_LEVEL": "DEBUG"} if debug else {},
    }
    spec = PairSpec(
        make_model(),
        connector_named(connector).with_extra(**json.loads(extra)),
        base=base,
        router=how == "router",
        plain=True,
    )
    begin = time.monotonic()
    with Pair.start(spec, logs) as pair:
        print(f"healthy after {time.monotonic() - begin:.0f} s")
        bad = 0
        requests = mixed(count, longest=longest)
        assert pair.plain is not None
        expected = asyncio.run(_plain(pair.plain.url, requests, at_once))
        for number in range(rounds):
            begin = time.monotonic()
            got = asyncio.run(pair.send_all(requests, at_once=at_once, how=how, limit_s=limit_s))
            found = differences(requests, expected, got)
            bad += len(found)
            print(
                f"round {number}: {count - len(found)} of {count} equal "
                f"in {time.monotonic() - begin:.1f} s",
                *found[:10],
                sep="\n  ",
            )
        if spec.connector.module_path == "kvpush.vllm":
            pair.wait_at_rest()
            print("at rest", pair.counters())
        if serve:
            _serve(pair)
    raise typer.Exit(1 if bad else 0)


def _serve(pair: Pair) -> None:
    for engine in [*pair.engines, *([pair.plain] if pair.plain else [])]:
        print(f"{engine.name}: {engine.url} side channel {engine.side_port} pid {engine.pid}")
    if pair.router is not None:
        print(f"router: {pair.router.url}")
    print("Ctrl-C ends them")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
