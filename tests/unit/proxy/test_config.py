"""How backends are written, and which settings are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvpush.proxy.config import (
    DecodeBackend,
    PrefillBackend,
    RouterConfig,
    parse_decode,
    parse_prefill,
)


@pytest.mark.parametrize(
    ("text", "url", "host", "port"),
    [
        ("http://p:8100", "http://p:8100", "p", 5600),
        ("http://p:8100/", "http://p:8100", "p", 5600),
        ("https://p/base/", "https://p/base", "p", 5600),
        ("http://p:8100,kv=10.0.0.1:5601", "http://p:8100", "10.0.0.1", 5601),
        ("http://p:8100,kv=:5601", "http://p:8100", "p", 5601),
        ("http://p:8100, kv=q:1", "http://p:8100", "q", 1),
        ("http://[::1]:8100", "http://[::1]:8100", "::1", 5600),
        ("http://p:8100,kv=[fe80::1]:5601", "http://p:8100", "fe80::1", 5601),
    ],
)
def test_prefill(text: str, url: str, host: str, port: int) -> None:
    assert parse_prefill(text) == PrefillBackend(url, host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p:8100",
        "ftp://p",
        "http://",
        "http://p:99999",
        "http://p:x",
        "http://p/v1",
        "http://p?a=1",
        "http://p,kv=q",
        "http://p,kv=q:0",
        "http://p,kv=q:x",
        "http://p,kv=q:99999",
        "http://p,kv=q:1/x",
        "http://p,kv=",
        "http://p,port=5",
        "http://p,",
    ],
)
def test_prefill_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_prefill(text)


def test_decode() -> None:
    assert parse_decode("http://d:8200/") == DecodeBackend("http://d:8200")
    with pytest.raises(ValueError, match="without /v1"):
        parse_decode("http://d:8200/v1/")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": ()}, "--prefill"),
        ({"decode": ()}, "--decode"),
        ({"port": 65_536}, "port 65536"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s"),
        ({"cool_off_s": -1.0}, "cool_off_s"),
    ],
)
def test_settings_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "prefill": (parse_prefill("http://p"),),
        "decode": (parse_decode("http://d"),),
    }
    RouterConfig(**good)
    with pytest.raises(ValueError, match=message):
        RouterConfig(**(good | change))
