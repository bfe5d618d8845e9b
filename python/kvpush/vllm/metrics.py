"""Transfer metrics, through vLLM's own classes: its log line and its Prometheus registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpush._core import Event

__all__ = ["KvPushPromMetrics", "KvPushStats"]

_SERIES = ("bytes", "descriptors_before", "descriptors", "plan_s", "post_s", "transfer_s")
"""The figures of one transfer that this rank has written (push) or read (pull), in the order of
`Event.moved`. Times are seconds."""


@dataclass
class KvPushStats(KVConnectorStats):
    """What one or several ranks saw since the last report. `data` is plain and serialisable."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"moved": [], "received": 0, "read": 0, "failed": {}, "refused_clients": 0}

    def record(self, event: Event) -> None:
        """Count how one grant or offer ended."""
        kind = event.kind
        if kind in ("receive_failed", "send_failed"):
            self.record_failure(event.reason)
            return
        if kind == "received":
            self.data["received"] += 1
        elif kind != "sent":
            return
        moved = event.moved
        if moved is not None:
            self.data["moved"].append(moved)
            self.data["read"] += kind == "received"  # pull: it was read here

    def record_received(self, count: int) -> None:
        """Count grants that ended well."""
        self.data["received"] += count

    def record_failure(self, reason: str) -> None:
        """Count a transfer that did not take place."""
        failed = self.data["failed"]
        failed[reason] = failed.get(reason, 0) + 1

    def record_refused_clients(self, count: int) -> None:
        """Count clients of the side channel that had not the right auth key, or none at all."""
        self.data["refused_clients"] += count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's."""
        self.data["moved"].extend(other.data["moved"])
        self.data["received"] += other.data["received"]
        self.data["read"] += other.data["read"]
        self.data["refused_clients"] += other.data["refused_clients"]
        for reason, count in other.data["failed"].items():
            self.data["failed"][reason] = self.data["failed"].get(reason, 0) + count
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        counts = ("moved", "received", "failed", "refused_clients")
        return not any(self.data[name] for name in counts)

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few figures, for vLLM's log line."""
        series = _by_series(self.data)
        moved, read = len(self.data["moved"]), self.data["read"]
        before, after = sum(series["descriptors_before"]), sum(series["descriptors"])
        figures: dict[str, int | float] = {
            "Transfers read" if read else "Transfers sent": moved,
            "Transfers received": self.data["received"],
            "Transfers failed": sum(self.data["failed"].values()),
            "MB read" if read else "MB sent": round(sum(series["bytes"]) / 2**20, 3),
            "Descriptors": after,
            "Descriptors before coalescing": before,
        }
        for name in ("plan_s", "post_s", "transfer_s"):
            values = sorted(series[name])
            label = name.removesuffix("_s")
            figures[f"Mean {label} (ms)"] = round(1e3 * sum(values) / moved, 3) if moved else 0
            figures[f"P90 {label} (ms)"] = round(1e3 * values[int(0.9 * moved)], 3) if moved else 0
        if self.data["refused_clients"]:
            figures["Side channel clients refused"] = self.data["refused_clients"]
        for reason, count in sorted(self.data["failed"].items()):
            figures[f"Failed: {reason}"] = count
        return figures


def _by_series(data: dict[str, Any]) -> dict[str, list[float]]:
    """The figures of all transfers, by name."""
    return {name: [moved[place] for moved in data["moved"]] for place, name in enumerate(_SERIES)}


class KvPushPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        times = [1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
        counts = [float(4**power) for power in range(1, 10)]
        sizes = [float(2**power) for power in range(12, 36, 2)]
        self._histograms = {
            "bytes": self._histogram(
                "bytes_sent", "Bytes of one transfer sent (pull: read).", sizes
            ),
            "descriptors": self._histogram(
                "descriptors", "Descriptors of one transfer, after coalescing.", counts
            ),
            "descriptors_before": self._histogram(
                "descriptors_before_coalescing", "Descriptors of one transfer, before.", counts
            ),
            "plan_s": self._histogram("plan_time_seconds", "Time to plan one transfer.", times),
            "post_s": self._histogram("post_time_seconds", "Time to post one transfer.", times),
            "transfer_s": self._histogram(
                "transfer_time_seconds", "First post to last completion of one transfer.", times
            ),
        }
        self._received = self._per_engine(
            self._counter_cls(
                name="vllm:kvpush_received",
                documentation="Transfers received complete.",
                labelnames=labelnames,
            )
        )
        self._refused_clients = self._per_engine(
            self._counter_cls(
                name="vllm:kvpush_refused_clients",
                documentation="Side channel clients refused: no auth key, or another one.",
                labelnames=labelnames,
            )
        )
        self._failed = self._counter_cls(
            name="vllm:kvpush_failed",
            documentation="Transfers that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {
            index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()
        }

    def _histogram(self, name: str, documentation: str, buckets: list[float]) -> dict[int, Any]:
        return self._per_engine(
            self._histogram_cls(
                name=f"vllm:kvpush_{name}",
                documentation=documentation,
                buckets=buckets,
                labelnames=self._labelnames,
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's stats."""
        series = _by_series(transfer_stats_data)
        for name, histogram in self._histograms.items():
            for value in series[name]:
                histogram[engine_idx].observe(value)
        self._received[engine_idx].inc(transfer_stats_data["received"])
        self._refused_clients[engine_idx].inc(transfer_stats_data["refused_clients"])
        for reason, count in transfer_stats_data["failed"].items():
            self._failed.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
