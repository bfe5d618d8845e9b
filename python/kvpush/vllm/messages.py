"""What one step's scheduler side tells the worker sides: small typed values that pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

__all__ = [
    "NO_BLOCK",
    "Blocks",
    "Close",
    "Grant",
    "Offer",
    "Refusal",
    "StepOrders",
    "Withdrawal",
]

NO_BLOCK = -1
"""Stands for a block that the request does not hold, in lists for the native engine."""

Blocks = tuple[tuple[int, list[int]], ...]
"""For each KV cache group: (index of the first block listed, block ids)."""


class Grant(msgspec.Struct, frozen=True):
    """Decode side: KV of these tokens may be written into these blocks.

    An empty span says that nothing is needed. `reports` is false where the scheduler does not wait
    for the request, and then nothing may be reported for it.
    """

    request_id: str
    transfer_id: str
    fingerprint: bytes
    attempt: int
    host: str
    port: int
    begin_token: int
    end_token: int
    blocks: Blocks
    deadline_s: float
    reports: bool


class Refusal(msgspec.Struct, frozen=True):
    """The request's own parameters are wrong: fail its load."""

    request_id: str
    block_ids: list[int]
    detail: str


class Offer(msgspec.Struct, frozen=True):
    """Prefill side: KV of `watermark` tokens lies in these blocks, beside those offered before."""

    request_id: str
    transfer_id: str
    fingerprint: bytes
    blocks: Blocks
    watermark: int
    final: bool


class Withdrawal(msgspec.Struct, frozen=True):
    """Prefill side: this transfer will not come, or the offer of this request is taken back."""

    transfer_id: str
    fingerprint: bytes
    reason: str
    request_id: str = ""


class Close(msgspec.Struct, frozen=True):
    """Prefill side: a request that was offered step by step has ended; its blocks are held.

    With a reason its KV will not come, or is not whole.
    """

    request_id: str
    transfer_id: str
    fingerprint: bytes
    reason: str


@dataclass(slots=True)
class StepOrders:
    """All orders of one step, to be carried out once.

    `progress` after its forward pass, the rest before it, `rewinds` first of all.
    """

    step: int = 0
    grants: list[Grant] = field(default_factory=list)
    revokes: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    withdrawals: list[Withdrawal] = field(default_factory=list)
    rewinds: list[str] = field(default_factory=list)
    """Requests whose blocks this step gives to others: what was offered of them is taken back."""
    closes: list[Close] = field(default_factory=list)
    progress: list[Offer] = field(default_factory=list)

    def __len__(self) -> int:
        """How many there are; no orders are false."""
        return (
            len(self.grants)
            + len(self.revokes)
            + len(self.refusals)
            + len(self.offers)
            + len(self.withdrawals)
            + len(self.rewinds)
            + len(self.closes)
            + len(self.progress)
        )
