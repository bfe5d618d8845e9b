"""Builds the C++ benchmarks, as optimised as the wheel, in build/bench-native."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench-native"
NOT_INSTALLED = 2
"""Exit status of the benchmarks of the core where google-benchmark is missing."""
_CACHE_ENTRY = "benchmark_DIR:PATH="


class NoGoogleBenchmarkError(Exception):
    """What the benchmarks of the core are made with is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "The benchmarks of the core need google-benchmark: install its CMake package "
            "(Debian and Ubuntu: libbenchmark-dev)."
        )


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        msg = f"{command[0]} is not in PATH; this needs CMake, Ninja and a C++20 compiler"
        raise RuntimeError(msg) from error
    if done.returncode != 0:
        msg = f"`{' '.join(command)}` failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise RuntimeError(msg)


def build(target: str) -> Path:
    """The built executable.

    Raises:
        NoGoogleBenchmarkError: The target needs it, and CMake does not find it.
        RuntimeError: CMake or the compiler failed; the message has what they said.
    """
    _run(
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=Release", "-DKVPUSH_BUILD_PYTHON=OFF", "-DKVPUSH_BUILD_BENCH=ON"),
    )
    if target == "kvpush_bench_core" and not _found(BUILD / "CMakeCache.txt"):
        raise NoGoogleBenchmarkError
    _run("cmake", "--build", str(BUILD), "--target", target)
    return BUILD / "bench" / "core" / target


def _found(cache: Path) -> bool:
    """Whether CMake found google-benchmark."""
    entries = [line for line in cache.read_text().splitlines() if line.startswith(_CACHE_ENTRY)]
    return bool(entries) and not entries[0].endswith("-NOTFOUND")
