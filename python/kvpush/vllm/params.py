"""`kv_transfer_params`: a client's input, checked field by field.

A wrong field is a `BadParamsError` that names field, value and the way out; it concerns that
request alone. Fields this connector does not know (stock proxies send some) are ignored. The
dictionary may be shared between the requests of one HTTP call and is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpush.errors import BadParamsError

__all__ = ["MAX_TRANSFER_ID_BYTES", "ConsumeParams", "ProduceParams", "parse_params"]

MAX_TRANSFER_ID_BYTES = 256
"""Router-made ids are UUIDs of 36 bytes; room for prefixed and nested ones."""
_MAX_HOST_CHARS = 255
"""The longest DNS name."""

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
"""vLLM adds this to every request id, other on each engine."""
_SAMPLE_PREFIX = re.compile(r"^\d+_")
"""vLLM puts this before the ids of a request's samples when n > 1."""

_HINTING_FIELDS = ("transfer_id", "remote_host", "remote_port", "remote_request_id")


class ProduceParams(msgspec.Struct, frozen=True):
    """The prefill leg: this engine's KV goes elsewhere."""

    transfer_id: str


class ConsumeParams(msgspec.Struct, frozen=True):
    """The decode leg: KV comes from the engine whose side channel is at host and port."""

    transfer_id: str
    host: str
    port: int


_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]


class _Fields(msgspec.Struct):
    """What is good for certain, each field for itself. Of the rest, errors are worded by hand."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: _Text | None = None
    remote_host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,255}\Z")] | None = None
    remote_port: Annotated[int, Meta(ge=1, lt=1 << 16)] | None = None
    remote_request_id: _Text | None = None
    remote_engine_id: _Text | None = None
    remote_block_ids: Any = None
    tp_size: _Count | None = None
    pp_size: _Count | None = None
    dcp_size: _Count | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0)] | None = None


def base_request_id(request_id: str) -> str:
    """A request id without what vLLM adds to it per engine and per sample."""
    return _SAMPLE_PREFIX.sub("", _RANDOM_SUFFIX.sub("", request_id))


def parse_params(params: object, request_id: str) -> ProduceParams | ConsumeParams | None:
    """Read one request's parameters; None where it has nothing to do with a transfer.

    Raises:
        BadParamsError: for a wrong or missing field.
    """
    if params is None or params == {}:
        return None
    return _parse_usual(params) or _parse_any(params, request_id)


def _parse_usual(params: object) -> ProduceParams | ConsumeParams | None:
    """What our router sends, in one step, as every request pays for it; None for the rest."""
    if not isinstance(params, dict):
        return None
    try:
        fields = msgspec.convert(params, _Fields)
    except msgspec.ValidationError:
        return None
    given = fields.transfer_id
    if given is None or not given.isascii() or len(given) > MAX_TRANSFER_ID_BYTES:
        return None
    if fields.do_remote_decode:
        return None if fields.do_remote_prefill else ProduceParams(given)
    host, port, blocks = fields.remote_host, fields.remote_port, fields.remote_block_ids
    if not fields.do_remote_prefill or host is None or port is None:
        return None
    if blocks is not None and not isinstance(blocks, (list, tuple)):
        return None
    return ConsumeParams(given, host, port)


def _parse_any(params: object, request_id: str) -> ProduceParams | ConsumeParams | None:
    if not isinstance(params, Mapping):
        raise BadParamsError("kv_transfer_params", params, "give an object, or leave it out")
    produce = _flag(params, "do_remote_decode")
    consume = _flag(params, "do_remote_prefill")
    if produce and consume:
        raise BadParamsError(
            "do_remote_prefill",
            True,
            "give it to the decode leg only; the prefill leg has do_remote_decode",
        )
    if produce:
        return ProduceParams(transfer_id=_transfer_id(params, request_id, remote=False))
    if consume:
        _check_optional(params)
        return ConsumeParams(
            transfer_id=_transfer_id(params, request_id, remote=True),
            host=_host(params),
            port=_port(params),
        )
    _check_leg_is_named(params)
    return None


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadParamsError(name, value, "give true or false")
    return value


def _check_leg_is_named(params: Mapping[str, Any]) -> None:
    """Parameters of a leg without its flag are a mistake; explicit falses are none."""
    if params.get("do_remote_prefill") is not None or params.get("do_remote_decode") is not None:
        return
    if any(params.get(name) is not None for name in _HINTING_FIELDS):
        raise BadParamsError(
            "do_remote_prefill",
            None,
            "it is missing: give do_remote_prefill to the decode leg, do_remote_decode to the "
            "prefill leg",
        )


def _text(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadParamsError(name, value, "give a string that is not empty, or leave it out")
    return value


def _transfer_id(params: Mapping[str, Any], request_id: str, *, remote: bool) -> str:
    """The id both legs share.

    A router gives it. Without one, both engines derive it from the request id that the proxy sent
    to both (X-Request-Id); where the legs ran one after the other, the decode leg has the prefill
    engine's own id, which that engine's random suffix tells from a name of the proxy's making.
    """
    given = _text(params, "transfer_id")
    other = _text(params, "remote_request_id") if remote else None
    if given is None:
        given = other if other is not None and _RANDOM_SUFFIX.search(other) else request_id
        given = base_request_id(given)
    if len(given.encode(errors="surrogatepass")) > MAX_TRANSFER_ID_BYTES:
        raise BadParamsError(
            "transfer_id", given[:40] + "...", f"give at most {MAX_TRANSFER_ID_BYTES} bytes"
        )
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise BadParamsError("transfer_id", given, "give valid Unicode") from error
    return given


def _host(params: Mapping[str, Any]) -> str:
    value = params.get("remote_host")
    way_out = "give the host of the prefill engine's side channel (its VLLM_NIXL_SIDE_CHANNEL_HOST)"
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_HOST_CHARS:
        raise BadParamsError("remote_host", value, way_out)
    if not all(c.isascii() and (c.isalnum() or c in ".-_:%[]") for c in value):
        raise BadParamsError("remote_host", value, way_out)
    return value


def _port(params: Mapping[str, Any]) -> int:
    value = params.get("remote_port")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 16:
        raise BadParamsError(
            "remote_port",
            value,
            "give the port of the prefill engine's side channel, 1 to 65535 "
            "(its VLLM_NIXL_SIDE_CHANNEL_PORT)",
        )
    return value


def _check_optional(params: Mapping[str, Any]) -> None:
    """Fields of stock proxies that are not needed, but must make sense where given."""
    _text(params, "remote_engine_id")
    for name, least in (("tp_size", 1), ("pp_size", 1), ("dcp_size", 1), ("remote_num_tokens", 0)):
        value = params.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadParamsError(name, value, f"give a whole number from {least}, or leave it out")
    blocks = params.get("remote_block_ids")
    if blocks is not None and not isinstance(blocks, (list, tuple)):
        raise BadParamsError("remote_block_ids", blocks, "leave it out: it is not used")
