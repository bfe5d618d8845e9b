"""A replay at a small size: every byte checked, every value there, and the limit of its handoff."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.engines.settings import ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE
from bench.replay.load import Point
from bench.replay.modes import MODES
from bench.replay.results import load
from bench.replay.rounds import Engines, Run, replay

ROOT = Path(__file__).resolve().parents[2]
STAMPED_LIMIT_S = 800

POINT = Point(rate=20.0, prompt_tokens=300, output_tokens=6, count=8)
# Chunks of 128: the third holds the last 44 tokens, in two blocks of 32.
ENGINES = Engines(block_size=32, num_blocks=256, chunk=128)


def serve(mode: str) -> list[Run]:
    model = ModelSettings(layers=4, max_model_len=1024, prefill_us=1.0, step_ms=1.0)
    logs = fresh_logs(DEFAULT_CACHE / "test-logs")
    return list(replay([MODES[mode]], [POINT], ENGINES, model, 1, logs, Console(stderr=True)))


def test_a_replay_measures_requests_and_the_limit() -> None:
    (run,) = serve("kvpush-push")
    wanted = {"ttft", "handoff"} | {"itl"}
    assert {f"{name}_{p}_ms" for name in wanted for p in ("p50", "p99")} <= run.values.keys()
    assert {"tpot_mean_ms", "prefill_cpu_ms", "decode_cpu_ms"} <= run.values.keys()
    assert min(run.values.values()) > 0
    # Of each layer, two blocks that may lie together.
    assert 4 <= run.values["bare_descriptors"] <= 8
    assert run.values["limit_ms"] > run.values["bare_write_ms"]


@pytest.mark.soak
def test_a_stamped_replay_sees_no_wrong_byte_in_any_mode(tmp_path: Path) -> None:
    # In a process of its own: beside pytest the folder tests/nixl hides the package that the stock
    # connectors import.
    command = [sys.executable, "-m", "bench.replay", "--stamp-all", "--out", str(tmp_path)]
    command += ["--modes", "kvpush-push,stock-push,stock-pull,none", "--rounds", "2"]
    command += ["--prompt", "300", "--block", "32", "--chunk", "128", "--rate", "20"]
    command += ["--count", "8", "--output-tokens", "6"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=STAMPED_LIMIT_S)
    runs = load(tmp_path / "all.json")
    assert len(runs) == 4 * 2
    for run in runs:
        assert run.values["decode_wrong_tokens"] == 0, run.mode
        # In each of five steps after the first token the whole prompt.
        assert run.values["decode_tokens_checked"] >= 5 * 8 * 300
