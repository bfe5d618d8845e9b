"""kv_transfer_params are a client's input: what is wrong fails that request alone, by name."""

from __future__ import annotations

import asyncio

import pytest

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, tokens

# (field, a wrong value; None leaves the field out)
WRONG_DECODE: list[tuple[str, object]] = [
    ("remote_host", None),
    ("remote_host", 5),
    ("remote_host", ""),
    ("remote_host", "no such host!"),
    ("remote_port", None),
    ("remote_port", "20001x"),
    ("remote_port", -1),
    ("remote_port", 70000),
    ("remote_port", True),
    ("remote_port", 3.5),
    ("transfer_id", 7),
    ("transfer_id", []),
    ("transfer_id", ""),
    ("transfer_id", "x" * 5000),
    ("do_remote_prefill", "yes"),
    ("do_remote_prefill", None),
    ("do_remote_decode", 1),
    ("remote_engine_id", {"a": 1}),
    ("remote_request_id", 12),
    ("remote_block_ids", "all"),
    ("tp_size", "two"),
    ("tp_size", 0),
    ("pp_size", []),
]

WRONG_PREFILL: list[tuple[str, object]] = [
    ("transfer_id", 7),
    ("transfer_id", {}),
    ("transfer_id", "y" * 5000),
    ("do_remote_decode", "yes"),
    ("do_remote_decode", None),
    ("do_remote_prefill", 0),
]


def _changed(params, field, value):
    params = dict(params)
    if value is None:
        params.pop(field, None)
    else:
        params[field] = value
    return params


def _ids(cases):
    return [f"{field}={'missing' if value is None else repr(value)[:12]}" for field, value in cases]


async def _send(url, request, params):
    async with Client() as client:
        return await client.complete(url, request, kv_transfer_params=params)


def _require_pair_works(pair, reference, seed):
    requests = distinct(2, 90, seed=seed)
    require_equal(requests, reference.answers(requests), asyncio.run(pair.send_all(requests)))


@pytest.mark.parametrize(("field", "value"), WRONG_DECODE, ids=_ids(WRONG_DECODE))
def test_wrong_field_of_the_decode_leg(default_pair, reference, field, value):
    pair = default_pair
    consumer = pair.consumers[0]
    mark = consumer.log_size()
    params = _changed(pair.decode_params(pair.producers[0], "wrong"), field, value)
    answer = asyncio.run(_send(consumer.url, Request(tokens(70, seed=601)), params))
    assert not answer.ok
    assert field in consumer.log_since(mark)
    _require_pair_works(pair, reference, 602)


@pytest.mark.parametrize(("field", "value"), WRONG_PREFILL, ids=_ids(WRONG_PREFILL))
def test_wrong_field_of_the_prefill_leg(default_pair, reference, field, value):
    pair = default_pair
    producer = pair.producers[0]
    mark = producer.log_size()
    params = {"do_remote_decode": True, "transfer_id": "wrong"}
    answer = asyncio.run(
        _send(producer.url, Request(tokens(70, seed=603), 1), _changed(params, field, value))
    )
    assert not answer.ok
    assert field in producer.log_since(mark)
    _require_pair_works(pair, reference, 604)


def test_parameters_that_are_no_object(default_pair, reference):
    pair = default_pair
    for params in ("text", 7, [1], True):
        answer = asyncio.run(_send(pair.consumers[0].url, Request([5, 6, 7]), params))
        assert not answer.ok
        assert 400 <= answer.status < 500
    _require_pair_works(pair, reference, 605)


def test_wrong_request_beside_right_ones(default_pair, reference):
    pair = default_pair
    requests = distinct(8, 300, seed=606)
    expected = reference.answers(requests)
    wrong = {"do_remote_prefill": True}

    async def scenario():
        return await asyncio.gather(
            pair.send_all(requests),
            *(
                _send(pair.consumers[0].url, Request(tokens(300, seed=607 + each)), wrong)
                for each in range(4)
            ),
        )

    got, *failed = asyncio.run(scenario())
    require_equal(requests, expected, got)
    assert not any(answer.ok for answer in failed)


def test_prefill_leg_sent_to_the_decode_engine_and_back(default_pair, reference):
    pair = default_pair
    request = Request(tokens(80, seed=620))
    prefill = {"do_remote_decode": True, "transfer_id": "swapped"}
    decode = pair.decode_params(pair.producers[0], "swapped")
    on_consumer = asyncio.run(_send(pair.consumers[0].url, request, prefill))
    on_producer = asyncio.run(_send(pair.producers[0].url, request, decode))
    assert not on_consumer.ok
    assert not on_producer.ok
    _require_pair_works(pair, reference, 621)
