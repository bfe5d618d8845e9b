"""Requests that carry the same id while the other is under way: right tokens or a refusal."""

from __future__ import annotations

import asyncio

import pytest

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import tokens


def _require_never_wrong(requests, expected, answers):
    served = [place for place, answer in enumerate(answers) if answer.ok]
    require_equal(
        [requests[place] for place in served],
        [expected[place] for place in served],
        [answers[place] for place in served],
    )
    return len(served)


async def _overlapping(pair, requests, request_id, with_transfer_id):
    async with Client() as client:
        legs = await asyncio.gather(
            *(
                pair.both_legs(
                    client, request, transfer_id=request_id, with_transfer_id=with_transfer_id
                )
                for request in requests
            )
        )
    return [each.decode for each in legs]


@pytest.mark.parametrize("with_transfer_id", [False, True], ids=["request-id", "transfer-id"])
@pytest.mark.parametrize("turn", range(4))
def test_different_prompts(default_pair, reference, turn, with_transfer_id):
    seed = 700 + 10 * turn + 100 * with_transfer_id
    requests = [Request(tokens(200 + 60 * each, seed=seed + each)) for each in range(2)]
    expected = reference.answers(requests)
    got = asyncio.run(_overlapping(default_pair, requests, f"same-{seed}", with_transfer_id))
    assert _require_never_wrong(requests, expected, got) >= 1


def test_prompts_of_equal_length(default_pair, reference):
    requests = [Request(tokens(256, seed=800 + each)) for each in range(4)]
    expected = reference.answers(requests)
    got = asyncio.run(_overlapping(default_pair, requests, "same-length", False))
    assert _require_never_wrong(requests, expected, got) >= 1


def test_the_same_prompt_twice(default_pair, reference):
    requests = [Request(tokens(210, seed=810))] * 2
    expected = reference.answers(requests)
    got = asyncio.run(_overlapping(default_pair, requests, "twins", False))
    assert _require_never_wrong(requests, expected, got) >= 1


def test_an_id_used_again_later(default_pair, reference):
    requests = [Request(tokens(180, seed=820 + each)) for each in range(3)]
    expected = reference.answers(requests)
    got = [
        asyncio.run(_overlapping(default_pair, [request], "again", False))[0]
        for request in requests
    ]
    require_equal(requests, expected, got)


def test_replay_of_a_finished_transfer(default_pair, reference):
    pair = default_pair
    request = Request(tokens(190, seed=830))
    expected = reference.answers([request])

    async def scenario():
        async with Client() as client:
            first = await pair.one_after_the_other(client, request, request_id="replayed")
            # The decode leg alone, once more: a prompt of whole blocks less one is not all cached.
            again = await client.complete(
                pair.consumers[0].url,
                Request([*request.prompt[:150], *tokens(40, seed=831)]),
                kv_transfer_params=first.prefill.kv_transfer_params,
            )
        return first.decode, again

    first, again = asyncio.run(scenario())
    require_equal([request], expected, [first])
    assert not again.ok
