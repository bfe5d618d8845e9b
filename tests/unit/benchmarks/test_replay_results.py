"""What a replay's runs come to: ratios, goals, the limit's descriptors, the pages' tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.pages import (
    IMAGES,
    PAGES,
    RESULTS,
    budget_part,
    charts_part,
    fill,
    goals_part,
    hooks_part,
    parts,
    selftest_part,
    stock_part,
)
from bench.replay.chart import plot
from bench.replay.goals import standings
from bench.replay.limit import CacheShape, last_blocks, runs_of
from bench.replay.load import Point
from bench.replay.results import load, medians, ratio, save_all
from bench.replay.rounds import Engines, Run

ROOT = Path(__file__).resolve().parents[3]
POINT = Point(4.0, 8000, 100, 40)
ENGINES = Engines(128, 1024, 2048)


def run(mode: str, number: int, point: Point = POINT, **values: float) -> Run:
    return Run(mode, point, ENGINES, number, values, 1.0)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine became three times slower in the second round: that decides nothing.
    ours, theirs = (10.0, 30.0, 12.0), (20.0, 60.0, 40.0)
    runs = [run("kvpush-push", i, ttft_p50_ms=value) for i, value in enumerate(ours)]
    runs += [run("stock-push", i, ttft_p50_ms=value) for i, value in enumerate(theirs)]
    assert ratio(runs, POINT, "ttft_p50_ms", "kvpush-push", "stock-push") == 0.5
    assert medians(runs, POINT, "kvpush-push") == {"ttft_p50_ms": 12.0}
    assert ratio(runs, POINT, "handoff_p50_ms", "kvpush-push", "stock-push") is None
    assert ratio(runs, POINT, "ttft_p50_ms", "kvpush-push", "none") is None


def test_only_rounds_that_both_have_are_compared() -> None:
    runs = [run("kvpush-push", 0, ttft_p50_ms=1.0), run("kvpush-push", 1, ttft_p50_ms=9.0)]
    runs.append(run("stock-push", 1, ttft_p50_ms=10.0))
    assert ratio(runs, POINT, "ttft_p50_ms", "kvpush-push", "stock-push") == 0.9


def test_goals_are_held_against_runs_of_their_scenario() -> None:
    runs = [
        run("kvpush-push", 0, handoff_p50_ms=35.4, handoff_over_limit=1.21, ttft_p50_ms=60.0),
        run("stock-push", 0, handoff_p50_ms=100.0, ttft_p50_ms=100.0),
    ]
    found = {(s.goal.what, s.goal.against): s.met for s in standings(runs)}
    assert found == {
        ("handoff p50", "stock-push"): True,  # 0.354 shows as 0.35
        ("handoff p50", "limit"): False,
        ("TTFT p50", "stock-push"): True,
    }
    elsewhere = Point(4.0, 4000, 100, 40)
    assert standings([run("kvpush-push", 0, elsewhere, handoff_over_limit=1.0)]) == []


def test_the_last_chunk_holds_what_the_last_step_computes() -> None:
    blocks = list(range(100, 163)), list(range(63))
    ours, theirs = last_blocks(blocks, 8000, 128, 2048)
    assert (ours[0], ours[-1], len(ours)) == (148, 162, 15)
    assert theirs == list(range(48, 63))
    assert last_blocks(blocks, 8000, 128, 32768)[1] == list(range(63))
    assert last_blocks((list(range(16)), list(range(16))), 2048, 128, 2048)[1] == list(range(16))


def test_the_limit_writes_each_block_of_each_layer_once() -> None:
    shape = CacheShape(layers=3, num_blocks=10, block_bytes=100)
    local, remote = [7, 2, 3, 4, 9], [1, 5, 6, 0, 8]
    runs = runs_of(shape, (10_000, 50_000), (local, remote))
    assert len(runs) == 3 * 4  # 2 and 3 lie together on both sides
    copied = {}
    for begin, target, length in runs.tolist():
        for offset in range(0, length, 100):
            copied[(begin - 10_000 + offset) // 100] = (target - 50_000 + offset) // 100
    assert copied == {
        layer * 10 + a: layer * 10 + b
        for layer in range(3)
        for a, b in zip(local, remote, strict=True)
    }
    assert runs.dtype == np.uint64


def test_results_survive_their_file(tmp_path: Path) -> None:
    runs = [run("kvpush-push", 0, ttft_p50_ms=1.5), run("none", 1, ttft_p50_ms=2.0)]
    save_all(runs, {"rate": "4"}, tmp_path / "load.json")
    assert load(tmp_path / "load.json") == runs
    (tmp_path / "other.json").write_text('{"runs": [{}]}')
    with pytest.raises(ValueError, match=r"other\.json is no result of a replay"):
        load(tmp_path / "other.json")


def test_the_same_results_make_the_same_charts(tmp_path: Path) -> None:
    runs = [
        run(mode, i, Point(rate, 8000, 100, 40), ttft_p50_ms=rate + i, tpot_mean_ms=1.0)
        for mode in ("kvpush-push", "stock-pull")
        for rate in (1.0, 4.0)
        for i in range(2)
    ]
    charts = [plot(runs, tmp_path / name) for name in ("one", "two")]
    assert [path.name for path in charts[0]] == ["ttft.png", "tpot.png"]
    for one, two in zip(*charts, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_marked_parts_of_a_page_are_replaced() -> None:
    page = "a\n<!-- measured: stock -->\nold\n<!-- end of stock -->\nb\n"
    filled = fill(page, {"stock": "| new |", "elsewhere": "x"})
    assert filled == page.replace("old", "| new |")
    assert fill(filled, {"stock": "| new |"}) == filled
    with pytest.raises(ValueError, match="has no"):
        fill("<!-- measured: stock -->", {"stock": "x"})


def test_tables_name_what_was_measured() -> None:
    runs = [
        run("kvpush-push", 0, handoff_p50_ms=30.0, tpot_mean_ms=1.0),
        run("stock-push", 0, handoff_p50_ms=100.0, tpot_mean_ms=1.0),
    ]
    row = stock_part([runs]).splitlines()[-1].strip("| ").split(" | ")
    assert row[:2] == ["8,000 tokens in chunks of 2,048, block 128, 4 req/s", "kvpush-push"]
    assert row[2:] == ["0.30", "-", "-", "-", "1.00", "-", "-", "-"]
    handoff = {"rows": [{"main_thread": "spinning", "stage": "posted", "ratio_p99": 0.0213}]}
    selftest = {"rows": [{"request": "1024 blocks", "layers": 64, "bare_ratio": 0.966}]}
    hooks = {
        "summary": [
            {"in_flight": 64, "per": "request", "ratio mean": 0.1004},
            {"in_flight": 16, "per": "request", "ratio mean": 0.01},
        ]
    }
    part = goals_part([runs], handoff, hooks, selftest)
    goals = [line[2:-2].split(" | ") for line in part.splitlines()]
    assert goals[2][1:] == ["stock-push", "at most 0.35", "0.30", "yes"]
    assert goals[3][1:] == ["stock-like writer", "at most 0.02", "0.0213", "no"]
    assert goals[4][1:] == ["stock-push", "at most 0.1", "0.100", "no"]
    assert goals[5][1:] == ["bare NIXL WRITE", "at least 0.97", "0.97", "yes"]
    assert goals_part([], None, None, None) == "No results yet."


def test_hook_times_stand_beside_stock_s() -> None:
    row = {"in_flight": 64, "per": "request", "kvpush mean": 150.4, "ratio mean": 0.123}
    line = hooks_part({"summary": [row]}).splitlines()[-1]
    assert line == "| 64 | request | 150 | - | - | - | - | - | 0.12 | - | - |"
    assert hooks_part(None) == "No results yet."


def test_a_budget_s_table_has_a_row_for_each_stage() -> None:
    stages = {"kvpush-push": {"posting": {"p50": 12_345.0, "p90": 20.0}}, "stock-push": {}}
    settings = {"prompt": 8000, "block": 128, "chunk": 2048, "rate": 4.0}
    lines = budget_part({"settings": settings, "stages": stages}).splitlines()
    assert lines[0] == "8,000 tokens, block 128, chunks of 2,048, 4 req/s (us):"
    assert "| posting | 12,345 | 20 | - | - |" in lines
    assert budget_part(None) == selftest_part(None) == "No results yet."


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_pages_have_the_tables_of_the_committed_results(page: Path) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, parts(ROOT / RESULTS)) == text, "run python -m bench.pages"
    assert "<!-- measured: " in text


def test_the_charts_of_committed_results_are_there() -> None:
    wanted = charts_part(ROOT / RESULTS / "load.json").count("docs/images/")
    assert len(list((ROOT / IMAGES).glob("*.png"))) >= wanted
