"""The connector classes that vLLM loads.

They only pass calls on: to `SchedulerSide` in the scheduler, to `WorkerSide` in a worker. vLLM's
base class differs between releases; what this one has is found by looking at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base

from kvpush.auth import AuthKey, load_auth_key
from kvpush.config import load_config
from kvpush.errors import KvPushError
from kvpush.side_channel import PROTOCOL, HelloReply, query_stats
from kvpush.vllm.checks import check_supported
from kvpush.vllm.factory import make_scheduler_facts, make_worker, side_channel_address
from kvpush.vllm.handshake import SideChannel
from kvpush.vllm.log import get_logger
from kvpush.vllm.messages import StepOrders
from kvpush.vllm.metrics import KvPushPromMetrics, KvPushStats
from kvpush.vllm.scheduler import SchedulerSide
from kvpush.vllm.worker import Results, WorkerSide

if TYPE_CHECKING:
    import torch

__all__ = ["KvPullConnector", "KvPushConnector"]

logger = get_logger("connector")

_RESULTS_BY_REQUEST = hasattr(vllm_base.KVConnectorBase_V1, "get_transfer_results")
"""Whether this vLLM takes failed loads by request; earlier ones take them by block."""


_LOOPBACK = "127.0.0.1"
_RANK_STATS_TIMEOUT_S = 1.0
"""A rank's thread answers within milliseconds, unless its process is stopped."""


@dataclass
class StepMetadata(vllm_base.KVConnectorMetadata):
    """One step's orders, as vLLM carries them to the workers."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class Handshake(vllm_base.KVConnectorHandshakeMetadata):
    """One rank's description, for the side channel, and where this host reads its counters."""

    info: bytes = b""
    stats_port: int = 0


class _SchedulerRole:
    """What lives in the scheduler's process: the scheduler side and the side channel."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: Any,
        mode: str,
        auth: AuthKey | None = None,
    ) -> None:
        self._auth = auth
        self.facts = make_scheduler_facts(vllm_config, kv_cache_config, config, mode)
        self.side = SchedulerSide(self.facts)
        self.address = side_channel_address(vllm_config)
        self.channel: SideChannel | None = None
        self.block_pool: Any = None
        self._refused_told = 0
        self._stats_ports: list[int] = []

    def listen(self, ranks: dict[tuple[int, int], Handshake]) -> None:
        """Serve the ranks' descriptions, PP-major."""
        if self.channel is not None:
            self.channel.stop()
        hello = HelloReply(
            protocol=PROTOCOL,
            engine_id=self.facts.engine_id,
            mode=self.facts.mode,
            tp_size=self.facts.tp_size,
            pp_size=self.facts.pp_size,
            ranks=[ranks[key].info for key in sorted(ranks)],
        )
        self._stats_ports = [ranks[key].stats_port for key in sorted(ranks)]
        self.channel = SideChannel(
            *self.address, self.stats, hello, auth=self._auth, cancel=self.side.cancel
        )
        self.channel.start()
        logger.info("Side channel on %s:%d", *self.address)

    def stats(self) -> dict[str, Any]:
        """For the side channel; called by its thread."""
        pool = self.block_pool
        return {
            "engine_id": self.facts.engine_id,
            "free_blocks": pool.get_num_free_blocks() if pool is not None else 0,
            "total_blocks": pool.num_gpu_blocks if pool is not None else 0,
            "scheduler": self.side.stats(),
            "side_channel": self.channel.counters() if self.channel is not None else {},
            "workers": self._worker_counters(),
        }

    def _worker_counters(self) -> list[dict[str, int]]:
        """Counters of the ranks on this host, read from their processes; idle ones answer too."""
        counters: list[dict[str, int]] = []
        for port in self._stats_ports:
            try:
                counters.append(self._ask_rank(port))
            except KvPushError as error:
                logger.debug("No counters from the rank at port %d: %s", port, error)
        return counters

    def _ask_rank(self, port: int) -> dict[str, int]:
        return query_stats(_LOOPBACK, port, _RANK_STATS_TIMEOUT_S, self._auth)

    def take_stats(self) -> KvPushStats | None:
        """Clients that the side channel has refused since the last call; None if there are none."""
        refused = self.channel.counters()["refused"] if self.channel is not None else 0
        fresh, self._refused_told = refused - self._refused_told, refused
        if not fresh:
            return None
        stats = KvPushStats()
        stats.record_refused_clients(fresh)
        return stats


class _WorkerRole:
    """What lives in a worker's process."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: Any,
        mode: str,
        auth: AuthKey | None = None,
    ) -> None:
        self._making = (vllm_config, kv_cache_config, config, mode)
        self._auth = auth
        self.side: WorkerSide | None = None
        self.info = b""
        # None: nothing has happened since they were asked for.
        self.stats: KvPushStats | None = None
        self.metadata: Any = None
        # Interfaces that take failures by block: reported there first, then as received.
        self.failed_blocks: set[int] = set()
        self.failed_waiting: set[str] = set()
        self.failed_told: set[str] = set()
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.stats_channel: SideChannel | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the engine over these tensors."""
        self.side, self.info = make_worker(*self._making, kv_caches, self._auth)
        self.stats_channel = SideChannel(_LOOPBACK, 0, self.side.counters, auth=self._auth)
        self.stats_channel.start()

    def begin_step(self, metadata: Any) -> None:
        """Carry out this step's orders, once."""
        if metadata is self.metadata:
            return
        self.metadata = metadata
        if self.side is not None and isinstance(metadata, StepMetadata):
            self.side.begin_step(metadata.orders)

    def take_results(self) -> Results | None:
        """What has ended; counted for the metrics. None if nothing has, as in most steps."""
        if self.side is None or not self.side.has_results():
            return None
        results = self.side.take_results()
        stats = self.stats = self.stats or KvPushStats()
        stats.record_received(results.delivered)
        for event in results.events:
            stats.record(event)
        for reason in results.failures:
            stats.record_failure(reason)
        return results

    def blocks_of(self, request_id: str) -> list[int]:
        """The blocks of a failed request; forgotten with this call."""
        return self.side.failed_blocks(request_id) if self.side is not None else []

    def take_results_by_block(self) -> None:
        """For interfaces that take failures by block.

        A failed request's blocks go out before its report, whichever vLLM asks for first.
        """
        results = self.take_results()
        if results is None:
            return
        self.sent |= results.sent
        self.received |= results.received - results.failed
        for request_id in results.failed:
            self.failed_blocks.update(self.blocks_of(request_id))
            self.failed_waiting.add(request_id)

    def shutdown(self) -> None:
        """Stop the native engine."""
        if self.stats_channel is not None:
            self.stats_channel.stop()
        if self.side is not None:
            self.side.shutdown()


class KvPushConnector(vllm_base.KVConnectorBase_V1, vllm_base.SupportsHMA):
    """Pushes each request's KV from the prefill engine into the decode engine's blocks."""

    _MODE = "push"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        auth = load_auth_key(config.auth_key_file)
        check_supported(vllm_config, kv_cache_config, results_by_request=_RESULTS_BY_REQUEST)
        self._scheduler: _SchedulerRole | None = None
        self._worker: _WorkerRole | None = None
        if role == vllm_base.KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerRole(vllm_config, kv_cache_config, config, self._MODE, auth)
        else:
            self._worker = _WorkerRole(vllm_config, kv_cache_config, config, self._MODE, auth)

    @property
    def _scheduler_role(self) -> _SchedulerRole:
        if self._scheduler is None:
            raise RuntimeError("a scheduler's hook was called in a worker")
        return self._scheduler

    @property
    def _scheduler_side(self) -> SchedulerSide:
        return self._scheduler_role.side

    @property
    def _worker_role(self) -> _WorkerRole:
        if self._worker is None:
            raise RuntimeError("a worker's hook was called in the scheduler")
        return self._worker

    # --- scheduler --------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember the pool, for the stats."""
        if self._scheduler is not None:
            self._scheduler.block_pool = gpu_block_pool

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: vLLM must not zero blocks that a peer may be writing."""
        del request
        groups = getattr(self._kv_cache_config, "transfer_group_ids", None)
        if groups is None:
            groups = range(len(self._kv_cache_config.kv_cache_groups))
        return tuple(groups)

    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        self._scheduler_side.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class."""
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        self._scheduler_side.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See the base class."""
        return StepMetadata(self._scheduler_side.take_orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        self._scheduler_side.worker_output(
            connector_output.finished_sending, connector_output.finished_recving
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self._scheduler_side.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self._scheduler_side.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although it has no live request."""
        return self._scheduler is not None and self._scheduler.side.needs_step()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        """Start the side channel (vLLM without pipeline stages in this interface)."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, tp_rank): handshake for tp_rank, handshake in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Handshake]
    ) -> None:
        """Start the side channel."""
        self._scheduler_role.listen(metadata)

    # --- worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the native engine over these tensors."""
        self._worker_role.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        """This rank's description."""
        worker = self._worker
        if worker is None or worker.stats_channel is None:
            return None
        return Handshake(worker.info, worker.stats_channel.port)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first hook of a step: orders are carried out before its forward pass."""
        if self._worker is not None:
            self._worker.begin_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The first hook of a step where vLLM calls the one above only for preemptions."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: grants have left before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: KV leaves from the cache itself."""

    def wait_for_save(self) -> None:
        """Offer what this step has computed."""
        if self._worker is not None and self._worker.side is not None:
            self._worker.side.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended on this rank."""
        del finished_req_ids
        worker = self._worker_role
        results = worker.take_results()
        if results is None:
            return vllm_base.KVConnectorTransferResults()
        for request_id in results.failed:
            worker.blocks_of(request_id)
        return vllm_base.KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What has ended on this rank, where failures are taken by block."""
        del finished_req_ids
        worker = self._worker_role
        worker.take_results_by_block()
        sent, worker.sent = worker.sent, set()
        received, worker.received = worker.received | worker.failed_told, set()
        worker.failed_told = set()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, where failures are taken by block."""
        worker = self._worker_role
        if _RESULTS_BY_REQUEST:
            return set()
        worker.take_results_by_block()
        blocks, worker.failed_blocks = worker.failed_blocks, set()
        worker.failed_told |= worker.failed_waiting
        worker.failed_waiting = set()
        return blocks

    def get_kv_connector_stats(self) -> KvPushStats | None:
        """What happened since the last call; None if nothing did."""
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        worker = self._worker
        if worker is None or worker.stats is None:
            return None
        stats, worker.stats = worker.stats, None
        return None if stats.is_empty() else stats

    # --- both -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the native engine and the side channel."""
        if self._scheduler is not None and self._scheduler.channel is not None:
            self._scheduler.channel.stop()
            self._scheduler.channel = None
        if self._worker is not None:
            self._worker.shutdown()

    def take_events(self) -> Iterable[Any]:
        """No cache events of its own."""
        return ()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvPushStats:
        """Stats from their plain form."""
        return KvPushStats(data=data) if data else KvPushStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvPushPromMetrics:
        """Prometheus metrics of this connector."""
        return KvPushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KvPullConnector(KvPushConnector):
    """Reads each request's KV from the prefill engine's blocks, as soon as its prefill has ended.

    The same engine, protocol and parameters: only the direction of the transfer differs, so both
    engines of a pair must have the same connector.
    """

    _MODE = "pull"


def _set_hit_source() -> None:
    """Tell vLLM's cache statistics where the tokens come from, where it asks."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return
    KvPushConnector._cache_hit_source = CacheHitSource.P2P


_set_hit_source()
