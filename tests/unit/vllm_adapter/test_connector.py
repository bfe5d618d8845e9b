"""The connector's own code: metadata, metrics, and the two ways vLLM takes results."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base

from kvpush.errors import UnsupportedError
from kvpush.vllm import connector as module
from kvpush.vllm import plugin
from kvpush.vllm.checks import check_supported
from kvpush.vllm.connector import Handshake, KvPullConnector, KvPushConnector, StepMetadata
from kvpush.vllm.messages import Refusal, StepOrders
from kvpush.vllm.metrics import KvPushStats
from kvpush.vllm.worker import Results
from tests.unit.vllm_adapter.fakes import FakeEvent


class FakeWorkerSide:
    """Results prepared by the test."""

    def __init__(self) -> None:
        self.results: list[Results] = []
        self.blocks = {"bad": [3, 4]}

    def has_results(self) -> bool:
        return bool(self.results)

    def take_results(self) -> Results:
        return self.results.pop(0)

    def failed_blocks(self, request_id: str) -> list[int]:
        return self.blocks.pop(request_id, [])


def worker_connector(side: FakeWorkerSide) -> Any:
    """A connector in a worker, without an engine."""
    connector: Any = KvPushConnector.__new__(KvPushConnector)
    connector._scheduler = None
    connector._worker = module._WorkerRole(None, None, None, "push")
    connector._worker.side = side
    return connector


FAILED = Results(sent={"s"}, received={"good", "bad"}, failed={"bad"})


@pytest.mark.skipif(
    not module._RESULTS_BY_REQUEST, reason="this vLLM takes failures as blocks, not by request"
)
def test_results_by_request() -> None:
    side = FakeWorkerSide()
    side.results = [FAILED]
    results = worker_connector(side).get_transfer_results(set())
    assert results.finished_sending == {"s"}
    assert results.finished_recving == {"good", "bad"}
    assert results.failed_recving == {"bad"}
    assert not side.blocks, "nothing may pile up"


@pytest.mark.parametrize("errors_first", [False, True])
def test_results_by_block_tell_the_blocks_before_the_request(
    monkeypatch: pytest.MonkeyPatch, errors_first: bool
) -> None:
    monkeypatch.setattr(module, "_RESULTS_BY_REQUEST", False)
    side = FakeWorkerSide()
    # The failure may come up between the two calls of a step.
    side.results = [Results(), FAILED] if errors_first else [FAILED]
    connector = worker_connector(side)
    told: set[int] = set()
    reported: list[str] = []
    for _ in range(3):
        if errors_first:
            told |= connector.get_block_ids_with_load_errors()
        sent, received = connector.get_finished(set())
        if "bad" in (received or ()):
            assert told == {3, 4}
        if not errors_first:
            told |= connector.get_block_ids_with_load_errors()
        reported += [*(sent or ()), *(received or ())]
    assert sorted(reported) == ["bad", "good", "s"]


def test_metadata_pickles() -> None:
    orders = StepOrders(step=3, refusals=[Refusal("r", [1], "x")], revokes=["q"])
    assert pickle.loads(pickle.dumps(StepMetadata(orders))).orders == orders
    assert pickle.loads(pickle.dumps(Handshake(b"x", 5))) == Handshake(b"x", 5)


def test_the_scheduler_side_reports_refused_clients_once() -> None:
    role = module._SchedulerRole.__new__(module._SchedulerRole)
    counters = {"refused": 0}
    role.channel = SimpleNamespace(counters=lambda: counters)  # type: ignore[assignment]
    role._refused_told = 0
    connector: Any = KvPushConnector.__new__(KvPushConnector)
    connector._scheduler, connector._worker = role, None
    assert connector.get_kv_connector_stats() is None
    counters["refused"] = 3
    stats = connector.get_kv_connector_stats()
    assert stats.aggregate(KvPushStats()).reduce()["Side channel clients refused"] == 3
    assert connector.get_kv_connector_stats() is None


def test_the_plugin_may_be_loaded_again() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KvPushConnector") is KvPushConnector
    assert KVConnectorFactory.get_connector_class_by_name("KvPullConnector") is KvPullConnector


def test_each_connector_has_a_mode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def role(side: str) -> Any:
        return lambda *arguments: made.extend((side, a) for a in arguments if isinstance(a, str))

    monkeypatch.setattr(module, "_SchedulerRole", role("scheduler"))
    monkeypatch.setattr(module, "_WorkerRole", role("worker"))
    monkeypatch.setattr(module, "check_supported", lambda *_, **__: None)
    monkeypatch.setattr(vllm_base.KVConnectorBase_V1, "__init__", lambda *_: None)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    for connector in (KvPushConnector, KvPullConnector):
        for side in (vllm_base.KVConnectorRole.SCHEDULER, "worker"):
            connector(config, side, None)
    assert made == [("scheduler", "push"), ("worker", "push"),
                    ("scheduler", "pull"), ("worker", "pull")]  # fmt: skip


def test_stats_of_ranks_and_intervals_add_up() -> None:
    first, second = KvPushStats(), KvPushStats()
    assert first.is_empty()
    sent = FakeEvent(
        "sent", 1, bytes=2**20, descriptors_before=10, descriptors=2, plan_us=5, transfer_us=1500
    )
    first.record(sent)  # type: ignore[arg-type]
    second.record_received(1)
    second.record(FakeEvent("receive_failed", 2, "deadline"))  # type: ignore[arg-type]
    second.record_failure("deadline")
    both = KvPushConnector.build_kv_connector_stats(first.data).aggregate(second)
    figures = both.reduce()
    assert figures["Transfers sent"] == 1
    assert figures["Transfers received"] == 1
    assert figures["Failed: deadline"] == 2
    assert figures["MB sent"] == 1
    assert figures["Mean transfer (ms)"] == 1.5
    assert KvPushStats().reduce()["Transfers sent"] == 0


def test_reads_are_counted_where_they_were_made() -> None:
    stats = KvPushStats()
    read = FakeEvent("received", 1, bytes=2**20, descriptors=2, transfer_us=1500)
    stats.record(read)  # type: ignore[arg-type]
    figures = stats.reduce()
    assert figures["Transfers read"] == figures["Transfers received"] == 1
    assert figures["MB read"] == 1
    assert figures["Mean transfer (ms)"] == 1.5
    assert "Transfers sent" not in figures
    # The producer's part: nothing of its own was moved.
    held = KvPushStats()
    held.record(FakeEvent("sent", 1))  # type: ignore[arg-type]
    assert held.is_empty()


def test_prometheus_metrics() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    types = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KvPushConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    stats = KvPushStats()
    stats.record(FakeEvent("sent", bytes=4096, descriptors=2))  # type: ignore[arg-type]
    stats.record_failure("deadline")
    stats.record_refused_clients(2)
    metrics.observe(stats.data)
    labels = {"engine": "0"}
    assert registry.get_sample_value("vllm:kvpush_bytes_sent_sum", labels) == 4096
    failed = registry.get_sample_value("vllm:kvpush_failed_total", {**labels, "reason": "deadline"})
    assert failed == 1
    assert registry.get_sample_value("vllm:kvpush_refused_clients_total", labels) == 2


# --- checks at start --------------------------------------------------------------------------


def spec(*kinds: str, **fields: Any) -> Any:
    """A cache specification of a class with these names among its bases."""
    made: type = object
    for kind in reversed(kinds):
        made = type(kind, (made,), {})
    value = made()
    value.__dict__.update(fields)
    return value


def check(kinds: tuple[str, ...] = ("FullAttentionSpec", "AttentionSpec"), **changes: Any) -> None:
    groups = [
        SimpleNamespace(layer_names=[f"l{n}"], kv_cache_spec=spec(*kinds))
        for n in range(changes.pop("groups", 1))
    ]
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    parallel |= {k: v for k, v in changes.items() if k in parallel}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(enable_return_routed_experts=changes.get("experts", False)),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        kv_transfer_config=SimpleNamespace(kv_buffer_device=changes.get("buffer", "cpu")),
    )
    check_supported(
        config,
        SimpleNamespace(kv_cache_groups=groups),
        results_by_request=changes.get("by_request", True),
    )


def test_dense_models_pass() -> None:
    check()
    check(groups=3)
    check(device="cuda", buffer="cuda")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"experts": True}, "--enable-return-routed-experts"),
        ({"device": "cuda", "buffer": "cpu"}, "kv_buffer_device"),
        ({"groups": 2, "by_request": False}, "2 KV cache groups"),
        ({"kinds": ("CircularBufferSpec",)}, "kind CircularBufferSpec"),
    ],
)
def test_what_cannot_work_is_refused_at_start(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check(**changes)
