"""What all tests share: marks by folder, and the options --soak and the skipping of GPU tests."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent

# Every test below one of these folders carries the folder's mark.
FOLDER_MARKS = ("nixl", "vllm", "gpu")

# Two engines start within a minute on two idle cores; a test's own work comes on top.
ENGINE_TIMEOUT_S = 900


@functools.cache
def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver answers and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60, check=False)
    return result.returncode == 0 and b"GPU" in result.stdout


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Lets `-m "not vllm"` work where vLLM, which those test files import, is not installed."""
    deselected = "not vllm" in (config.getoption("markexpr") or "")
    if deselected and collection_path == TESTS / "vllm" and not importlib.util.find_spec("vllm"):
        return True
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on the same examples in every run; soak draws new ones each time."""
    soak = config.getoption("--soak")
    settings.register_profile("kvpush", deadline=None, derandomize=not soak, print_blob=True)
    settings.load_profile("kvpush")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = config.getoption("--soak")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDER_MARKS:
            item.add_marker(folder)
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
        if item.get_closest_marker("soak") and not soak:
            item.add_marker(pytest.mark.skip(reason="long; runs with --soak (make soak)"))
        if item.get_closest_marker("gpu") and not has_nvidia_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; nvidia-smi lists none"))
