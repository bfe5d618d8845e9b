"""The sweep's scripts around real servers, at a small size: from serve_pd.sh to a chart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.servers import HOST, free_port, runs_on_cpu
from bench.sweep.plot import read

SWEEP = Path(__file__).resolve().parents[2] / "bench" / "sweep"

STEP_LIMIT_S = 600
# A busy machine may take minutes to load the benchmark, before its first request. A step has two.
MEASUREMENT_LIMIT_S = 280


def environment(mode: str, model: Path, folder: Path) -> dict[str, str]:
    variables = {
        "PYTHON": sys.executable,
        "MODE": mode,
        "MODEL": str(model),
        "TP": "1",
        "PREFILL_IP": HOST,
        "DECODE_IP": HOST,
        "RUN_DIR": str(folder / "run"),
        "RESULTS_DIR": str(folder / "results"),
        "SERVER_ARGS": "--dtype float32 --enforce-eager --block-size 32 --max-model-len 1024",
        "QPS_LIST": "4 8",
        "INPUT_LENS": "200",
        "OUTPUT_LENS": "8",
        "ITERATIONS": "1",
        "NUM_PROMPTS": "5",
        "LIMIT_S": str(MEASUREMENT_LIMIT_S),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if runs_on_cpu():
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    else:
        variables["SERVER_ARGS"] += " --kv-cache-memory-bytes 1073741824"
    for name in ("PREFILL_PORT", "DECODE_PORT", "PROXY_PORT"):
        variables[name] = str(free_port())
    variables |= {"PREFILL_SIDE_PORT": str(free_port()), "DECODE_SIDE_PORT": str(free_port())}
    return os.environ | variables


def tokens_received(env: dict[str, str]) -> float:
    """Prompt tokens that the decode engine has taken from its connector."""
    url = f"http://{HOST}:{env['DECODE_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=STEP_LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    name = "vllm:external_prefix_cache_hits_total"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def serving(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """Both servers of a mode, started at once by the script; the environment that they run in."""
    env = environment(request.param, model, tmp_path)
    starts = [
        subprocess.Popen([SWEEP / "serve_pd.sh"], env=env | {"ROLE": role})
        for role in ("prefill", "decode")
    ]
    try:
        assert [start.wait(STEP_LIMIT_S) for start in starts] == [0, 0]
        yield env
    finally:
        for start in starts:
            start.kill()
            start.wait()
        for what in ("proxy", "server"):
            subprocess.run([SWEEP / "cleanup.sh", what], env=env, check=True, timeout=STEP_LIMIT_S)
    assert not list((tmp_path / "run").glob("*.pid"))


@pytest.mark.parametrize(
    "serving",
    [
        "kvpush-push",
        pytest.param("kvpush-pull", marks=pytest.mark.soak),
        pytest.param("stock-push", marks=pytest.mark.soak),
        pytest.param("stock-pull", marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_a_sweep_from_servers_to_chart(serving: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([SWEEP / "run_sweep.sh"], env=serving, check=True, timeout=STEP_LIMIT_S)

    mode, results = serving["MODE"], tmp_path / "results"
    names = [f"{mode}_qps{qps}_in200_out8_iter0" for qps in (4, 8)]
    assert sorted(path.name for path in results.iterdir()) == sorted(
        f"{name}.{end}" for name in names for end in ("json", "log")
    )
    for name in names:
        result = json.loads((results / f"{name}.json").read_text())
        assert result["completed"] == 5
        assert result["total_output_tokens"] == 5 * 8
    panels = read(results, "ttft", "median")
    assert set(panels[200, 8][mode]) == {4.0, 8.0}

    chart = [sys.executable, str(SWEEP / "plot.py"), "--results-dir", str(results)]
    chart += ["--metric", "tpot"]
    subprocess.run(chart, check=True, timeout=STEP_LIMIT_S)
    assert (results / "tpot.png").stat().st_size > 0
    # At every point all prompts came over the wire: equal counts with a prefill on D prove nothing.
    assert tokens_received(serving) >= 2 * 5 * 150
