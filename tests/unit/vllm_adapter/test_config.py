from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpush import config as config_module
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


def _room_for(name: str, other: str) -> dict[str, float]:
    """Keys with which no other relation is broken first."""
    if other == "resend_s" and name != "peer_timeout_s":
        return {"peer_timeout_s": 100.0}
    return {}


@pytest.mark.parametrize("relation", config_module._AT_LEAST, ids=lambda r: f"{r[0]} {r[2]}")
def test_each_relation_between_keys_holds_by_default_and_is_checked(
    relation: tuple[str, float, str, str],
) -> None:
    name, times, other, why = relation
    config = load_config({})
    assert getattr(config, name) >= times * getattr(config, other)
    with pytest.raises(ConfigError) as raised:
        load_config({other: getattr(config, name) / times * 1.01, **_room_for(name, other)})
    assert str(raised.value).endswith(f"{why}.")
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("typo", ["recieve_deadline_s", "peer_timeout", "auth_key", "keep_alive_s"])
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(typo: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as raised:
        load_config({typo: "secret value"})
    nearest = str(raised.value).split("did you mean ")[1].split("?")[0].strip("'")
    assert nearest in Config.__struct_fields__
    assert "secret value" not in str(raised.value)


DOCS = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_docs_list_every_key_with_its_default() -> None:
    rows = {
        cells[1].strip().strip("`"): cells[2].strip().strip("`")
        for line in DOCS.read_text().splitlines()
        if len(cells := line.split("|")) >= 4 and cells[1].strip().startswith("`")
    }
    for field in msgspec.structs.fields(Config):
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        shown = f"{default:g}" if isinstance(default, float) else msgspec.json.encode(default)
        text = shown if isinstance(shown, str) else shown.decode()
        assert rows.get(field.name) == text, f"{field.name}: {DOCS.name} must say {text}"


def test_the_docs_name_every_reason_for_a_failure() -> None:
    source = DOCS.parents[1].joinpath("csrc", "status.cpp").read_text()
    names = set(re.findall(r'"([a-z_]+)"', source.split("kNames = {")[1].split("}")[0]))
    names.discard("none")
    assert len(names) > 10
    text = DOCS.read_text()
    assert not {name for name in names if f"| `{name}` |" not in text}
