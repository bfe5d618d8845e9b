"""Which headers pass."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from kvpush.proxy.headers import client_headers, leg_headers


def proxied(*items: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(items))


def test_headers_of_the_legs() -> None:
    client = proxied(
        ("Host", "router"),
        ("Content-Length", "5"),
        ("content-type", "application/json; charset=utf-8"),
        ("Content-Encoding", "gzip"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "1"),
        ("Expect", "100-continue"),
        ("Authorization", "Bearer k"),
        ("X-Twice", "a"),
        ("X-Twice", "b"),
        ("X-data-parallel-rank", "3"),
    )
    common = [
        ("Authorization", "Bearer k"),
        ("X-Twice", "a"),
        ("X-Twice", "b"),
    ]
    rank = [("X-data-parallel-rank", "3")]
    content = [("Content-Type", "application/json")]
    assert list(leg_headers(client, "f" * 32, leg="p").items()) == common + content
    assert list(leg_headers(client, "f" * 32, leg="d").items()) == common + rank + content


def test_a_request_id_is_made_unique_and_is_bounded() -> None:
    client = proxied(("x-request-id", "a" * 5000))
    first, second = "1" * 32, "2" * 32
    ids = {
        leg_headers(client, each, leg=leg)["X-Request-Id"]
        for each in (first, second)
        for leg in "pd"
    }
    assert len(ids) == 4
    assert all(each.startswith("aaa") and len(each) < 300 for each in ids)
    assert "X-Request-Id" not in leg_headers(proxied(), first, leg="p")


def test_headers_of_the_answer() -> None:
    backend = proxied(
        ("Content-Type", "text/event-stream"),
        ("Content-Length", "5"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "X-Hop"),
        ("X-Hop", "1"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
    )
    kept = ["Content-Type", "Content-Length", "Set-Cookie", "Set-Cookie"]
    assert [name for name, _ in client_headers(backend, whole_body=False).items()] == kept
    kept.remove("Content-Length")
    assert [name for name, _ in client_headers(backend, whole_body=True).items()] == kept
