"""What a deployment may set: the keys of `kv_connector_extra_config`, with defaults and reasons.

Every key is checked when the engine starts: an unknown one, a wrong type or a value out of range
is a `ConfigError` that names the key. Importing this module needs neither vLLM nor NIXL.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvpush.errors import ConfigError

__all__ = ["Config", "load_config"]

Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]
Micros = Annotated[float, msgspec.Meta(ge=0.0, le=1_000_000.0)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. Durations end in `_s` (seconds) or `_us` (microseconds)."""

    backends: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)] = msgspec.field(
        default_factory=lambda: ["UCX"]
    )
    """NIXL backend, as a list of one name. UCX runs on shared memory as well as InfiniBand."""

    backend_params: dict[str, str] = msgspec.field(default_factory=dict)
    """Parameters handed to the NIXL backend as they are."""

    receive_deadline_s: Seconds = 120.0
    """How long a decode request waits for its KV before it fails. Covers queueing and prefill of
    the longest prompt on a loaded prefill engine; clients rarely wait longer than two minutes."""

    offer_ttl_s: Seconds = 120.0
    """How long a finished prefill is held for a decode engine that has not asked for it. Both legs
    start together, so only a decode engine short of blocks comes late; equal to its deadline."""

    grant_ttl_s: Seconds = 240.0
    """How long a prefill engine remembers a decode engine's blocks without a prefill. Longer than
    any receive deadline, so that the decode side, which owns the blocks, gives up first."""

    keepalive_s: Seconds = 1.0
    """How often a native thread tells its peers that it lives. One small message a second."""

    peer_timeout_s: Seconds = 10.0
    """Silence after which a peer counts as lost: ten keepalives, so a busy host is not mistaken."""

    fence_margin_s: Annotated[float, msgspec.Meta(ge=0.05, le=86_400.0)] = 2.0
    """How much longer than the peer time-out blocks stay untouched after a peer was lost: covers
    the batch that a stopped process may still have had in flight."""

    resend_s: Seconds = 2.0
    """After how long an unanswered message is sent again."""

    retry_grace_s: Seconds = 5.0
    """How long a prefill whose decode side failed stays on offer for that side's next attempt."""

    revoke_patience_s: Seconds = 20.0
    """How long a decode side waits for a living prefill side to confirm that it stopped writing,
    before it breaks the connection instead."""

    hello_timeout_s: Seconds = 10.0
    """How long two engines may take to meet over NIXL. First contact loads transports."""

    discovery_timeout_s: Seconds = 10.0
    """How long a prefill engine's side channel may take to answer: milliseconds, but seconds where
    its host is short of CPU."""

    retry_backoff_s: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 1.0
    """After a failed discovery, requests for the same address fail at once for this long."""

    drain_s: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 5.0
    """How long shutdown waits for transfers in flight."""

    max_batch_descriptors: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1024
    """Descriptors in one post. Posting costs 4 to 8 us each, so a batch blocks the native thread
    for a few milliseconds at most."""

    max_batch_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 32)] = 32 << 20
    """Bytes in one post: what a process stopped in the middle may still write."""

    max_handles_in_flight: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Posts in flight per rank."""

    max_prepared_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 8 << 20
    """Blocks in NIXL's prepared lists, of all peers, both sides counted; 0: none are made.
    Scattered blocks are posted from such lists. From NIXL 1.4 on they take no memory to speak of,
    before that 32 bytes for each block."""

    spin_us: Micros = 50.0
    """How long the native thread spins after it found work."""

    busy_poll_us: Micros = 100.0
    """Its sleep between looks while a transfer waits for a peer. Each look costs about 10 us of
    CPU where timers are slow, so a tenth of a core; the latency it adds is a fraction of a step."""

    idle_poll_us: Micros = 1000.0
    """Its sleep between looks when nothing is in flight: under 1 % of a core."""

    thread_policy: Literal["batch", "normal"] = "batch"
    """How the operating system schedules the native thread where cores are short. "batch": when it
    wakes it does not preempt vLLM's thread, and waits for a core up to a time slice. "normal": it
    takes its turn at once, and vLLM's step waits."""

    push_when: Literal["step", "end"] = "step"
    """When a prefill is pushed: after each step what that has computed, or all of it at its end."""

    min_push_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 4 << 20
    """Before the end of a prefill, smaller pieces than this (of one rank) wait for more. Each piece
    costs a descriptor per layer: with dozens of layers pieces of this size cost little more than
    one push of the whole, pieces of a few hundred KiB several times that. Short prompts, and chunks
    cut small by decodes beside them, make no pieces of their own."""

    auth_key_file: str = ""
    """File with the key that all engines and routers share; empty: KVPUSH_AUTH_KEY, else none."""

    model_id: str = ""
    """Name that both sides of a pair must share; empty: the model's name or path as served. Set it
    where the same model lies under different paths."""

    @property
    def backend(self) -> str:
        """The one backend named."""
        return self.backends[0]


def _allowed(name: str) -> str:
    """The type and range of a key, in words."""
    hints = typing.get_type_hints(Config, include_extras=True)
    hint = hints[name]
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) is not Annotated:
        return str(getattr(hint, "__name__", hint)) if isinstance(hint, type) else str(hint)
    base, *metas = typing.get_args(hint)
    words = [str(getattr(base, "__name__", base)) if isinstance(base, type) else str(base)]
    for meta in metas:
        for bound, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            limit = getattr(meta, bound, None)
            if limit is not None:
                words.append(f"{sign} {limit:g}")
        if getattr(meta, "min_length", None) is not None:
            words.append(f"of {meta.min_length} to {meta.max_length} entries")
    return " ".join([words[0], ", ".join(words[1:])]).strip()


def load_config(values: Mapping[str, Any]) -> Config:
    """Check `kv_connector_extra_config`.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    hints = typing.get_type_hints(Config, include_extras=True)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1, cutoff=0.0)
            raise ConfigError(
                f"kv_connector_extra_config has an unknown key {name!r}; did you mean {near[0]!r}? "
                f"Known keys: {', '.join(sorted(hints))}."
            )
        try:
            checked[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"kv_connector_extra_config[{name!r}] is {value!r}, but must be {_allowed(name)}."
            ) from error
    config = Config(**checked)
    _check_together(config)
    return config


_AT_LEAST = (
    ("peer_timeout_s", 3, "keepalive_s", "one late message must not make a living peer lost"),
    ("peer_timeout_s", 2, "resend_s", "what was lost must be sent again before its peer is lost"),
    ("fence_margin_s", 0.01, "peer_timeout_s", "clocks of two hosts run at rates that differ"),
    ("revoke_patience_s", 2, "resend_s", "the question must be repeated before the break"),
    ("hello_timeout_s", 2, "resend_s", "a HELLO that was lost must be sent again in time"),
    (
        "grant_ttl_s",
        1,
        "receive_deadline_s",
        "the prefill side must not forget a request that the decode side still waits for",
    ),
    ("idle_poll_us", 1, "busy_poll_us", "the thread looks more often while a transfer waits"),
)
"""Relations between keys: the first is at least so many times the second, and why."""


def _check_together(config: Config) -> None:
    for name, times, other, why in _AT_LEAST:
        value, least = getattr(config, name), times * getattr(config, other)
        if value < least:
            raise ConfigError(
                f"kv_connector_extra_config[{name!r}] is {value:g}, but must be at least "
                f"{least:g}, {times:g} times {other!r} ({getattr(config, other):g}): {why}."
            )
