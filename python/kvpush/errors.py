"""What kvpush raises where a person can act: every message names the cause and the way out."""

from __future__ import annotations

__all__ = [
    "BadParamsError",
    "ConfigError",
    "KvPushError",
    "NixlNotFoundError",
    "PeerIncompatibleError",
    "PeerUnreachableError",
    "SideChannelError",
    "UnsupportedError",
]


class KvPushError(Exception):
    """Any error of kvpush's own."""


class NixlNotFoundError(KvPushError, ImportError):
    """NIXL's library is not installed, or not where it was said to be."""


class ConfigError(KvPushError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class UnsupportedError(KvPushError, ValueError):
    """This model, layout or engine setting can't be transferred."""


class SideChannelError(KvPushError):
    """The side channel can't listen."""


class PeerUnreachableError(KvPushError):
    """Another engine does not answer."""


class PeerIncompatibleError(KvPushError):
    """Another engine answers, or refuses to, but the two can't work together."""


class BadParamsError(KvPushError, ValueError):
    """A field of a request's `kv_transfer_params` is wrong or missing."""

    def __init__(self, field: str, value: object, way_out: str) -> None:
        shown = "missing" if value is None else repr(value)
        if len(shown) > _LONGEST_SHOWN_CHARS:
            shown = shown[:_LONGEST_SHOWN_CHARS] + "..."
        super().__init__(f"kv_transfer_params: {field!r} is {shown}; {way_out}.")
        self.field = field
        self.value = value


_LONGEST_SHOWN_CHARS = 120
"""A client's value in a log line: enough to recognise it."""
