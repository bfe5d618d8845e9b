"""Compares answers token for token with those of one plain engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.client import Answer, Request


@dataclass(frozen=True)
class Difference:
    """One request whose two answers differ, and where."""

    index: int
    prompt_tokens: int
    first_at: int
    expected: Sequence[int]
    got: Sequence[int]
    error: str | None

    def __str__(self) -> str:
        head = f"request {self.index} ({self.prompt_tokens} prompt tokens)"
        if self.error is not None:
            return f"{head}: {self.error}"
        at = self.first_at
        return (
            f"{head}: differs from token {at} of {len(self.expected)}: "
            f"expected {list(self.expected[at : at + 4])}, got {list(self.got[at : at + 4])}"
        )


def differences(
    requests: Sequence[Request], expected: Sequence[Answer], got: Sequence[Answer]
) -> list[Difference]:
    """Return every request whose answers differ, or that either side did not answer."""
    found: list[Difference] = []
    for index, (request, want, have) in enumerate(zip(requests, expected, got, strict=True)):
        if want.ok and have.ok and want.token_ids and want.token_ids == have.token_ids:
            continue
        pairs = enumerate(zip(want.token_ids, have.token_ids, strict=False))
        shorter = min(len(want.token_ids), len(have.token_ids))
        first = next((at for at, (one, other) in pairs if one != other), shorter)
        error = have.error if want.ok else f"the plain engine failed: {want.error}"
        if error is None and not want.token_ids:
            error = "the plain engine returned no tokens"
        found.append(
            Difference(index, len(request.prompt), first, want.token_ids, have.token_ids, error)
        )
    return found


def require_equal(
    requests: Sequence[Request], expected: Sequence[Answer], got: Sequence[Answer]
) -> None:
    """Raise ``AssertionError`` with one line per request that differs."""
    found = differences(requests, expected, got)
    if found:
        lines = "".join(f"\n  {difference}" for difference in found[:10])
        raise AssertionError(f"{len(found)} of {len(requests)} answers differ:{lines}")
