"""What an engine without HTTP is made of; plain values that travel to its process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURE = "TimedForCausalLM"


@dataclass(frozen=True)
class ModelSettings:
    """A model that only takes time. The defaults behave like an accelerator of some size.

    With `stamp` it writes a pattern of (prompt so far, position, layer) into the KV it would
    compute, and checks the pattern of what it would read: "all" of it in every step, or "sampled"
    (everything once when it is new to this engine, then one block of each request per step).
    """

    layers: int = 64
    kv_heads: int = 1
    head_dim: int = 32
    vocab_size: int = 1024
    max_model_len: int = 32768
    dtype: str = "bfloat16"
    prefill_us: float = 6.0
    step_ms: float = 7.0
    stamp: str = ""


@dataclass(frozen=True)
class ConnectorSettings:
    """Which KV connector an engine loads."""

    name: str
    module_path: str | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"


KVPUSH = ConnectorSettings("KvPushConnector", "kvpush.vllm")
KVPUSH_PULL = ConnectorSettings("KvPullConnector", "kvpush.vllm")
STOCK_PUSH = ConnectorSettings("NixlPushConnector")
STOCK_PULL = ConnectorSettings("NixlConnector")


@dataclass(frozen=True)
class EngineSettings:
    """One engine. `side_port` is where its connector meets others; 0 without a connector."""

    name: str
    model: ModelSettings = ModelSettings()
    connector: ConnectorSettings | None = None
    role: str = "kv_both"
    side_port: int = 0
    block_size: int = 128
    num_blocks: int = 1024
    max_num_batched_tokens: int = 32768
    max_num_seqs: int = 128
    prefix_caching: bool = False
    time_hooks: bool = False
    # Its pages are there from the start, as an accelerator's memory is.
    resident_cache: bool = False
    record_blocks: bool = False
    time_stages: bool = False
    seed: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def write_config(settings: ModelSettings, folder: Path) -> Path:
    """Write the model's config.json: all that vLLM reads of it from disk."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": settings.kv_heads * settings.head_dim,
        "intermediate_size": settings.head_dim,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.kv_heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.max_model_len,
        "torch_dtype": settings.dtype,
        "bos_token_id": settings.vocab_size - 2,
        "eos_token_id": settings.vocab_size - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
