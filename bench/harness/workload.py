"""Requests of mixed length, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.harness.client import Request

# The tiny model's vocabulary, less its special tokens.
_FIRST_TOKEN, _VOCAB = 5, 512

# More than any block size used here, so that a shared beginning is never a hit on the whole prompt.
_OWN_TAIL = 130


def tokens(count: int, seed: int) -> list[int]:
    """Return ``count`` random token ids of the tiny model."""
    draw = random.Random(seed)
    return [draw.randrange(_FIRST_TOKEN, _VOCAB) for _ in range(count)]


def mixed(
    count: int = 40,
    *,
    shortest: int = 10,
    longest: int = 1500,
    max_tokens: tuple[int, int] = (8, 32),
    sharing: float = 0.3,
    seed: int = 7,
) -> list[Request]:
    """Return requests from ``shortest`` to ``longest`` prompt tokens, evenly over the logarithm.

    ``sharing`` of them begin like an earlier one, so that prefix caches have something to hit.
    """
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(count):
        length = round(shortest * (longest / shortest) ** (index / max(1, count - 1)))
        prompt = tokens(length, draw.randrange(1 << 30))
        if prompts and draw.random() < sharing:
            earlier = draw.choice(prompts)
            shared = draw.randint(1, len(earlier))
            if shared <= length - _OWN_TAIL:
                prompt[:shared] = earlier[:shared]
        prompts.append(prompt)
    draw.shuffle(prompts)
    return [Request(prompt, draw.randint(*max_tokens)) for prompt in prompts]


def distinct(count: int, length: int, *, max_tokens: int = 16, seed: int = 1) -> list[Request]:
    """Return requests of one length that share no prefix."""
    return [Request(tokens(length, seed * 1_000_003 + index), max_tokens) for index in range(count)]


def prompt_tokens(requests: Sequence[Request]) -> int:
    """Return the number of prompt tokens of requests whose prompts are token ids."""
    return sum(len(request.prompt) for request in requests)
