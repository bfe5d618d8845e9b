"""A replay at a small size: every byte checked, every value there, and the limit of its handoff."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.engines.settings import ModelSettings
from bench.harness.servers import fresh_logs
from bench.harness.tiny_model import DEFAULT_CACHE
from bench.replay.load import Point
from bench.replay.modes import MODES
from bench.replay.rounds import Engines, Run, replay

POINT = Point(rate=20.0, prompt_tokens=300, output_tokens=6, count=8)
# Chunks of 128: the third holds the last 44 tokens, in two blocks of 32.
ENGINES = Engines(block_size=32, num_blocks=256, chunk=128)


def serve(modes: list[str], *, stamp: str = "", rounds: int = 1) -> list[Run]:
    model = ModelSettings(layers=4, max_model_len=1024, prefill_us=1.0, step_ms=1.0, stamp=stamp)
    chosen = [MODES[name] for name in modes]
    logs: Path = fresh_logs(DEFAULT_CACHE / "test-logs")
    return list(replay(chosen, [POINT], ENGINES, model, rounds, logs, Console(stderr=True)))


def test_a_replay_measures_requests_and_the_limit() -> None:
    (run,) = serve(["kvpush-push"])
    wanted = {"ttft", "handoff"} | {"itl"}
    assert {f"{name}_{p}_ms" for name in wanted for p in ("p50", "p99")} <= run.values.keys()
    assert {"tpot_mean_ms", "prefill_cpu_ms", "decode_cpu_ms"} <= run.values.keys()
    assert min(run.values.values()) > 0
    # Of each layer, two blocks that may lie together.
    assert 4 <= run.values["bare_descriptors"] <= 8
    assert run.values["limit_ms"] > run.values["bare_write_ms"]


@pytest.mark.soak
def test_a_stamped_replay_sees_no_wrong_byte_in_any_mode() -> None:
    modes = [name for name in MODES if name != "decode-alone"]
    runs = serve(modes, stamp="all", rounds=2)
    assert [(run.mode, run.round) for run in runs] == [
        *((mode, 0) for mode in modes),
        *((mode, 1) for mode in [*modes[1:], modes[0]]),
    ]
    for run in runs:
        assert run.values["decode_wrong_tokens"] == 0, run.mode
        assert run.values["decode_tokens_checked"] > POINT.count * POINT.prompt_tokens
