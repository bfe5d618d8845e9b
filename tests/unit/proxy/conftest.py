"""The fake prefill servers have no side channel: what they would be told is noted instead."""

from __future__ import annotations

from typing import Any

import pytest

from kvpush.proxy import cancel


@pytest.fixture(autouse=True)
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Side channel and transfer id of each request that a prefill server was told of."""
    told: list[tuple[str, int, str]] = []

    def note(host: str, port: int, transfer_id: str, *_rest: Any) -> None:
        told.append((host, port, transfer_id))

    monkeypatch.setattr(cancel, "cancel_transfer", note)
    return told
