"""The simulator: fixed seeds, the seeds that have failed before, and that a seed is one run."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KNOWN_SEEDS = Path(__file__).with_name("seeds.txt")
SIMULATOR = Path(
    os.environ.get("KVPUSH_SIM", ROOT / "build" / "dev" / "tests" / "cpp" / "kvpush-sim")
)

SEEDS = 20_000
SOAK_SEEDS = 1_000_000
CLOSING_LINE = re.compile(
    r"^(\d+) passed, (\d+) failed "
    r"\((\d+) loads done, (\d+) ended otherwise, (\d+) posts from lists\)$"
)


def simulate(first: int, last: int, *options: str) -> str:
    """Runs seeds first..last and gives the output; a failing seed fails the test by its line."""
    if not SIMULATOR.exists():
        pytest.fail(f"{SIMULATOR} is missing: build the tests with `make cpp-dev`")
    result = subprocess.run(
        [str(SIMULATOR), "--seeds", f"{first}..{last}", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        pytest.fail(
            f"seeds {first}..{last}, exit status {result.returncode}:\n" + "\n".join(lines[-20:])
        )
    return result.stdout


def simulate_all(first: int, count: int) -> tuple[int, int, int]:
    """Runs a range on all cores; gives how many loads were done, and how many ended otherwise.

    And how many posts named prepared lists.
    """
    workers = os.cpu_count() or 1
    edges = [first + count * i // workers for i in range(workers + 1)]
    done = otherwise = listed = passed = 0
    with ThreadPoolExecutor(workers) as pool:
        for output in pool.map(simulate, edges[:-1], [edge - 1 for edge in edges[1:]]):
            match = CLOSING_LINE.match(output.strip().splitlines()[-1])
            assert match is not None, output
            passed += int(match[1])
            done += int(match[3])
            otherwise += int(match[4])
            listed += int(match[5])
    assert passed == count
    return done, otherwise, listed


def known_seeds() -> list[int]:
    """The numbers in seeds.txt."""
    lines = [line.split("#")[0].split() for line in KNOWN_SEEDS.read_text().splitlines()]
    return [int(words[0]) for words in lines if words]


@pytest.mark.timeout(600)
def test_fixed_seeds() -> None:
    done, otherwise, listed = simulate_all(1, SEEDS)
    # A world in which nothing succeeds, or nothing goes wrong, shows nothing.
    assert done > SEEDS
    assert otherwise > SEEDS
    assert listed > SEEDS


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("seed", known_seeds())
def test_seeds_that_have_failed(seed: int, mode: str) -> None:
    simulate(seed, seed, "--mode", mode)


def test_each_mode_can_be_asked_for() -> None:
    loads = {simulate(1, 60, *mode) for mode in (("--mode", "push"), ("--mode", "pull"), ())}
    assert len(loads) == 3, "by itself, a seed is one or the other"


def test_a_seed_is_one_run() -> None:
    runs = {simulate(1, 50, "--verbose") for _ in range(3)}
    assert len(runs) == 1
    hashes = re.findall(r"^seed \d+ hash ([0-9a-f]{16})$", runs.pop(), re.MULTILINE)
    assert len(set(hashes)) == len(hashes) == 50


def test_usage_errors_have_their_own_status() -> None:
    wrong_mode = ["--seeds", "1", "--mode", "x"]
    for arguments in ([], ["--seeds", "x"], ["--seeds", "5..1"], ["--what"], wrong_mode):
        result = subprocess.run([str(SIMULATOR), *arguments], capture_output=True, check=False)
        assert result.returncode == 2
        assert b"usage" in result.stderr


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_million_seeds() -> None:
    simulate_all(1, SOAK_SEEDS)
