"""From the client's body to the bodies of both legs. Pure functions: no clock, no network.

A body is kept as its members' raw JSON. The decode leg is then the client's own bytes but for one
member, and a value that this module doesn't know (a number beyond 64 bits, say) reaches the servers
as the client wrote it.

A transfer joins ONE prompt on a prefill server with the same prompt on a decode server.
`plain_reason` finds the requests for which that can't be had; they go to a decode server alone,
without transfer parameters, and it computes the prompt itself: slower, never wrong.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

from kvpush.proxy.config import PrefillBackend
from kvpush.proxy.errors import RequestError

Body: TypeAlias = dict[str, msgspec.Raw]

_body_decoder = msgspec.json.Decoder(Body)


class Endpoint(enum.Enum):
    """The generating endpoints; the value is the path on router and servers alike."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


# Members that only shape the sampled text or its reporting. The prefill leg's one token is thrown
# away, so they are useless there at best; at worst they end it before its token limit, refuse one
# token (min_tokens), want streaming (stream_options), or hold the prefill up (compiling a grammar).
# The decode server still checks every one of them.
_SAMPLING_MEMBERS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "seed",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_logprobs",
        "top_p",
        "use_beam_search",
        "watermarking",
    }
)
# A chat template may write response_format (as it does tools) into the prompt, and both legs must
# have the same prompt. A completion's prompt is the client's own.
_COMPLETIONS_SAMPLING_MEMBERS = _SAMPLING_MEMBERS | {"response_format"}

_KV_TRANSFER_PARAMS = "kv_transfer_params"


def parse_body(data: bytes, endpoint: Endpoint) -> Body:
    """Read a client's body and drop its own transfer parameters; RequestError if it is wrong."""
    try:
        body = _body_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"The body is not a JSON object: {error}.") from error
    if endpoint is Endpoint.COMPLETIONS:
        if _value(body, "prompt") in (None, "") and _value(body, "prompt_embeds") in (None, []):
            raise RequestError(400, "`prompt` is missing or empty.", param="prompt")
    else:
        messages = _value(body, "messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(
                400, "`messages` must be a list of at least one message.", param="messages"
            )
    _drop_transfer_params(body)
    return body


def plain_reason(body: Body, endpoint: Endpoint) -> str | None:
    """Say why a request must be served by a decode server alone; None if both legs are right.

    Where a member's meaning is in doubt (a string for a number), the answer is a reason: the decode
    server alone is always right, and it is the one to refuse what is malformed.
    """
    n = _value(body, "n")
    if n is not None and n != 1:
        # Each of the n samples is an engine request of its own with the same prompt and transfer
        # id; only one of them could be paired with the prefill.
        return "n is not 1"
    if _value(body, "use_beam_search"):
        # Beam search makes engine requests of its own, without the transfer parameters.
        return "beam search"
    if _wants_prompt_logprobs(body, endpoint):
        # They exist only where the prompt is computed; vLLM then ignores a connector's tokens.
        return "log probabilities of the prompt"
    truncate = _value(body, "truncate_prompt_tokens")
    if truncate is not None and not (type(truncate) is int and truncate > 0):
        # -1 means "to what the model can hold", which depends on the leg's own token limit.
        return "truncation to the model's limit"
    if endpoint is Endpoint.COMPLETIONS:
        return _plain_reason_of_prompt(body, truncated=truncate is not None)
    return None


def prefill_body(body: Body, endpoint: Endpoint, transfer_id: str) -> bytes:
    """Return the prefill leg's body: the same prompt, and one token that nobody reads."""
    dropped = (
        _COMPLETIONS_SAMPLING_MEMBERS if endpoint is Endpoint.COMPLETIONS else _SAMPLING_MEMBERS
    )
    leg: dict[str, Any] = {name: value for name, value in body.items() if name not in dropped}
    leg |= {"stream": False, "max_tokens": 1, "n": 1, "ignore_eos": True}
    if endpoint is Endpoint.CHAT or "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    leg[_KV_TRANSFER_PARAMS] = {"do_remote_decode": True, "transfer_id": transfer_id}
    return msgspec.json.encode(leg)


def decode_body(body: Body, prefill: PrefillBackend, transfer_id: str) -> bytes:
    """Return the decode leg's body: the client's, and where the prompt's KV comes from."""
    leg: dict[str, Any] = dict(body)
    leg[_KV_TRANSFER_PARAMS] = {
        "do_remote_prefill": True,
        "remote_host": prefill.side_channel_host,
        "remote_port": prefill.side_channel_port,
        "transfer_id": transfer_id,
    }
    return msgspec.json.encode(leg)


def plain_body(body: Body) -> bytes:
    """Return the body for a decode server that computes the prompt itself."""
    return msgspec.json.encode(body)


def _value(body: Body, name: str) -> Any:
    raw = body.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"`{name}` is not valid JSON: {error}.", param=name) from error


def _drop_transfer_params(body: Body) -> None:
    """Remove the client's transfer parameters: they could name any host and any transfer."""
    params = _value(body, _KV_TRANSFER_PARAMS)
    if params is not None and not isinstance(params, dict):
        raise RequestError(
            400,
            f"`{_KV_TRANSFER_PARAMS}` must be an object (the router sets its own and ignores it).",
            param=_KV_TRANSFER_PARAMS,
        )
    body.pop(_KV_TRANSFER_PARAMS, None)
    # vLLM copies vllm_xargs into the dictionary in which it hands transfer parameters to its
    # connector.
    extra = _value(body, "vllm_xargs")
    if isinstance(extra, dict) and _KV_TRANSFER_PARAMS in extra:
        del extra[_KV_TRANSFER_PARAMS]
        body["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(extra))


def _wants_prompt_logprobs(body: Body, endpoint: Endpoint) -> bool:
    if _value(body, "prompt_logprobs") is not None:
        return True
    if not _value(body, "echo"):
        return False
    # An echo reports the prompt's log probabilities too: in a chat always, in a completion if
    # logprobs is given.
    return endpoint is Endpoint.CHAT or _value(body, "logprobs") is not None


def _plain_reason_of_prompt(body: Body, *, truncated: bool) -> str | None:
    """Several prompts of one request share its transfer id: their tokens must tell them apart."""
    if _value(body, "prompt_embeds") is not None:
        return "a prompt given as embeddings has no tokens to be recognised by"
    prompt = _value(body, "prompt")
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list) or not prompt:
        return "a prompt of unknown form"
    if len(prompt) == 1 or all(type(item) is int for item in prompt):
        return None
    if not all(isinstance(item, list) for item in prompt):
        # Different texts can have the same tokens (normalisation, stripped blanks): only the
        # servers could tell.
        return "several prompts given as text"
    if truncated:
        return "several prompts that are truncated may become equal"
    try:
        distinct = {tuple(item) for item in prompt}
    except TypeError:
        return "a prompt of unknown form"
    return None if len(distinct) == len(prompt) else "several prompts of which two are equal"
