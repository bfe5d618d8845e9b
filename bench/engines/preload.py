"""Imported once by the fork server: engines then start in seconds instead of a dozen."""

import torch  # noqa: F401
import vllm.engine.arg_utils
import vllm.model_executor.layers.attention
import vllm.model_executor.models
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401
