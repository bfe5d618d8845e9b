"""Types of the native module. Hand-written; stubtest compares it with the module itself."""

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

__version__: str

# --- geometry -----------------------------------------------------------------------------------

@final
class Region:
    """One layer's KV memory on one rank, by real addresses and strides (bytes).

    Fields are those of `csrc/region.h`, which gives the address formula. `kind` is "attention" or
    "state", `memory` "host" or "device".
    """

    def __init__(
        self,
        *,
        layer: str,
        dtype: str,
        base: int,
        block_stride: int,
        num_blocks: int,
        kind: str = "attention",
        group: int = 0,
        memory: str = "host",
        device: int = 0,
        tokens_per_block: int = 0,
        tokens_per_page: int = 0,
        page_stride: int = 0,
        token_stride: int = 0,
        components: int = 1,
        component_stride: int = 0,
        first_head: int = 0,
        heads: int = 0,
        total_heads: int = 0,
        head_stride: int = 0,
        element_bytes: int = 0,
        replicated: bool = False,
        state_bytes: int = 0,
    ) -> None: ...
    @property
    def layer(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def memory(self) -> str: ...
    @property
    def device(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def block_stride(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def tokens_per_page(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def token_stride(self) -> int: ...
    @property
    def components(self) -> int: ...
    @property
    def component_stride(self) -> int: ...
    @property
    def first_head(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def total_heads(self) -> int: ...
    @property
    def head_stride(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def replicated(self) -> bool: ...
    @property
    def state_bytes(self) -> int: ...

def validate_region(region: Region, index: int = 0) -> None:
    """Check one region in itself. Raises ValueError naming layer, field and value."""

_RegionPair: TypeAlias = tuple[int, int, int, int]
"""(producer region, consumer region, first global head, end of global heads)."""

_BlockTable: TypeAlias = Sequence[tuple[int, Sequence[int] | npt.NDArray[np.uint32]]]
"""For each KV cache group: (index of the first block listed, block ids). -1 marks a hole."""

def assign_writers(
    producers: Sequence[Sequence[Region]], consumers: Sequence[Sequence[Region]]
) -> list[list[list[_RegionPair]]]:
    """Which rank writes what: result[producer][consumer]. ValueError if it can't be mapped."""

@final
class CopyPlan:
    """Runs of one planned copy."""

    @property
    def runs(self) -> npt.NDArray[np.uint64]:
        """[n, 3]: local address, remote address, length in bytes."""
    @property
    def batches(self) -> list[tuple[str, int, str, int, int, int]]:
        """(local kind, local device, remote kind, remote device, first run, end run)."""
    @property
    def bytes(self) -> int: ...
    @property
    def descriptors_before(self) -> int: ...

@final
class PatternPlan:
    """A planned copy that is not spelled out: one layer's runs serve all that are alike."""

    @property
    def total_runs(self) -> int:
        """As many as the `CopyPlan` has."""
    @property
    def pattern_runs(self) -> int:
        """How many are kept."""
    @property
    def bytes(self) -> int: ...
    @property
    def descriptors_before(self) -> int: ...
    def parts(
        self, max_runs: int, max_bytes: int
    ) -> list[tuple[tuple[str, int, str, int], npt.NDArray[np.uint64]]]:
        """The parts in which it is posted: (local and remote kind and device), runs [n, 3]."""

@final
class CopyPlanner:
    """Plans copies between one pair of ranks."""

    def __init__(
        self,
        local: Sequence[Region],
        remote: Sequence[Region],
        pairs: Sequence[_RegionPair],
        local_is_producer: bool,
    ) -> None: ...
    def plan(
        self,
        span: tuple[int, int],
        local_blocks: _BlockTable,
        remote_blocks: _BlockTable,
        include_state: bool = True,
    ) -> CopyPlan:
        """Plan [begin, end) token positions. ValueError if a block is missing or out of range."""
    def plan_pattern(
        self,
        span: tuple[int, int],
        local_blocks: _BlockTable,
        remote_blocks: _BlockTable,
        include_state: bool = True,
    ) -> PatternPlan:
        """The same, not spelled out: what the engine makes of each request."""

# --- engine -------------------------------------------------------------------------------------

@final
class EngineConfig:
    """How one rank's engine runs. Durations are seconds; see `kvpush.config` for the defaults."""

    def __init__(
        self,
        *,
        agent_name: str,
        session: int,
        engine_id: str,
        nixl_library: str,
        backend: str = "UCX",
        backend_params: dict[str, str] = ...,
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        facts: Sequence[tuple[str, str]] = (),
        offer_ttl_s: float = 120.0,
        grant_ttl_s: float = 240.0,
        retry_grace_s: float = 5.0,
        keepalive_s: float = 1.0,
        peer_timeout_s: float = 10.0,
        fence_margin_s: float = 2.0,
        resend_s: float = 2.0,
        revoke_patience_s: float = 20.0,
        max_batch_descriptors: int = 1024,
        max_batch_bytes: int = 33554432,
        max_handles_in_flight: int = 64,
        max_prepared_blocks: int = 8388608,
        spin_us: float = 50.0,
        busy_poll_us: float = 20.0,
        idle_poll_us: float = 1000.0,
        thread_policy: str = "batch",
        push_granularity_tokens: int = 0,
        min_push_tokens: int = 0,
        mode: str = "push",
    ) -> None:
        """`mode`: "push" (producers WRITE) or "pull" (consumers READ); equal on all peers.

        `thread_policy`: "batch" (SCHED_BATCH, Linux) or "normal".
        """
    @property
    def session(self) -> int: ...
    @property
    def engine_id(self) -> str: ...

@final
class PeerInfo:
    """What a rank tells about itself, decoded from the bytes of `Engine.peer_info()`."""

    @staticmethod
    def decode(blob: bytes) -> PeerInfo:
        """ValueError for bytes that are not a peer's description."""
    @property
    def session(self) -> int: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def facts(self) -> list[tuple[str, str]]: ...
    @property
    def regions(self) -> list[Region]: ...

@final
class Event:
    """How one grant or offer ended, or what became of a peer. Plain values.

    `kind`: "received" (the grant is complete), "receive_failed", "receive_revoked",
    "sent" (every consumer of the offer has ended, at least one complete or needing nothing),
    "send_failed" (the offer ended otherwise), "peer_lost". For grants and offers `ticket` names
    the request and exactly one event comes for each; only after it may its blocks be reused.
    """

    @property
    def kind(self) -> str: ...
    @property
    def ticket(self) -> int:
        """As given to grant() or offer(); 0 for peer events."""
    @property
    def reason(self) -> str:
        """A name of csrc/status.h's Reason ("none", "deadline", "peer_lost", ...)."""
    @property
    def detail(self) -> str:
        """One sentence for the log; may be empty."""
    @property
    def session(self) -> int:
        """The peer concerned, where one is; else 0."""
    @property
    def bytes(self) -> int: ...
    @property
    def descriptors_before(self) -> int: ...
    @property
    def descriptors(self) -> int: ...
    @property
    def plan_us(self) -> float: ...
    @property
    def post_us(self) -> float: ...
    @property
    def transfer_us(self) -> float:
        """First post to last completion: of an offer's writes (push), a grant's READs (pull)."""
    @property
    def moved(self) -> tuple[int, int, int, float, float, float] | None:
        """Bytes, descriptors before, descriptors; seconds to plan, post, transfer. All at once.

        None where no byte was moved.
        """
    @property
    def first_post_ns(self) -> int:
        """When the first call to post them began: time.monotonic_ns(); 0 if there was none."""
    @property
    def last_post_ns(self) -> int:
        """When the last one returned; 0 if there was none."""

@final
class Engine:
    """One rank's transfer engine: a native thread that owns the NIXL agent.

    Every method may be called from any Python thread. grant, revoke, offer, withdraw and poll
    return in microseconds; start, connect and shutdown block with the GIL released.
    """

    def __init__(self, config: EngineConfig) -> None: ...
    def start(
        self,
        regions: Sequence[Region],
        memory: Sequence[tuple[int, int, str, int]],
    ) -> None:
        """Make the agent, register `memory` ((address, length, kind, device)), start the thread.

        Raises ValueError for a bad region and RuntimeError with the cause if NIXL refuses.
        """
    def peer_info(self) -> bytes:
        """This rank's description, for the side channel. Valid after start()."""
    def connect(
        self,
        producers: Sequence[bytes],
        consumers: Sequence[bytes],
        consumer_index: int,
        timeout_s: float,
    ) -> list[int]:
        """Meet the ranks of a producer engine that this rank, consumers[consumer_index], needs.

        `consumers` are the peer_info() of all ranks of this engine. Returns the sessions to grant
        to. Sessions already met are not met again. Raises ValueError if geometry or facts differ
        (naming the field and both values), TimeoutError if a peer can't be reached or does
        not answer, ConnectionResetError if one is lost meanwhile, ConnectionRefusedError if this
        engine has too many peers, and ConnectionAbortedError if it stops.
        """
    def grant(
        self,
        ticket: int,
        transfer_id: str,
        fingerprint: bytes,
        attempt: int,
        sessions: Sequence[int],
        span: tuple[int, int],
        blocks: _BlockTable,
        deadline_s: float,
    ) -> None:
        """Have the tokens of `span` come into `blocks` from these peers, until the grant ends.

        `fingerprint` is 16 bytes, `attempt` nonzero. An empty span says "nothing is needed": the
        producers are told and may free. Ends in one "received", "receive_failed" or
        "receive_revoked" event, also when the arguments turn out wrong.
        """
    def revoke(self, ticket: int) -> None:
        """Take a grant back; unknown: no-op.

        Its event comes when no writer can write, and no READ is in flight, any more.
        """
    def offer(
        self,
        ticket: int,
        transfer_id: str,
        fingerprint: bytes,
        new_blocks: _BlockTable,
        watermark: int,
        final: bool,
    ) -> None:
        """Offer KV, or let an offer grow: `new_blocks` are appended to those offered before.

        `watermark` tokens from the first are in memory. After `final` nothing more comes. Ends in
        one "sent" or "send_failed" event.
        """
    def offer_all(
        self,
        offers: Sequence[tuple[int, str, bytes, _BlockTable, int, bool]],
        device_event: int = 0,
    ) -> int:
        """Several offers at the price of one; each has the fields of offer().

        Their KV is in memory once `device_event` (a CUDA event's handle; 0: now) has completed. The
        event must stay alive, and must not be recorded again, until fences_passed() has reached the
        number returned.
        """
    def fences_passed(self) -> int:
        """Events of offer_all() calls up to this number are not asked about any more."""
    def rewind(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
        """Take back what was offered under these tickets: their blocks will hold something else.

        Blocks, with the GIL released, until none of the blocks is read any more. Returns the
        tickets that may be offered anew, from the first block; the others have ended. None after a
        time-out: then they must be withdrawn.
        """
    def withdraw(
        self, ticket: int, reason: str, transfer_id: str = "", fingerprint: bytes = b""
    ) -> None:
        """End an offer early, for one of csrc/status.h's reasons. Consumers are told.

        With a key and a ticket never offered, tells consumers that this transfer will not come; no
        event follows then.
        """
    def cork(self) -> None:
        """Keep the commands that come now, to be delivered together by uncork()."""
    def uncork(self) -> None:
        """Deliver what was kept."""
    def has_events(self) -> bool:
        """Whether poll() would return any; costs next to nothing."""
    def poll(self) -> list[Event]:
        """Take the events since the last call."""
    def counters(self) -> dict[str, int]:
        """Totals and table sizes.

        Tables (zero at rest): grants_live, offers_live, served_live, handles_in_flight,
        posts_queued, fences_waiting. Gauges: peers, prepared_blocks. Totals: transfers_received,
        transfers_sent, transfers_failed, bytes_written, descriptors_planned, descriptors_posted,
        writes_posted, bytes_read, reads_posted, posted_from_lists, messages_received,
        messages_dropped, peers_lost.
        """
    def shutdown(self, drain_s: float) -> None:
        """Stop: wait up to `drain_s` for handles to end, tell the peers, join. Idempotent."""
