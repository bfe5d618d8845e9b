"""Blocks that a real load has scattered, posted from NIXL's prepared lists: equal tokens."""

from __future__ import annotations

from bench.harness import tiny_model
from bench.harness.workload import mixed
from tests.vllm.test_geometry import Case, require_equal_after_transfer

LAYERS = 8
LONGEST = 3900
_LONG = {"max_model_len": 4096}
# Enough layers and blocks for prepared lists to be of use.
SCATTERED = Case("scattered", tiny_model.qwen3(layers=LAYERS), _LONG, _LONG)
MOST_ROUNDS = 8


def test_a_load_that_scatters_blocks_comes_from_lists(fleet):
    pair = fleet.pair(SCATTERED.name, SCATTERED.start)
    for round_ in range(MOST_ROUNDS):
        requests = mixed(16, longest=LONGEST, max_tokens=(2, 24), sharing=0.0, seed=4000 + round_)
        require_equal_after_transfer(pair, requests)
        counters = pair.counters(pair.producers)
        if counters["posted_from_lists"] > 0:
            break
    assert counters["prepared_blocks"] == 2 * LAYERS * pair.stats(pair.producers[0])["total_blocks"]
    assert counters["posted_from_lists"] > 0, "no round has scattered the blocks"
    # A load all of which may come from them.
    before = counters["posted_from_lists"]
    requests = mixed(16, longest=LONGEST, max_tokens=(2, 24), sharing=0.0, seed=5000)
    require_equal_after_transfer(pair, requests)
    assert pair.counters(pair.producers)["posted_from_lists"] > before
