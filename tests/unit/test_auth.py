from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvpush.auth import KEY_VARIABLE, AuthKey, load_auth_key
from kvpush.errors import ConfigError

SECRET = "0123456789abcdef0123456789abcdef"


def shown_by(key: AuthKey) -> SimpleNamespace:
    """What a holder of this key gives its socket; one of ZMQ's own does not tell it again."""
    sock: Any = SimpleNamespace()
    key.guard_client(sock)
    return sock  # type: ignore[no-any-return]


def public_key(key: AuthKey) -> bytes:
    return bytes(z85.decode(shown_by(key).curve_publickey))


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_no_key() -> None:
    assert load_auth_key("", {}) is None


def test_file_and_environment_give_the_same_key(tmp_path: Path) -> None:
    from_file = load_auth_key(key_file(tmp_path, SECRET + "\n"), {})
    from_variable = load_auth_key("", {KEY_VARIABLE: SECRET})
    assert from_file is not None
    assert from_variable is not None
    assert from_file.admits(public_key(from_variable))
    other = load_auth_key("", {KEY_VARIABLE: SECRET[::-1]})
    assert other is not None
    assert not from_file.admits(public_key(other))


def test_the_key_is_not_shown() -> None:
    key = load_auth_key("", {KEY_VARIABLE: SECRET})
    assert SECRET not in repr(key)
    assert SECRET not in str(vars(key))


def test_a_listener_is_no_client() -> None:
    """The two ends have key pairs of their own."""
    key = AuthKey(SECRET.encode())
    assert shown_by(key).curve_serverkey != shown_by(key).curve_publickey


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "has 5 bytes, but must have 16 to 4096: make one with"),
        ("", 0o600, "has 0 bytes"),
        ("x" * 5000, 0o600, "4097 bytes"),
        (SECRET, 0o644, "open to every user of this host: chmod o-rwx"),
    ],
)
def test_a_file_that_will_not_do(tmp_path: Path, text: str, mode: int, said: str) -> None:
    name = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=said) as raised:
        load_auth_key(name, {})
    assert name in str(raised.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_auth_key(str(tmp_path / "missing"), {})
    with pytest.raises(ConfigError, match="is no file"):
        load_auth_key(str(tmp_path), {})


def test_a_key_given_twice(tmp_path: Path) -> None:
    name = key_file(tmp_path, SECRET)
    with pytest.raises(ConfigError, match=f"given twice.*{KEY_VARIABLE}"):
        load_auth_key(name, {KEY_VARIABLE: SECRET})


def test_an_empty_variable_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE}: The auth key has 0 bytes"):
        load_auth_key("", {KEY_VARIABLE: ""})


def test_a_zmq_without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    with pytest.raises(ConfigError, match="without CURVE"):
        AuthKey(SECRET.encode())
