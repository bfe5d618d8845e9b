"""docs/faults.md names tests that exist, and one at least for every situation."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "faults.md"
PYTEST_NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")
GTEST_NAME = re.compile(r"`([A-Z]\w+)\.([A-Z]\w+)`")
GTEST_MACRO = re.compile(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)")


def situations() -> list[list[str]]:
    """The cells of every row that is no heading."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [row for row in rows if row[0].strip() not in ("situation", "---")]


@functools.cache
def gtests() -> set[tuple[str, str]]:
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests" / "cpp").iterdir()
        if path.suffix in (".h", ".cpp")
    ]
    return {name for source in sources for name in GTEST_MACRO.findall(source)}


def test_each_situation_has_a_test() -> None:
    rows = situations()
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 3, row
        assert PYTEST_NAME.search(row[2]) or GTEST_NAME.search(row[2]), row[0]


@pytest.mark.parametrize("name", sorted({*PYTEST_NAME.findall(TABLE.read_text(encoding="utf-8"))}))
def test_pytest_names_exist(name: tuple[str, str]) -> None:
    path, function = name
    source = (ROOT / "tests" / path).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), function


@pytest.mark.parametrize("name", sorted({*GTEST_NAME.findall(TABLE.read_text(encoding="utf-8"))}))
def test_googletest_names_exist(name: tuple[str, str]) -> None:
    assert name in gtests()
