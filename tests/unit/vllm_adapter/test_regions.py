"""Regions from tensors that vLLM's own code lays out, compared with what is really in memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")

from kvpush._core import Region, validate_region  # noqa: E402
from kvpush.errors import UnsupportedError  # noqa: E402
from kvpush.vllm.regions import HeadPlan, describe_caches, merge_ranges, plan_heads  # noqa: E402

BLOCKS, TOKENS, HEADS, HEAD_SIZE = 5, 32, 3, 64
LAYERS = ("layers.0", "layers.1")


def spec_of(**more: Any) -> Any:
    values = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    return interface.FullAttentionSpec(**{**values, **more})


def config_of(spec: Any, layers: Iterable[str] = LAYERS) -> Any:
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec)
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])


def describe(tensors: dict[str, Any], spec: Any, **more: Any) -> Any:
    options: dict[str, Any] = {"total_heads": HEADS, "tp_rank": 0, "tp_size": 1, **more}
    return describe_caches(tensors, config_of(spec, tensors), **options)


def address(region: Region, block: int, token: int, component: int, head: int) -> int:
    """The formula of csrc/region.h."""
    return (
        region.base
        + block * region.block_stride
        + (token // region.tokens_per_page) * region.page_stride
        + (token % region.tokens_per_page) * region.token_stride
        + component * region.component_stride
        + (head - region.first_head) * region.head_stride
    )


def read(region: Region, block: int, token: int, component: int, head: int) -> bytes:
    return ctypes.string_at(address(region, block, token, component, head), region.element_bytes)


def numbered(shape: tuple[int, ...]) -> Any:
    """A tensor in which every element is another number."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize(
    ("name", "kernel_tokens"),
    [
        ("LBHNC", TOKENS),
        ("LBNHC", TOKENS),
        ("LHBNC", TOKENS),
        ("BLHNC", TOKENS),
        ("BLNHC", TOKENS),
        # vLLM splits blocks into the kernel's only where a block of one layer is dense.
        ("LBHNC", TOKENS // 2),
        ("LBNHC", TOKENS // 2),
    ],
)
def test_every_layout_of_vllm(name: str, kernel_tokens: int) -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout")
    layout = getattr(layouts.KVCacheLayout, name, None)
    if layout is None:
        pytest.skip(f"this vLLM has no layout {name}")
    spec = spec_of()
    page = spec.page_size_bytes
    raw = torch.arange(BLOCKS * len(LAYERS) * page // 4, dtype=torch.float32).view(torch.int8)
    outer = name.startswith("B")
    place = interface.KVCacheTensor(
        size=raw.numel(),
        layers=list(LAYERS),
        layer_stride=page if outer else page * BLOCKS,
        block_stride=page * len(LAYERS) if outer else page,
    )
    if name == "LHBNC":
        place.block_stride = page // HEADS
    views = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, place, kernel_tokens)
    tensors = dict(zip(LAYERS, views, strict=True))
    made = describe(tensors, spec)
    assert made.memory == [(raw.data_ptr(), raw.numel(), "host", 0)]
    assert not made.whole_blocks
    for region, tensor in zip(made.regions, views, strict=True):
        validate_region(region)
        pages = TOKENS // kernel_tokens
        for block, token, head in itertools.product(range(BLOCKS), range(TOKENS), range(HEADS)):
            kernel_block = block * pages + token // kernel_tokens
            expected = tensor[kernel_block, head, token % kernel_tokens].contiguous().numpy()
            assert read(region, block, token, 0, head) == expected.tobytes()


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, BLOCKS, HEADS, TOKENS, HEAD_SIZE), "KBHNC"),
        ((2, BLOCKS, TOKENS, HEADS, HEAD_SIZE), "KBNHC"),
        ((BLOCKS, 2, TOKENS, HEADS, HEAD_SIZE), "BKNHC"),
        ((BLOCKS, TOKENS, 2, HEADS, HEAD_SIZE), "BNKHC"),
    ],
)
def test_keys_and_values_apart_as_earlier_vllm_has_them(shape: tuple[int, ...], order: str) -> None:
    tensor = numbered(shape)
    (region,) = describe({"a": tensor}, spec_of()).regions
    validate_region(region)
    assert region.components == 2
    axes = tensor.permute(*(order.index(axis) for axis in "BNKHC"))
    for block, token, part, head in itertools.product(
        range(BLOCKS), range(TOKENS), range(2), range(HEADS)
    ):
        expected = axes[block, token, part, head].numpy().tobytes()
        assert read(region, block, token, part, head) == expected


def test_a_transposed_view_is_read_by_its_strides() -> None:
    tensor = numbered((2, BLOCKS, TOKENS, HEADS, HEAD_SIZE)).permute(0, 1, 3, 2, 4)
    (region,) = describe({"a": tensor}, spec_of()).regions
    assert (region.head_stride, region.token_stride) == (HEAD_SIZE * 4, HEADS * HEAD_SIZE * 4)


def test_what_fits_two_ways_is_refused() -> None:
    tensor = numbered((2, BLOCKS, TOKENS, TOKENS, HEAD_SIZE))
    with pytest.raises(UnsupportedError, match="can be read as KBHNC or KBNHC"):
        describe({"a": tensor}, spec_of(num_kv_heads=TOKENS), total_heads=TOKENS)


@pytest.mark.parametrize(
    "shape",
    [
        (BLOCKS + 1, HEADS, TOKENS, 2 * HEAD_SIZE),
        (BLOCKS, HEADS + 1, TOKENS, 2 * HEAD_SIZE),
        (BLOCKS, HEADS, TOKENS + 1, 2 * HEAD_SIZE),
        (BLOCKS, HEADS, TOKENS, HEAD_SIZE),
        (BLOCKS, 100),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0: a KV cache tensor of shape"):
        describe({"layers.0": numbered(shape)}, spec_of())


def test_a_latent_cache_is_replicated() -> None:
    spec = interface.MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32
    )
    tensor = numbered((BLOCKS, 1, TOKENS, HEAD_SIZE))
    (region,) = describe({"a": tensor}, spec, total_heads=16, tp_rank=1, tp_size=4).regions
    assert region.replicated
    assert (region.first_head, region.heads, region.total_heads) == (0, 1, 1)


def test_layers_that_share_memory_are_described_once() -> None:
    spec = spec_of()
    tensor = numbered((BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE))
    made = describe_caches(
        {"a": tensor, "shares a": tensor},
        config_of(spec, ["a"]),
        total_heads=HEADS,
        tp_rank=0,
        tp_size=1,
    )
    assert [region.layer for region in made.regions] == ["a"]
    both = describe({"a": tensor, "in the group": tensor}, spec)
    assert [region.layer for region in both.regions] == ["a"]
    other = numbered((BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE))
    with pytest.raises(UnsupportedError, match="no KV cache group"):
        describe_caches(
            {"a": tensor, "b": other},
            config_of(spec, ["a"]),
            total_heads=HEADS,
            tp_rank=0,
            tp_size=1,
        )


@pytest.mark.parametrize(
    ("held", "total", "rank", "size", "expected"),
    [
        (8, 8, 0, 1, HeadPlan(0, 8, 8)),
        (4, 8, 1, 2, HeadPlan(4, 4, 8)),
        (1, 2, 0, 4, HeadPlan(0, 1, 2)),
        (1, 2, 1, 4, HeadPlan(0, 1, 2)),
        (1, 2, 2, 4, HeadPlan(1, 1, 2)),
        (1, 1, 3, 4, HeadPlan(0, 1, 1)),
        (3, 2, 1, 2, HeadPlan(3, 3, 6)),
    ],
)
def test_heads_of_a_rank(held: int, total: int, rank: int, size: int, expected: HeadPlan) -> None:
    assert plan_heads(held, total, rank, size) == expected


def test_memory_is_registered_once() -> None:
    ranges = [(100, 50, "host", 0), (120, 10, "host", 0), (150, 5, "host", 0), (500, 1, "host", 0)]
    ranges += [(100, 50, "device", 0), (100, 50, "device", 1), (100, 50, "host", 0)]
    assert merge_ranges(ranges) == [
        (100, 50, "device", 0),
        (100, 50, "device", 1),
        (100, 55, "host", 0),
        (500, 1, "host", 0),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [32, 96])
def test_the_cpu_attention_keeps_tokens_where_the_regions_say(dtype: Any, tokens: int) -> None:
    """Writes tokens with vLLM's own kernel and finds their keys and values by the regions."""
    ops = pytest.importorskip("vllm._custom_ops")
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    isa = cpu_attn._get_attn_isa(dtype, tokens, HEAD_SIZE)
    if isa != "vec" or not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip(f"this machine's CPU attention is {isa}")
    cache = torch.zeros((BLOCKS, HEADS, tokens, 2 * HEAD_SIZE), dtype=dtype)
    halves = cache.view(BLOCKS, HEADS, 2 * tokens, HEAD_SIZE).chunk(2, dim=2)
    count = 2 * tokens
    key = torch.randn((count, HEADS, HEAD_SIZE)).to(dtype)
    value = torch.randn((count, HEADS, HEAD_SIZE)).to(dtype)
    slots = torch.arange(count) + tokens
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    spec = spec_of(block_size=tokens, dtype=dtype)
    made = describe({"a": cache}, spec, cpu_isa={"a": isa})
    keys, values = made.regions
    assert (keys.layer, values.layer) == ("a/k", "a/v")
    assert made.whole_blocks
    assert not made.packing
    for place, head in itertools.product(range(count), range(HEADS)):
        block, token = 1 + place // tokens, place % tokens
        pieces = [read(keys, block, token, part, head) for part in range(keys.components)]
        assert b"".join(pieces) == key[place, head].view(torch.uint8).numpy().tobytes()
        found = read(values, block, token, 0, head)
        assert found == value[place, head].view(torch.uint8).numpy().tobytes()


def test_other_cpu_packings_need_the_same_on_both_sides() -> None:
    cache = numbered((BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE))
    made = describe({"a": cache}, spec_of(), cpu_isa={"a": "amx"})
    assert len(made.regions) == 1
    assert made.whole_blocks
    assert made.packing == "amx, 32 tokens a block"
