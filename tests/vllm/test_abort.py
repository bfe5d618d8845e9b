"""Clients that leave, on either leg and at any moment."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, mixed, tokens
from tests.vllm.waiting import leave, loading, until


def _params(transfer_id):
    return {"do_remote_decode": True, "transfer_id": transfer_id}


def _require_right_or_failed(requests, expected, answers):
    """Whatever was answered as a success has the plain engine's tokens."""
    kept = [place for place, answer in enumerate(answers) if answer is not None and answer.ok]
    require_equal(
        [requests[place] for place in kept],
        [expected[place] for place in kept],
        [answers[place] for place in kept],
    )


def test_decode_client_leaves_while_its_kv_is_awaited(default_pair, reference):
    pair = default_pair
    producer, consumer = pair.producers[0], pair.consumers[0]
    request = Request(tokens(400, seed=401))

    async def scenario():
        async with Client() as client:
            decode = asyncio.create_task(
                client.complete(
                    consumer.url, request, kv_transfer_params=pair.decode_params(producer, "left-1")
                )
            )
            await until(lambda: loading(pair, consumer) == 1, "the decode leg waits")
            await leave(decode)
            await asyncio.to_thread(pair.wait_at_rest, [consumer])
            # Its prefill comes late and finds nobody: its blocks are freed in time.
            return await pair.prefill_leg(
                client, request, producer, request_id="left-1", params=_params("left-1")
            )

    assert asyncio.run(scenario()).ok
    pair.wait_at_rest()
    after = distinct(4, 100, seed=402)
    require_equal(after, reference.answers(after), asyncio.run(pair.send_all(after)))


def test_decode_client_leaves_in_the_middle_of_its_answer(default_pair):
    pair = default_pair
    request = Request(tokens(300, seed=403), max_tokens=2000)

    async def scenario():
        async with Client() as client:
            legs = asyncio.create_task(pair.both_legs(client, request, transfer_id="left-2"))
            consumer = pair.consumers[0]
            await until(
                lambda: consumer.metric("vllm:num_requests_running") == 1, "the decode leg runs"
            )
            await leave(legs)

    asyncio.run(scenario())
    pair.wait_at_rest()


def test_prefill_client_leaves_at_any_moment(default_pair, reference):
    pair = default_pair
    requests = distinct(16, 1000, seed=404)
    expected = reference.answers(requests)
    producer, consumer = pair.producers[0], pair.consumers[0]

    async def one(client, place, request):
        transfer_id = f"prefill-left-{place}"
        decode = asyncio.create_task(
            client.complete(
                consumer.url, request, kv_transfer_params=pair.decode_params(producer, transfer_id)
            )
        )
        prefill = asyncio.create_task(
            pair.prefill_leg(
                client, request, producer, request_id=transfer_id, params=_params(transfer_id)
            )
        )
        # From before the request is read to after its end.
        await asyncio.sleep(0.1 * place)
        await leave(prefill)
        return await decode

    async def scenario():
        async with Client() as client:
            return await asyncio.gather(*(one(client, *each) for each in enumerate(requests)))

    _require_right_or_failed(requests, expected, asyncio.run(scenario()))
    pair.wait_at_rest()


def test_client_of_the_router_leaves(default_pair):
    pair = default_pair
    requests = distinct(8, 700, max_tokens=400, seed=405)

    async def scenario():
        async with Client() as client:
            tasks = [
                asyncio.create_task(client.complete(pair.router.url, request))
                for request in requests
            ]
            for place, task in enumerate(tasks):
                await asyncio.sleep(0.02 * place)
                await leave(task)

    asyncio.run(scenario())
    pair.wait_at_rest()


@pytest.mark.parametrize("seed", [1, 2])
def test_storm_of_aborts_on_both_sides(default_pair, reference, seed):
    pair = default_pair
    requests = mixed(40, longest=800, seed=406 + seed)
    expected = reference.answers(requests)
    draw = random.Random(seed)

    async def one(client, place, request):
        producer, consumer = pair.producers[place % 2], pair.consumers[0]
        transfer_id = f"storm-{seed}-{place}"
        tasks = [
            asyncio.create_task(
                pair.prefill_leg(
                    client, request, producer, request_id=transfer_id, params=_params(transfer_id)
                )
            ),
            asyncio.create_task(
                client.complete(
                    consumer.url,
                    request,
                    kv_transfer_params=pair.decode_params(producer, transfer_id),
                )
            ),
        ]
        victim = draw.choice([None, None, *tasks])
        if victim is not None:
            await asyncio.sleep(draw.uniform(0, 2.0))
            await leave(victim)
        await asyncio.gather(*tasks, return_exceptions=True)
        return None if tasks[1].cancelled() else tasks[1].result()

    async def scenario():
        async with Client() as client:
            return await asyncio.gather(*(one(client, *each) for each in enumerate(requests)))

    _require_right_or_failed(requests, expected, asyncio.run(scenario()))
    pair.wait_at_rest()
    after = distinct(6, 200, seed=410 + seed)
    require_equal(after, reference.answers(after), asyncio.run(pair.send_all(after)))
