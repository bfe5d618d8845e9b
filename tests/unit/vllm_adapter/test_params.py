from __future__ import annotations

import copy
from typing import Any

import pytest

from kvpush.errors import BadParamsError
from kvpush.vllm import params as params_module
from kvpush.vllm.params import ConsumeParams, ProduceParams, parse_params
from tests.unit.vllm_adapter.fakes import consume, produce

ID = "cmpl-x-0-0123abcd"


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": False, "do_remote_decode": False},
        {"do_remote_prefill": False, "remote_host": None},
        {"something_else": 3},
    ],
)
def test_nothing_to_transfer(params: object) -> None:
    assert parse_params(params, ID) is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ([1], "kv_transfer_params"),
        ("text", "kv_transfer_params"),
        (consume(do_remote_prefill="yes"), "do_remote_prefill"),
        (consume(do_remote_prefill=1), "do_remote_prefill"),
        (produce(do_remote_decode="true"), "do_remote_decode"),
        (produce(do_remote_prefill=True), "do_remote_prefill"),
        ({"remote_host": "h", "remote_port": 1, "transfer_id": "t"}, "do_remote_prefill"),
        ({"transfer_id": "t"}, "do_remote_prefill"),
        ({"do_remote_prefill": True}, "remote_host"),
        (consume(remote_host=None), "remote_host"),
        (consume(remote_host=""), "remote_host"),
        (consume(remote_host=7), "remote_host"),
        (consume(remote_host="a/b"), "remote_host"),
        (consume(remote_host="x" * 256), "remote_host"),
        (consume(remote_port=None), "remote_port"),
        (consume(remote_port="5600"), "remote_port"),
        (consume(remote_port=True), "remote_port"),
        (consume(remote_port=0), "remote_port"),
        (consume(remote_port=65536), "remote_port"),
        (consume(remote_port=5600.0), "remote_port"),
        (consume(transfer_id=5), "transfer_id"),
        (consume(transfer_id=""), "transfer_id"),
        (consume(transfer_id="x" * 257), "transfer_id"),
        (consume(transfer_id="\ud800"), "transfer_id"),
        (produce(transfer_id=["t"]), "transfer_id"),
        (consume(remote_engine_id=3), "remote_engine_id"),
        (consume(remote_request_id={}), "remote_request_id"),
        (consume(tp_size=0), "tp_size"),
        (consume(tp_size="2"), "tp_size"),
        (consume(pp_size=1.5), "pp_size"),
        (consume(remote_num_tokens=-1), "remote_num_tokens"),
        (consume(remote_block_ids=5), "remote_block_ids"),
    ],
)
def test_a_wrong_field_is_named(params: object, field: str) -> None:
    with pytest.raises(BadParamsError) as raised:
        parse_params(params, ID)
    assert raised.value.field == field
    assert repr(field) in str(raised.value)


def test_parameters_are_not_changed() -> None:
    params = consume(unknown_field={"a": [1]})
    before = copy.deepcopy(params)
    assert parse_params(params, ID) == ConsumeParams("t", "127.0.0.1", 5600)
    assert params == before


def test_router_gives_the_id_to_both_legs() -> None:
    assert parse_params(produce(), "cmpl-p-0-11111111") == ProduceParams("t")


def test_both_legs_at_once_with_one_request_id() -> None:
    p = parse_params({"do_remote_decode": True}, "cmpl-x-0-11111111")
    d = parse_params(consume(transfer_id=None, remote_request_id="x"), "cmpl-x-0-22222222")
    assert p is not None
    assert d is not None
    assert p.transfer_id == d.transfer_id == "cmpl-x-0"


def test_legs_in_sequence_without_transfer_id() -> None:
    d = parse_params(
        consume(transfer_id=None, remote_request_id="cmpl-p-0-11111111"), "cmpl-other-0-22222222"
    )
    assert d is not None
    assert d.transfer_id == "cmpl-p-0"


def test_samples_share_their_parents_id() -> None:
    d = parse_params(consume(transfer_id=None), "1_cmpl-x-0-22222222")
    assert d is not None
    assert d.transfer_id == "cmpl-x-0"


_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 65535, 65536, 5600.0, -1),
    *("", "t", "1", "h\n", "\u00e9", "127.0.0.1", "[::1]", "a_b.c-d%eth0", "x" * 256, "x" * 257),
    *([], [[1]], (), {}, b"t"),
)


@pytest.mark.parametrize("field", [*params_module._Fields.__struct_fields__, "something_else"])
def test_the_quick_way_differs_in_nothing_but_time(field: str) -> None:
    quick = 0
    for leg in ({}, consume(), produce()):
        for value in _VALUES:
            params = leg | {field: value}
            usual = params_module._parse_usual(params)
            if usual is not None:
                quick += 1
                assert usual == params_module._parse_any(params, ID), params
    assert quick


def test_the_usual_parameters_go_the_quick_way() -> None:
    assert params_module._parse_usual(consume(transfer_id="t")) is not None
    assert params_module._parse_usual(produce(transfer_id="t")) is not None
