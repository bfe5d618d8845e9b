"""`kvpush selftest`: right when all is right, and red when one byte is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvpush.selftest.cases import POISON, Case, Geometry, cases, expected_memory, source_bytes
from kvpush.selftest.run import FAULT_VARIABLE

GEOMETRY = Geometry(layers=2, pool_blocks=64)


def selftest(*options: str, fault: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpush", "selftest", "--quick", *options],
        env=os.environ | {FAULT_VARIABLE: fault} | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def report_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.stdout.count("\n") == 1, result.stdout
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def children_of_the_selftest() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    lines = listed.stdout.splitlines()
    return [line for line in lines if line.split()[0] == "1" and "spawn_main" in line]


def test_json_says_that_every_byte_is_right() -> None:
    result = selftest("--json")
    assert result.returncode == 0, result.stderr
    report = report_of(result)
    assert report["ok"] is True
    assert (report["mismatches"], report["error"], report["backend"]) == (0, "", "UCX")
    assert report["nixl_library"].endswith("libnixl_capi.so")
    assert report["nixl_versions"]
    for row in report["rows"]:
        assert row["bytes_wrong"] == 0
        assert row["bytes"] > 0
        assert 0 < row["descriptors"] <= row["descriptors_before"]
        for name in ("plan_us", "post_us", "transfer_us", "grant_to_received_us"):
            assert row[name] > 0
    contiguous = next(row for row in report["rows"] if row["request"] == "256 blocks")
    assert contiguous["descriptors"] == contiguous["layers"]


def test_the_table_shows_a_wrong_byte() -> None:
    result = selftest(fault="byte")
    assert result.returncode == 1, result.stderr
    assert "256 blocks, scattered" in result.stdout
    assert "libnixl_capi.so" in result.stdout
    assert "44 bytes are wrong" in result.stdout
    assert "(granted)" in result.stdout


def test_a_byte_that_should_have_been_left_alone_is_found() -> None:
    result = selftest("--json", fault="untouched-byte")
    assert result.returncode == 1, result.stderr
    report = report_of(result)
    assert report["ok"] is False
    assert report["error"] == ""
    # One byte of each transfer was spoiled: three measured ones and one to warm up.
    assert {row["bytes_wrong"] for row in report["rows"]} == {4}
    assert report["mismatches"] == 4 * len(report["rows"])
    assert "(not granted)" in report["first_mismatch"]


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ("exit", (), "the producer process ended during 'offer' with exit status 3"),
        ("hang", ("--limit-s", "8"), "--limit-s"),
        ("nonsense", (), FAULT_VARIABLE),
        ("", ("--backend", "NOSUCH"), "NOSUCH"),
        ("", ("--limit-s", "0.01"), "--limit-s"),
    ],
)
def test_a_run_that_fails_says_why(fault: str, options: tuple[str, ...], says: str) -> None:
    before = children_of_the_selftest()
    result = selftest("--json", *options, fault=fault)
    assert result.returncode == 2
    report = report_of(result)
    assert report["ok"] is False
    assert says in report["error"]
    assert says in result.stderr
    assert children_of_the_selftest() == before, "a process was left behind"


def test_without_nixl_it_says_what_to_install() -> None:
    result = selftest("--json", KVPUSH_NIXL_LIBRARY="/nowhere/libnixl_capi.so")
    assert result.returncode == 2
    assert "/nowhere/libnixl_capi.so" in report_of(result)["error"]


def test_the_expected_memory_is_right_token_by_token() -> None:
    source = source_bytes(GEOMETRY, 5)
    case = Case(
        name="odd",
        tokens=100,
        first_token=19,
        producer_order="random",
        consumer_order="descending",
    )
    expected = expected_memory(GEOMETRY, case, source)
    row = GEOMETRY.tokens_per_block * GEOMETRY.element_bytes
    written: set[int] = set()
    for layer in range(GEOMETRY.layers):
        for component in range(GEOMETRY.components):
            for token in range(19, 100):
                block, place = divmod(token, GEOMETRY.tokens_per_block)
                inside = component * row + place * GEOMETRY.element_bytes
                starts = [
                    layer * GEOMETRY.layer_bytes + ids[block] * GEOMETRY.block_bytes + inside
                    for ids in (case.producer_ids(GEOMETRY), case.consumer_ids(GEOMETRY))
                ]
                here, there = (range(s, s + GEOMETRY.element_bytes) for s in starts)
                assert bytes(expected[i] for i in there) == bytes(source[i] for i in here)
                written.update(there)
    assert len(written) == case.payload_bytes(GEOMETRY)
    assert all(expected[i] == POISON for i in range(len(expected)) if i not in written)


def test_each_case_fits_its_memory() -> None:
    geometry = Geometry(layers=1, pool_blocks=1280)
    for case in cases(geometry, 1024):
        for ids in (case.producer_ids(geometry), case.consumer_ids(geometry)):
            assert len(set(ids)) == case.blocks(geometry)
            assert set(ids) <= set(range(geometry.pool_blocks))
