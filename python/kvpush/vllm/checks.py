"""What must hold before an engine with this connector serves, checked once at start.

vLLM makes some of these checks for its own connectors by their names; they are made here for this
one. Every refusal says what to change.
"""

from __future__ import annotations

from typing import Any

from kvpush.errors import UnsupportedError
from kvpush.vllm.regions import layer_specs

__all__ = ["check_supported"]


def check_supported(vllm_config: Any, kv_cache_config: Any, *, results_by_request: bool) -> None:
    """Refuse what can't be transferred.

    `results_by_request`: this vLLM takes failed loads by request, not by block.

    Raises:
        UnsupportedError: naming the setting and the way out.
    """
    _check_parallel(vllm_config.parallel_config)
    _check_features(vllm_config)
    if kv_cache_config is None:
        raise UnsupportedError("This vLLM gives its connectors no KV cache configuration.")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 and not results_by_request:
        raise UnsupportedError(
            f"This vLLM can't be told of a failed load for a model with {len(groups)} KV cache "
            "groups. Use a newer vLLM, or --disable-hybrid-kv-cache-manager."
        )
    for layer, (group, spec) in layer_specs(kv_cache_config).items():
        _check_layer(layer, groups[group], spec)


def _check_parallel(parallel: Any) -> None:
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(
                f"{flag} {getattr(parallel, name)} spreads the tokens of a block over ranks, which "
                "kvpush can't transfer. Leave it at 1."
            )


def _check_features(vllm_config: Any) -> None:
    model = vllm_config.model_config
    if getattr(model, "enable_return_routed_experts", False):
        raise UnsupportedError(
            "--enable-return-routed-experts needs data that is not in the KV cache. Leave it out."
        )
    transfer = vllm_config.kv_transfer_config
    platform = str(vllm_config.device_config.device_type)
    if platform in ("cuda", "xpu") and transfer.kv_buffer_device not in (None, platform):
        raise UnsupportedError(
            f"kv_buffer_device is {transfer.kv_buffer_device!r}: kvpush transfers straight from "
            f"and to the KV cache and has no buffers. Set it to {platform!r} or leave it out."
        )


def _check_layer(layer: str, group: Any, spec: Any) -> None:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError(f"Layer {layer} keeps KV outside the device's cache.")
    kinds = {base.__name__ for base in type(spec).__mro__}
    if "MambaSpec" in kinds:
        if getattr(spec, "mamba_cache_mode", "none") != "none":
            raise UnsupportedError(
                f"Layer {layer} keeps several states per request for the prefix cache, which "
                "kvpush can't transfer. Use --no-enable-prefix-caching for this model."
            )
        return
    if "AttentionSpec" not in kinds:
        raise UnsupportedError(
            f"Layer {layer} has a cache of kind {type(spec).__name__}; kvpush transfers "
            "attention layers and Mamba states."
        )
    if getattr(spec, "prefix_replay_tokens", 0):
        raise UnsupportedError(f"Layer {layer} replays a window of its prefix after a load.")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedError(
            f"Layer {layer} stores {spec.tokens_per_state} tokens per state; kvpush transfers "
            "layers that store each token."
        )
