"""The model that takes time but computes nothing.

Its layers are vLLM's own `Attention` modules, so vLLM allocates a real KV cache for them and
connectors transfer it. The forward pass sleeps, as a host thread does that waits for an
accelerator: the GIL and the core are free meanwhile. Every logit is zero, so greedy decoding gives
token 0 for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry

from bench.engines.settings import ARCHITECTURE, ModelSettings

if TYPE_CHECKING:
    from bench.engines.stamps import Stamper


class TimedForCausalLM(nn.Module):
    """See the module. `settings` and `stamper` are set before and after vLLM makes it."""

    settings = ModelSettings()
    stamper: Stamper | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        model = self.settings
        self.layers = nn.ModuleList(
            Attention(
                model.kv_heads,
                model.head_dim,
                model.head_dim**-0.5,
                num_kv_heads=model.kv_heads,
                cache_config=vllm_config.cache_config,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.layers.{index}.attn".lstrip("."),
            )
            for index in range(model.layers)
        )
        # Loaders want something to load.
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._logits = torch.zeros(0, model.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], 1)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take the time that this batch would take, and stamp meanwhile."""
        del positions, intermediate_tensors, inputs_embeds, kwargs
        begin = time.perf_counter()
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and metadata:
            one = next(iter(metadata.values()))
            if self.stamper is not None:
                self.stamper.step(one)
            self._wait(begin + self._duration_s(one))
        return torch.zeros(input_ids.shape[0], 1)

    def _duration_s(self, metadata: Any) -> float:
        starts = metadata.query_start_loc
        lengths = starts[1:] - starts[:-1]
        prefill = int(lengths[lengths > 1].sum())
        return self.settings.step_ms / 1e3 + prefill * self.settings.prefill_us / 1e6

    @staticmethod
    def _wait(until: float) -> None:
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Zeros, from one buffer: the sampler only reads greedy logits."""
        rows = hidden_states.shape[0]
        if self._logits.shape[0] < rows:
            self._logits = torch.zeros(rows, self.settings.vocab_size)
        return self._logits[:rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        del weights
        return {"weight"}


def register(settings: ModelSettings) -> None:
    """Make this process's vLLM know the model. Call before an engine is made."""
    TimedForCausalLM.settings = settings
    ModelRegistry.register_model(ARCHITECTURE, TimedForCausalLM)
