"""kvpush: pushes each request's KV cache from a prefill engine into a decode engine of vLLM.

Importing this package loads neither vLLM nor NIXL nor torch. The parts:

* `kvpush.config` and `kvpush.errors`: what a deployment sets, and what may go wrong.
* `kvpush.vllm`: the connector; the only part that imports vLLM.
* `kvpush.proxy`: the router in front of prefill and decode engines.
* `kvpush.cli`: the command `kvpush`.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__: str = version("kvpush")
