"""Engines of different shape: KV from either to the other, and equal tokens.

Both engines of a case can prefill and decode, so that one start serves both directions. What is
expected comes from the decoding engine itself, asked without a transfer and under a cache salt of
its own; that the KV came over the wire shows in the counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness import tiny_model
from bench.harness.client import Answer, Client, Request
from bench.harness.equality import require_equal
from bench.harness.pair import Pair, PairSpec
from bench.harness.servers import KVPUSH, Engine, EngineSpec, start_engines
from bench.harness.tiny_model import ModelSpec, make_model
from bench.harness.workload import mixed, tokens

# Tensor-parallel ranks wait for each other by spinning: where cores are few and busy, a step takes
# seconds. How long anything may take is not what is tested here.
_LIMIT_S = 300
_MEETING_LIMIT_S = 60
_CONNECTOR = KVPUSH.with_extra(
    receive_deadline_s=_LIMIT_S,
    offer_ttl_s=_LIMIT_S,
    grant_ttl_s=1.5 * _LIMIT_S,
    discovery_timeout_s=_MEETING_LIMIT_S,
    hello_timeout_s=_MEETING_LIMIT_S,
    peer_timeout_s=_MEETING_LIMIT_S,
)

_COMMON: Mapping[str, Any] = {"num_blocks": 512, "max_model_len": 2048}

_NO_CACHE = {"prefix_caching": False}

# vLLM's CPU runner allocates what pipeline stages hand on only while it warms up for a compiler.
_STAGES = {
    "extra_args": (
        "--pipeline-parallel-size",
        "2",
        "--no-enforce-eager",
        "--compilation-config",
        '{"mode": 2, "backend": "eager"}',
    )
}

# The CPU kernel of rotary embeddings is wrong on what MLA hands it, a slice of each head: a prompt
# then has other values in a batch than alone. Its PyTorch form is right.
_MLA: Mapping[str, Any] = {
    "block_size": 16,
    "extra_args": ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
}


@dataclass(frozen=True)
class Case:
    """A model, and how the two engines that run it differ."""

    name: str
    model: ModelSpec
    first: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)

    def start(self, logs: Path) -> Pair:
        model = make_model(self.model)
        specs = [
            EngineSpec(model, name, "kv_both", _CONNECTOR, **{**_COMMON, **more})
            for name, more in (("first", self.first), ("second", self.second))
        ]
        first, second = start_engines(specs, logs)
        pair = Pair(PairSpec(model, _CONNECTOR), [], None)
        pair.producers, pair.consumers = [first], [second]
        pair.remember_free_blocks()
        return pair


WINDOW = 80

WINDOWED = Case("window", tiny_model.gemma3(window=WINDOW), {"max_num_batched_tokens": 128})
CORE = [
    Case(
        "tp-2-block-32-with-tp-1-block-64",
        tiny_model.qwen3(),
        {"tensor_parallel": 2},
        {"block_size": 64},
    ),
    WINDOWED,
]
SOAK = [
    Case("one-head-on-tp-2", tiny_model.qwen3(kv_heads=1), {"tensor_parallel": 2}),
    Case("pp-2-with-block-96", tiny_model.qwen3(), _STAGES, {"block_size": 96}),
    Case("latent-on-tp-2", tiny_model.deepseek_v2(), {**_MLA, "tensor_parallel": 2}, _MLA),
    Case("state", tiny_model.granite_hybrid(), _NO_CACHE, _NO_CACHE),
]


def over(cases: Sequence[Case], soak: Sequence[Case] = ()) -> pytest.MarkDecorator:
    """Run a test over these cases; tests that share one run one after the other, on its engines."""
    params = [pytest.param(case, id=case.name) for case in cases]
    params += [pytest.param(case, id=case.name, marks=pytest.mark.soak) for case in soak]
    return pytest.mark.parametrize("running", params, indirect=True)


@pytest.fixture
def running(request, fleet) -> Pair:
    """The engines of one case."""
    case: Case = request.param
    pair: Pair = fleet.pair(case.name, case.start)
    return pair


@pytest.fixture(params=["there", "back"])
def ends(request, running) -> Iterator[Pair]:
    """The engines of a case as producer and consumer in one order or the other."""
    pair = running
    first, second = sorted(pair.engines, key=lambda engine: engine.name)
    producer, consumer = (first, second) if request.param == "there" else (second, first)
    pair.producers, pair.consumers = [producer], [consumer]
    yield pair
    for engine in pair.engines:
        assert engine.alive(), f"{engine.name} died{engine.tail()}"
    pair.wait_at_rest()


async def _alone(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """What the engine answers with no transfer, and without what one left in its cache."""
    salted = [replace(request, extra={"cache_salt": "alone"}) for request in requests]
    async with Client(_LIMIT_S) as client:
        return await client.complete_all(engine.url, salted, at_once=16)


def require_equal_after_transfer(pair: Pair, requests: Sequence[Request]) -> None:
    """Send the requests over the pair; each must be loaded, and its tokens be the right ones."""
    (producer,), (consumer,) = pair.producers, pair.consumers
    pair.wait_at_rest()
    before = pair.counters([consumer])
    written = pair.counters([producer])["bytes_written"]
    expected = asyncio.run(_alone(consumer, requests))
    answers = {tuple(answer.token_ids) for answer in expected}
    assert len(answers) == len(requests), "a model whose answers say nothing of its prompts"
    got = asyncio.run(pair.send_all(requests, at_once=8, limit_s=_LIMIT_S))
    require_equal(requests, expected, got)
    pair.wait_at_rest()
    after = pair.counters([consumer])
    ranks = len(pair.stats(consumer)["workers"])
    received = after["transfers_received"] - before["transfers_received"]
    assert received == ranks * len(requests)
    assert after["transfers_failed"] == before["transfers_failed"]
    assert pair.counters([producer])["bytes_written"] > written


@over(CORE, SOAK)
def test_tokens_are_those_of_one_engine(ends, request):
    pair = ends
    # Each direction has prompts of its own: nothing may be in a cache from the other's.
    seed = 21 + sum(map(ord, request.node.callspec.id))
    require_equal_after_transfer(
        pair, mixed(10, longest=1200, max_tokens=(8, 16), sharing=0.0, seed=seed)
    )


@over([WINDOWED])
def test_every_length_around_a_window_and_its_blocks(ends, request):
    """The decode engine needs one token of the window more than a prefill of the whole keeps."""
    pair = ends
    base = 1000 * (1 + sum(map(ord, request.node.callspec.id)))
    lengths = [*range(2, 6), *range(WINDOW - 2, WINDOW + 3), *range(165, 200), *range(330, 340)]
    requests = [Request(tokens(length, seed=base + length), 12) for length in lengths]
    require_equal_after_transfer(pair, requests)


@over(CORE)
def test_a_prefix_in_the_decode_engine_is_not_sent_again(ends, request):
    pair = ends
    base = 77 + sum(map(ord, request.node.callspec.id))
    prompt = tokens(640, seed=base)
    first = [Request(prompt[:400], 8)]
    require_equal_after_transfer(pair, first)
    longer = [Request([*prompt[:400], *tokens(240, seed=base + at)], 8) for at in range(1, 4)]
    require_equal_after_transfer(pair, longer)
