"""What it costs to get from block ids to a posted transfer: kvpush beside vLLM's stock connector.

Both do the same work on the same ids: a request's blocks on a prefill engine, its blocks on a
decode engine, for every region. Three stages, each timed alone:

* plan: stock, its own `_compute_desc_ids` for both sides; kvpush, `CopyPlanner.plan_pattern` called
  from Python. The engine calls it from its native thread ("core"), which takes less.
* make: stock, `make_prepped_xfer` on lists of all blocks prepared beforehand, one handle for the
  whole request; kvpush, from a plan to a handle for every part, from such lists where the planner
  wants them and from runs elsewhere. What preparing takes is printed apart.
* post: `transfer`, until all handles are done.

Stock goes through NIXL's Python module, as it does in vLLM. kvpush's make and post are those of the
engine: Poster and NixlTransport over NIXL's C API, in a C++ program (bench/core/transfers.cpp) that
is built first and answers this one. It also says what the same handles would take from runs, step
by step. Either side has two agents in one process. After each transfer the bytes are compared.
Times are the best of several rounds, which take turns: processor time of the calling thread for
plan and make, which never wait, and elapsed time for post.

`python -m bench.desc_prep` (needs vLLM and NIXL; about three minutes). `--quick` leaves NIXL out.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from bench import record_allocation
from bench.core.native import build
from kvpush import _core
from kvpush._nixl import find_library, prepare_environment

Ids = npt.NDArray[np.uint32]

BLOCK_BYTES = 64  # small: what is compared is the work for each descriptor, not the copying
POOL_BLOCKS = record_allocation.POOL_BLOCKS
BLOCK_TOKENS = record_allocation.BLOCK_TOKENS
REGIONS = (64, 128)
SIZES = record_allocation.SIZES
PATTERNS = ("contiguous", "recorded", "random")
PART_RUNS = 1_024  # the engine's max_batch_descriptors
# Transfers of more pieces than this are made but not posted: posting takes some us for each.
MAX_POSTED = 140_000
POST_ROUNDS = 2
TURNS = 2  # in which either side has half of the rounds
QUICKEST_TIMED_US = 200.0  # calls are timed together until they take this long
TABLE_COLUMNS = 150
DONE_LIMIT_S = 120.0


COSTS = ("spell out", "list", "create", "make from runs", "make", "post")


def costs_ns(row: dict[str, Any]) -> dict[str, float | None]:
    """Of a row of the results, by the names in COSTS: nanoseconds for each descriptor.

    `make from runs` is the sum of the three before it: runs to addresses, addresses to NIXL's lists
    one call each, lists to a handle. `make` is what the engine does.
    """
    ours, runs = row["ours"], row["runs"]
    steps = (
        ours["spell_out"],
        ours["fill_lists"] - ours["spell_out"],
        ours["make_runs"] - ours["fill_lists"],
        ours["make_runs"],
        ours["make"],
    )
    values: list[float | None] = [1e3 * us / runs for us in steps]
    values.append(1e3 * ours["post"] / runs if "post" in ours else None)
    return dict(zip(COSTS, values, strict=True))


@dataclass
class Row:
    """One pattern, in microseconds."""

    regions: int
    blocks: int
    pattern: str
    descriptors: int = 0
    runs: int = 0
    stock: dict[str, float] = field(default_factory=dict)
    ours: dict[str, float] = field(default_factory=dict)


def block_ids(pattern: str, blocks: int) -> tuple[Ids, Ids]:
    """Ids on the producer's and on the consumer's side."""
    if pattern == "contiguous":
        ids = np.arange(blocks, dtype=np.uint32)
        return ids + 100, ids + 300
    if pattern == "recorded":
        producer, consumer = record_allocation.load()[blocks]
        return np.array(producer, dtype=np.uint32), np.array(consumer, dtype=np.uint32)
    rng = np.random.default_rng(blocks)
    return (
        rng.permutation(POOL_BLOCKS)[:blocks].astype(np.uint32),
        rng.permutation(POOL_BLOCKS)[:blocks].astype(np.uint32),
    )


def best_us(work: Callable[[], object], rounds: int) -> float:
    """The quickest of some rounds. Reading the clock takes as long as the quickest calls."""
    start = time.thread_time()
    work()
    once_us = (time.thread_time() - start) * 1e6
    calls = max(1, int(QUICKEST_TIMED_US / max(once_us, 1.0)))
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            work()
        best = min(best, time.thread_time() - start)
    return best * 1e6 / calls


class Stock:
    """The stock worker's index computation, called on the few fields that it reads."""

    def __init__(self, regions: int) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
            NixlBaseConnectorWorker,
        )

        self._compute = NixlBaseConnectorWorker._compute_desc_ids
        self._regions = regions
        self._worker: Any = SimpleNamespace(
            _has_mamba=False,
            _transfer_layer_group_ids=[],
            num_regions=regions,
            block_len_per_layer=[BLOCK_BYTES] * regions,
            region_group_ids=[0] * regions,
            _uses_region_group_mapping=False,
        )

    def plan(self, ids: list[int]) -> npt.NDArray[np.int64]:
        indices: npt.NDArray[np.int64] = self._compute(
            self._worker,
            block_ids=[ids],
            dst_num_blocks=POOL_BLOCKS,
            block_size_ratio=None,
            physical_blocks_per_logical=1,
            region_num_blocks=[POOL_BLOCKS] * self._regions,
            region_group_ids=[0] * self._regions,
            uses_region_group_mapping=False,
        )
        return indices


def make_planner(regions: int, producer: int, consumer: int) -> Any:
    """One rank to one rank, equal layouts; the two base addresses."""

    def side(base: int) -> list[Any]:
        return [
            _core.Region(
                layer=f"layer.{i}",
                dtype="bfloat16",
                base=base + i * POOL_BLOCKS * BLOCK_BYTES,
                block_stride=BLOCK_BYTES,
                num_blocks=POOL_BLOCKS,
                tokens_per_block=BLOCK_TOKENS,
                tokens_per_page=BLOCK_TOKENS,
                token_stride=BLOCK_BYTES // BLOCK_TOKENS,
                heads=1,
                total_heads=1,
                element_bytes=BLOCK_BYTES // BLOCK_TOKENS,
            )
            for i in range(regions)
        ]

    local, remote = side(producer), side(consumer)
    pairs = _core.assign_writers([local], [remote])[0][0]
    return _core.CopyPlanner(local, remote, pairs, local_is_producer=True)


class StockWire:
    """Two NIXL agents of this process with a KV cache each."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(backends=["UCX"])
        self.producer = nixl_agent("bench-producer", config)
        self.consumer = nixl_agent("bench-consumer", config)
        size = max(REGIONS) * POOL_BLOCKS * BLOCK_BYTES
        rng = np.random.default_rng(0)
        self.source = rng.integers(0, 256, size, dtype=np.uint8)
        self.sink = np.zeros(size, dtype=np.uint8)
        for agent, memory in ((self.producer, self.source), (self.consumer, self.sink)):
            agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
        self.peer = self.producer.add_remote_agent(self.consumer.get_agent_metadata())
        self.prepared: tuple[Any, Any] | None = None
        self.prepare_s = 0.0

    def prepare(self) -> None:
        """What the stock connector makes when two engines meet: lists of every block."""
        offsets = np.arange(max(REGIONS) * POOL_BLOCKS, dtype=np.uint64) * BLOCK_BYTES
        start = time.perf_counter()
        lists = []
        for name, memory in (("NIXL_INIT_AGENT", self.source), (self.peer, self.sink)):
            table = np.zeros((offsets.size, 3), dtype=np.uint64)
            table[:, 0] = offsets + memory.ctypes.data
            table[:, 1] = BLOCK_BYTES
            descs = self.producer.get_xfer_descs(table, "DRAM")
            lists.append(self.producer.prep_xfer_dlist(name, descs))
        self.prepare_s = time.perf_counter() - start
        self.prepared = (lists[0], lists[1])

    def make(self, local: Any, remote: Any) -> Any:
        assert self.prepared is not None
        return self.producer.make_prepped_xfer(
            "WRITE", self.prepared[0], local, self.prepared[1], remote, b"written"
        )

    def time_make(self, local: Any, remote: Any, rounds: int) -> float:
        """The handle of a request; released at once and not posted. The quickest of some."""
        best = float("inf")
        for _ in range(rounds):
            start = time.thread_time()
            handle = self.make(local, remote)
            best = min(best, time.thread_time() - start)
            self.producer.release_xfer_handle(handle)
        return best * 1e6

    def time_post(self, local: Any, remote: Any, check: Callable[[], None]) -> float:
        """The quickest of some rounds, each compared byte for byte."""
        best = float("inf")
        for _ in range(POST_ROUNDS):
            handle = self.make(local, remote)
            start = time.perf_counter()
            self._post(handle)
            best = min(best, time.perf_counter() - start)
            self.producer.release_xfer_handle(handle)
            check()
        return best * 1e6

    def _post(self, handle: Any) -> None:
        deadline = time.monotonic() + DONE_LIMIT_S
        state = self.producer.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            state = self.producer.check_xfer_state(handle)
        if state != "DONE":
            msg = f"a transfer ended as {state}"
            raise RuntimeError(msg)
        self.consumer.get_new_notifs()

    def check(self, regions: int, producer: Ids, consumer: Ids) -> None:
        """Compares what has arrived, and clears it."""
        shape = (max(REGIONS), POOL_BLOCKS, BLOCK_BYTES)
        sent = self.source.reshape(shape)[:regions, producer]
        got = self.sink.reshape(shape)[:regions, consumer]
        if not np.array_equal(sent, got):
            msg = "bytes differ"
            raise RuntimeError(msg)
        self.sink[:] = 0


class OurWire:
    """The C++ program: the engine's own way from a plan to a transfer."""

    def __init__(self, part: int) -> None:
        prepare_environment()
        self._part = part
        self._process = subprocess.Popen(
            [build("kvpush_bench_transfers"), str(find_library())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # What lists of all blocks take, where ids are scattered.
        self.prepared: dict[str, float] = self._ask("prepare")

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            msg = f"the C++ benchmark ended with {self._process.wait()}; it says why above"
            raise RuntimeError(msg)
        return json.loads(answer)

    def measure(self, row: Row, producer: Ids, consumer: Ids, rounds: int) -> dict[str, float]:
        """Microseconds by stage."""
        post_rounds = POST_ROUNDS if row.descriptors <= MAX_POSTED else 0
        words = [row.regions, rounds, post_rounds, self._part, row.blocks]
        words += [*producer.tolist(), *consumer.tolist()]
        answer: dict[str, float] = self._ask(" ".join(map(str, words)))
        return answer

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Wires:
    stock: StockWire
    ours: OurWire


def keep_best(best: dict[str, float], more: dict[str, float]) -> None:
    for stage, us in more.items():
        best[stage] = min(us, best.get(stage, us))


def measure(row: Row, wires: Wires | None, rounds: int) -> None:
    producer, consumer = block_ids(row.pattern, row.blocks)
    span = (0, row.blocks * BLOCK_TOKENS)
    stock = Stock(row.regions)
    # As they come: the stock connector gets lists of Python integers, ours arrays.
    local_list, remote_list = producer.tolist(), consumer.tolist()
    planner = make_planner(row.regions, 1 << 40, 1 << 44)
    tables = ([(0, producer)], [(0, consumer)])
    plan = planner.plan_pattern(span, *tables)
    row.runs, row.descriptors = plan.total_runs, plan.descriptors_before
    local, remote = stock.plan(local_list), stock.plan(remote_list)
    rounds = max(1, rounds // TURNS)

    def check() -> None:
        assert wires is not None
        wires.stock.check(row.regions, producer, consumer)

    for _ in range(TURNS):
        theirs = {
            "plan": best_us(lambda: (stock.plan(local_list), stock.plan(remote_list)), rounds)
        }
        ours = {"plan": best_us(lambda: planner.plan_pattern(span, *tables), rounds)}
        if wires is not None:
            theirs["make"] = wires.stock.time_make(local, remote, rounds)
            if row.descriptors <= MAX_POSTED:
                theirs["post"] = wires.stock.time_post(local, remote, check)
            more = wires.ours.measure(row, producer, consumer, rounds)
            ours |= {"core": more.pop("plan")} | more
        keep_best(row.stock, theirs)
        keep_best(row.ours, ours)


def pair_of(row: Row, stage: str) -> str:
    if stage not in row.ours:
        return ""
    return f"{row.stock[stage]:,.0f} / {row.ours[stage]:,.0f}"


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="From block ids to a posted transfer, microseconds: stock / kvpush")
    for name in ("regions", "blocks", "pattern", "descriptors", "runs"):
        table.add_column(name, justify="left" if name == "pattern" else "right", no_wrap=True)
    for name in ("plan", "ratio", "make", "plan + make", "post"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        both = [side["plan"] + side["make"] for side in (row.stock, row.ours) if "make" in side]
        cells = [str(row.regions), f"{row.blocks:,}", row.pattern]
        cells += [f"{row.descriptors:,}", f"{row.runs:,}", pair_of(row, "plan")]
        cells.append(f"{row.stock['plan'] / row.ours['plan']:.1f}x")
        cells += [pair_of(row, "make"), f"{both[0] / both[1]:.2f}x" if both else ""]
        cells.append(pair_of(row, "post"))
        table.add_row(*cells)
    console.print(table)


def show_parts(rows: list[Row], console: Console) -> None:
    """What a descriptor of kvpush's costs, from runs step by step and as the engine makes it."""
    table = Table(title="kvpush, nanoseconds for each descriptor of a plan")
    for name in ("regions", "blocks", "pattern", *COSTS):
        table.add_column(name, justify="left" if name == "pattern" else "right", no_wrap=True)
    for row in rows:
        if "make" in row.ours:
            cells = [f"{ns:.1f}" if ns is not None else "" for ns in costs_ns(asdict(row)).values()]
            table.add_row(str(row.regions), f"{row.blocks:,}", row.pattern, *cells)
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="planning only, without NIXL")] = False,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 20,
    part: Annotated[int, typer.Option(help="descriptors in one handle of kvpush")] = PART_RUNS,
    save: Annotated[
        Path | None, typer.Option(help="a file for the rows, e.g. bench/results/desc_prep.json")
    ] = None,
) -> None:
    """Prints the tables."""
    console = Console(width=TABLE_COLUMNS)
    wires = None
    if not quick:
        wires = Wires(StockWire(), OurWire(part))
        wires.stock.prepare()
    rows = [Row(r, b, p) for r in REGIONS for b in SIZES for p in PATTERNS]
    for row in rows:
        measure(row, wires, rounds)
    result: dict[str, Any] = {"rows": [asdict(row) for row in rows]}
    if wires is not None:
        wires.ours.close()
        pieces = max(REGIONS) * POOL_BLOCKS
        result["prepared"] = {
            "descriptors": 2 * pieces,
            "stock_s": wires.stock.prepare_s,
            **wires.ours.prepared,
        }
        lists = wires.ours.prepared
        console.print(
            f"Prepared beforehand: 2 lists of {pieces:,} descriptors, by the stock connector in "
            f"{wires.stock.prepare_s:.2f} s. By kvpush, where blocks are scattered: in "
            f"{lists['seconds']:.2f} s, {lists['longest'] * 1e3:.1f} ms at a time, and "
            f"{lists['mb']:.0f} MB."
        )
    show(rows, console)
    if wires is not None:
        show_parts(rows, console)
    if save is not None:
        save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
