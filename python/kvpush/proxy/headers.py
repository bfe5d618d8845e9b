"""Which headers pass through the router, and in which form."""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy

REQUEST_ID = "X-Request-Id"

MAX_REQUEST_ID_CHARS = 256
"""A client's request id is cut to this length: it is part of ids and log lines in two servers."""

# About one connection, not about the message: never passed on (RFC 9110, section 7.6.1).
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Describe the body or the address as the client sent them; the legs have bodies and addresses of
# their own.
_REWRITTEN_REQUEST = frozenset(
    {"host", "content-length", "content-type", "content-encoding", "expect", "x-request-id"}
)
# Chosen for the decode server's ranks; the prefill server may have no such rank.
_DECODE_ONLY = frozenset({"x-data-parallel-rank"})


def leg_headers(client: CIMultiDictProxy[str], transfer_id: str, *, leg: str) -> CIMultiDict[str]:
    """Return the headers of one leg; `leg` is "p" or "d".

    The request id gets a suffix that no other request and no other leg has: engines key their state
    by it, and clients do send the same one twice.
    """
    dropped = _HOP_BY_HOP | _REWRITTEN_REQUEST | _named_by_connection(client)
    if leg == "p":
        dropped |= _DECODE_ONLY
    headers = _without(client, dropped)
    headers["Content-Type"] = "application/json"
    if client_id := client.get(REQUEST_ID):
        headers[REQUEST_ID] = f"{client_id[:MAX_REQUEST_ID_CHARS]}-{transfer_id[:16]}-{leg}"
    return headers


def plain_headers(client: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers of a request that has no body, such as GET /v1/models."""
    return _without(client, _HOP_BY_HOP | _REWRITTEN_REQUEST | _named_by_connection(client))


def client_headers(backend: CIMultiDictProxy[str], *, whole_body: bool) -> CIMultiDict[str]:
    """Return a backend's headers as the client gets them.

    `whole_body`: the router sends the body in one piece and so counts its length itself. Otherwise
    the backend's Content-Length stays, so that the client notices an answer that was cut off.
    """
    dropped = _HOP_BY_HOP | _named_by_connection(backend)
    if whole_body:
        dropped |= {"content-length"}
    return _without(backend, dropped)


def _named_by_connection(headers: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in headers.get("Connection", "").split(","))


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )
