"""The router's settings, and how backends are written on the command line."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec

from kvpush.auth import AuthKey

DEFAULT_SIDE_CHANNEL_PORT = 5600
"""vLLM's own default of VLLM_NIXL_SIDE_CHANNEL_PORT."""

MAX_PORT = 65_535


class PrefillBackend(msgspec.Struct, frozen=True):
    """A prefill server: its base URL, and its side channel, where decode servers meet it."""

    url: str
    side_channel_host: str
    side_channel_port: int


class DecodeBackend(msgspec.Struct, frozen=True):
    """A decode server: its OpenAI base URL."""

    url: str


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one router. Times are seconds, sizes are bytes."""

    prefill: tuple[PrefillBackend, ...]
    decode: tuple[DecodeBackend, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    # Three sockets a request (client, P, D): 1,000 requests need 3,000 file descriptors.
    max_concurrent: int = 1_000
    # A chat with a few images in base64 has some 10 MiB; 64 MiB leaves room.
    max_body_bytes: int = 64 * 1024 * 1024
    connect_timeout_s: float = 5.0
    # The longest silence of a decode server. A long answer without streaming is one long silence,
    # so it is generous: it exists only so that nothing waits without end.
    idle_timeout_s: float = 3_600.0
    body_timeout_s: float = 60.0
    health_timeout_s: float = 2.0
    cool_off_s: float = 5.0
    # How long requests under way may go on after SIGTERM.
    drain_s: float = 10.0
    access_log: bool = False
    # What the side channels of the prefill servers ask for, if they have a key.
    auth: AuthKey | None = None

    def __post_init__(self) -> None:
        """Refuse settings with which no request could ever be served."""
        if not self.prefill:
            raise ValueError("at least one --prefill URL is needed")
        if not self.decode:
            raise ValueError("at least one --decode URL is needed")
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port {self.port} is not between 0 and {MAX_PORT}")
        for name in ("max_concurrent", "max_body_bytes", "connect_timeout_s", "idle_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0")
        if self.cool_off_s < 0 or self.drain_s < 0:
            raise ValueError("cool_off_s and drain_s must not be negative")


def parse_prefill(text: str) -> PrefillBackend:
    """Read `http://host:port` or `http://host:port,kv=host:port`; ValueError says what is wrong."""
    url_text, *options = text.split(",")
    url, parts = _parse_url(url_text)
    host, port = parts.hostname or "", DEFAULT_SIDE_CHANNEL_PORT
    for option in options:
        name, _, value = option.partition("=")
        if name.strip() != "kv":
            raise ValueError(f"{text!r}: unknown option {name.strip()!r}; known: kv=HOST:PORT")
        host, port = _parse_side_channel(value.strip(), default_host=parts.hostname or "")
    return PrefillBackend(url=url, side_channel_host=host, side_channel_port=port)


def parse_decode(text: str) -> DecodeBackend:
    """Read `http://host:port`; ValueError says what is wrong."""
    url, _ = _parse_url(text)
    return DecodeBackend(url=url)


def _parse_url(text: str) -> tuple[str, SplitResult]:
    parts = urlsplit(text.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not a URL of the form http://HOST:PORT")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r}: a backend's URL has no query and no fragment")
    _ = parts.port  # urlsplit checks the port's range only when it is read
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"{text!r}: give the server's base URL, without /v1")
    return f"{parts.scheme}://{parts.netloc}{path}", parts


def _parse_side_channel(text: str, *, default_host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"kv={text}: {error}") from error
    if port is None or port == 0 or parts.path or parts.query or parts.username is not None:
        raise ValueError(f"kv={text} is not of the form kv=HOST:PORT")
    return parts.hostname or default_host, port
