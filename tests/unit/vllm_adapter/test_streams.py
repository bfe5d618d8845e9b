"""Offers that grow while their prefill runs: the scheduler's half."""

from __future__ import annotations

from typing import Any

import pytest

from kvpush.vllm.messages import Offer, StepOrders
from kvpush.vllm.scheduler import GroupShape, SchedulerSide
from tests.unit.vllm_adapter.fakes import (
    BLOCK,
    make_request,
    plan_step,
    produce,
    scheduler_facts,
)

REQUEST = "cmpl-a-0-0123abcd"


class Engine:
    """A scheduler side, and the little of vLLM's scheduler that its streams look at."""

    def __init__(self, **facts: Any) -> None:
        self.side = SchedulerSide(scheduler_facts(**facts))

    def admit(self, request_id: str = REQUEST, **more: Any) -> Any:
        request = make_request(request_id, 40, produce(), **more)
        self.side.new_request(request)
        return request

    def step(self, request: Any, tokens: int, **blocks: Any) -> StepOrders:
        """Plan one request's step, then count its tokens as vLLM does, after the hook."""
        plan = {kind: {request.request_id: ids} for kind, ids in blocks.items()}
        resumed = [request.request_id] if "resumed" in plan else []
        plan = {"cached" if kind == "resumed" else kind: ids for kind, ids in plan.items()}
        orders = self.side.take_orders(
            plan_step(**plan, scheduled={request.request_id: tokens}, resumed=resumed)
        )
        request.num_computed_tokens += tokens
        return orders

    def preempt(self, request: Any) -> StepOrders:
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        return self.side.take_orders(plan_step())

    def finish(self, request: Any, status: str, ids: Any) -> tuple[bool, Any]:
        request.status.name = status
        return self.side.finished(request, ids)

    def at_rest(self) -> bool:
        return not any(self.side.stats().values()) and not self.side.needs_step()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def piece(orders: StepOrders) -> Offer:
    (offer,) = orders.progress
    return offer


def test_each_step_offers_what_it_computes_and_the_last_is_final(engine: Engine) -> None:
    request = engine.admit()
    first = piece(engine.step(request, 20, new=[[11, 12]]))
    assert (first.transfer_id, first.watermark, first.final) == ("t", 20, False)
    assert first.blocks == ((0, [11, 12]),)
    second = piece(engine.step(request, 10, cached=None))
    assert (second.watermark, second.final, second.blocks) == (30, False, ((2, []),))
    last = piece(engine.step(request, 10, cached=[[13]]))
    assert (last.watermark, last.final, last.blocks) == (40, True, ((2, [13]),))
    held, returned = engine.finish(request, "FINISHED_LENGTH_CAPPED", [[11, 12, 13]])
    assert held
    assert returned["remote_num_tokens"] == 40
    orders = engine.side.take_orders(plan_step())
    assert not orders.offers
    assert [(close.request_id, close.reason) for close in orders.closes] == [(REQUEST, "")]
    assert engine.side.needs_step()
    engine.side.worker_output({REQUEST}, None)
    assert engine.at_rest()


def test_prefix_hits_go_out_with_the_first_step(engine: Engine) -> None:
    request = engine.admit()
    request.num_computed_tokens = 32
    only = piece(engine.step(request, 8, new=[[11, 12, 13]]))
    assert (only.watermark, only.final, only.blocks) == (40, True, ((0, [11, 12, 13]),))


def test_room_for_speculation_is_not_offered(engine: Engine) -> None:
    request = engine.admit()
    first = piece(engine.step(request, 16, new=[[11, 12, 13, 14]]))
    assert (first.watermark, first.blocks) == (16, ((0, [11]),))
    last = piece(engine.step(request, 27, cached=[[15]]))
    assert (last.watermark, last.blocks) == (40, ((1, [12, 13]),))


def test_after_the_last_piece_decoding_offers_nothing(engine: Engine) -> None:
    request = engine.admit()
    assert piece(engine.step(request, 40, new=[[11, 12, 13]])).final
    assert not engine.step(request, 1, cached=[[14]])
    engine.finish(request, "FINISHED_STOPPED", [[11, 12, 13, 14]])
    assert engine.side.take_orders(plan_step()).closes[0].reason == ""


def test_a_preempted_prefill_is_taken_back_and_offered_anew(engine: Engine) -> None:
    request = engine.admit()
    engine.step(request, 20, new=[[11, 12]])
    orders = engine.preempt(request)
    assert orders.rewinds == [REQUEST]
    assert not orders.progress
    assert not engine.side.take_orders(plan_step()).rewinds, "it was said twice"
    request.num_computed_tokens = 16
    again = piece(engine.step(request, 8, resumed=[[21, 22]]))
    assert (again.watermark, again.blocks) == (24, ((0, [21, 22]),))
    last = piece(engine.step(request, 16, cached=[[23]]))
    assert (last.watermark, last.final, last.blocks) == (40, True, ((2, [23]),))


def test_preempted_and_planned_again_in_one_step(engine: Engine) -> None:
    request = engine.admit()
    engine.step(request, 20, new=[[11, 12]])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    orders = engine.step(request, 16, resumed=[[21]])
    assert orders.rewinds == [REQUEST]
    assert piece(orders).blocks == ((0, [21]),)


def test_preempted_after_its_last_piece_and_finished_with_late_output(engine: Engine) -> None:
    """Async scheduling: the step that preempts is planned before the last one's output is seen."""
    request = engine.admit()
    assert piece(engine.step(request, 40, new=[[11, 12, 13]])).final
    assert engine.preempt(request).rewinds == [REQUEST]
    assert engine.finish(request, "FINISHED_LENGTH_CAPPED", [[]]) == (True, None)
    orders = engine.side.take_orders(plan_step())
    assert [close.reason for close in orders.closes] == ["producer_short"]
    assert not orders.rewinds
    engine.side.worker_output({REQUEST}, None)
    assert engine.at_rest()


def test_preempted_outside_of_a_step_and_ended_before_the_next(engine: Engine) -> None:
    request = engine.admit()
    engine.step(request, 20, new=[[11, 12]])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    engine.finish(request, "FINISHED_ABORTED", [[]])
    orders = engine.side.take_orders(plan_step())
    assert orders.rewinds == [REQUEST]
    assert [close.reason for close in orders.closes] == ["producer_aborted"]


def test_an_aborted_prefill_is_held_until_nothing_reads_its_blocks(engine: Engine) -> None:
    request = engine.admit()
    engine.step(request, 20, new=[[11, 12]])
    assert engine.finish(request, "FINISHED_ABORTED", [[11, 12]]) == (True, None)
    orders = engine.side.take_orders(plan_step())
    assert [close.reason for close in orders.closes] == ["producer_aborted"]
    assert not orders.withdrawals
    assert engine.side.needs_step()
    engine.side.worker_output({REQUEST}, None)
    assert engine.at_rest()


def test_an_abort_before_the_first_step_needs_no_close(engine: Engine) -> None:
    request = engine.admit()
    assert engine.finish(request, "FINISHED_ABORTED", [[]]) == (False, None)
    orders = engine.side.take_orders(plan_step())
    assert [w.reason for w in orders.withdrawals] == ["producer_aborted"]
    assert not orders.closes
    assert engine.at_rest()


def test_a_twin_of_a_stream_is_not_offered_beside_it(engine: Engine) -> None:
    first, twin = engine.admit("a"), engine.admit("b")
    engine.step(first, 20, new=[[11, 12]])
    assert not engine.step(twin, 20, new=[[21, 22]]).progress
    engine.step(first, 20, cached=[[13]])
    engine.finish(first, "FINISHED_LENGTH_CAPPED", [[11, 12, 13]])
    engine.step(twin, 20, cached=[[23]])
    assert not engine.finish(twin, "FINISHED_LENGTH_CAPPED", [[21, 22, 23]])[0]
    engine.side.worker_output({"a"}, None)
    engine.side.take_orders(plan_step())
    assert engine.at_rest()


@pytest.mark.parametrize(
    "facts",
    [
        {"streams": False},
        {"groups": (GroupShape(BLOCK), GroupShape(BLOCK, window=True))},
        {"groups": (GroupShape(BLOCK, state=True),)},
    ],
)
def test_what_does_not_stream_is_offered_at_its_end(facts: dict[str, Any]) -> None:
    engine = Engine(**facts)
    blocks = [[11, 12, 13]] * len(engine.side._facts.groups)
    request = engine.admit(_all_token_ids=list(range(40)), max_tokens=1)
    count = request.num_prompt_tokens
    assert not engine.step(request, count, new=blocks)
    assert engine.finish(request, "FINISHED_LENGTH_CAPPED", blocks)[0]
    orders = engine.side.take_orders(plan_step())
    assert len(orders.offers) == 1
    assert not orders.closes
