"""The benchmark of the hand-over, a few times over: stages in order, rows that add up."""

from __future__ import annotations

from bench.handoff import KINDS, MAINS, STAGES, run, summarize
from kvpush.selftest.cases import Case, Geometry


def test_stages_of_a_hand_over_follow_each_other() -> None:
    geometry = Geometry(layers=4, pool_blocks=64, tokens_per_block=32)
    case = Case(name="handoff", tokens=64, producer_order="random", consumer_order="random")
    found = run(geometry, case, count=2)
    for kind in KINDS:
        for main in MAINS:
            assert len(found[kind][main]) == 2
            for sample in found[kind][main]:
                assert 0 < sample["begun"] < sample["posted"]
                assert sample["arrived"] > 0
    rows = summarize(found)
    assert [(row["main_thread"], row["stage"]) for row in rows] == [
        (main, stage) for main in MAINS for stage in STAGES
    ]
    for row in rows:
        middle = row["kvpush_p50_us"] / row["python-writer_p50_us"]
        assert row["ratio_p50"] == middle
