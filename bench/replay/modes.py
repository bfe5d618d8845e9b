"""The modes: which connector both engines load, and how a request's legs are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.engines.pair import Mode
from bench.engines.settings import KVPUSH, KVPUSH_PULL, STOCK_PULL, STOCK_PUSH

# "together": both legs at once; "sequence": the decode leg follows the prefill leg and gets what
# that one returned; "decode": the decode engine alone.
MODES = {
    mode.name: mode
    for mode in (
        Mode("kvpush-push", KVPUSH, "together"),
        Mode("kvpush-pull", KVPUSH_PULL, "together"),
        Mode("stock-push", STOCK_PUSH, "together"),
        Mode("stock-pull", STOCK_PULL, "sequence"),
        Mode("none", None, "decode"),
        Mode("decode-alone", None, "decode", prompt_tokens=16),
    )
}

OURS = tuple(name for name in MODES if name.startswith("kvpush-"))


def mode_named(name: str, extra: dict[str, Any]) -> Mode:
    """A mode; if the connector is ours, with more configuration. ValueError for unknown names."""
    if name not in MODES:
        raise ValueError(f"there is no mode {name!r}; the modes are {', '.join(MODES)}")
    mode = MODES[name]
    if not extra or name not in OURS or mode.connector is None:
        return mode
    return replace(mode, connector=replace(mode.connector, extra_config=extra))
