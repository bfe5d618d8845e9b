from __future__ import annotations

from typing import Any

import pytest

from kvpush.config import Config, load_config
from kvpush.errors import ConfigError


def test_defaults_hold_together() -> None:
    assert load_config({}) == Config()


def test_values_are_taken() -> None:
    config = load_config({"receive_deadline_s": 5, "backends": ["LIBFABRIC"], "spin_us": 0})
    assert config.receive_deadline_s == 5.0
    assert config.backend == "LIBFABRIC"


def test_an_unknown_key_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"recieve_deadline_s.*'receive_deadline_s'"):
        load_config({"recieve_deadline_s": 5})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("receive_deadline_s", "5", "float > 0, <= 86400"),
        ("receive_deadline_s", -1, "float > 0"),
        ("receive_deadline_s", True, "float > 0"),
        ("receive_deadline_s", None, "float > 0"),
        ("max_batch_descriptors", 0, "int >= 1"),
        ("max_batch_descriptors", 1.5, "int >= 1"),
        ("backends", [], "of 1 to 1 entries"),
        ("backends", "UCX", "list"),
        ("backend_params", {"a": 1}, "dict"),
        ("model_id", 3, "str"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({key: value})
    assert repr(key) in str(raised.value)
    assert repr(value) in str(raised.value)
    assert allowed in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [{"keepalive_s": 5, "peer_timeout_s": 10}, {"receive_deadline_s": 300}],
)
def test_values_that_contradict_each_other(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        load_config(values)
