"""Engines that don't fit are told so when they meet: the field and both values, in one line."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.harness import tiny_model
from bench.harness.client import Client
from bench.harness.equality import require_equal
from bench.harness.pair import Pair, PairSpec
from bench.harness.servers import KVPUSH, EngineSpec, start_engines
from bench.harness.tiny_model import make_model
from bench.harness.workload import distinct
from kvpush._core import Engine, EngineConfig, Region
from kvpush._nixl import find_library, prepare_environment
from kvpush.config import load_config
from kvpush.vllm.factory import _facts

CONNECT_LIMIT_S = 30.0
LAYERS = ("layers.0", "layers.1")


class Side:
    """A native engine over a small cache, with the facts that the adapter takes from vLLM."""

    def __init__(self, names: tuple[str, ...] = LAYERS, element: int = 64, **facts: Any) -> None:
        blocks, tokens, heads = 4, 16, 2
        self.memory = [np.zeros(blocks * tokens * heads * element, np.uint8) for _ in names]
        regions = [
            Region(
                layer=layer,
                dtype="float32",
                base=memory.ctypes.data,
                block_stride=tokens * heads * element,
                num_blocks=blocks,
                tokens_per_block=tokens,
                tokens_per_page=tokens,
                page_stride=tokens * heads * element,
                token_stride=element,
                heads=heads,
                total_heads=heads,
                head_stride=tokens * element,
                element_bytes=element,
            )
            for layer, memory in zip(names, self.memory, strict=True)
        ]
        session = secrets.randbits(64) | 1
        self.engine = Engine(
            EngineConfig(
                agent_name=f"refusal-{session:016x}",
                session=session,
                engine_id=f"{session:x}",
                nixl_library=str(find_library()),
                facts=_facts(*facts_of(**facts)),
            )
        )
        ranges = [(memory.ctypes.data, memory.nbytes, "host", 0) for memory in self.memory]
        self.engine.start(regions, ranges)
        self.info = self.engine.peer_info()

    def meet(self, producer: Side) -> list[int]:
        return self.engine.connect([producer.info], [self.info], 0, CONNECT_LIMIT_S)


def facts_of(**more: Any) -> tuple[Any, Any, str, Any]:
    """Arguments of `_facts`, for a model that differs in what is named."""
    values: dict[str, Any] = {
        "model": "m",
        "dtype": "float32",
        "cache_dtype": "auto",
        "kv_heads": 2,
        "head_size": 8,
        "layers": 2,
        "packing": "",
        "mode": "push",
        **more,
    }
    model = SimpleNamespace(
        model=values["model"],
        dtype=values["dtype"],
        get_total_num_kv_heads=lambda: values["kv_heads"],
        get_head_size=lambda: values["head_size"],
        get_total_num_hidden_layers=lambda: values["layers"],
    )
    config = SimpleNamespace(
        model_config=model, cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"])
    )
    return config, load_config({}), values["mode"], SimpleNamespace(packing=values["packing"])


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    """Makes engines that end with the module."""
    prepare_environment()
    made: list[Side] = []

    def one(**more: Any) -> Side:
        made.append(Side(**more))
        return made[-1]

    yield one
    for side in made:
        side.engine.shutdown(1.0)


@pytest.fixture(scope="module")
def consumer(make: Callable[..., Side]) -> Side:
    return make()


@pytest.mark.parametrize(
    ("other", "field", "values"),
    [
        ({"model": "n"}, "model", ("m", "n")),
        ({"dtype": "bfloat16"}, "dtype", ("float32", "bfloat16")),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype", ("float32", "fp8")),
        ({"kv_heads": 4}, "kv_heads", ("2", "4")),
        ({"head_size": 16}, "head_size", ("8", "16")),
        ({"layers": 3}, "layers", ("2", "3")),
        ({"mode": "pull"}, "mode", ("push", "pull")),
        ({"packing": "amx"}, "cache_packing", ("", "amx")),
        # What the models' facts don't show, the regions do.
        ({"element": 128}, "element_bytes", ("64", "128")),
    ],
)
def test_what_differs_is_named(
    make: Any, consumer: Side, other: Any, field: str, values: tuple[str, str]
) -> None:
    producer = make(**other)
    for here, there in ((consumer, producer), (producer, consumer)):
        with pytest.raises(ValueError, match=field) as refused:
            here.meet(there)
        line = str(refused.value)
        assert "\n" not in line
        assert all(value in line for value in values)
    assert consumer.meet(make()), "the next one is met as ever"


def test_missing_layers_are_named(make: Any, consumer: Side) -> None:
    short = make(names=LAYERS[:1])
    with pytest.raises(ValueError, match=r"layers\.1"):
        consumer.meet(short)
    assert consumer.meet(make())


@pytest.fixture
def trio(fleet, server_logs) -> Iterator[Pair]:
    """A decode engine, a prefill engine that fits and one that has a layer more."""
    fleet.stop()
    fits, longer = make_model(), make_model(tiny_model.qwen3(layers=3))
    # The refused prefill keeps its blocks until its offer expires: nobody can tell it.
    connector = KVPUSH.with_extra(
        model_id="same", offer_ttl_s=20, receive_deadline_s=20, grant_ttl_s=30
    )
    specs = [
        EngineSpec(model, name, role, connector, num_blocks=256)
        for model, name, role in (
            (fits, "fits", "kv_producer"),
            (longer, "longer", "kv_producer"),
            (fits, "decode", "kv_consumer"),
        )
    ]
    engines = start_engines(specs, server_logs / "refusal")
    pair = Pair(PairSpec(fits, connector), engines, None)
    try:
        pair.remember_free_blocks()
        yield pair
    finally:
        pair.stop()


@pytest.mark.soak
def test_engines_that_do_not_fit_live_on(trio: Pair) -> None:
    """The request fails, saying why; both engines serve others, and a pair that fits works."""
    requests = distinct(4, 200)
    (fits, longer), (decode,) = trio.producers, trio.consumers

    async def refuse():
        async with Client() as client:
            return [(await trio.both_legs(client, r, longer, decode)).decode for r in requests]

    async def alone(engine):
        async with Client() as client:
            return await client.complete_all(engine.url, requests)

    mark = decode.log_size()
    assert not any(answer.ok for answer in asyncio.run(refuse()))
    said = [line for line in decode.log_since(mark).splitlines() if "can't be used" in line]
    assert said
    assert all(word in said[0] for word in ("layers", "2", "3", str(longer.side_port)))
    for engine in (longer, fits, decode):
        answers = asyncio.run(alone(engine))
        assert all(answer.ok for answer in answers)
    fresh = distinct(6, 300, seed=8)
    trio.producers = [fits]
    got = asyncio.run(trio.send_all(fresh))
    trio.producers = [fits, longer]
    requests = fresh
    require_equal(fresh, asyncio.run(alone(fits)), got)
    trio.wait_at_rest()
