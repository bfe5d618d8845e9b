"""The bodies of both legs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpush.proxy.config import PrefillBackend
from kvpush.proxy.errors import RequestError
from kvpush.proxy.legs import (
    Endpoint,
    decode_body,
    parse_body,
    plain_body,
    plain_reason,
    prefill_body,
)

P = PrefillBackend("http://p", "10.0.0.1", 5601)
COMPLETIONS, CHAT = Endpoint.COMPLETIONS, Endpoint.CHAT
MESSAGES = [{"role": "user", "content": "hi"}]


def parsed(body: object, endpoint: Endpoint = COMPLETIONS) -> Any:
    return parse_body(json.dumps(body).encode(), endpoint)


def prefill(body: object, endpoint: Endpoint = COMPLETIONS) -> Any:
    return json.loads(prefill_body(parsed(body, endpoint), endpoint, "id"))


def decode(body: object, endpoint: Endpoint = COMPLETIONS) -> Any:
    return json.loads(decode_body(parsed(body, endpoint), P, "id"))


def reason(body: dict[str, Any], endpoint: Endpoint = COMPLETIONS) -> str | None:
    default = {"prompt": "hi"} if endpoint is COMPLETIONS else {"messages": MESSAGES}
    return plain_reason(parsed(default | body, endpoint), endpoint)


def test_prefill_leg_of_the_smallest_completion() -> None:
    assert prefill({"prompt": "hi"}) == {
        "prompt": "hi",
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "id"},
    }


def test_prefill_leg_of_the_smallest_chat_limits_both_token_fields() -> None:
    leg = prefill({"messages": MESSAGES}, CHAT)
    assert leg["messages"] == MESSAGES
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)


def test_prefill_leg_of_a_completion_limits_max_completion_tokens_only_if_given() -> None:
    assert "max_completion_tokens" not in prefill({"prompt": "hi"})
    assert prefill({"prompt": "hi", "max_completion_tokens": 9})["max_completion_tokens"] == 1


@pytest.mark.parametrize(
    "member",
    [
        {"stream_options": {"include_usage": True}, "stream": True},
        {"stream_interval": 4},
        {"min_tokens": 5},
        {"best_of": 3},
        {"echo": True},
        {"logprobs": 3},
        {"logprob_token_ids": [1, 2], "logprobs": 2},
        {"stop": ["a"]},
        {"stop_token_ids": [1]},
        {"ignore_eos": False},
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"repetition_detection": {"min_count": 2, "max_pattern_size": 3}},
        {"logit_bias": {"5": -100}},
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
        {"thinking_token_budget": 5},
        {"return_token_ids": True},
        {"seed": 1, "temperature": 0.3, "top_p": 0.1, "top_k": 3, "min_p": 0.1},
        {"max_tokens": 0},
        {"max_tokens": None},
    ],
    ids=lambda member: next(iter(member)),
)
def test_what_breaks_one_token_is_repaired_on_the_prefill_leg_only(member: dict[str, Any]) -> None:
    body = {"prompt": "hi", "model": "m"} | member
    assert prefill(body) == prefill({"prompt": "hi", "model": "m"})
    assert decode(body) == body | {"kv_transfer_params": decode(body)["kv_transfer_params"]}


@pytest.mark.parametrize(
    "member",
    [
        {"model": "adapter"},
        {"cache_salt": "salt"},
        {"priority": 3},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5, "truncation_side": "left"},
        {"suffix": "after"},
        {"vllm_xargs": {"session_id": "s"}},
        {"ec_transfer_params": {"a": 1}},
        {"unknown": {"deep": [None, True]}},
    ],
    ids=lambda member: next(iter(member)),
)
def test_what_makes_the_prompt_or_its_kv_is_the_same_on_both_legs(member: dict[str, Any]) -> None:
    body = {"prompt": "hi"} | member
    for leg in (prefill(body), decode(body)):
        assert leg | member == leg


def test_what_a_chat_template_may_read_is_the_same_on_both_legs() -> None:
    members = {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "chat_template": "x",
        "chat_template_kwargs": {"enable_thinking": True},
        "documents": [{"title": "t", "text": "x"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "mm_processor_kwargs": {"a": 1},
    }
    for leg in (prefill(members, CHAT), decode(members, CHAT)):
        assert leg | members == leg


def test_decode_leg_names_the_side_channel() -> None:
    assert decode({"prompt": "hi"})["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "remote_host": "10.0.0.1",
        "remote_port": 5601,
        "transfer_id": "id",
    }


def test_values_reach_the_decode_leg_as_they_were_written() -> None:
    body = b'{"prompt": "hi", "seed": 123456789012345678901234567890, "top_p": 0.10000000000000001}'
    leg = decode_body(parse_body(body, COMPLETIONS), P, "id")
    assert b"123456789012345678901234567890" in leg
    assert b"0.10000000000000001" in leg


# -- the client's own transfer parameters ----------------------------------------------------------


@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": True, "remote_host": "evil"}])
def test_the_clients_transfer_parameters_are_not_passed_on(given: object) -> None:
    body = {"prompt": "hi", "kv_transfer_params": given}
    assert decode(body) == decode({"prompt": "hi"})
    assert prefill(body) == prefill({"prompt": "hi"})
    assert json.loads(plain_body(parsed(body))) == {"prompt": "hi"}


@pytest.mark.parametrize("given", [1, "x", [], True])
def test_transfer_parameters_that_are_no_object_are_refused(given: object) -> None:
    with pytest.raises(RequestError, match="must be an object") as caught:
        parsed({"prompt": "hi", "kv_transfer_params": given})
    assert (caught.value.status, caught.value.param) == (400, "kv_transfer_params")


def test_transfer_parameters_hidden_in_the_extra_arguments_are_not_passed_on() -> None:
    body = {"prompt": "hi", "vllm_xargs": {"kv_transfer_params": "x", "other": 1}}
    assert decode(body)["vllm_xargs"] == prefill(body)["vllm_xargs"] == {"other": 1}


# -- bodies that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"{} {}", b'{"a": NaN}', b"\xff", b"[" * 100_000,
     b'{"a":' * 100_000, b'{"prompt": "\xff\xfe"}'],
    ids=["empty", "half", "list", "null", "string", "two", "nan", "no utf-8", "deep list",
         "deep object", "no utf-8 in a value"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(data, COMPLETIONS)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": ""}, {"prompt_embeds": []}])
def test_a_completion_without_a_prompt_is_refused(body: object) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(body)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("messages", [None, [], "hi", {"role": "user"}])
def test_a_chat_without_messages_is_refused(messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        parsed({"messages": messages}, CHAT)
    assert (caught.value.status, caught.value.param) == (400, "messages")


# -- what one transfer can serve -------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 1},
        {"n": None},
        {"prompt": ["hi"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": [[1, 2], [1, 2, 3], [3]]},
        {"echo": True},
        {"echo": False, "logprobs": 1},
        {"logprobs": 1},
        {"truncate_prompt_tokens": 7},
        {"use_beam_search": False},
        {"stream": True, "min_tokens": 5},
    ],
    ids=str,
)
def test_one_transfer_serves(body: dict[str, Any]) -> None:
    assert reason(body) is None


@pytest.mark.parametrize(
    ("body", "because"),
    [
        ({"n": 2}, "n is not 1"),
        ({"n": 0}, "n is not 1"),
        ({"n": "1"}, "n is not 1"),
        ({"use_beam_search": True}, "beam search"),
        ({"prompt_logprobs": 0}, "log probabilities"),
        ({"echo": True, "logprobs": 0}, "log probabilities"),
        ({"truncate_prompt_tokens": -1}, "truncation"),
        ({"truncate_prompt_tokens": "5"}, "truncation"),
        ({"prompt": ["a", "b"]}, "several prompts given as text"),
        ({"prompt": ["a", [1]]}, "several prompts given as text"),
        ({"prompt": [[1, 2], [1, 2]]}, "two are equal"),
        ({"prompt": [[1], [2]], "truncate_prompt_tokens": 5}, "truncated"),
        ({"prompt": [[1], [{}]]}, "unknown form"),
        ({"prompt": []}, "unknown form"),
        ({"prompt": {"a": 1}}, "unknown form"),
        ({"prompt_embeds": "AAAA"}, "embeddings"),
    ],
    ids=str,
)
def test_one_transfer_does_not_serve(body: dict[str, Any], because: str) -> None:
    found = reason(body)
    assert found is not None
    assert because in found


def test_chat_with_an_echo_reports_the_prompts_log_probabilities() -> None:
    assert reason({"echo": True}, CHAT) is not None
    assert reason({"echo": False}, CHAT) is None
