"""The vLLM adapter: the only part of kvpush that imports vLLM.

vLLM finds the connectors here, by `"kv_connector_module_path": "kvpush.vllm"` or through the entry
point. NIXL's library is looked for when a worker's engine is made, not on import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpush.vllm.connector import KvPullConnector, KvPushConnector

__all__ = ["KvPullConnector", "KvPushConnector"]


def __getattr__(name: str) -> Any:
    """Import vLLM only when a connector is asked for: plugins load before vLLM is complete."""
    if name in __all__:
        from kvpush.vllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
