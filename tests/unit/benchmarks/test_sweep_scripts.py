"""The sweep's scripts, as far as they go without servers: help, refusals, reading of results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from bench.sweep.plot import draw, in_order, read
from bench.sweep.serving_benchmark import check
from bench.sweep.stock_proxy import Proxy, Stock

SWEEP = Path(__file__).resolve().parents[3] / "bench" / "sweep"
SETTINGS = {"MODE": "kvpush-push", "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1"}


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SWEEP / script, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", ["serve_pd.sh", "run_sweep.sh", "cleanup.sh"])
def test_help_explains_the_variables(script: str) -> None:
    shown = run(script, "--help")
    assert shown.returncode == 0
    assert "optional:" in shown.stdout
    assert "#" not in shown.stdout


@pytest.mark.parametrize(
    ("script", "variables", "said"),
    [
        ("serve_pd.sh", {}, "ROLE is not set"),
        ("serve_pd.sh", {"ROLE": "both"}, "ROLE is 'both': it must be one of: prefill decode"),
        ("serve_pd.sh", {"ROLE": "decode"}, "MODE is not set"),
        ("serve_pd.sh", {"ROLE": "decode", "MODE": "push"}, "MODE is 'push': it must be one of"),
        ("serve_pd.sh", {"ROLE": "decode", "MODE": "stock-pull"}, "PREFILL_IP is not set"),
        ("serve_pd.sh", {"ROLE": "decode", **SETTINGS, "TP": "0"}, "TP is '0'"),
        ("serve_pd.sh", {"ROLE": "proxy", **SETTINGS, "PROXY_PORT": "70000"}, "PROXY_PORT is"),
        ("run_sweep.sh", {}, "MODE is not set"),
        ("run_sweep.sh", {**SETTINGS, "QPS_LIST": "1 fast"}, "QPS_LIST has 'fast'"),
        ("run_sweep.sh", {**SETTINGS, "INPUT_LENS": ""}, "INPUT_LENS is not set"),
        ("run_sweep.sh", {**SETTINGS, "OUTPUT_LENS": "128 0.5"}, "OUTPUT_LENS has '0.5'"),
        ("run_sweep.sh", {**SETTINGS, "ITERATIONS": "1.5"}, "ITERATIONS is '1.5'"),
        ("cleanup.sh", {}, "say what to end"),
    ],
)
def test_bad_settings_are_named(script: str, variables: dict[str, str], said: str) -> None:
    refused = run(script, **variables)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_a_sweep_takes_no_arguments() -> None:
    refused = run("run_sweep.sh", "--qps", "3", **SETTINGS)
    assert refused.returncode == 2
    assert "--qps" in refused.stderr


def fake_python(folder: Path, does: str, unhealthy: str = "exit 1") -> Path:
    """An interpreter that runs the scripts' own lines, and instead of a module what is said.

    And `unhealthy` instead of asking for a server's health.
    """
    fake = folder / "python"
    own = f'-) exec {sys.executable} "$@" ;; -c) {unhealthy} ;;'
    fake.write_text(f"#!/bin/sh\ncase $1 in {own} esac\n{does}\n")
    fake.chmod(0o755)
    return fake


def test_a_server_that_ends_while_starting_is_an_error(tmp_path: Path) -> None:
    fake = fake_python(tmp_path, "echo no vLLM; exit 1")
    failed = run("serve_pd.sh", **SETTINGS, ROLE="decode", PYTHON=str(fake), RUN_DIR=str(tmp_path))
    assert failed.returncode == 2
    assert "no vLLM" in failed.stderr
    assert "decode ended while starting" in failed.stderr
    assert not (tmp_path / "decode.pid").exists()


@pytest.mark.parametrize(
    ("mode", "connector", "module"),
    [
        ("stock-pull", "NixlConnector", None),
        ("stock-push", "NixlPushConnector", None),
        ("kvpush-pull", "KvPullConnector", "kvpush.vllm"),
        ("kvpush-push", "KvPushConnector", "kvpush.vllm"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_gets_its_mode_s_connector(
    tmp_path: Path, role: str, mode: str, connector: str, module: str | None
) -> None:
    arguments = tmp_path / "arguments"
    fake = fake_python(tmp_path, f'printf "%s\\n" "$@" >{arguments}; exit 1')
    run(
        "serve_pd.sh",
        **SETTINGS | {"MODE": mode},
        ROLE=role,
        PYTHON=str(fake),
        RUN_DIR=str(tmp_path),
        KV_EXTRA='{"x": 1}',
    )
    said = arguments.read_text().splitlines()
    config = json.loads(said[said.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == connector
    assert config.get("kv_connector_module_path") == module
    assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert config["kv_connector_extra_config"] == {"x": 1}
    assert ("--no-enable-prefix-caching" in said) == (role == "decode")
    assert said[said.index("--model") + 1] == "Qwen/Qwen3-32B"
    assert said[said.index("--tensor-parallel-size") + 1] == "8"


@contextmanager
def models_server(*names: str) -> Iterator[str]:
    """A server that lists models; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": name} for name in names]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            serving.join()


def test_a_proxy_is_not_started_before_servers_of_its_mode(tmp_path: Path) -> None:
    settings = SETTINGS | {"ROLE": "proxy", "RUN_DIR": str(tmp_path)}
    with models_server("M", "sweep-kvpush-push") as push, models_server("M") as silent:
        refused = run("serve_pd.sh", **settings | {"MODE": "kvpush-pull", "PREFILL_PORT": push})
        assert refused.returncode == 2
        assert "MODE is 'kvpush-pull', but the prefill server" in refused.stderr
        assert "MODE=kvpush-push" in refused.stderr
        # The same mode, and a server that does not say; then one that is not there.
        ports = {"PREFILL_PORT": push, "DECODE_PORT": silent}
        fake = fake_python(tmp_path, "echo no proxy; exit 1")
        started = run("serve_pd.sh", **settings | ports, PYTHON=str(fake))
        assert "proxy ended while starting" in started.stderr
    refused = run("serve_pd.sh", **settings | ports)
    assert refused.returncode == 2
    assert "the prefill server does not answer" in refused.stderr


def test_a_measurement_that_hangs_ends_the_sweep(tmp_path: Path) -> None:
    fake = fake_python(tmp_path, "exec sleep 600")
    with models_server("M", "sweep-kvpush-push") as port:
        ended = run(
            "run_sweep.sh",
            **SETTINGS,
            PYTHON=str(fake),
            PROXY_URL=f"http://127.0.0.1:{port}",
            RESULTS_DIR=str(tmp_path),
            LIMIT_S="1",
        )
    assert ended.returncode == 2
    assert "did not end within 1 s (LIMIT_S)" in ended.stderr
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_ctrl_c_ends_a_measurement(tmp_path: Path) -> None:
    # Says that it failed, as the benchmark does.
    fake = fake_python(tmp_path, "trap 'exit 1' INT; echo measuring; sleep 600")
    with models_server("M", "sweep-kvpush-push") as port:
        sweep = subprocess.Popen(
            [SWEEP / "run_sweep.sh"],
            env={"PATH": os.environ["PATH"], "PYTHON": str(fake), **SETTINGS}
            | {"PROXY_URL": f"http://127.0.0.1:{port}", "RESULTS_DIR": str(tmp_path)},
            start_new_session=True,
        )
        try:
            wait_for(lambda: any(log.read_text() for log in tmp_path.glob("*.log")))
            # As a terminal does: to the whole group.
            os.killpg(sweep.pid, signal.SIGINT)
            assert sweep.wait(60) == 130
        finally:
            with suppress(ProcessLookupError):
                os.killpg(sweep.pid, signal.SIGKILL)
            sweep.wait()


def test_ctrl_c_ends_a_server_that_is_starting(tmp_path: Path) -> None:
    fake = fake_python(tmp_path, "exec sleep 600", 'touch "$0.asked"; exit 1')
    starting = subprocess.Popen(
        [SWEEP / "serve_pd.sh"],
        env={"PATH": os.environ["PATH"], "PYTHON": str(fake), **SETTINGS}
        | {"ROLE": "prefill", "RUN_DIR": str(tmp_path)},
        start_new_session=True,
    )
    server = tmp_path / "prefill.pid"
    try:
        wait_for(fake.with_name(f"{fake.name}.asked").exists)
        group = int(server.read_text())
        os.killpg(starting.pid, signal.SIGINT)
        assert starting.wait(60) == 130
        assert not server.exists()
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(starting.pid, signal.SIGKILL)
        starting.wait()


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_cleanup_says_when_there_is_nothing(tmp_path: Path) -> None:
    done = run("cleanup.sh", "server", RUN_DIR=str(tmp_path))
    assert done.returncode == 0
    assert "prefill: not running on this host" in done.stdout


def test_cleanup_ends_the_whole_group(tmp_path: Path) -> None:
    group = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
    (tmp_path / "proxy.pid").write_text(str(group.pid))
    try:
        # Reaped here, as nothing else does, so that the script sees the group gone.
        ending = subprocess.Popen(
            [SWEEP / "cleanup.sh", "proxy"], env={**os.environ, "RUN_DIR": str(tmp_path)}
        )
        assert group.wait(60) < 0
        assert ending.wait(60) == 0
    finally:
        group.kill()
    assert not (tmp_path / "proxy.pid").exists()


def write_result(folder: Path, name: str, **values: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(values))


def test_results_are_grouped_for_the_chart(tmp_path: Path) -> None:
    write_result(tmp_path, "stock-pull_qps2_in1024_out8_iter0", median_ttft_ms=5.0)
    write_result(tmp_path, "stock-pull_qps2_in1024_out8_iter1", median_ttft_ms=7.0)
    write_result(tmp_path, "kvpush-push_qps0.5_in1024_out8_iter0", median_ttft_ms=3.0)
    write_result(tmp_path, "kvpush-push_qps2_in4096_out8_iter0", median_ttft_ms=4.0)
    write_result(tmp_path, "something else", median_ttft_ms=1.0)
    assert read(tmp_path, "ttft", "median") == {
        (1024, 8): {"stock-pull": {2.0: [5.0, 7.0]}, "kvpush-push": {0.5: [3.0]}},
        (4096, 8): {"kvpush-push": {2.0: [4.0]}},
    }
    with pytest.raises(ValueError, match="no usable p99_tpot_ms"):
        read(tmp_path, "tpot", "p99")


def test_a_mode_keeps_its_colour(tmp_path: Path) -> None:
    whole = {mode: {1.0: [5.0]} for mode in ("kvpush-push", "stock-pull", "other", "kvpush-pull")}
    some = {mode: whole[mode] for mode in ("kvpush-push", "kvpush-pull")}
    assert in_order({(1024, 8): whole, (2048, 8): some}) == {
        "stock-pull": "C0",
        "kvpush-pull": "C2",
        "kvpush-push": "C3",
        "other": "C4",
    }
    assert in_order({(1024, 8): some}) == {"kvpush-pull": "C2", "kvpush-push": "C3"}
    # The first panel lacks modes that the legend has.
    draw({(1024, 8): some, (2048, 8): whole}, "TTFT", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_a_result_with_failed_requests_is_none(tmp_path: Path) -> None:
    write_result(tmp_path, "all", completed=3, num_prompts=3)
    check(tmp_path / "all.json")
    write_result(tmp_path, "some", completed=2, num_prompts=3)
    with pytest.raises(ValueError, match="1 of 3 requests failed"):
        check(tmp_path / "some.json")


class Server:
    """A prefill or decode server that notes what it is asked."""

    def __init__(self, answer: dict[str, Any], status: int = 200) -> None:
        self._status = status
        self.asked: list[tuple[dict[str, Any], str]] = []
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self.server = TestServer(app)
        self._answer = answer

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json(), request.headers["X-Request-Id"]))
        return web.json_response(self._answer, status=self._status)


async def through_stock_proxy(legs: str) -> tuple[Server, Server, dict[str, Any]]:
    prefill = Server({"kv_transfer_params": {"remote_block_ids": [4, 5]}})
    decode = Server({"text": "hello"})
    async with prefill.server, decode.server:
        first, second = (
            str(server.server.make_url("")).rstrip("/") for server in (prefill, decode)
        )
        stock = Stock(legs, first, second, "10.0.0.1", 5600, "prefill-id", 8)
        body = {"prompt": "hi", "max_tokens": 9, "stream": True, "stream_options": {}}
        async with (
            TestServer(Proxy(stock).application()) as proxy,
            ClientSession() as session,
            session.post(proxy.make_url("/v1/completions"), json=body) as answer,
        ):
            return prefill, decode, await answer.json()


@pytest.mark.parametrize("legs", ["pull", "push"])
def test_the_stock_proxy_sends_both_legs(legs: str) -> None:
    prefill, decode, answer = asyncio.run(through_stock_proxy(legs))
    assert answer == {"text": "hello"}
    ((first, first_id),) = prefill.asked
    ((second, second_id),) = decode.asked
    assert first_id == second_id
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert "stream_options" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["stream"]) == (9, True)
    if legs == "pull":
        assert second["kv_transfer_params"] == {"remote_block_ids": [4, 5]}
    else:
        wanted = {"remote_engine_id": "prefill-id", "tp_size": 8, "remote_port": 5600}
        assert wanted.items() <= second["kv_transfer_params"].items()
        assert second["kv_transfer_params"]["remote_request_id"] == first_id


class Waiting(Server):
    """A decode server whose KV never comes."""

    def __init__(self) -> None:
        super().__init__({})
        self.over = asyncio.Event()

    async def _complete(self, _: web.Request) -> web.Response:
        await self.over.wait()
        return web.json_response({})


async def with_a_failing_prefill() -> tuple[int, str]:
    prefill, decode = Server({"error": "no"}, status=500), Waiting()
    async with prefill.server, decode.server:
        first, second = (
            str(server.server.make_url("")).rstrip("/") for server in (prefill, decode)
        )
        stock = Stock("push", first, second, "10.0.0.1", 5600, "prefill-id", 8)
        try:
            async with (
                TestServer(Proxy(stock).application()) as proxy,
                ClientSession() as session,
                session.post(proxy.make_url("/v1/completions"), json={"prompt": "hi"}) as answer,
            ):
                return answer.status, await answer.text()
        finally:
            decode.over.set()


def test_the_stock_proxy_ends_a_decode_leg_without_a_prefill() -> None:
    status, text = asyncio.run(asyncio.wait_for(with_a_failing_prefill(), 60))
    assert status == 502
    assert "prefill server" in text
