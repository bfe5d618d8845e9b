"""A load of everything at once on engines whose KV is stamped: no wrong byte, nothing left over.

Two real engines without HTTP, few blocks on both sides, small prefill chunks, shared prefixes,
transfer ids used again, retries, and legs aborted on either side at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engines.pair import Pair
from tests.vllm.stamped import Load, require_right_stamps, start, wait_at_rest

DEADLINE_S = 10.0
# A request that nobody helps ends at its deadline; the rest is a slow machine.
DRAIN_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    times = {
        "receive_deadline_s": DEADLINE_S,
        "offer_ttl_s": DEADLINE_S,
        "grant_ttl_s": 1.5 * DEADLINE_S,
    }
    with start("stamped", **times) as pair:
        yield pair


def require_clean_load(pair: Pair, seed: int, count: int) -> None:
    before = pair.report()
    load = Load(pair, seed)
    load.run(count)
    pair.drain(DRAIN_LIMIT_S)
    wait_at_rest(pair)
    require_right_stamps(pair)

    # Requests of one transfer id are told apart by their prompts: none of these may fail.
    assert not load.failed()
    served = load.served()
    assert len(served) > count / 2
    assert all(len(request.tokens) == request.max_tokens for request in served)

    # The load was what it was meant to be.
    def gained(side: str, name: str) -> int:
        return int(after[side][name]) - int(before[side][name])

    after = pair.report()
    received = [
        r["decode"]["connector"]["workers"][0]["transfers_received"] for r in (before, after)
    ]
    assert received[1] - received[0] > count / 2
    assert load.aborted
    assert load.retries
    assert gained("decode", "preemptions")
    for side in ("prefill", "decode"):
        assert gained(side, "prefix_hit_tokens")
        assert after[side]["stamps"]["tokens_checked"] > before[side]["stamps"]["tokens_checked"]


def test_no_wrong_byte_and_nothing_left(pair: Pair) -> None:
    require_clean_load(pair, seed=4, count=500)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 14))
def test_no_wrong_byte_and_nothing_left_in_a_long_load(pair: Pair, seed: int) -> None:
    require_clean_load(pair, seed, count=2000)
