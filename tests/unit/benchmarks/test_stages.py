"""The marks of a handoff's stages, on objects shaped like both connectors', and their sums."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

from bench.engines.pair import Timeline
from bench.engines.stage_timer import StageTimer
from bench.replay.budget import STAGES, marks_of, stages_us


class Scheduler:
    def request_finished(self, request: Any, blocks: list[int]) -> str:
        return f"{request.request_id} with {blocks}"


class Reports:
    """A worker's connector that reports what it is told."""

    def __init__(self, **more: Any) -> None:
        self.received: set[str] = set()
        self.__dict__.update(more)

    def get_transfer_results(self, _: set[str]) -> Any:
        return SimpleNamespace(finished_recving=self.received)


class OurSide:
    def __init__(self) -> None:
        self._sends_by_ticket = {7: SimpleNamespace(request_id="a-01234567")}

    def _prepare(self, offer: Any) -> int:
        del offer
        return 3

    def _take_event(self, event: Any, results: Any) -> None:
        del self._sends_by_ticket[event.ticket]


class StockWorker:
    def __init__(self) -> None:
        self._finished_blocks_inbox: queue.Queue[Any] = queue.Queue()

    def _xfer_blocks(self, *, request_id: str) -> int:
        del request_id
        return 5


def followed(**more: Any) -> tuple[StageTimer, Any, Any]:
    timer, scheduler, connector = StageTimer(), Scheduler(), Reports(**more)
    timer.follow(scheduler, connector)
    return timer, scheduler, connector


def test_marks_of_ours() -> None:
    side = OurSide()
    timer, scheduler, connector = followed(_worker=SimpleNamespace(side=side))
    request = SimpleNamespace(request_id="a-01234567")
    assert scheduler.request_finished(request, [1]) == "a-01234567 with [1]"
    assert side._prepare(request) == 3
    event = SimpleNamespace(kind="sent", ticket=7, first_post_ns=100, last_post_ns=2000)
    side._take_event(event, None)
    marks = timer.marks["a"]
    assert marks["finished"] <= marks["given"]
    assert (marks["begun"], marks["posted"]) == (100, 2000)
    connector.received = {"b-89abcdef"}
    assert connector.get_transfer_results(set()).finished_recving == {"b-89abcdef"}
    assert timer.marks["b"].keys() == {"received"}


def test_marks_of_the_stock_push_connector() -> None:
    worker = StockWorker()
    timer, _, _ = followed(connector_worker=worker)
    worker._finished_blocks_inbox.put(("a-01234567", [1]))
    assert worker._finished_blocks_inbox.get() == ("a-01234567", [1])
    assert worker._xfer_blocks(request_id="a-01234567") == 5
    marks = timer.marks["a"]
    assert marks["given"] <= marks["begun"] <= marks["posted"]


def test_stages_join_the_marks_of_both_engines() -> None:
    timeline = Timeline("a", 10, 2, arrival=0.0, legs="together", tokens=[9e-6, 1.0])
    reports = {
        # Each engine sees the request finish; only the prefill engine's counts.
        "prefill": {"stages": {"a": {"finished": 1000, "given": 3000, "begun": 4000}}},
        "decode": {"stages": {"a": {"finished": 8000, "received": 7000}}},
    }
    marks = marks_of([timeline], reports)
    assert marks == [
        {"token": 9000, "finished": 1000, "given": 3000, "begun": 4000, "received": 7000}
    ]
    found = stages_us(marks)
    assert found[STAGES[0][0]] == [2.0]
    assert found[STAGES[-1][0]] == [8.0]
    assert "posting" not in found  # no mark of its end
    reports["prefill"]["stages"]["a"]["begun"] = 2000  # while the prefill went on
    assert marks_of([timeline], reports)[0]["begun"] == 3000
