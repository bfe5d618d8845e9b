"""Records which blocks vLLM's own block manager gives out after a mixed load.

Two engines are played with nothing but their `KVCacheManager`: a prefill engine that allocates
prompts in chunks, several at a time, and a decode engine that allocates whole prompts and then
grows its running requests block by block. After the load, one request of each size is allocated
on both sides; its two lists of block ids are what a transfer of it would see. The result lies in
`bench/data/allocation.json` as runs `[first id, count]`, a negative count for falling ids.

`python -m bench.record_allocation` writes the file anew (needs vLLM; no GPU, no model).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "allocation.json"

BLOCK_TOKENS = 16
POOL_BLOCKS = 20_000
SIZES = (64, 1_024, 8_192)  # blocks of the recorded requests
LOAD_REQUESTS = 600
PROMPT_TOKENS = (200, 8_000)
ANSWER_TOKENS = (16, 600)
CHUNK_TOKENS = 2_048
PREFILLS_AT_ONCE = 4
DECODES_AT_ONCE = 24


def make_manager() -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float16
    )
    config = KVCacheConfig(
        num_blocks=POOL_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=POOL_BLOCKS * BLOCK_TOKENS,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


class Player:
    """One engine's block manager and its running requests."""

    def __init__(self, name: str) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.name = name
        self.manager = make_manager()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._made = 0

    def request(self, rng: random.Random, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._made += 1
        return Request(
            request_id=f"{self.name}-{self._made}",
            prompt_token_ids=[rng.randrange(1 << 15) for _ in range(tokens)],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def grow(self, request: Any, tokens: int) -> None:
        """Allocates room for the next tokens and counts them as computed."""
        if self.manager.allocate_slots(request, tokens) is None:
            msg = f"{self.name}: the pool is too small for the load"
            raise RuntimeError(msg)
        request.num_computed_tokens += tokens

    def blocks(self, request: Any) -> list[int]:
        return [int(block) for block in self.manager.get_block_ids(request.request_id)[0]]


def play_prefill(player: Player, prompts: list[int], rng: random.Random) -> None:
    """Prompts in chunks, some at a time; each is freed a while after its last chunk."""
    waiting = list(prompts)
    running: list[tuple[Any, int]] = []
    handed_over: list[Any] = []
    while waiting or running:
        while waiting and len(running) < PREFILLS_AT_ONCE:
            tokens = waiting.pop()
            running.append((player.request(rng, tokens), tokens))
        for entry in list(running):
            request, tokens = entry
            step = min(CHUNK_TOKENS, tokens - request.num_computed_tokens)
            player.grow(request, step)
            if request.num_computed_tokens == tokens:
                running.remove(entry)
                handed_over.append(request)
        while len(handed_over) > PREFILLS_AT_ONCE:
            player.manager.free(handed_over.pop(rng.randrange(len(handed_over))))


def play_decode(player: Player, prompts: list[int], rng: random.Random) -> None:
    """Whole prompts, then token by token; at the end the engine is as busy as before."""
    waiting = list(prompts)
    running: list[tuple[Any, int]] = []
    while waiting:
        while waiting and len(running) < DECODES_AT_ONCE:
            tokens = waiting.pop()
            request = player.request(rng, tokens)
            player.grow(request, tokens)
            running.append((request, rng.randint(*ANSWER_TOKENS)))
        for place, (request, left) in reversed(list(enumerate(running))):
            if left == 0:
                player.manager.free(request)
                del running[place]
                continue
            request.append_output_token_ids(rng.randrange(1 << 15))
            player.grow(request, 1)
            running[place] = (request, left - 1)


def to_runs(ids: list[int]) -> list[tuple[int, int]]:
    """[first id, count], the count negative where ids fall."""
    runs: list[tuple[int, int]] = []
    for block in ids:
        if runs:
            first, count = runs[-1]
            for step in (1, -1):
                if count * step >= 1 and block == first + count:
                    runs[-1] = (first, count + step)
                    break
                if count == 1 and block == first + step:
                    runs[-1] = (first, 2 * step)
                    break
            else:
                runs.append((block, 1))
            continue
        runs.append((block, 1))
    return runs


def from_runs(runs: list[tuple[int, int]]) -> list[int]:
    ids: list[int] = []
    for first, count in runs:
        step = 1 if count > 0 else -1
        ids.extend(range(first, first + count, step))
    return ids


def load() -> dict[int, tuple[list[int], list[int]]]:
    """By size: the ids on the prefill and on the decode side."""
    recorded = json.loads(DATA.read_text())
    return {
        int(size): (from_runs(sides["prefill"]), from_runs(sides["decode"]))
        for size, sides in recorded["requests"].items()
    }


def main() -> None:
    rng = random.Random(1)
    prompts = [rng.randint(*PROMPT_TOKENS) for _ in range(LOAD_REQUESTS)]
    players = {"prefill": Player("prefill"), "decode": Player("decode")}
    play_prefill(players["prefill"], prompts, rng)
    play_decode(players["decode"], prompts, rng)
    requests: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for size in SIZES:
        requests[size] = {}
        for side, player in players.items():
            request = player.request(rng, size * BLOCK_TOKENS)
            step = CHUNK_TOKENS if side == "prefill" else size * BLOCK_TOKENS
            while request.num_computed_tokens < size * BLOCK_TOKENS:
                player.grow(request, min(step, size * BLOCK_TOKENS - request.num_computed_tokens))
            ids = player.blocks(request)
            requests[size][side] = to_runs(ids)
            if from_runs(requests[size][side]) != ids:
                msg = "runs do not give the ids back"
                raise RuntimeError(msg)
            player.manager.free(request)
            print(f"{side}: {size} blocks in {len(requests[size][side])} runs of ids")
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(
        json.dumps(
            {"pool_blocks": POOL_BLOCKS, "block_tokens": BLOCK_TOKENS, "requests": requests},
            separators=(",", ":"),
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
