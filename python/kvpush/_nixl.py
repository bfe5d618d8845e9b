"""Finds NIXL's C library, without importing NIXL.

The library is opened by the native module, by its absolute path and only when an engine is made.
NIXL's plugins and UCX's modules lie beside it and are found from there, so nothing else has to be
set; a `NIXL_PLUGIN_DIR` in the environment still wins.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from kvpush.errors import NixlNotFoundError

__all__ = ["LIBRARY_NAME", "LIBRARY_VARIABLE", "find_library", "prepare_environment"]

LIBRARY_NAME = "libnixl_capi.so"
"""The C API: it pulls in the rest of NIXL."""

LIBRARY_VARIABLE = "KVPUSH_NIXL_LIBRARY"
"""Environment variable that names the library's file, for installations found nowhere else."""

# Newest CUDA first. "nixl" itself is a list of requirements on PyPI, but a source build may put the
# library there.
_DISTRIBUTIONS = ("nixl-cu13", "nixl-cu12", "nixl")

_SYSTEM_FOLDERS = (
    "/opt/nvidia/nvda_nixl/lib/x86_64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib/aarch64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib64",
    "/opt/nvidia/nvda_nixl/lib",
)


def find_library() -> Path:
    """The absolute path of NIXL's C library.

    Looked for in this order: the file that `KVPUSH_NIXL_LIBRARY` names; the installed wheels, that
    of the CUDA release torch runs with before the others; NIXL's system-wide folder; the folders of
    `LD_LIBRARY_PATH`.

    Raises:
        NixlNotFoundError: It is in none of them, or `KVPUSH_NIXL_LIBRARY` names no file. The
            message lists every place and says what to install.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        path = Path(named).absolute()
        if path.is_file():
            return path
        msg = f"{LIBRARY_VARIABLE} is set to {named!r}, and there is no such file"
        raise NixlNotFoundError(msg)

    tried = [f"environment variable {LIBRARY_VARIABLE}: not set"]
    for distribution in _distributions():
        found = _in_distribution(distribution, tried)
        if found is not None:
            return found
    for folder in _folders():
        path = folder / LIBRARY_NAME
        if path.is_file():
            return path.absolute()
        tried.append(f"file {path}: not there")
    places = "\n".join(f"  - {place}" for place in tried)
    msg = (
        f"NIXL's library {LIBRARY_NAME} was not found. Install NIXL with `pip install nixl`, "
        f"or set {LIBRARY_VARIABLE} to the library's path. Looked at:\n{places}"
    )
    raise NixlNotFoundError(msg)


def prepare_environment(peer_timeout_s: float = 10.0) -> None:
    """Sets what UCX should know before the first NIXL agent of the process is made.

    Settings that are there already are left alone.
    """
    # Through a cut network the kernel would keep what was written, for a quarter of an hour, and
    # deliver it when the cut heals: into blocks that others have by then. A connection that is
    # given up earlier than the peer itself takes what it holds with it.
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", f"{max(1, round(peer_timeout_s * 500))}ms")
    # UCX keeps memory registrations that nobody uses any more, by default without a limit. This is
    # the figure vLLM uses.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")


def _distributions() -> list[str]:
    """The distributions that may hold the library, the one for torch's CUDA release first."""
    major = _torch_cuda_major()
    first = f"nixl-cu{major}"
    return sorted(_DISTRIBUTIONS, key=lambda name: name != first)


def _torch_cuda_major() -> str | None:
    """The CUDA release torch was built for, if torch is loaded already; it is never loaded here."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return version.split(".")[0] if isinstance(version, str) and version else None


def _in_distribution(name: str, tried: list[str]) -> Path | None:
    """The library inside an installed distribution; says in `tried` why not."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        tried.append(f"Python distribution {name}: not installed")
        return None
    # The list of files may be missing; then the wheels' usual place is tried.
    tag = name.replace("-", "_")
    usual = f".{tag}.mesonpy.libs/{LIBRARY_NAME}"
    listed = [str(file) for file in distribution.files or () if file.name == LIBRARY_NAME]
    for file in (*listed, usual):
        path = Path(str(distribution.locate_file(file))).absolute()
        if path.is_file():
            return path
    tried.append(f"Python distribution {name} {distribution.version}: has no {LIBRARY_NAME}")
    return None


def _folders() -> list[Path]:
    """Folders outside Python's packages, in the order they are tried."""
    search_path = os.environ.get("LD_LIBRARY_PATH", "")
    return [Path(folder) for folder in (*_SYSTEM_FOLDERS, *search_path.split(os.pathsep)) if folder]
