"""What makes one prompt's KV differ from another's, as 128 bits.

Both legs of a transfer compute it from their own request; the engines pair only equal ones, so
two prompts that were given the same transfer id are told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

__all__ = ["FINGERPRINT_BYTES", "PromptRequest", "fingerprint", "has_embeds"]

FINGERPRINT_BYTES = 16

_EMPTY = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"kvpush-prompt")
"""Copied for each prompt: quicker than making one."""
_ENCODER = msgspec.msgpack.Encoder()


class PromptRequest(Protocol):
    """The parts of vLLM's request that its KV depends on."""

    prompt_token_ids: Sequence[int] | None


def has_embeds(request: Any) -> bool:
    """Whether a part of the prompt was given as embeddings, which have no token ids."""
    return getattr(request, "prompt_embeds", None) is not None


def _texts(request: Any) -> Iterable[str]:
    """Everything but the tokens, in a fixed order, each part with its tag."""
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        yield f"lora={lora.lora_name}"
    salt = getattr(request, "cache_salt", None)
    if salt:
        yield f"salt={salt}"
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        yield f"mm={feature.modality}:{feature.identifier}@{place.offset}+{place.length}"


def fingerprint(request: Any) -> bytes:
    """16 bytes over token ids, LoRA name, cache salt and multimodal items with their places."""
    digest = _EMPTY.copy()
    # MessagePack gives small ids few bytes: less to convert and less to hash than fixed-size ones,
    # and the same bytes in every process.
    ids = request.prompt_token_ids
    tokens = _ENCODER.encode(ids if isinstance(ids, list) else list(ids or ()))
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens)
    for text in _texts(request):
        data = text.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
