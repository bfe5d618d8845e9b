"""The tiny model and the plain engine: what makes equal tokens mean equal KV."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from bench.harness.client import Client, Request
from bench.harness.equality import require_equal
from bench.harness.workload import distinct, mixed, tokens


def test_answers_depend_on_each_part_of_the_prompt(reference):
    prompt = tokens(320, seed=3)
    variants = [Request(prompt)]
    for at in range(0, 320, 32):
        # A block of other tokens stands for a block of KV that is missing or another request's.
        changed = [*prompt[:at], *tokens(32, seed=1000 + at), *prompt[at + 32 :]]
        variants.append(Request(changed))
    answers = reference.answers(variants)
    assert all(answer.ok for answer in answers)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(variants)


def test_answers_differ_between_prompts(reference):
    requests = distinct(12, 60)
    answers = reference.answers(requests)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(requests)


def test_answers_do_not_depend_on_what_runs_beside_them(reference):
    requests = mixed(24, longest=1200, seed=12)
    together = reference.answers(requests)

    async def one_by_one():
        async with Client() as client:
            # Another salt: nothing may come from the first pass's prefix cache.
            return await client.complete_all(
                reference.engine.url,
                [replace(request, extra={"cache_salt": "alone"}) for request in requests],
                at_once=1,
            )

    require_equal(requests, together, asyncio.run(one_by_one()))
