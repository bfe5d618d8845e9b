"""The scheduler's half of streamed push: what each step adds to the offers of running prefills.

Theory of operation. A prefill that streams is offered in pieces while it runs. Each step's metadata
says how many tokens of its prompt will have their KV in memory when that step has run, and which
blocks hold them; the workers pass that on as soon as it has. Prefix hits are part of the first
step's piece: vLLM may share blocks that the same step fills, so they are not there any earlier. The
piece that reaches the end of the prompt is final, so the KV waits for no later step.

A prefill that is preempted loses its blocks in the very step that may give them to others. That
step's metadata takes everything back, before its forward pass; what is computed again is offered
again, from the first token on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpush.vllm.messages import Blocks, Offer, StepOrders

__all__ = ["Stream", "Streams"]

_Table = Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class Stream:
    """One prefill that is being offered."""

    request: Any
    transfer_id: str
    fingerprint: bytes
    preemptions: int
    blocks: list[list[int]] = field(default_factory=list)
    """Of each group, all that the request holds."""
    offered: list[int] = field(default_factory=list)
    """Of each group, how many of them the workers know."""
    final: bool = False

    def was_preempted(self) -> bool:
        """Whether its blocks are gone; forgets them if so."""
        preemptions = self.request.num_preemptions
        if preemptions == self.preemptions:
            return False
        self.preemptions = preemptions
        self.blocks, self.offered, self.final = [], [], False
        return True

    def add_blocks(self, blocks: _Table, *, is_whole: bool) -> None:
        """What this step has allocated, or all that it holds."""
        if self.final:
            return
        if is_whole or not self.blocks:
            self.blocks = [list(ids) for ids in blocks]
            self.offered = [0] * len(self.blocks)
            return
        for known, more in zip(self.blocks, blocks, strict=True):
            known.extend(more)


class Streams:
    """All streams of one engine. `tokens_per_block` has one entry for each KV cache group."""

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        self._tokens_per_block = tuple(tokens_per_block)
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        """How many prefills stream."""
        return len(self._streams)

    def begin(self, request: Any, transfer_id: str, fingerprint: bytes) -> None:
        """A prefill is about to be scheduled for the first time."""
        self._streams[request.request_id] = Stream(
            request, transfer_id, fingerprint, request.num_preemptions
        )

    def end(self, request_id: str) -> Stream | None:
        """Its prefill has ended. None if it did not stream."""
        return self._streams.pop(request_id, None)

    def add_step(self, output: Any, orders: StepOrders) -> None:
        """What this step takes back, and what it will have computed."""
        for request_id, stream in self._streams.items():
            if stream.was_preempted():
                orders.rewinds.append(request_id)
        for request_id, blocks, is_whole in _new_blocks(output):
            if request_id in self._streams:
                self._streams[request_id].add_blocks(blocks, is_whole=is_whole)
        scheduled = output.num_scheduled_tokens
        for request_id, stream in self._streams.items():
            count = scheduled.get(request_id, 0)
            if count and not stream.final:
                orders.progress.append(self._piece(request_id, stream, count))

    def _piece(self, request_id: str, stream: Stream, count: int) -> Offer:
        request = stream.request
        # vLLM adds what is scheduled only after this hook.
        watermark = min(request.num_computed_tokens + count, request.num_prompt_tokens)
        stream.final = watermark == request.num_prompt_tokens
        return Offer(
            request_id=request_id,
            transfer_id=stream.transfer_id,
            fingerprint=stream.fingerprint,
            blocks=self._not_offered(stream, watermark),
            watermark=watermark,
            final=stream.final,
        )

    def _not_offered(self, stream: Stream, watermark: int) -> Blocks:
        """Blocks up to the watermark: beyond it may be room for speculation."""
        table: list[tuple[int, list[int]]] = []
        for group, size in enumerate(self._tokens_per_block):
            first, end = stream.offered[group], -(-watermark // size)
            table.append((first, stream.blocks[group][first:end]))
            stream.offered[group] = end
        return tuple(table)


def _new_blocks(output: Any) -> Iterator[tuple[str, _Table, bool]]:
    """(request, blocks, whether these are all of its blocks) of the requests scheduled."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True
    cached = output.scheduled_cached_reqs
    for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            yield request_id, blocks, request_id in cached.resumed_req_ids
