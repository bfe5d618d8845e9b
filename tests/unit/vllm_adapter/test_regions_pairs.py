"""Tensors as vLLM's own layout code makes them -> regions -> planner -> bytes compared.

Each side is laid out by vLLM for its block size, its heads per rank and a layout of its back ends.
The producer's cache holds a known value for each (layer, token, head, element). The runs that the
planner gives are copied with memmove; then each token is looked up in the consumer's tensors.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout")

from kvpush._core import CopyPlanner, Region, assign_writers  # noqa: E402
from kvpush.vllm.regions import describe_caches  # noqa: E402

LAYERS = 2
HEAD_SIZE = 8
WINDOW = 96
SPAN = (40, 300)
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC")
"""What FlashAttention, FlashInfer and the packed cross-layer caches have."""

Table = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Model:
    """One group of layers of each kind; `heads` are those of the whole model."""

    heads: int = 4
    kinds: Sequence[str] = ("full",)

    def spec(self, kind: str, block_size: int, tp: int) -> Any:
        common = {"block_size": block_size, "head_size": HEAD_SIZE, "dtype": torch.float32}
        if kind == "latent":
            return interface.MLAAttentionSpec(num_kv_heads=1, **common)
        common["num_kv_heads"] = max(1, self.heads // tp)
        if kind == "window":
            return interface.SlidingWindowSpec(sliding_window=WINDOW, **common)
        return interface.FullAttentionSpec(**common)

    def truth(self, kind: str, layer: int) -> Any:
        """[token, head, element]: no value occurs twice in the model."""
        heads, content = (1, HEAD_SIZE) if kind == "latent" else (self.heads, 2 * HEAD_SIZE)
        count = SPAN[1] * heads * content
        first = 1 + (self.kinds.index(kind) * LAYERS + layer) * count
        return torch.arange(first, first + count, dtype=torch.float32).view(-1, heads, content)


@dataclass(frozen=True)
class Shape:
    """How one engine lays out and splits its cache."""

    layout: str = "LBHNC"
    block_size: int = 32
    tp: int = 1
    pp: int = 1
    descending: bool = False


@dataclass
class Engine:
    """Its ranks' tensors by layer name, their regions, and one block list for each group."""

    model: Model
    shape: Shape
    blocks: list[list[int]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    regions: list[list[Region]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = -(-SPAN[1] // self.shape.block_size)
        for group in range(len(self.model.kinds)):
            ids = range(1 + group * size, 1 + (group + 1) * size)
            self.blocks.append(list(reversed(ids)) if self.shape.descending else list(ids))
        for stage, tp_rank in itertools.product(range(self.shape.pp), range(self.shape.tp)):
            self._make_rank(stage, tp_rank, 1 + size * len(self.model.kinds))

    def _make_rank(self, stage: int, tp_rank: int, num_blocks: int) -> None:
        held = range(stage * LAYERS // self.shape.pp, (stage + 1) * LAYERS // self.shape.pp)
        groups: list[Any] = []
        tensors: dict[str, Any] = {}
        raw: Any = None
        for kind in self.model.kinds:
            spec = self.model.spec(kind, self.shape.block_size, self.shape.tp)
            names = [f"{kind}.{layer}" for layer in held]
            page, outer = spec.page_size_bytes, self.shape.layout.startswith("B")
            if raw is None:
                raw = torch.zeros(num_blocks * len(names) * page, dtype=torch.int8)
            place = interface.KVCacheTensor(
                size=raw.numel(),
                layers=names,
                layer_stride=page if outer else page * num_blocks,
                block_stride=page * len(names) if outer else page,
            )
            if self.shape.layout == "LHBNC":
                place.block_stride = page // spec.num_heads
            layout = layouts.KVCacheLayout[self.shape.layout]
            # The groups overlay each other, as in vLLM: a block id belongs to one at a time.
            views = interface.create_kv_cache_views(raw, spec, num_blocks, layout, place, None)
            tensors.update(zip(names, views, strict=True))
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        made = describe_caches(
            tensors,
            SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups),
            total_heads=self.model.heads,
            tp_rank=tp_rank,
            tp_size=self.shape.tp,
        )
        self.tensors.append(tensors)
        self.regions.append(list(made.regions))

    def layers(self) -> Iterator[tuple[str, Any, tuple[Any, Any, Any], Any]]:
        """Of every rank's layers: name, tensor, index of its live tokens, and what belongs there.

        `tensor[index]` is [token, head, element].
        """
        positions = torch.arange(SPAN[1])
        for rank, tensors in enumerate(self.tensors):
            tp_rank = rank % self.shape.tp
            for name, tensor in tensors.items():
                kind, layer = name.split(".")
                truth = self.model.truth(kind, int(layer))
                held, total = tensor.shape[1], truth.shape[1]
                first = tp_rank * total // self.shape.tp if total > 1 else 0
                ids = torch.tensor(self.blocks[self.model.kinds.index(kind)])
                blocks = ids[positions // self.shape.block_size]
                offsets = positions % self.shape.block_size
                live = blocks >= 0
                index = (blocks[live], slice(None), offsets[live])
                yield name, tensor, index, truth[live, first : first + held]

    def fill(self) -> None:
        for _, tensor, index, truth in self.layers():
            tensor[index] = truth

    def check(self) -> int:
        """Every token of the span has come, and nothing else. Returns the bytes."""
        live = 0
        for name, tensor, index, truth in self.layers():
            content = tensor[index]
            wanted = truth.clone()
            outside = wanted.shape[0] - (SPAN[1] - SPAN[0])
            wanted[: max(0, outside)] = 0
            assert torch.equal(content, wanted), name
            live += int(wanted.count_nonzero()) * 4
        return live

    def table(self) -> Table:
        first, end = SPAN[0] // self.shape.block_size, -(-SPAN[1] // self.shape.block_size)
        return [(first, ids[first:end]) for ids in self.blocks]


def copy(producer: Engine, consumer: Engine) -> int:
    """Copy the span as the native engine would; returns the bytes written."""
    written = 0
    writers = assign_writers(producer.regions, consumer.regions)
    for source, targets in zip(producer.regions, writers, strict=True):
        for target, pairs in zip(consumer.regions, targets, strict=True):
            if not pairs:
                continue
            plan = CopyPlanner(source, target, pairs, True).plan(
                SPAN, producer.table(), consumer.table()
            )
            for local, remote, length in plan.runs.tolist():
                ctypes.memmove(remote, local, length)
            written += plan.bytes
    return written


def check(model: Model, source: Shape, sink: Shape) -> None:
    producer, consumer = Engine(model, source), Engine(model, sink)
    producer.fill()
    written = copy(producer, consumer)
    assert written == consumer.check()  # nothing twice, nothing beside


@pytest.mark.parametrize(("source", "sink"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_to_any_layout(source: str, sink: str) -> None:
    check(Model(), Shape(source), Shape(sink, descending=True))


@pytest.mark.parametrize(
    ("source", "sink"), [(32, 64), (64, 32), (32, 96), (96, 32), (64, 96), (96, 64)]
)
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_block_sizes(source: int, sink: int, layout: str) -> None:
    check(Model(), Shape(layout, source), Shape("LBNHC", sink))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("source", "sink"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 4), (4, 1)])
def test_ranks_and_replicated_heads(source: int, sink: int, heads: int) -> None:
    check(Model(heads=heads), Shape("LBNHC", tp=source), Shape("LBHNC", 64, tp=sink))


@pytest.mark.parametrize(("source", "sink"), [(2, 1), (1, 2), (2, 2)])
def test_pipeline_stages(source: int, sink: int) -> None:
    check(Model(), Shape(pp=source, tp=2), Shape("BLHNC", pp=sink))


@pytest.mark.parametrize(("source", "sink"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_latent_caches(source: int, sink: int) -> None:
    check(
        Model(heads=16, kinds=("latent",)),
        Shape("LBHNC", 64, tp=source),
        Shape("BLHNC", 32, tp=sink),
    )


@pytest.mark.parametrize(("source", "sink"), list(itertools.product(("LBNHC", "BLHNC"), repeat=2)))
def test_groups_that_overlay_each_other(source: str, sink: str) -> None:
    check(Model(kinds=("full", "window")), Shape(source, tp=2), Shape(sink, 64, descending=True))


def test_layers_of_different_groups_at_the_same_address_are_all_described() -> None:
    engine = Engine(Model(kinds=("full", "window")), Shape())
    layers = [(region.layer, region.group) for region in engine.regions[0]]
    assert layers == [("full.0", 0), ("full.1", 0), ("window.0", 1), ("window.1", 1)]
    assert engine.regions[0][0].base == engine.regions[0][2].base


def test_only_the_live_window_moves() -> None:
    model = Model(kinds=("full", "window"))
    producer, consumer = Engine(model, Shape()), Engine(model, Shape("LBNHC"))
    producer.fill()
    # The window of token 300 begins at 205, in block 6; the producer holds one block more.
    producer.blocks[1][:5] = [-1] * 5
    consumer.blocks[1][:6] = [-1] * 6
    assert copy(producer, consumer) == consumer.check()


def test_a_window_that_the_producer_has_left_is_refused() -> None:
    model = Model(kinds=("full", "window"))
    producer, consumer = Engine(model, Shape()), Engine(model, Shape())
    producer.blocks[1][:7] = [-1] * 7
    consumer.blocks[1][:6] = [-1] * 6
    with pytest.raises(ValueError, match="group 1: the producer has no block 6"):
        copy(producer, consumer)
