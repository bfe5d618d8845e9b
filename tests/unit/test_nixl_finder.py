"""Finding NIXL's library: the order of places, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpush import _nixl
from kvpush.errors import KvPushError, NixlNotFoundError


class Site:
    """A site-packages folder with made-up NIXL wheels."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, name: str, *, files: bool = True, library: bool = True) -> Path:
        """Install a wheel; returns where its library is, or would be."""
        tag = name.replace("-", "_")
        info = self.path / f"{tag}-9.9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        place = self.path / f".{tag}.mesonpy.libs" / "libnixl_capi.so"
        if library:
            place.parent.mkdir()
            place.touch()
        if files:
            (info / "RECORD").write_text(f".{tag}.mesonpy.libs/libnixl_capi.so,,\n")
        return place


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A Python and a system with no NIXL at all."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setattr(_nixl, "_SYSTEM_FOLDERS", (str(tmp_path / "opt"),))
    monkeypatch.delenv("KVPUSH_NIXL_LIBRARY", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return Site(packages)


def set_torch_cuda(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Make it look as if a torch built for this CUDA release were loaded."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda=version))
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_environment_variable_wins(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("nixl-cu13")
    own = tmp_path / "own.so"
    own.touch()
    monkeypatch.setenv("KVPUSH_NIXL_LIBRARY", str(own))
    assert _nixl.find_library() == own


def test_relative_path_in_the_variable_becomes_absolute(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.so").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVPUSH_NIXL_LIBRARY", "own.so")
    assert _nixl.find_library() == tmp_path / "own.so"


def test_wrong_variable_is_an_error_even_with_a_wheel(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("nixl-cu13")
    monkeypatch.setenv("KVPUSH_NIXL_LIBRARY", "/nowhere/libnixl_capi.so")
    with pytest.raises(NixlNotFoundError, match="KVPUSH_NIXL_LIBRARY is set to '/nowhere/"):
        _nixl.find_library()


@pytest.mark.parametrize("name", ["nixl-cu12", "nixl-cu13", "nixl"])
@pytest.mark.parametrize("files", [True, False])
def test_any_wheel_will_do_without_cuda(site: Site, name: str, files: bool) -> None:
    place = site.install(name, files=files)
    assert _nixl.find_library() == place


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.8", "nixl-cu12"), ("13.0", "nixl-cu13"), (None, "nixl-cu13"), ("11.8", "nixl-cu13")],
)
def test_wheel_follows_torch(
    site: Site, monkeypatch: pytest.MonkeyPatch, cuda: str | None, expected: str
) -> None:
    places = {name: site.install(name) for name in ("nixl-cu12", "nixl-cu13")}
    set_torch_cuda(monkeypatch, cuda)
    assert _nixl.find_library() == places[expected]


def test_the_other_wheel_is_used_where_torchs_is_missing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site.install("nixl-cu13")
    set_torch_cuda(monkeypatch, "12.8")
    assert _nixl.find_library() == place


def test_wheel_without_the_library_is_passed_over(site: Site) -> None:
    site.install("nixl-cu13", library=False)
    place = site.install("nixl-cu12")
    assert _nixl.find_library() == place


def test_system_folders_come_last(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("opt", "ld"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libnixl_capi.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(["", "/nowhere", str(tmp_path / "ld")]))
    assert _nixl.find_library() == tmp_path / "opt" / "libnixl_capi.so"
    (tmp_path / "opt" / "libnixl_capi.so").unlink()
    assert _nixl.find_library() == tmp_path / "ld" / "libnixl_capi.so"
    place = site.install("nixl-cu12")
    assert _nixl.find_library() == place


def test_error_lists_every_place_and_what_to_install(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("nixl-cu12", library=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    with pytest.raises(NixlNotFoundError) as raised:
        _nixl.find_library()
    message = str(raised.value)
    for part in (
        "pip install nixl",
        "KVPUSH_NIXL_LIBRARY: not set",
        "nixl-cu13: not installed",
        "nixl-cu12 9.9: has no libnixl_capi.so",
        f"{tmp_path}/opt/libnixl_capi.so: not there",
        "/nowhere/libnixl_capi.so: not there",
    ):
        assert part in message


def test_error_is_both_ours_and_an_import_error() -> None:
    assert issubclass(NixlNotFoundError, KvPushError)
    assert issubclass(NixlNotFoundError, ImportError)


def test_settings_that_are_there_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", "7")
    _nixl.prepare_environment()
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "7"


def test_connections_end_before_the_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer_timeout_s, wanted in ((10.0, "5000ms"), (0.5, "250ms")):
        monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "")
        monkeypatch.delenv("UCX_TCP_USER_TIMEOUT")
        _nixl.prepare_environment(peer_timeout_s)
        assert os.environ["UCX_TCP_USER_TIMEOUT"] == wanted


def test_missing_settings_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", "")
    monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED")
    _nixl.prepare_environment()
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "1024"


@pytest.mark.nixl
def test_installed_library_is_found_without_importing_anything() -> None:
    code = (
        "import sys; from kvpush._nixl import find_library; print(find_library());"
        "assert not {'torch', 'nixl', 'nixl_cu12', 'nixl_cu13'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(result.stdout.strip()).is_file()
