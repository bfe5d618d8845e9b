"""Entry point of `vllm.general_plugins`: makes the connectors known by name."""

from __future__ import annotations

__all__ = ["CONNECTORS", "register"]

CONNECTORS = ("KvPushConnector", "KvPullConnector")


def register() -> None:
    """Register with vLLM's connector factory. vLLM may call it more than once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in CONNECTORS:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvpush.vllm", name)
