"""What the tables of bench.desc_prep are made of, and a machine without google-benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.core.__main__ as core
from bench import desc_prep
from bench.core import native
from bench.desc_prep import COSTS, best_us, costs_ns
from bench.pages import desc_prep_part, goals_part, make_part


def row(pattern: str, stock: dict[str, float], ours: dict[str, float]) -> dict[str, object]:
    counts = {"regions": 64, "blocks": 64, "descriptors": 4_000, "runs": 2_000}
    return {**counts, "pattern": pattern, "stock": stock, "ours": ours}


OURS = {
    "plan": 2.0,
    "core": 1.0,
    "spell_out": 4.0,
    "fill_lists": 20.0,
    "make_runs": 48.0,
    "make": 36.0,
    "listed": 1,
}
MEASURED = {
    "rows": [
        row("recorded", {"plan": 25, "make": 50}, {**OURS, "post": 8_000}),
        row("random", {"plan": 6, "make": 30}, OURS),
    ]
}


def test_the_steps_of_a_handle_add_up_to_it() -> None:
    costs = costs_ns(MEASURED["rows"][0])
    assert costs == dict(zip(COSTS, (2, 8, 14, 24, 18, 4_000), strict=True))


def test_a_row_says_how_often_stocks_time_holds_ours() -> None:
    row = "| 64 | 64 | recorded | 4,000 | 2,000 | 12.5 | 25.0 | 1.39 | 1.97 |"
    assert row in desc_prep_part(MEASURED)


def test_what_was_not_posted_has_no_share_of_the_post() -> None:
    first, second = make_part(MEASURED).splitlines()[2:]
    assert first.startswith("| 64 | 64 | recorded | lists |")
    assert first.endswith("| 4,000.0 | 25.0 | 0.45% |")
    assert second.endswith("| - | 15.0 | - |")


def test_goals_are_held_by_the_worst_pattern() -> None:
    planning, making = goals_part([], None, None, None, MEASURED).splitlines()[2:]
    assert planning.endswith("| 12.50 | yes |")  # random ids have no goal
    assert making.endswith("| 0.95 | no |")


def test_short_calls_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls = 0

    def work() -> None:
        nonlocal now, calls
        now += 10e-6
        calls += 1

    monkeypatch.setattr("bench.desc_prep.time.thread_time", lambda: now)
    assert best_us(work, rounds=2) == pytest.approx(10.0)
    assert calls == 1 + 2 * (desc_prep.QUICKEST_TIMED_US / 10)


def test_a_machine_without_google_benchmark_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    (tmp_path / "CMakeCache.txt").write_text("//x\nbenchmark_DIR:PATH=benchmark_DIR-NOTFOUND\n")
    monkeypatch.setattr(native, "BUILD", tmp_path)
    monkeypatch.setattr(native, "_run", lambda *command: ran.append(command[1]))
    assert core.main([]) == 2
    assert "libbenchmark-dev" in capsys.readouterr().out
    assert ran == ["-S"]  # configured, not built
    assert native.build("kvpush_bench_transfers").name == "kvpush_bench_transfers"
