"""From vLLM's KV cache tensors to regions: real addresses and strides, checked against the specs.

What a tensor's axes mean is found by matching its extents with the sizes that vLLM's KV cache
specification gives (blocks, heads, tokens, bytes per token and head). Where that leaves more than
one meaning, or none, the engine does not start; nothing is guessed from a name.

vLLM's CPU attention keeps, inside one (block, head), all keys transposed ([element][token]) and
behind them all values ([token][element]); each layer then has two regions. Its other instruction
sets pack keys in ways of their own, for which whole blocks are moved and both sides must be alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvpush._core import Region
from kvpush.errors import UnsupportedError

__all__ = [
    "CacheLayout",
    "HeadPlan",
    "MemoryRange",
    "describe_caches",
    "is_state",
    "layer_specs",
    "plan_heads",
]

MemoryRange = tuple[int, int, str, int]
"""Address, length in bytes, "host" or "device", device number."""

_ORDERS_4D = ("BHNC", "BNHC")
_ORDERS_5D = ("KBHNC", "KBNHC", "BKHNC", "BKNHC", "BHKNC", "BNKHC", "BHNKC", "BNHKC")
_ORDERS_3D = ("BNC",)
"""Axis orders seen in vLLM. B: blocks, H: heads, N: tokens, C: elements, K: keys and values."""

_TRANSPOSED_KEYS_ISA = "vec"
"""The CPU attention's plain vector path: keys as [element][token] in each (block, head)."""


class HeadPlan(msgspec.Struct, frozen=True):
    """Which of a layer's heads one rank holds."""

    first: int
    held: int
    total: int
    replicated: bool = False


class CacheLayout(msgspec.Struct, frozen=True):
    """All KV memory of one rank."""

    regions: list[Region]
    memory: list[MemoryRange]
    whole_blocks: bool
    """Spans are best widened to whole blocks: tokens interleave inside a block."""
    packing: str
    """Names a packing that both sides must share; empty where any two layouts can be mapped."""


def plan_heads(held: int, total: int, tp_rank: int, tp_size: int) -> HeadPlan:
    """The global heads of one tensor-parallel rank, replicated ones included.

    vLLM splits the heads evenly, and where there are more ranks than heads gives each head to
    neighbouring ranks.

    Raises:
        UnsupportedError: the layer's heads don't follow from the model's.
    """
    if tp_size == 1:
        return HeadPlan(first=0, held=held, total=held)
    if max(1, total // tp_size) != held:
        if held == 1:
            raise UnsupportedError(
                f"A layer holds 1 KV head per rank, but the model has {total} for {tp_size} ranks: "
                "which head a rank holds is unknown. Use --tensor-parallel-size 1 for this model."
            )
        total = held * tp_size
    first = tp_rank * held if total >= tp_size else tp_rank * total // tp_size
    return HeadPlan(first=first, held=held, total=total)


def layer_specs(kv_cache_config: Any) -> dict[str, tuple[int, Any]]:
    """For each layer: its KV cache group and its specification."""
    specs: dict[str, tuple[int, Any]] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = (group_id, own[name] if own is not None else group.kv_cache_spec)
    return specs


def describe_caches(
    tensors: Mapping[str, Any],
    kv_cache_config: Any,
    *,
    total_heads: int,
    tp_rank: int,
    tp_size: int,
    cpu_isa: Mapping[str, str] | None = None,
) -> CacheLayout:
    """Describe every layer's tensor. `cpu_isa` names the CPU attention's variant of each layer.

    Raises:
        UnsupportedError: naming the layer and what does not fit.
    """
    specs = layer_specs(kv_cache_config)
    _check_every_layer_has_a_group(tensors, specs)
    regions: list[Region] = []
    memory: list[MemoryRange] = []
    seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
    whole_blocks, packing = False, ""
    for layer, tensor in tensors.items():
        memory.append(_memory_of(tensor))
        if layer not in specs:
            continue
        group, spec = specs[layer]
        if is_state(spec):
            regions.append(_state_region(layer, group, tensor, spec, kv_cache_config.num_blocks))
            continue
        # Groups overlay each other's memory: only within one do equal addresses mean one KV.
        identity = (group, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if identity in seen:
            continue  # a layer that shares another's KV has nothing of its own to move
        seen[identity] = layer
        axes = _Axes.match(layer, tensor, spec, kv_cache_config.num_blocks)
        heads = _heads_of(spec, total_heads, tp_rank, tp_size)
        isa = (cpu_isa or {}).get(layer)
        if isa is None:
            regions.append(axes.region(layer, group, heads))
        elif isa == _TRANSPOSED_KEYS_ISA and tensor.element_size() > 1:
            regions.extend(axes.transposed_key_regions(layer, group, heads))
            whole_blocks = True
        else:
            regions.append(axes.region(layer, group, heads))
            whole_blocks = True
            packing = f"{isa}, {axes.tokens_per_block} tokens a block"
    return CacheLayout(
        regions=regions, memory=merge_ranges(memory), whole_blocks=whole_blocks, packing=packing
    )


def _check_every_layer_has_a_group(
    tensors: Mapping[str, Any], specs: Mapping[str, tuple[int, Any]]
) -> None:
    """Only a layer that shares another's KV may be in no group."""
    known = {tensor.data_ptr() for layer, tensor in tensors.items() if layer in specs}
    for layer, tensor in tensors.items():
        if layer not in specs and tensor.data_ptr() not in known:
            raise UnsupportedError(f"Layer {layer} has a KV cache tensor but no KV cache group.")


def merge_ranges(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Join ranges of one device that overlap or touch: each byte is registered once."""
    merged: list[MemoryRange] = []
    for address, length, kind, device in sorted(ranges, key=lambda r: (r[2], r[3], r[0])):
        if merged:
            last_address, last_length, last_kind, last_device = merged[-1]
            end = last_address + last_length
            if (kind, device) == (last_kind, last_device) and address <= end:
                merged[-1] = (
                    last_address,
                    max(end, address + length) - last_address,
                    kind,
                    device,
                )
                continue
        merged.append((address, length, kind, device))
    return merged


def _memory_of(tensor: Any) -> MemoryRange:
    storage = tensor.untyped_storage()
    kind, device = _placement(tensor)
    return (storage.data_ptr(), storage.nbytes(), kind, device)


def _placement(tensor: Any) -> tuple[str, int]:
    if tensor.device.type == "cpu":
        return "host", 0
    return "device", tensor.device.index or 0


def _heads_of(spec: Any, total_heads: int, tp_rank: int, tp_size: int) -> HeadPlan:
    if _is_latent(spec):
        return HeadPlan(first=0, held=1, total=1, replicated=True)
    held = int(getattr(spec, "num_heads", spec.num_kv_heads))
    return plan_heads(held, total_heads, tp_rank, tp_size)


def is_state(spec: Any) -> bool:
    """Mamba and its kin: one opaque state per request instead of something per token."""
    return any(base.__name__ == "MambaSpec" for base in type(spec).__mro__)


def _state_region(layer: str, group: int, tensor: Any, spec: Any, num_blocks: int) -> Region:
    """States are copied whole; a page may be longer than the state in it."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    item = int(tensor.element_size())
    content = _state_bytes(spec)
    held, dense = item, True
    for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        dense = dense and (extent == 1 or stride * item == held)
        held *= extent
    if shape[0] != num_blocks or not dense or held < content:
        raise UnsupportedError(
            f"Layer {layer}: a state tensor of shape {shape} and strides {strides} does not match "
            f"{num_blocks} blocks of {content} bytes."
        )
    memory, device = _placement(tensor)
    return Region(
        layer=layer,
        dtype="+".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        base=tensor.data_ptr(),
        block_stride=strides[0] * item,
        num_blocks=num_blocks,
        kind="state",
        group=group,
        memory=memory,
        device=device,
        replicated=bool(getattr(spec, "tp_replicated", False)),
        state_bytes=content,
    )


def _state_bytes(spec: Any) -> int:
    """Bytes of one state without its page's padding."""
    declared = getattr(spec, "state_content_size_bytes", None)
    if declared is not None:
        return int(declared)
    return sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )


def _is_latent(spec: Any) -> bool:
    """MLA: one latent per token, the same on every rank."""
    return any("MLA" in base.__name__ for base in type(spec).__mro__)


def _content_bytes(spec: Any) -> int:
    """Bytes of one (head, token): keys and values together."""
    declared = getattr(spec, "state_content_size_bytes", None)
    if declared is not None:
        return int(declared)
    per_token = spec.page_size_bytes // spec.block_size
    return int(per_token // spec.num_kv_heads)


class _Axes(msgspec.Struct, frozen=True):
    """What the axes of one layer's tensor mean; strides in bytes."""

    base: int
    dtype: str
    item: int
    memory: str
    device: int
    num_blocks: int
    tokens_per_block: int
    tokens_per_page: int
    page_stride: int
    heads: int
    head_stride: int
    token_stride: int
    components: int
    component_stride: int
    content: int
    """Bytes of one (component, head, token)."""

    @classmethod
    def match(cls, layer: str, tensor: Any, spec: Any, num_blocks: int) -> _Axes:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        item = int(tensor.element_size())
        found: dict[str, _Axes] = {}
        for order in _orders(spec, len(shape)):
            extent = dict(zip(order, shape, strict=True))
            stride = dict(zip(order, strides, strict=True))
            if not _fits(extent, stride, spec, num_blocks, item):
                continue
            found[order] = cls._made(tensor, spec, num_blocks, extent, stride)
        distinct = set(map(repr, (msgspec.structs.astuple(axes) for axes in found.values())))
        if not found:
            raise UnsupportedError(
                f"Layer {layer}: a KV cache tensor of shape {shape} and strides {strides} does not "
                f"match {num_blocks} blocks of {spec.block_size} tokens with "
                f"{getattr(spec, 'num_kv_heads', 1)} heads of {_content_bytes(spec)} bytes."
            )
        if len(distinct) > 1:
            raise UnsupportedError(
                f"Layer {layer}: a KV cache tensor of shape {shape} can be read as "
                f"{' or '.join(found)}. Choose a --block-size unlike the number of heads."
            )
        return next(iter(found.values()))

    @classmethod
    def _made(
        cls,
        tensor: Any,
        spec: Any,
        num_blocks: int,
        extent: Mapping[str, int],
        stride: Mapping[str, int],
    ) -> _Axes:
        item = int(tensor.element_size())
        memory, device = _placement(tensor)
        return cls(
            base=tensor.data_ptr(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item=item,
            memory=memory,
            device=device,
            num_blocks=num_blocks,
            tokens_per_block=spec.block_size,
            tokens_per_page=extent["N"],
            page_stride=stride["B"] * item,
            heads=extent.get("H", 1),
            head_stride=stride.get("H", 0) * item,
            token_stride=stride["N"] * item,
            components=extent.get("K", 1),
            component_stride=stride.get("K", 0) * item,
            content=extent["C"] * item,
        )

    def region(self, layer: str, group: int, heads: HeadPlan) -> Region:
        """One region: every (component, head, token) is a contiguous piece."""
        return self._region(layer, group, heads)

    def transposed_key_regions(self, layer: str, group: int, heads: HeadPlan) -> list[Region]:
        """Keys as one component per element, values as pieces per token.

        The tensor's own token axis does not exist in memory: keys and values of one (block, head)
        follow each other, whatever the view says.
        """
        if self.components == 1:
            half, values_at = self.content // 2, self.tokens_per_page * self.content // 2
        else:
            half, values_at = self.content, self.component_stride
        keys = self._region(
            f"{layer}/k",
            group,
            heads,
            token_stride=self.item,
            components=half // self.item,
            component_stride=self.tokens_per_page * self.item,
            element_bytes=self.item,
        )
        values = self._region(
            f"{layer}/v",
            group,
            heads,
            base=self.base + values_at,
            token_stride=half,
            components=1,
            component_stride=0,
            element_bytes=half,
        )
        return [keys, values]

    def _region(
        self,
        layer: str,
        group: int,
        heads: HeadPlan,
        *,
        base: int | None = None,
        token_stride: int | None = None,
        components: int | None = None,
        component_stride: int | None = None,
        element_bytes: int | None = None,
    ) -> Region:
        pages = self.tokens_per_block // self.tokens_per_page
        return Region(
            layer=layer,
            dtype=self.dtype,
            base=self.base if base is None else base,
            block_stride=self.page_stride * pages,
            num_blocks=self.num_blocks,
            kind="attention",
            group=group,
            memory=self.memory,
            device=self.device,
            tokens_per_block=self.tokens_per_block,
            tokens_per_page=self.tokens_per_page,
            page_stride=self.page_stride,
            token_stride=self.token_stride if token_stride is None else token_stride,
            components=self.components if components is None else components,
            component_stride=(
                self.component_stride if component_stride is None else component_stride
            ),
            first_head=heads.first,
            heads=heads.held,
            total_heads=heads.total,
            head_stride=self.head_stride,
            element_bytes=self.content if element_bytes is None else element_bytes,
            replicated=heads.replicated,
        )


def _orders(spec: Any, dimensions: int) -> Sequence[str]:
    if dimensions == len(_ORDERS_4D[0]) and hasattr(spec, "state_content_size_bytes"):
        # Where the specification itself defines the logical view, there is only one.
        return ("BHNC",)
    return {3: _ORDERS_3D, 4: _ORDERS_4D, 5: _ORDERS_5D}.get(dimensions, ())


def _fits(
    extent: Mapping[str, int], stride: Mapping[str, int], spec: Any, num_blocks: int, item: int
) -> bool:
    pages, rest = divmod(extent["B"], num_blocks)
    heads = 1 if _is_latent(spec) else int(getattr(spec, "num_heads", spec.num_kv_heads))
    return (
        rest == 0
        and pages * extent["N"] == spec.block_size
        and extent.get("H", 1) == heads
        and extent.get("K", 2) == 2  # noqa: PLR2004 - keys and values
        and extent["C"] * item * extent.get("K", 1) == _content_bytes(spec)
        and stride["C"] == 1
    )
