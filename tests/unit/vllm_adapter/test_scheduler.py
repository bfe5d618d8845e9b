from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from kvpush.vllm.fingerprint import fingerprint
from kvpush.vllm.messages import NO_BLOCK
from kvpush.vllm.scheduler import MAX_CANCELS, GroupShape, SchedulerSide
from tests.unit.vllm_adapter.fakes import (
    BLOCK,
    consume,
    make_request,
    produce,
    scheduler_facts,
)

IDS = [[11, 12, 13]]


@pytest.fixture
def side() -> SchedulerSide:
    return SchedulerSide(scheduler_facts())


def at_rest(side: SchedulerSide) -> bool:
    side.take_orders()
    return not any(side.stats().values()) and not side.needs_step()


def admit(side: SchedulerSide, request: Any, computed: int = 0) -> int:
    """What the scheduler does with a new request; returns the tokens it waits for."""
    side.new_request(request)
    needed, wait = side.matched_tokens(request, computed)
    assert side.matched_tokens(request, computed) == (needed, wait), "must change nothing"
    assert wait == (needed > 0)
    side.allocated(request, lambda: IDS, needed)
    return needed


def finish(
    side: SchedulerSide, request: Any, status: str, computed: int = 0, ids: Any = None
) -> tuple[bool, Any]:
    request.status.name = status
    request.num_computed_tokens = computed
    return side.finished(request, IDS if ids is None else ids)


def test_ordinary_requests_leave_no_trace(side: SchedulerSide) -> None:
    request = make_request()
    assert admit(side, request) == 0
    assert side.stats()["tracked"] == 0
    assert finish(side, request, "FINISHED_STOPPED", 40) == (False, None)
    assert at_rest(side)


# --- decode side ------------------------------------------------------------------------------


def test_a_load_is_granted_in_the_step_that_allocated(side: SchedulerSide) -> None:
    params = consume()
    before = copy.deepcopy(params)
    request = make_request(params=params)
    assert admit(side, request) == 39
    assert side.needs_step()
    (grant,) = side.take_orders().grants
    assert (grant.begin_token, grant.end_token) == (0, 39)
    assert grant.blocks == ((0, [11, 12, 13]),)
    assert grant.fingerprint == fingerprint(request)
    assert (grant.host, grant.port, grant.transfer_id) == ("127.0.0.1", 5600, "t")
    assert grant.reports
    assert grant.attempt
    assert params == before
    side.allocated(request, lambda: IDS, 0)  # vLLM calls again once the load has ended
    side.worker_output(None, {request.request_id})
    assert side.matched_tokens(request, 0) == (0, False)
    assert finish(side, request, "FINISHED_STOPPED", 45) == (False, None)
    assert at_rest(side)


def test_a_prefix_hit_leaves_only_the_tail(side: SchedulerSide) -> None:
    assert admit(side, make_request(params=consume()), computed=2 * BLOCK) == 7
    (grant,) = side.take_orders().grants
    assert (grant.begin_token, grant.end_token) == (32, 39)
    assert grant.blocks == ((2, [13]),)


def test_a_prefix_hit_does_not_trim_a_state() -> None:
    groups = (GroupShape(BLOCK), GroupShape(BLOCK, state=True))
    side = SchedulerSide(scheduler_facts(groups=groups))
    request = make_request(params=consume())
    external, _ = side.matched_tokens(request, 2 * BLOCK)
    side.allocated(request, lambda: [[11, 12, 13], [7]], external)
    (grant,) = side.take_orders().grants
    assert grant.begin_token == 2 * BLOCK
    assert grant.blocks == ((2, [13]), (0, [7]))


def test_slots_beyond_the_prompt_are_not_granted(side: SchedulerSide) -> None:
    request = make_request(params=consume())
    external, _ = side.matched_tokens(request, 0)
    # As with speculative decoding, which allocates blocks for what it looks ahead.
    side.allocated(request, lambda: [[11, 12, 13, 14, 15]], external)
    (grant,) = side.take_orders().grants
    assert (grant.end_token, grant.blocks) == (39, ((0, [11, 12, 13]),))


@pytest.mark.parametrize(("tokens", "computed"), [(33, 32), (1, 0), (17, 16)])
def test_a_full_hit_tells_that_nothing_is_needed(
    side: SchedulerSide, tokens: int, computed: int
) -> None:
    request = make_request(params=consume(), tokens=tokens)
    assert admit(side, request, computed) == 0
    (grant,) = side.take_orders().grants
    assert grant.begin_token == grant.end_token
    assert not grant.reports
    side.allocated(request, lambda: IDS, 0)
    finish(side, request, "FINISHED_STOPPED", tokens)
    assert at_rest(side)


def test_after_a_failed_load_the_prompt_is_computed_here(side: SchedulerSide) -> None:
    request = make_request(params=consume())
    admit(side, request)
    side.take_orders()
    side.worker_output(None, {request.request_id})
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, lambda: IDS, 0)
    assert not side.take_orders()


def test_abort_before_allocation_tells_the_producer(side: SchedulerSide) -> None:
    request = make_request(params=consume())
    side.new_request(request)
    side.matched_tokens(request, 0)
    assert finish(side, request, "FINISHED_ABORTED") == (False, None)
    assert side.needs_step()
    orders = side.take_orders()
    assert [(g.begin_token, g.end_token, g.reports) for g in orders.grants] == [(0, 0, False)]
    assert not orders.revokes
    assert at_rest(side)


def test_abort_while_loading_revokes_and_waits_for_the_report(side: SchedulerSide) -> None:
    request = make_request(params=consume())
    admit(side, request)
    side.take_orders()
    assert finish(side, request, "FINISHED_ABORTED") == (False, None)
    assert side.take_orders().revokes == [request.request_id]
    assert side.needs_step(), "the workers owe a report"
    side.worker_output(None, {request.request_id})
    assert at_rest(side)


def test_failing_a_load_by_policy_revokes_nothing(side: SchedulerSide) -> None:
    """vLLM finishes the request first, and passes on the report afterwards."""
    request = make_request(params=consume())
    admit(side, request)
    side.take_orders()
    finish(side, request, "FINISHED_ERROR")
    side.worker_output(None, {request.request_id})
    assert not side.take_orders()
    assert at_rest(side)


def test_abort_after_the_report_revokes_nothing(side: SchedulerSide) -> None:
    request = make_request(params=consume())
    admit(side, request)
    side.take_orders()
    side.worker_output(None, {request.request_id})
    finish(side, request, "FINISHED_ABORTED")
    assert at_rest(side)


def test_a_twin_computes_here_and_its_producer_is_told_later(side: SchedulerSide) -> None:
    first, twin = make_request("a", params=consume()), make_request("b", params=consume())
    assert admit(side, first) == 39
    assert admit(side, twin) == 0
    assert len(side.take_orders().grants) == 1, "the twin must not end the first one's transfer"
    finish(side, twin, "FINISHED_STOPPED", 40)
    assert not side.take_orders()
    side.worker_output(None, {"a"})
    (grant,) = side.take_orders().grants
    assert not grant.reports
    finish(side, first, "FINISHED_STOPPED", 40)
    assert at_rest(side)


def test_the_same_id_with_another_prompt_is_another_transfer(side: SchedulerSide) -> None:
    assert admit(side, make_request("a", params=consume())) == 39
    assert admit(side, make_request("b", tokens=41, params=consume())) == 40
    assert len({g.fingerprint for g in side.take_orders().grants}) == 2


def test_wrong_parameters_fail_the_request_alone(
    side: SchedulerSide, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(params=consume(remote_port="x"))
    assert admit(side, request) == 40
    assert "remote_port" in caplog.text
    assert request.request_id in caplog.text
    orders = side.take_orders()
    (refusal,) = orders.refusals
    assert refusal.block_ids == [11, 12, 13]
    assert not orders.grants
    finish(side, request, "FINISHED_ERROR")
    side.worker_output(None, {request.request_id})
    assert at_rest(side)


def test_wrong_parameters_fail_even_a_full_hit(side: SchedulerSide) -> None:
    assert admit(side, make_request(params=consume(remote_port=0), tokens=33), computed=32) == 1


def test_wrong_parameters_are_recomputed_where_the_policy_says_so(side: SchedulerSide) -> None:
    request = make_request(params=produce(transfer_id=3))
    admit(side, request)
    side.worker_output(None, {request.request_id})
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, lambda: IDS, 0)
    assert finish(side, request, "FINISHED_LENGTH_CAPPED", 40) == (False, None)
    assert at_rest(side)


@pytest.mark.parametrize("kind", [{"prompt_embeds": object()}, {"resumable": True}])
def test_prompts_without_whole_token_ids_are_refused(
    side: SchedulerSide, kind: dict[str, Any]
) -> None:
    request = make_request(params=consume(), **kind)
    admit(side, request)
    assert side.take_orders().refusals


@pytest.mark.parametrize("params", [consume(), produce()])
def test_a_leg_at_an_engine_of_the_other_role_is_refused(params: dict[str, object]) -> None:
    side = SchedulerSide(scheduler_facts(can_produce=False, can_consume=False))
    admit(side, make_request(params=params))
    assert "kv_role" in side.take_orders().refusals[0].detail


# --- prefill side -----------------------------------------------------------------------------


def test_a_finished_prefill_is_offered_and_held(side: SchedulerSide) -> None:
    request = make_request(params=produce())
    assert admit(side, request) == 0
    held, returned = finish(side, request, "FINISHED_LENGTH_CAPPED", 40)
    assert held
    assert returned["do_remote_prefill"] is True
    assert returned["transfer_id"] == "t"
    assert (returned["remote_host"], returned["remote_port"]) == ("127.0.0.1", 5600)
    (offer,) = side.take_orders().offers
    assert (offer.watermark, offer.final) == (40, True)
    assert offer.blocks == ((0, [11, 12, 13]),)
    assert side.needs_step()
    side.worker_output({request.request_id}, None)
    assert at_rest(side)


def test_returned_parameters_make_the_same_key_on_the_decode_side(side: SchedulerSide) -> None:
    p = make_request("cmpl-p-0-11111111", params={"do_remote_decode": True})
    admit(side, p)
    _, returned = finish(side, p, "FINISHED_LENGTH_CAPPED", 40)
    offer = side.take_orders().offers[0]
    other = SchedulerSide(scheduler_facts())
    admit(other, make_request("cmpl-d-0-22222222", params=returned))
    grant = other.take_orders().grants[0]
    assert (grant.transfer_id, grant.fingerprint) == (offer.transfer_id, offer.fingerprint)


def test_only_prompt_blocks_are_offered(side: SchedulerSide) -> None:
    request = make_request(params=produce(), tokens=20)
    admit(side, request)
    finish(side, request, "FINISHED_STOPPED", 40)
    (offer,) = side.take_orders().offers
    assert offer.watermark == 20
    assert offer.blocks == ((0, [11, 12]),)


@pytest.mark.parametrize(
    ("status", "computed", "ids", "reason"),
    [
        ("FINISHED_ABORTED", 40, IDS, "producer_aborted"),
        ("FINISHED_ERROR", 40, IDS, "producer_aborted"),
        ("FINISHED_IGNORED", 0, [[]], "producer_aborted"),
        ("FINISHED_LENGTH_CAPPED", 0, [[]], "producer_short"),
        ("FINISHED_LENGTH_CAPPED", 38, IDS, "producer_short"),
        ("FINISHED_LENGTH_CAPPED", 40, [[11, 12]], "producer_short"),
    ],
)
def test_other_ends_are_told_at_once(
    side: SchedulerSide, status: str, computed: int, ids: Any, reason: str
) -> None:
    request = make_request(params=produce())
    admit(side, request)
    assert finish(side, request, status, computed, ids) == (False, None)
    assert side.needs_step()
    orders = side.take_orders()
    assert [w.reason for w in orders.withdrawals] == [reason]
    assert not orders.offers
    assert at_rest(side)


def test_an_aborted_twin_does_not_withdraw_the_other(side: SchedulerSide) -> None:
    first, twin = make_request("a", params=produce()), make_request("b", params=produce())
    admit(side, first)
    admit(side, twin)
    finish(side, twin, "FINISHED_ABORTED", 5)
    assert not side.take_orders().withdrawals
    assert finish(side, first, "FINISHED_LENGTH_CAPPED", 40)[0]
    third = make_request("c", params=produce())
    admit(side, third)
    finish(side, third, "FINISHED_ABORTED", 5)
    assert not side.take_orders().withdrawals, "the first one's KV is on its way"


def test_of_two_twins_one_is_offered(side: SchedulerSide) -> None:
    first, twin = make_request("a", params=produce()), make_request("b", params=produce())
    admit(side, first)
    admit(side, twin)
    assert finish(side, first, "FINISHED_LENGTH_CAPPED", 40)[0]
    assert not finish(side, twin, "FINISHED_LENGTH_CAPPED", 40)[0]
    assert len(side.take_orders().offers) == 1
    side.worker_output({"a"}, None)
    assert at_rest(side)


def test_passed_window_blocks_are_holes() -> None:
    side = SchedulerSide(scheduler_facts(groups=(GroupShape(BLOCK), GroupShape(BLOCK))))
    request = make_request(params=produce())
    side.new_request(request)
    finish(side, request, "FINISHED_STOPPED", 40, [[1, 2, 3], [0, 0, 3]])
    (offer,) = side.take_orders().offers
    assert offer.blocks == ((0, [1, 2, 3]), (0, [NO_BLOCK, NO_BLOCK, 3]))


# --- cancelled by the router ------------------------------------------------------------------


def test_a_held_prefill_that_was_cancelled_is_taken_back(side: SchedulerSide) -> None:
    request, other = make_request("a", params=produce()), make_request("b", params=produce())
    other.kv_transfer_params = produce(transfer_id="another")
    for each in (request, other):
        admit(side, each)
        finish(side, each, "FINISHED_LENGTH_CAPPED", 40)
    side.take_orders()
    side.cancel("t")
    assert side.needs_step()
    (withdrawal,) = side.take_orders().withdrawals
    assert (withdrawal.request_id, withdrawal.transfer_id) == ("a", "t")
    assert withdrawal.reason == "cancelled"
    assert side.stats()["held"] == 2, "until the workers say that nothing reads it any more"
    side.worker_output({"a", "b"}, None)
    assert at_rest(side)


def test_a_prefill_that_ends_after_it_was_cancelled_is_not_offered(side: SchedulerSide) -> None:
    request = make_request(params=produce())
    admit(side, request)
    side.cancel("t")
    assert finish(side, request, "FINISHED_LENGTH_CAPPED", 40) == (False, None)
    orders = side.take_orders()
    assert not orders.offers
    assert [w.reason for w in orders.withdrawals] == ["cancelled"]
    assert at_rest(side)


def test_offered_and_cancelled_in_one_step(side: SchedulerSide) -> None:
    request = make_request(params=produce())
    admit(side, request)
    assert finish(side, request, "FINISHED_LENGTH_CAPPED", 40)[0]
    side.cancel("t")
    orders = side.take_orders()
    assert [o.request_id for o in orders.offers] == [w.request_id for w in orders.withdrawals]


def test_a_cancelled_transfer_is_forgotten_in_time(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.cancel("t")
    assert at_rest(side)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    request = make_request(params=produce())
    admit(side, request)
    assert finish(side, request, "FINISHED_LENGTH_CAPPED", 40)[0], "the id may be used again"


def test_any_number_of_cancels_is_bounded(side: SchedulerSide) -> None:
    for batch in range(3):
        for number in range(MAX_CANCELS):
            side.cancel(f"{batch}-{number}")
        side.take_orders()
    assert len(side._cancelled) == MAX_CANCELS
    assert not side._cancels
