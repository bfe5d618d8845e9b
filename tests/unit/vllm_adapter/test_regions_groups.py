"""Models whose groups forget (windows, states): their regions, and what the scheduler says."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout")

from kvpush._core import CopyPlanner, Region, assign_writers, validate_region  # noqa: E402
from kvpush.config import load_config  # noqa: E402
from kvpush.errors import UnsupportedError  # noqa: E402
from kvpush.vllm.checks import check_supported  # noqa: E402
from kvpush.vllm.factory import make_scheduler_facts  # noqa: E402
from kvpush.vllm.regions import describe_caches  # noqa: E402
from kvpush.vllm.scheduler import GroupShape, SchedulerSide  # noqa: E402
from tests.unit.vllm_adapter.fakes import (  # noqa: E402
    BLOCK,
    consume,
    make_request,
    produce,
    scheduler_facts,
)

BLOCKS = 6
LAYERS = ("mamba.0", "mamba.1")
STATE = GroupShape(2048, state=True)
WINDOW = GroupShape(BLOCK, window=True)


def state_spec(**more: Any) -> Any:
    values: dict[str, Any] = {
        "block_size": 2048,
        "shapes": ((3, 8), (2, 4, 4)),
        "dtypes": (torch.float32, torch.float32),
        "page_size_padded": 1024,
    }
    return interface.MambaSpec(**{**values, **more})


def state_side(layout: str, spec: Any) -> tuple[Any, list[Region]]:
    """The pages as vLLM lays them out, and their regions."""
    page, outer = spec.page_size_bytes, layout.startswith("B")
    raw = torch.zeros(BLOCKS * len(LAYERS) * page, dtype=torch.int8)
    place = interface.KVCacheTensor(
        size=raw.numel(),
        layers=list(LAYERS),
        layer_stride=page if outer else page * BLOCKS,
        block_stride=page * len(LAYERS) if outer else page,
    )
    views = interface.create_kv_cache_views(
        raw, spec, BLOCKS, layouts.KVCacheLayout[layout], place, None
    )
    group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=spec)
    made = describe_caches(
        dict(zip(LAYERS, views, strict=True)),
        SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]),
        total_heads=2,
        tp_rank=0,
        tp_size=1,
    )
    return raw.view(-1), list(made.regions)


@pytest.mark.parametrize("source", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("sink", ["LBNHC", "BLHNC"])
def test_states_are_copied_whole_and_alone(source: str, sink: str) -> None:
    memory, regions = state_side(source, state_spec())
    target, remote = state_side(sink, state_spec())
    memory.random_(1, 100)
    for region in regions:
        validate_region(region)
        assert (region.kind, region.state_bytes) == ("state", (3 * 8 + 2 * 4 * 4) * 4)
    ((pairs,),) = assign_writers([regions], [remote])
    planner = CopyPlanner(regions, remote, pairs, True)
    assert planner.plan((0, 39), [(0, [3])], [(0, [5])], include_state=False).bytes == 0
    plan = planner.plan((0, 39), [(0, [3])], [(0, [5])])
    for local, address, length in plan.runs.tolist():
        ctypes.memmove(address, local, length)
    size = regions[0].state_bytes
    for here, there in zip(regions, remote, strict=True):
        got = ctypes.string_at(there.base + 5 * there.block_stride, size)
        assert got == ctypes.string_at(here.base + 3 * here.block_stride, size)
    assert int((target != 0).sum()) == plan.bytes == len(LAYERS) * size


def test_states_of_another_kind_are_refused() -> None:
    _, regions = state_side("LBHNC", state_spec())
    _, remote = state_side("LBHNC", state_spec(dtypes=(torch.bfloat16, torch.float32)))
    with pytest.raises(ValueError, match=r"float32\+float32.*bfloat16\+float32"):
        assign_writers([regions], [remote])


def test_a_state_tensor_that_does_not_fit_is_refused() -> None:
    group = SimpleNamespace(layer_names=["mamba.0"], kv_cache_spec=state_spec())
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
    tensor = torch.zeros((BLOCKS, 1, 1, 64), dtype=torch.int8)
    with pytest.raises(UnsupportedError, match=r"mamba\.0: a state tensor"):
        describe_caches({"mamba.0": tensor}, config, total_heads=2, tp_rank=0, tp_size=1)


def test_states_kept_for_the_prefix_cache_are_refused() -> None:
    group = SimpleNamespace(
        layer_names=["mamba.0"], kv_cache_spec=state_spec(mamba_cache_mode="align")
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu"),
    )
    caches = SimpleNamespace(kv_cache_groups=[group])
    with pytest.raises(UnsupportedError, match="--no-enable-prefix-caching"):
        check_supported(config, caches, results_by_request=True)
    group.kv_cache_spec = state_spec()
    check_supported(config, caches, results_by_request=True)


def test_groups_are_known_by_their_specifications() -> None:
    common = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    specs = [
        interface.FullAttentionSpec(**common),
        # Without the hybrid manager a windowed layer keeps everything.
        interface.FullAttentionSpec(**common, sliding_window=64),
        interface.SlidingWindowSpec(**common, sliding_window=64),
        interface.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64),
        state_spec(),
    ]
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=[], kv_cache_spec=spec) for spec in specs]
    )
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", is_kv_producer=True, is_kv_consumer=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
        ),
    )
    facts = make_scheduler_facts(vllm_config, config, load_config({}), "push")
    kinds = [(group.window, group.state) for group in facts.groups]
    assert kinds == [(False, False)] * 2 + [(True, False)] * 2 + [(False, True)]


def long_request(tokens: int, params: object, request_id: str = "a") -> Any:
    return make_request(
        request_id, tokens=tokens, params=params, _all_token_ids=list(range(tokens)), max_tokens=8
    )


@pytest.mark.parametrize("forgetful", [STATE, WINDOW])
def test_a_prefill_stops_before_the_token_that_is_computed_again(forgetful: GroupShape) -> None:
    side = SchedulerSide(scheduler_facts(groups=(GroupShape(BLOCK), forgetful)))
    there, here = long_request(49, produce(), "there"), long_request(49, consume(), "here")
    side.new_request(there)
    assert (there.num_prompt_tokens, len(there.prompt_token_ids)) == (48, 48)
    assert (len(there._all_token_ids), there.max_tokens) == (48, 1)
    side.new_request(there)
    assert there.num_prompt_tokens == 48, "only once"
    side.new_request(here)
    assert side.matched_tokens(here, 0) == (48, True)
    blocks = [[1, 2, 3], [7] if forgetful.state else [0, 2, 3]]
    side.allocated(here, lambda: blocks, 48)
    there.status.name, there.num_computed_tokens = "FINISHED_LENGTH_CAPPED", 48
    assert side.finished(there, blocks)[0]
    orders = side.take_orders()
    (offer,), (grant,) = orders.offers, orders.grants
    assert (offer.fingerprint, offer.watermark) == (grant.fingerprint, 48)
    assert offer.blocks == grant.blocks
    assert offer.blocks[1] == ((0, [7]) if forgetful.state else (0, [-1, 2, 3]))


def test_a_state_that_has_gone_too_far_back_is_not_offered() -> None:
    side = SchedulerSide(scheduler_facts(groups=(GroupShape(BLOCK), STATE)))
    request = long_request(49, produce())
    side.new_request(request)
    request.status.name, request.num_computed_tokens = "FINISHED_LENGTH_CAPPED", 47
    assert not side.finished(request, [[1, 2, 3], [7]])[0]
    (withdrawal,) = side.take_orders().withdrawals
    assert withdrawal.reason == "producer_short"


def test_full_attention_computes_the_whole_prompt() -> None:
    side = SchedulerSide(scheduler_facts())
    request = long_request(49, produce())
    side.new_request(request)
    assert (request.num_prompt_tokens, request.max_tokens) == (49, 8)
