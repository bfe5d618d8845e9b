"""The scheduler side: decides which request gives or takes KV, and words it as orders.

Runs in vLLM's scheduler; every method is called by the engine's main thread except `stats`, which
the side channel's thread calls. No method raises on a client's input: an exception in a hook would
end the engine.

Theory of operation. A request that takes KV (decode leg) goes through

    NEW -> LOADING -> LOADED     its blocks were granted; the workers report the end once
    NEW -> LOCAL                 nothing to load: full prefix hit, or a twin is loading the same

and never back: after a failed load or a preemption it is computed here. A request that gives KV
(prefill leg) is offered step by step while it is computed (`kvpush.vllm.streams`), or else when it
has finished; its blocks are then held until the workers report that every write has ended. Orders
leave with the metadata of the same step.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpush.errors import BadParamsError
from kvpush.vllm.fingerprint import fingerprint, has_embeds
from kvpush.vllm.log import get_logger
from kvpush.vllm.messages import (
    NO_BLOCK,
    Blocks,
    Close,
    Grant,
    Offer,
    Refusal,
    StepOrders,
    Withdrawal,
)
from kvpush.vllm.params import ConsumeParams, ProduceParams, parse_params
from kvpush.vllm.streams import Stream, Streams

__all__ = ["GroupShape", "SchedulerFacts", "SchedulerSide"]

logger = get_logger("scheduler")

_HANDING_OVER = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Ends of a prefill whose KV is whole; every other end is an abort or an error."""

_NOTHING = StepOrders()
"""The orders of most steps; nobody adds to them."""

MAX_CANCELS = 4096
"""Transfers that were cancelled, waiting for a step or remembered: 100 times what one second brings
to a busy router. Of more, the oldest are forgotten: their KV is held for its time to live."""
_CANCEL_MEMORY_S = 60.0
"""A prefill leg that was cancelled while it was on its way is here by then."""

_Key = tuple[str, bytes]


class GroupShape(msgspec.Struct, frozen=True):
    """One KV cache group, as far as block lists need it."""

    tokens_per_block: int
    state: bool = False
    """Its first block holds one state of the whole request so far."""
    window: bool = False
    """Blocks are given back as soon as the next token does not see them."""


class SchedulerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler side knows of its engine."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    groups: tuple[GroupShape, ...]
    can_produce: bool
    can_consume: bool
    receive_deadline_s: float
    mode: str = "push"
    streams: bool = True
    """Whether prefills are offered step by step."""
    null_block_id: int = 0


class _Phase(enum.Enum):
    NEW = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    LOCAL = enum.auto()


@dataclass(slots=True)
class _Tracked:
    """One live request that has to do with a transfer."""

    params: ProduceParams | ConsumeParams | None
    request: Any = None
    refused: str = ""
    key: _Key = ("", b"")
    phase: _Phase = _Phase.NEW
    told: bool = False


class SchedulerSide:
    """See the module."""

    def __init__(self, facts: SchedulerFacts) -> None:
        self._facts = facts
        self._tracked: dict[str, _Tracked] = {}
        # Decode side. Key of each load under way -> its request, which may have been aborted.
        self._loading: dict[_Key, str] = {}
        self._loading_keys: dict[str, _Key] = {}
        # Keys under load for which a twin was computed here: its prefill must be told.
        self._twins: dict[_Key, ConsumeParams] = {}
        # Prefill side. Live requests per key, and blocks held until the writes have ended. A key is
        # taken while a prefill streams or is held.
        self._producing: Counter[_Key] = Counter()
        self._held: dict[str, _Key] = {}
        self._held_keys: set[_Key] = set()
        self._streams = Streams([shape.tokens_per_block for shape in facts.groups])
        # Transfers given up by the router: fresh ones, put in by the side channel's thread, then
        # those taken note of, with the time to forget them.
        self._cancels: deque[str] = deque(maxlen=MAX_CANCELS)
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        # The decode leg computes the prompt's last token again. Where a cache forgets (a state is
        # one token further, a window has left its first block), the prefill must stop before it.
        self._stops_short = any(shape.state or shape.window for shape in facts.groups)
        # There the blocks that count are known at the end only.
        self._may_stream = facts.streams and not self._stops_short
        self._no_blocks: Blocks = tuple((0, []) for _ in facts.groups)
        self._orders = StepOrders()
        self._step = 0

    # --- hooks ------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._track(request)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond `computed_tokens` come from elsewhere. Changes nothing."""
        tracked = self._track(request)
        if tracked is None or tracked.phase is not _Phase.NEW:
            return 0, False
        if tracked.refused:
            # At least one token, so that the scheduler waits for the worker's verdict.
            return max(1, request.num_prompt_tokens - computed_tokens), True
        if not isinstance(tracked.params, ConsumeParams) or tracked.key in self._loading:
            return 0, False
        # The last token is computed here again: its logits are needed.
        needed = request.num_prompt_tokens - 1 - computed_tokens
        return (needed, True) if needed > 0 else (0, False)

    def allocated(
        self, request: Any, get_block_ids: Callable[[], Sequence[Sequence[int]]], external: int
    ) -> None:
        """Blocks were allocated; `external` tokens of them are to be loaded.

        `get_block_ids` is called only where they matter: listing them costs time, and this hook
        runs for every request.
        """
        tracked = self._track(request)
        if tracked is None or tracked.phase is not _Phase.NEW:
            return
        if tracked.refused:
            self._refuse(request, tracked, get_block_ids, external)
        elif isinstance(tracked.params, ConsumeParams):
            if external > 0:
                self._grant(request, tracked, tracked.params, get_block_ids(), external)
            else:
                tracked.phase = _Phase.LOCAL
                self._decline(request.request_id, tracked, tracked.params)

    def take_orders(self, output: Any = None) -> StepOrders:
        """The orders of the step that vLLM has just planned, its scheduler's output."""
        if self._cancels:
            self._take_cancels()
        orders = self._orders
        if self._may_stream and self._producing and output is not None:
            for new in output.scheduled_new_reqs:
                self._begin_stream(new.req_id)
            if self._streams:
                self._streams.add_step(output, orders)
        if not orders:
            return _NOTHING
        self._orders = StepOrders()
        self._step += 1
        orders.step = self._step
        return orders

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Returns whether its blocks stay held, and what the client gets."""
        tracked = self._track(request)
        if tracked is None:
            return False, None
        del self._tracked[request.request_id]
        if isinstance(tracked.params, ProduceParams) and not tracked.refused:
            return self._finish_producing(request, tracked, tracked.params, block_ids)
        if tracked.phase is _Phase.LOADING:
            self._orders.revokes.append(request.request_id)
        elif tracked.phase is _Phase.NEW and isinstance(tracked.params, ConsumeParams):
            self._decline(request.request_id, tracked, tracked.params)
        return False, None

    def worker_output(
        self, finished_sending: Iterable[str] | None, finished_recving: Iterable[str] | None
    ) -> None:
        """What all ranks have reported."""
        for request_id in finished_recving or ():
            self._end_loading(request_id)
        for request_id in finished_sending or ():
            key = self._held.pop(request_id, None)
            if key is not None:
                self._held_keys.discard(key)

    def needs_step(self) -> bool:
        """Whether the engine must step although it has no live request.

        It must where orders wait to leave, or the workers still owe a report.
        """
        return bool(self._orders or self._held or self._loading_keys)

    def cancel(self, transfer_id: str) -> None:
        """Nobody will ask for this transfer's KV. Any thread; done in the next step."""
        self._cancels.append(transfer_id)

    def stats(self) -> dict[str, int]:
        """Table sizes; all zero at rest."""
        return {
            "tracked": len(self._tracked),
            "loading": len(self._loading_keys),
            "twins": len(self._twins),
            "producing": self._producing.total(),
            "held": len(self._held),
            "orders": len(self._orders),
            "streams": len(self._streams),
        }

    # --- both sides -------------------------------------------------------------------------

    def _track(self, request: Any) -> _Tracked | None:
        """The request's record; None for one that has nothing to do with a transfer."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None and request.kv_transfer_params:
            tracked = self._open(request)
            if tracked is not None:
                self._tracked[request.request_id] = tracked
        return tracked

    def _open(self, request: Any) -> _Tracked | None:
        try:
            params = parse_params(request.kv_transfer_params, request.request_id)
            if params is None:
                return None
            self._check_role(params)
            _check_prompt(request)
        except BadParamsError as error:
            logger.error("Request %s fails: %s", request.request_id, error)  # noqa: TRY400
            return _Tracked(params=None, refused=str(error))
        tracked = _Tracked(
            params=params, request=request, key=(params.transfer_id, fingerprint(request))
        )
        if isinstance(params, ProduceParams):
            if self._stops_short:
                _leave_last_token(request)
            self._producing[tracked.key] += 1
        return tracked

    def _check_role(self, params: ProduceParams | ConsumeParams) -> None:
        if isinstance(params, ProduceParams) and not self._facts.can_produce:
            raise BadParamsError(
                "do_remote_decode",
                True,
                "this engine has kv_role kv_consumer; send the prefill leg to one with kv_producer "
                "or kv_both",
            )
        if isinstance(params, ConsumeParams) and not self._facts.can_consume:
            raise BadParamsError(
                "do_remote_prefill",
                True,
                "this engine has kv_role kv_producer; send the decode leg to one with kv_consumer "
                "or kv_both",
            )

    def _block_table(
        self, block_ids: Sequence[Sequence[int]], begin_token: int, end_token: int
    ) -> Blocks:
        """The blocks that hold [begin_token, end_token), with holes where the window has passed."""
        table: list[tuple[int, list[int]]] = []
        null = self._facts.null_block_id
        for shape, ids in zip(self._facts.groups, block_ids, strict=True):
            if shape.state:
                table.append((0, list(ids[:1])))
                continue
            first = begin_token // shape.tokens_per_block
            last = -(-end_token // shape.tokens_per_block)
            table.append((first, [NO_BLOCK if b == null else b for b in ids[first:last]]))
        return tuple(table)

    # --- decode side ------------------------------------------------------------------------

    def _grant(
        self,
        request: Any,
        tracked: _Tracked,
        params: ConsumeParams,
        block_ids: Sequence[Sequence[int]],
        external: int,
    ) -> None:
        end = request.num_prompt_tokens - 1
        begin = end - external
        tracked.phase = _Phase.LOADING
        self._loading[tracked.key] = request.request_id
        self._loading_keys[request.request_id] = tracked.key
        blocks = self._block_table(block_ids, begin, end)
        self._orders.grants.append(
            self._make_grant(request.request_id, tracked.key, params, (begin, end), blocks)
        )

    def _make_grant(
        self,
        request_id: str,
        key: _Key,
        params: ConsumeParams,
        span: tuple[int, int],
        blocks: Blocks,
    ) -> Grant:
        return Grant(
            request_id=request_id,
            transfer_id=key[0],
            fingerprint=key[1],
            attempt=secrets.randbits(64) | 1,
            host=params.host,
            port=params.port,
            begin_token=span[0],
            end_token=span[1],
            blocks=blocks,
            deadline_s=self._facts.receive_deadline_s,
            reports=span[1] > span[0],
        )

    def _decline(self, request_id: str, tracked: _Tracked, params: ConsumeParams) -> None:
        """Tell the prefill side that nothing is needed, so that it frees."""
        if tracked.key in self._loading:
            # The key belongs to a twin that still loads: told when that one has ended.
            self._twins[tracked.key] = params
            if not tracked.told:
                tracked.told = True
                logger.warning(
                    "Request %s computes its prompt here: another request with the same transfer "
                    "id %r and the same prompt is receiving that KV now.",
                    request_id,
                    tracked.key[0],
                )
            return
        self._orders.grants.append(
            self._make_grant(request_id, tracked.key, params, (0, 0), self._no_blocks)
        )

    def _refuse(
        self,
        request: Any,
        tracked: _Tracked,
        get_block_ids: Callable[[], Sequence[Sequence[int]]],
        external: int,
    ) -> None:
        if external <= 0:
            # The scheduler loads nothing for requests that must not read a cache (prompt logprobs).
            tracked.phase = _Phase.LOCAL
            return
        tracked.phase = _Phase.LOADING
        self._loading_keys[request.request_id] = ("", b"")
        first = (request.num_prompt_tokens - external) // self._facts.groups[0].tokens_per_block
        self._orders.refusals.append(
            Refusal(
                request_id=request.request_id,
                block_ids=list(get_block_ids()[0][first:]),
                detail=tracked.refused,
            )
        )

    def _end_loading(self, request_id: str) -> None:
        key = self._loading_keys.pop(request_id, None)
        if request_id in self._orders.revokes:
            # It failed and was finished for that in this very output: nothing is left to revoke.
            self._orders.revokes.remove(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.phase is _Phase.LOADING:
            tracked.phase = _Phase.LOADED
        if key is None or self._loading.get(key) != request_id:
            return
        del self._loading[key]
        params = self._twins.pop(key, None)
        if params is not None:
            self._orders.grants.append(
                self._make_grant(request_id, key, params, (0, 0), self._no_blocks)
            )

    # --- prefill side -----------------------------------------------------------------------

    def _begin_stream(self, request_id: str) -> None:
        """Offer a prefill step by step, unless it has a twin that is offered."""
        tracked = self._tracked.get(request_id)
        if (
            tracked is not None
            and isinstance(tracked.params, ProduceParams)
            and tracked.key not in self._held_keys
        ):
            self._held_keys.add(tracked.key)
            self._streams.begin(tracked.request, *tracked.key)

    def _end_stream(self, request: Any, stream: Stream, reason: str) -> None:
        """The workers report when nothing reads its blocks any more, whatever became of it."""
        key = (stream.transfer_id, stream.fingerprint)
        if stream.was_preempted():
            self._orders.rewinds.append(request.request_id)
        self._orders.closes.append(Close(request.request_id, *key, reason))
        self._held[request.request_id] = key

    def _finish_producing(
        self,
        request: Any,
        tracked: _Tracked,
        params: ProduceParams,
        block_ids: Sequence[Sequence[int]],
    ) -> tuple[bool, dict[str, Any] | None]:
        key = tracked.key
        self._producing[key] -= 1
        if self._producing[key] <= 0:
            del self._producing[key]
        watermark = min(request.num_computed_tokens, request.num_prompt_tokens)
        whole = self._holds_whole_prompt(block_ids, watermark, request.num_prompt_tokens)
        stream = self._streams.end(request.request_id)
        cancelled = self._is_cancelled(key[0])
        if cancelled or request.status.name not in _HANDING_OVER or not whole:
            reason = "producer_short"
            if cancelled:
                reason = "cancelled"
            elif request.status.name not in _HANDING_OVER:
                reason = "producer_aborted"
            if stream is not None:
                self._end_stream(request, stream, reason)
            else:
                self._withdraw(key, reason)
            return stream is not None, None
        returned = self._returned_params(request, params, block_ids, watermark)
        if stream is not None:
            self._end_stream(request, stream, "" if stream.final else "producer_short")
            return True, returned
        if key in self._held_keys:
            logger.warning(
                "Request %s is not offered: another with the same transfer id %r and the same "
                "prompt is being handed over.",
                request.request_id,
                key[0],
            )
            return False, returned
        self._orders.offers.append(
            Offer(
                request_id=request.request_id,
                transfer_id=key[0],
                fingerprint=key[1],
                blocks=self._block_table(block_ids, 0, watermark),
                watermark=watermark,
                final=True,
            )
        )
        self._held[request.request_id] = key
        self._held_keys.add(key)
        return True, returned

    def _holds_whole_prompt(
        self, block_ids: Sequence[Sequence[int]], watermark: int, prompt_tokens: int
    ) -> bool:
        """Whether the KV that a decode engine may ask for is there: all but the last token.

        Where the cache forgets, the prefill has stopped before that token, and exactly there.

        A request that is preempted in its last step finishes with no blocks or too few.
        """
        needed = prompt_tokens if self._stops_short else prompt_tokens - 1
        if watermark < needed or watermark <= 0:
            return False
        return all(
            len(ids) > 0 if shape.state else len(ids) * shape.tokens_per_block >= needed
            for shape, ids in zip(self._facts.groups, block_ids, strict=True)
        )

    def _take_cancels(self) -> None:
        """Take back what is held for transfers that were cancelled; remember the rest."""
        forget = time.monotonic() + _CANCEL_MEMORY_S
        fresh: set[str] = set()
        while self._cancels:
            transfer_id = self._cancels.popleft()
            fresh.add(transfer_id)
            self._cancelled[transfer_id] = forget
            self._cancelled.move_to_end(transfer_id)
        while len(self._cancelled) > MAX_CANCELS:
            self._cancelled.popitem(last=False)
        for request_id, key in self._held.items():
            if key[0] in fresh:
                self._orders.withdrawals.append(
                    Withdrawal(
                        transfer_id=key[0],
                        fingerprint=key[1],
                        reason="cancelled",
                        request_id=request_id,
                    )
                )

    def _is_cancelled(self, transfer_id: str) -> bool:
        if self._cancels:
            self._take_cancels()
        forget = self._cancelled.get(transfer_id)
        return forget is not None and time.monotonic() < forget

    def _withdraw(self, key: _Key, reason: str) -> None:
        if key in self._producing or key in self._held_keys:
            return  # a twin's KV comes, or is on its way
        self._orders.withdrawals.append(
            Withdrawal(transfer_id=key[0], fingerprint=key[1], reason=reason)
        )

    def _returned_params(
        self,
        request: Any,
        params: ProduceParams,
        block_ids: Sequence[Sequence[int]],
        watermark: int,
    ) -> dict[str, Any]:
        """What a router that runs the legs one after the other passes on to the decode leg."""
        facts = self._facts
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params.transfer_id,
            "remote_host": facts.host,
            "remote_port": facts.port,
            "remote_engine_id": facts.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_num_tokens": watermark,
            "tp_size": facts.tp_size,
            "pp_size": facts.pp_size,
            "transfer_mode": facts.mode,
        }


def _leave_last_token(request: Any) -> None:
    """Let a prefill leg end before the prompt's last token; its answer is of no use anyway.

    Called after the fingerprint was taken, before vLLM has scheduled the request.
    """
    if request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1


def _check_prompt(request: Any) -> None:
    if has_embeds(request):
        raise BadParamsError(
            "kv_transfer_params",
            "given for a prompt of embeddings",
            "leave it out: such a prompt has no token ids to tell it from another",
        )
    if getattr(request, "resumable", False):
        raise BadParamsError(
            "kv_transfer_params",
            "given for a prompt that is streamed in",
            "leave it out: a transfer needs the whole prompt",
        )
