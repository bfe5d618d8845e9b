"""A tiny real model, made on the spot and kept in a cache folder.

Its weights are random, which is enough to prove a KV transfer only if the output depends on every
part of the prompt's KV. Two things make it so: weights large enough that the logits are far apart
(no near-ties that two batch shapes could break differently), and query/key norms large enough that
attention picks out single tokens instead of averaging over all of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CACHE = REPO_ROOT / ".cache" / "kvpush"

# Part of the cache key: raise it when the recipe below changes.
_RECIPE_VERSION = 1

# Texts for the tokenizer: files every Python installation has.
_CORPUS_MODULES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py")

_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['content'] }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class ModelSpec:
    """What to make: a transformers model type, its config fields, and how to draw weights.

    ``scaled`` multiplies every parameter whose name ends with the key; ``filled`` sets it.
    """

    model_type: str
    fields: Mapping[str, Any]
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    initializer_range: float = 0.3
    scaled: Mapping[str, float] = field(default_factory=dict)
    filled: Mapping[str, float] = field(default_factory=dict)
    seed: int = 20
    dtype: str = "float32"

    def key(self) -> str:
        """Return a folder name that changes whenever the model would."""
        described = json.dumps([_RECIPE_VERSION, asdict(self)], sort_keys=True)
        return f"{self.model_type}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def qwen3(
    *, layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 32
) -> ModelSpec:
    """Describe a dense Qwen3 model; the defaults are the one most tests use."""
    return ModelSpec(
        model_type="qwen3",
        fields={
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": False,
        },
        scaled={"q_norm.weight": 2.5, "k_norm.weight": 2.5},
    )


def gemma3(*, layers: int = 4, window: int = 80, kv_heads: int = 2) -> ModelSpec:
    """Describe a Gemma 3 text model in which every other layer sees a sliding window."""
    kinds = ("sliding_attention", "full_attention")
    return ModelSpec(
        model_type="gemma3_text",
        fields={
            "num_hidden_layers": layers,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": window,
            "tie_word_embeddings": False,
            "layer_types": [kinds[index % len(kinds)] for index in range(layers)],
        },
        # Gemma's norms multiply by one plus the weight.
        filled={"q_norm.weight": 1.5, "k_norm.weight": 1.5},
    )


def deepseek_v2(*, layers: int = 2) -> ModelSpec:
    """Describe a dense DeepSeek V2 model: multi-head latent attention, no experts."""
    return ModelSpec(
        model_type="deepseek_v2",
        fields={
            "num_hidden_layers": layers,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": layers,
            "tie_word_embeddings": False,
        },
        # The latent is wide: without this its values drown everything, and rounding decides.
        scaled={"kv_b_proj.weight": 0.1},
    )


def granite_hybrid(*, layers: int = 4) -> ModelSpec:
    """Describe a Granite 4 model without experts: Mamba 2 layers, and attention in every other."""
    kinds = ("mamba", "attention")
    return ModelSpec(
        model_type="granitemoehybrid",
        fields={
            "num_hidden_layers": layers,
            "hidden_size": 128,
            "intermediate_size": 256,
            "shared_intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": [kinds[index % len(kinds)] for index in range(layers)],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 32,
            "position_embedding_type": "rope",
            "attention_multiplier": 1.0,
            "tie_word_embeddings": False,
        },
    )


def make_model(spec: ModelSpec | None = None, cache: Path = DEFAULT_CACHE) -> Path:
    """Return the folder of the model ``spec`` describes, making it first if it is not there.

    Safe to call from several processes at once: the folder appears whole or not at all.
    """
    spec = qwen3() if spec is None else spec
    target = cache / "models" / spec.key()
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{spec.key()}-", dir=target.parent))
    try:
        _save_tokenizer(spec, scratch)
        _save_weights(spec, scratch)
        scratch.chmod(0o755)  # mkdtemp's own mode shuts other users out
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _corpus() -> Sequence[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [stdlib / name for name in _CORPUS_MODULES if (stdlib / name).exists()]
    if not files:
        raise FileNotFoundError(
            f"no text to train a tokenizer on: none of {_CORPUS_MODULES} in {stdlib}"
        )
    return [str(path) for path in files]


def _save_tokenizer(spec: ModelSpec, folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train(
        list(_corpus()),
        vocab_size=spec.vocab_size,
        min_frequency=2,
        special_tokens=list(_SPECIAL_TOKENS),
        show_progress=False,
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=spec.max_position_embeddings,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _save_weights(spec: ModelSpec, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        spec.model_type,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        initializer_range=spec.initializer_range,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **spec.fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, spec.dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for suffix, factor in spec.scaled.items():
                if name.endswith(suffix):
                    parameter.mul_(factor)
            for suffix, value in spec.filled.items():
                if name.endswith(suffix):
                    parameter.fill_(value)
    model.save_pretrained(folder)
