"""Builds the two sides from vLLM's configuration: everything that reads `vllm_config`."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

from kvpush._core import Engine, EngineConfig
from kvpush._nixl import find_library, prepare_environment
from kvpush.auth import AuthKey
from kvpush.config import Config
from kvpush.side_channel import PROTOCOL
from kvpush.vllm.device_events import CudaEvents, HostEvents, StepEvents
from kvpush.vllm.log import get_logger
from kvpush.vllm.regions import CacheLayout, describe_caches, is_state
from kvpush.vllm.scheduler import GroupShape, SchedulerFacts
from kvpush.vllm.worker import WorkerFacts, WorkerSide

__all__ = ["make_scheduler_facts", "make_worker", "side_channel_address"]

logger = get_logger("factory")

_MAX_TOKENS = (1 << 32) - 1
"""The native engine counts tokens in 32 bits."""


def side_channel_address(vllm_config: Any) -> tuple[str, int]:
    """Where this engine's side channel listens; data-parallel engines count up from the port."""
    from vllm import envs

    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    if index is None:
        index = parallel.data_parallel_rank
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT + index


def make_scheduler_facts(
    vllm_config: Any, kv_cache_config: Any, config: Config, mode: str
) -> SchedulerFacts:
    """What the scheduler side needs."""
    host, port = side_channel_address(vllm_config)
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    return SchedulerFacts(
        engine_id=transfer.engine_id,
        host=host,
        port=port,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        groups=tuple(
            GroupShape(
                tokens_per_block=group.kv_cache_spec.block_size,
                state=_holds_state(group.kv_cache_spec),
                window=_forgets(group.kv_cache_spec),
            )
            for group in kv_cache_config.kv_cache_groups
        ),
        can_produce=transfer.is_kv_producer,
        can_consume=transfer.is_kv_consumer,
        receive_deadline_s=config.receive_deadline_s,
        mode=mode,
        streams=config.push_when == "step" and mode == "push",
    )


def make_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    config: Config,
    mode: str,
    kv_caches: Mapping[str, Any],
    auth: AuthKey | None = None,
) -> tuple[WorkerSide, bytes]:
    """Describe the memory, start the native engine, and tell the engine's ranks of each other.

    Returns the worker side and this rank's description. A collective call: every rank makes it.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    layout = describe_caches(
        kv_caches,
        kv_cache_config,
        total_heads=vllm_config.model_config.get_total_num_kv_heads(),
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        cpu_isa=_cpu_isas(vllm_config, kv_caches),
    )
    session = secrets.randbits(64) | 1
    engine_id = vllm_config.kv_transfer_config.engine_id
    rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
    prepare_environment(config.peer_timeout_s)
    engine = Engine(
        EngineConfig(
            # Anybody on the fabric may read this name, so it must not tell the session.
            agent_name=f"kvpush-{engine_id}-{rank}-{secrets.token_hex(8)}",
            session=session,
            engine_id=engine_id,
            nixl_library=str(find_library()),
            backend=config.backend,
            backend_params=dict(config.backend_params),
            tp_rank=tp.rank_in_group,
            tp_size=tp.world_size,
            pp_rank=pp.rank_in_group,
            pp_size=pp.world_size,
            facts=_facts(vllm_config, config, mode, layout),
            **_pieces(config, layout),
            mode=mode,
            **_tuning(config),
        )
    )
    engine.start(layout.regions, layout.memory)
    _log_layout(layout, rank)
    info = engine.peer_info()
    worker = WorkerSide(
        WorkerFacts(
            engine_id=engine_id,
            rank=rank,
            tokens_per_block=tuple(
                0 if _holds_state(group.kv_cache_spec) else group.kv_cache_spec.block_size
                for group in kv_cache_config.kv_cache_groups
            ),
            windows={
                layer: group.kv_cache_spec.block_size
                for group in kv_cache_config.kv_cache_groups
                if _forgets(group.kv_cache_spec)
                for layer in group.layer_names
            },
            whole_blocks=layout.whole_blocks,
            mode=mode,
            hello_timeout_s=config.hello_timeout_s,
            discovery_timeout_s=config.discovery_timeout_s,
            retry_backoff_s=config.retry_backoff_s,
            drain_s=config.drain_s,
        ),
        engine,
        _gather(info, tp, pp),
        rank,
        _step_events(layout),
        auth,
    )
    return worker, info


def _step_events(layout: CacheLayout) -> StepEvents:
    if all(kind == "host" for _, _, kind, _ in layout.memory):
        return HostEvents()
    import torch

    return CudaEvents(torch.cuda.Event)


def _pieces(config: Config, layout: CacheLayout) -> dict[str, Any]:
    """How a prefill is cut while it runs: at whole blocks, into pieces worth a WRITE."""
    sizes = {region.tokens_per_block for region in layout.regions if region.kind == "attention"}
    token_bytes = sum(
        region.heads * region.components * region.element_bytes
        for region in layout.regions
        if region.kind == "attention"
    )
    return {
        "push_granularity_tokens": math.lcm(*sizes) if config.push_when == "step" else 0,
        "min_push_tokens": min(-(-config.min_push_bytes // max(1, token_bytes)), _MAX_TOKENS),
    }


def _holds_state(spec: Any) -> bool:
    return is_state(_any_of(spec))


def _forgets(spec: Any) -> bool:
    kinds = {base.__name__ for base in type(_any_of(spec)).__mro__}
    return bool(kinds & {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"})


def _any_of(spec: Any) -> Any:
    """A group of layers that differ in size only has one specification for each."""
    specs = getattr(spec, "kv_cache_specs", None)
    return spec if specs is None else next(iter(specs.values()))


def _tuning(config: Config) -> dict[str, Any]:
    """Settings that the native engine takes as they are."""
    names = (
        "offer_ttl_s",
        "grant_ttl_s",
        "keepalive_s",
        "peer_timeout_s",
        "fence_margin_s",
        "resend_s",
        "retry_grace_s",
        "revoke_patience_s",
        "max_batch_descriptors",
        "max_batch_bytes",
        "max_handles_in_flight",
        "max_prepared_blocks",
        "spin_us",
        "busy_poll_us",
        "idle_poll_us",
        "thread_policy",
    )
    return {name: getattr(config, name) for name in names}


def _facts(
    vllm_config: Any, config: Config, mode: str, layout: CacheLayout
) -> list[tuple[str, str]]:
    """What must be equal on both sides.

    What may differ (tensor-parallel size, block size, layout) is in the regions: the planner maps
    it.
    """
    model = vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        ("protocol", str(PROTOCOL)),
        ("mode", mode),
        ("model", config.model_id or str(model.model)),
        ("dtype", dtype),
        ("kv_cache_dtype", dtype if cache_dtype == "auto" else cache_dtype),
        ("kv_heads", str(model.get_total_num_kv_heads())),
        ("head_size", str(model.get_head_size())),
        ("layers", str(model.get_total_num_hidden_layers())),
        ("cache_packing", layout.packing),
    ]


def _cpu_isas(vllm_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, str]:
    """Which variant of the CPU attention each layer runs; empty on accelerators."""
    if any(tensor.device.type != "cpu" for tensor in kv_caches.values()):
        return {}
    layers = vllm_config.compilation_config.static_forward_context
    isas = {name: getattr(layers.get(name), "isa", None) for name in kv_caches}
    return {name: str(isa) for name, isa in isas.items() if isa is not None}


def _gather(info: bytes, tp: Any, pp: Any) -> list[bytes]:
    """Every rank's description, PP-major."""
    import torch

    def over(group: Any, value: Any) -> list[Any]:
        if group.world_size == 1:
            return [value]
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return [blob for stage in over(pp, over(tp, info)) for blob in stage]


def _log_layout(layout: CacheLayout, rank: int) -> None:
    total = sum(length for _, length, _, _ in layout.memory)
    logger.info(
        "Rank %d: %d regions, %.1f MiB of KV cache registered (process %d)",
        rank,
        len(layout.regions),
        total / 2**20,
        os.getpid(),
    )
    for region in layout.regions:
        logger.debug(
            "Region %s: blocks %d of %d B, tokens %d of %d B, heads %d of %d B from %d, "
            "components %d of %d B, element %d B",
            region.layer,
            region.num_blocks,
            region.block_stride,
            region.tokens_per_block,
            region.token_stride,
            region.heads,
            region.head_stride,
            region.first_head,
            region.components,
            region.component_stride,
            region.element_bytes,
        )
