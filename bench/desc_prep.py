"""What it costs to get from block ids to a posted transfer: kvpush beside vLLM's stock connector.

Both do the same work on the same ids: a request's blocks on a prefill engine, its blocks on a
decode engine, for every region. Three stages, each timed alone:

* plan: stock, its own `_compute_desc_ids` for both sides; kvpush, `CopyPlanner.plan_pattern`, which
  is what the engine calls.
* make: stock, `make_prepped_xfer` on lists of all blocks prepared beforehand (the time for that is
  printed apart), one handle for the whole request; kvpush, descriptors of the planned runs and
  `initialize_xfer`, which need nothing beforehand, one handle for every part that the engine posts.
* post: `transfer`, until all handles are done.

Both go through NIXL's Python module between two agents of this process; the engine itself goes
through the C API. After each transfer the bytes are compared. Times are the best of several rounds:
processor time of the calling thread for plan and make, which never wait, and elapsed time for post.

`python -m bench.desc_prep` (needs vLLM and NIXL; about two minutes). `--quick` leaves NIXL out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from bench import record_allocation
from kvpush import _core

Ids = npt.NDArray[np.uint32]

BLOCK_BYTES = 64  # small: what is compared is the work for each descriptor, not the copying
POOL_BLOCKS = record_allocation.POOL_BLOCKS
BLOCK_TOKENS = record_allocation.BLOCK_TOKENS
REGIONS = (64, 128)
SIZES = record_allocation.SIZES
PATTERNS = ("contiguous", "recorded", "random")
PART_RUNS = 1_024  # the engine's max_batch_descriptors
PART_BYTES = 32 << 20  # and its max_batch_bytes
# Transfers of more pieces than this are made but not posted: posting takes some us for each.
MAX_POSTED = 140_000
POST_ROUNDS = 2
TABLE_COLUMNS = 150
DONE_LIMIT_S = 120.0


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
    """The quickest of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best * 1e6


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


class Wire:
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
        # (address, length, device) of either side, reused as the engine reuses its lists.
        self._table = np.zeros((2, PART_RUNS, 3), dtype=np.uint64)
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

    def make_stock(self, local: Any, remote: Any) -> Any:
        assert self.prepared is not None
        return self.producer.make_prepped_xfer(
            "WRITE", self.prepared[0], local, self.prepared[1], remote, b"written"
        )

    def make_ours(self, runs: npt.NDArray[np.uint64]) -> Any:
        """A handle of one part of a plan."""
        table = self._table[:, : len(runs)]
        table[0, :, :2] = runs[:, ::2]
        table[1, :, :2] = runs[:, 1:]
        return self.producer.initialize_xfer(
            "WRITE",
            self.producer.get_xfer_descs(table[0], "DRAM"),
            self.producer.get_xfer_descs(table[1], "DRAM"),
            self.peer,
            b"written",
        )

    def post(self, handles: list[Any]) -> None:
        deadline = time.monotonic() + DONE_LIMIT_S
        states = [self.producer.transfer(handle) for handle in handles]
        for handle, posted in zip(handles, states, strict=True):
            state = posted
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


Maker = Callable[[], Any]


def time_make(wire: Wire, makers: list[Maker], rounds: int) -> float:
    """Makes every handle of a request; released at once and not posted. The quickest of some."""
    best = float("inf")
    for _ in range(rounds):
        spent = 0.0
        for make in makers:
            start = time.thread_time()
            handle = make()
            spent += time.thread_time() - start
            wire.producer.release_xfer_handle(handle)
        best = min(best, spent)
    return best * 1e6


def time_post(wire: Wire, makers: list[Maker], check: Callable[[], None]) -> float:
    """The quickest of some rounds, each compared byte for byte."""
    best = float("inf")
    for _ in range(POST_ROUNDS):
        handles = [make() for make in makers]
        start = time.perf_counter()
        wire.post(handles)
        best = min(best, time.perf_counter() - start)
        for handle in handles:
            wire.producer.release_xfer_handle(handle)
        check()
    return best * 1e6


def measure(row: Row, wire: Wire | None, rounds: int) -> None:
    producer, consumer = block_ids(row.pattern, row.blocks)
    span = (0, row.blocks * BLOCK_TOKENS)
    stock = Stock(row.regions)
    # As they come: the stock connector gets lists of Python integers, ours arrays.
    local_list, remote_list = producer.tolist(), consumer.tolist()
    bases = (1 << 40, 1 << 44)
    if wire is not None:
        bases = (wire.source.ctypes.data, wire.sink.ctypes.data)
    planner = make_planner(row.regions, *bases)
    row.stock["plan"] = best_us(lambda: (stock.plan(local_list), stock.plan(remote_list)), rounds)
    tables = ([(0, producer)], [(0, consumer)])
    row.ours["plan"] = best_us(lambda: planner.plan_pattern(span, *tables), rounds)
    plan = planner.plan_pattern(span, *tables)
    row.runs, row.descriptors = plan.total_runs, plan.descriptors_before
    if wire is None:
        return

    def check() -> None:
        wire.check(row.regions, producer, consumer)

    local, remote = stock.plan(local_list), stock.plan(remote_list)
    parts = [runs for _, runs in plan.parts(PART_RUNS, PART_BYTES)]
    both: list[tuple[dict[str, float], list[Maker]]] = [
        (row.stock, [lambda: wire.make_stock(local, remote)]),
        (row.ours, [partial(wire.make_ours, part) for part in parts]),
    ]
    for side, makers in both:
        side["make"] = time_make(wire, makers, rounds)
        if row.descriptors <= MAX_POSTED:
            side["post"] = time_post(wire, makers, check)


def pair_of(row: Row, stage: str) -> str:
    if stage not in row.ours:
        return ""
    return f"{row.stock[stage]:,.0f} / {row.ours[stage]:,.0f}"


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="From block ids to a posted transfer, microseconds: stock / kvpush")
    for name in ("regions", "blocks", "pattern", "descriptors", "runs"):
        table.add_column(name, justify="left" if name == "pattern" else "right", no_wrap=True)
    for name in ("plan", "ratio", "make", "plan + make", "ratio", "post"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for side in (row.stock, row.ours):
            if "make" in side:
                side["both"] = side["plan"] + side["make"]
        cells = [str(row.regions), f"{row.blocks:,}", row.pattern]
        cells += [f"{row.descriptors:,}", f"{row.runs:,}", pair_of(row, "plan")]
        cells.append(f"{row.stock['plan'] / row.ours['plan']:.1f}x")
        cells += [pair_of(row, "make"), pair_of(row, "both")]
        cells.append(f"{row.stock['both'] / row.ours['both']:.2f}x" if "both" in row.ours else "")
        cells.append(pair_of(row, "post"))
        table.add_row(*cells)
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="planning only, without NIXL")] = False,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON")] = False,
) -> None:
    """Prints the table."""
    console = Console(width=TABLE_COLUMNS)
    wire = None
    if not quick:
        wire = Wire()
        wire.prepare()
    rows = [Row(r, b, p) for r in REGIONS for b in SIZES for p in PATTERNS]
    for row in rows:
        measure(row, wire, rounds)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    if wire is not None:
        pieces = max(REGIONS) * POOL_BLOCKS
        console.print(
            f"Prepared beforehand by the stock connector: 2 lists of {pieces:,} descriptors, "
            f"{wire.prepare_s:.1f} s. By kvpush: none."
        )
    show(rows, console)


if __name__ == "__main__":
    typer.run(main)
