from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvpush.vllm.fingerprint import FINGERPRINT_BYTES, fingerprint
from tests.unit.vllm_adapter.fakes import make_request


def feature(identifier: str = "hash", offset: int = 2, length: int = 3) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


def variants() -> dict[str, Any]:
    other_tokens = make_request()
    other_tokens.prompt_token_ids[-1] += 1
    return {
        "plain": make_request(),
        "other token": other_tokens,
        "shorter": make_request(tokens=39),
        "salt": make_request(cache_salt="s"),
        "lora": make_request(lora_request=SimpleNamespace(lora_name="s")),
        "image": make_request(mm_features=[feature()]),
        "image elsewhere": make_request(mm_features=[feature(offset=3)]),
        "longer image": make_request(mm_features=[feature(length=4)]),
        "other image": make_request(mm_features=[feature(identifier="other")]),
        "two images": make_request(mm_features=[feature(), feature(offset=9)]),
    }


def test_whatever_changes_kv_changes_the_fingerprint() -> None:
    prints = {name: fingerprint(request) for name, request in variants().items()}
    assert len(set(prints.values())) == len(prints)
    assert {len(value) for value in prints.values()} == {FINGERPRINT_BYTES}


def test_equal_requests_have_equal_fingerprints_on_both_engines() -> None:
    again = {name: fingerprint(request) for name, request in variants().items()}
    for name, request in variants().items():
        request.request_id = "other"
        assert fingerprint(request) == again[name]
