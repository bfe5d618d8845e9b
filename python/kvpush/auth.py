"""The key that engines and routers of one deployment share, and what is derived from it.

With a key the side channel speaks ZMQ's CURVE: both ends prove that they hold it, and everything
said is encrypted. Two key pairs are derived from it, one for those who listen and one for those who
ask, so nothing but the key has to be handed out. The key comes from a file or the environment,
never from a setting that vLLM writes into its log.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from kvpush.errors import ConfigError

__all__ = ["KEY_VARIABLE", "AuthKey", "load_auth_key"]

KEY_VARIABLE = "KVPUSH_AUTH_KEY"

_LEAST_KEY_BYTES = 16
"""128 bits, if they are random: what is shorter could be guessed."""
_MOST_KEY_BYTES = 4096
"""More is a wrong file."""
_WAY_OUT = "make one with `openssl rand -hex 32` and give all engines and routers the same"

# scrypt with 16 MiB, some 50 ms, once for each process: a guess at a weak key costs as much.
_SCRYPT_COST = 2**14
_SCRYPT_BLOCK = 8


class AuthKey:
    """Key pairs for both ends of a side channel. Immutable; any thread."""

    def __init__(self, secret: bytes) -> None:
        """Derive the pairs.

        Raises:
            ConfigError: the key is too short, or this ZMQ has no CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "An auth key is set, but this pyzmq was built without CURVE (libsodium). Install "
                "pyzmq's own wheel (pip install --force-reinstall pyzmq), or run without a key."
            )
        if not _LEAST_KEY_BYTES <= len(secret) <= _MOST_KEY_BYTES:
            raise ConfigError(
                f"The auth key has {len(secret)} bytes, but must have {_LEAST_KEY_BYTES} to "
                f"{_MOST_KEY_BYTES}: {_WAY_OUT}."
            )
        self._server = _pair(secret, b"kvpush side channel: those who listen")
        self._client = _pair(secret, b"kvpush side channel: those who ask")

    def __repr__(self) -> str:
        return "AuthKey(...)"

    def guard_listener(self, listener: zmq.Socket[Any]) -> None:
        """Make a socket that is not yet bound refuse whoever does not hold the key.

        Its context also needs somebody who answers ZAP: see `admits`.
        """
        _, listener.curve_secretkey = self._server
        listener.curve_server = True

    def guard_client(self, client: zmq.Socket[Any]) -> None:
        """Make a socket that is not yet connected prove that it holds the key."""
        client.curve_serverkey, _ = self._server
        client.curve_publickey, client.curve_secretkey = self._client

    def admits(self, public_key: bytes) -> bool:
        """Whether a client with this public key, 32 bytes, holds the key."""
        return hmac.compare_digest(z85.encode(public_key), self._client[0])


def load_auth_key(file: str = "", environ: Mapping[str, str] = os.environ) -> AuthKey | None:
    """Read the key from `file`, else from KVPUSH_AUTH_KEY; None where there is neither.

    White space around it does not belong to it.

    Raises:
        ConfigError: naming the file or the variable, what is wrong and the way out.
    """
    value = environ.get(KEY_VARIABLE)
    if file and value is not None:
        raise ConfigError(
            f"The auth key is given twice: by 'auth_key_file' ({file}) and by {KEY_VARIABLE}. "
            "Leave one of them out."
        )
    if file:
        secret = _read(Path(file))
    elif value is not None:
        secret = value.encode(errors="surrogateescape")
    else:
        return None
    try:
        return _derive(secret.strip())
    except ConfigError as error:
        raise ConfigError(f"{file or KEY_VARIABLE}: {error}") from error


@functools.lru_cache(maxsize=4)
def _derive(secret: bytes) -> AuthKey:
    return AuthKey(secret)


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"auth_key_file {path} is no file: {_WAY_OUT}.")
        if mode & stat.S_IRWXO:
            raise ConfigError(
                f"auth_key_file {path} is open to every user of this host: chmod o-rwx {path}."
            )
        with path.open("rb") as file:
            return file.read(_MOST_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"auth_key_file {path} can't be read: {error}.") from error


def _pair(secret: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """A CURVE key pair, public and secret, in ZMQ's Z85."""
    raw = hashlib.scrypt(secret, salt=purpose, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=1, dklen=32)
    encoded = z85.encode(raw)
    return zmq.curve_public(encoded), encoded
