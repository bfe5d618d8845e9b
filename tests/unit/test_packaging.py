"""The installed distribution: what it declares and what it carries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvpush

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    return importlib.metadata.distribution("kvpush")


def test_version_is_that_of_the_project(distribution: importlib.metadata.Distribution) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert kvpush.__version__ == distribution.version == project["version"]
    assert f"project(kvpush VERSION {project['version']} " in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("console_scripts", "kvpush", "kvpush.cli:main"),
        ("vllm.general_plugins", "kvpush", "kvpush.vllm.plugin:register"),
    ],
)
def test_entry_points_are_declared_and_exist(
    distribution: importlib.metadata.Distribution, group: str, name: str, value: str
) -> None:
    (entry,) = distribution.entry_points.select(group=group, name=name)
    assert entry.value == value
    # Found, not imported: the plugin's module imports vLLM, which need not be installed here.
    assert (Path(kvpush.__file__).parents[1] / f"{entry.module.replace('.', '/')}.py").is_file()


def test_console_script_answers() -> None:
    script = Path(sys.executable).with_name("kvpush")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "proxy" in result.stdout
    assert "selftest" in result.stdout


def test_types_are_shipped() -> None:
    spec = importlib.util.find_spec("kvpush")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


def test_no_tests_no_simulator_in_the_distribution(
    distribution: importlib.metadata.Distribution,
) -> None:
    files = distribution.files
    assert files
    for file in files:
        assert not {"tests", "bench", "sim", "csrc"} & set(file.parts), file
        assert file.suffix not in {".a", ".h", ".cpp"}, file


def test_vllm_and_nixl_are_no_requirements(distribution: importlib.metadata.Distribution) -> None:
    plain = [r for r in distribution.requires or [] if "extra ==" not in r]
    names = {r.split(">")[0].split("=")[0].strip() for r in plain}
    assert names == {"aiohttp", "msgspec", "multidict", "pyzmq", "rich", "typer"}


def test_native_module_loads_neither_nixl_nor_cuda() -> None:
    code = "import kvpush._core; print(open('/proc/self/maps').read())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "kvpush/_core" in result.stdout
    assert "libnixl" not in result.stdout
    assert "libcuda" not in result.stdout
