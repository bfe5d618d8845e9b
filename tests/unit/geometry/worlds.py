"""Random pairs of engines: layouts, parallelism, block lists. What hypothesis draws from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from kvpush import _core

from .oracle import HOLE, Blocks, Memory

AXES = ("block", "page", "token", "component", "head", "layer")
# From the innermost axis out, as tensors have them: K and V inside the block, or in two halves of
# the pool; the layers in one tensor inside the block, or one after the other.
REAL_ORDERS = (
    ("head", "token", "component", "page", "block", "layer"),
    ("token", "head", "component", "page", "block", "layer"),
    ("head", "token", "page", "block", "component", "layer"),
    ("token", "page", "block", "head", "component", "layer"),
    ("component", "token", "page", "head", "layer", "block"),
    ("head", "token", "component", "page", "layer", "block"),
    ("token", "head", "page", "component", "layer", "block"),
)


@dataclass(frozen=True)
class Layer:
    """A layer of the model, the same on both sides."""

    name: str
    kind: str  # "attention", "latent", "state"
    group: int
    total_heads: int
    components: int
    component_bytes: int
    split: bool  # K and V are regions of their own, "NAME/k" and "NAME/v", in one tensor


@dataclass(frozen=True)
class Layout:
    """How one side lays out the layers of one group."""

    tokens_per_block: int
    pages: int
    order: tuple[str, ...]  # axes from the innermost out
    padding: tuple[int, ...]  # bytes added to the stride of each, in that order
    joined: bool  # all layers in one tensor
    slots: str  # the layers' places in it: "straight", "reversed", or "gap" (one place is empty)
    packed: bool  # components inside the element, where there are two
    transposed: bool  # keys as [byte][token], where they are split and the tokens are innermost
    values_first: bool  # V before K, where they are split
    spare_blocks: int
    device: bool


@dataclass(frozen=True)
class Side:
    """One engine's parallelism and layouts."""

    tp: int
    pp: int
    head_cuts: tuple[int, ...] | None  # uneven shares of the heads; None: as vLLM splits them
    groups: tuple[int, ...]  # the engine's own number of each of the model's groups
    layouts: tuple[Layout, ...]  # by the model's groups


@dataclass
class Request:
    tokens: int
    span: range
    producer: list[Blocks]  # by the producer's own groups
    consumer: list[Blocks]


@dataclass
class World:
    layers: list[Layer]
    producer: Side
    consumer: Side
    request: Request
    producers: list[Memory] = field(default_factory=list)
    consumers: list[Memory] = field(default_factory=list)

    def shard(self, side: Side, rank: int) -> int:
        return rank % side.tp


def head_share(side: Side, rank: int, total: int) -> tuple[int, int]:
    """(first head, heads) of a tensor-parallel rank."""
    if side.head_cuts is not None and total == max(side.head_cuts):
        return side.head_cuts[rank], side.head_cuts[rank + 1] - side.head_cuts[rank]
    if total >= side.tp:
        share = total // side.tp
        return rank * share, share
    return rank * total // side.tp, 1


def layer_share(side: Side, stage: int, layers: list[Layer]) -> list[Layer]:
    """A pipeline stage's layers."""
    begin, end = (len(layers) * s // side.pp for s in (stage, stage + 1))
    return layers[begin:end]


def strides_of(extents: dict[str, int], layout: Layout, element: int) -> tuple[dict[str, int], int]:
    """A stride for each axis, and the size of the whole."""
    strides = {}
    size = element
    for axis, padding in zip(layout.order, layout.padding, strict=True):
        strides[axis] = size + padding
        size = strides[axis] * extents[axis]
    return strides, size


def slot(layout: Layout, index: int, count: int) -> int:
    """A layer's place among those of its tensor."""
    if layout.slots == "reversed":
        return count - 1 - index
    return index + (1 if layout.slots == "gap" and 2 * index >= count else 0)


def attention_regions(
    side: Side, rank: int, layers: list[Layer], layout: Layout, num_blocks: int, base: int
) -> tuple[list[_core.Region], int]:
    """Regions of one group's attention layers (all alike), from `base` on; and the end address."""
    first = layers[0]
    first_head, heads = head_share(side, rank, first.total_heads)
    packed = first.components == 1 or (layout.packed and not first.split)
    components = 1 if packed else first.components
    element = first.component_bytes * (first.components if packed else 1)
    page = layout.tokens_per_block // layout.pages
    extents = {
        "block": num_blocks,
        "page": layout.pages,
        "token": page,
        "component": components,
        "head": heads,
        "layer": len(layers) + (layout.slots == "gap") if layout.joined else 1,
    }
    strides, size = strides_of(extents, layout, element)
    regions = []
    for i, layer in enumerate(layers):
        start = base + (slot(layout, i, len(layers)) * strides["layer"] if layout.joined else 0)
        shapes = [(layer.name, start, components, element, strides)]
        if layer.split:
            key_strides, key_element, key_components = strides, element, 1
            if layout.transposed and layout.order[0] == "token" and strides["token"] == element:
                key_components, key_element = element, 1
                key_strides = strides | {"token": 1, "component": page}
            keys, values = start, start + strides["component"]
            if layout.values_first:
                keys, values = values, keys
            shapes = [
                (f"{layer.name}/k", keys, key_components, key_element, key_strides),
                (f"{layer.name}/v", values, 1, element, strides),
            ]
        regions += [
            _core.Region(
                layer=name,
                dtype="x",
                group=side.groups[layer.group],
                memory="device" if layout.device else "host",
                device=layer.group if layout.device else 0,
                base=at,
                block_stride=own["block"],
                num_blocks=num_blocks,
                tokens_per_block=layout.tokens_per_block,
                tokens_per_page=page,
                page_stride=own["page"],
                token_stride=own["token"],
                components=parts,
                component_stride=own["component"],
                first_head=first_head,
                heads=heads,
                total_heads=layer.total_heads,
                head_stride=own["head"],
                element_bytes=part_bytes,
                replicated=layer.kind == "latent",
            )
            for name, at, parts, part_bytes, own in shapes
        ]
        if not layout.joined:
            base += size
    return regions, base + size if layout.joined else base


def state_regions(
    side: Side, layers: list[Layer], layout: Layout, num_blocks: int, base: int, *, shared: bool
) -> tuple[list[_core.Region], int]:
    regions = []
    for layer in layers:
        size = layer.component_bytes + layout.padding[0]
        regions.append(
            _core.Region(
                layer=layer.name,
                dtype="x",
                kind="state",
                group=side.groups[layer.group],
                memory="device" if layout.device else "host",
                device=layer.group if layout.device else 0,
                base=base,
                block_stride=size,
                num_blocks=num_blocks,
                state_bytes=layer.component_bytes,
                replicated=shared,
            )
        )
        base += size * num_blocks
    return regions, base


def rank_regions(
    side: Side,
    rank: int,
    layers: list[Layer],
    blocks: list[int],
    base: int,
    *,
    shared_state: bool,
) -> tuple[list[_core.Region], int]:
    """All regions of a rank, from `base` on, and the end address."""
    own = layer_share(side, rank // side.tp, layers)
    regions: list[_core.Region] = []
    for group, layout in enumerate(side.layouts):
        members = [layer for layer in own if layer.group == group]
        if not members:
            continue
        if members[0].kind == "state":
            made, base = state_regions(
                side, members, layout, blocks[group], base, shared=shared_state
            )
        else:
            made, base = attention_regions(
                side, rank % side.tp, members, layout, blocks[group], base
            )
        regions += made
        base += 1  # groups that touch by chance would make runs that no planner looks for
    return regions, base


def build_ranks(
    side: Side, layers: list[Layer], blocks: list[int], seed: int, *, shared_state: bool
) -> list[Memory]:
    """Memory of every rank, filled with noise. `blocks`: pool sizes by the model's groups."""
    ranks = []
    for rank in range(side.pp * side.tp):
        _, size = rank_regions(side, rank, layers, blocks, 0, shared_state=shared_state)
        rng = np.random.default_rng([seed, rank])
        memory = Memory(rng.integers(0, 256, size + 1, dtype=np.uint8))
        memory.regions, _ = rank_regions(
            side, rank, layers, blocks, memory.base, shared_state=shared_state
        )
        ranks.append(memory)
    return ranks


@st.composite
def layouts(draw: st.DrawFn, *, plain: bool) -> Layout:
    pages = draw(st.sampled_from([1, 1, 2, 3]))
    order = draw(st.one_of(st.sampled_from(REAL_ORDERS), st.permutations(AXES).map(tuple)))
    padded = not plain and draw(st.booleans())
    padding = draw(st.tuples(*[st.sampled_from([0, 0, 0, 1, 3])] * 6)) if padded else (0,) * 6
    return Layout(
        tokens_per_block=pages * draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        pages=pages,
        order=order,
        padding=padding,
        joined=draw(st.sampled_from([True, True, False])),
        slots=draw(st.sampled_from(["straight", "straight", "gap", "reversed"])),
        packed=draw(st.booleans()),
        transposed=draw(st.booleans()),
        values_first=draw(st.booleans()),
        spare_blocks=draw(st.integers(0, 3)),
        device=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def near(draw: st.DrawFn, layout: Layout, other: Layout) -> Layout:
    """The same layout, but for some traits taken from another."""
    traits = draw(
        st.sets(
            st.sampled_from(["tokens_per_block", "order", "padding", "joined", "slots", "packed"]),
            max_size=2,
        )
    )
    changes = {trait: getattr(other, trait) for trait in traits}
    if "tokens_per_block" in traits:
        changes["pages"] = other.pages
    changes["spare_blocks"] = other.spare_blocks
    return replace(layout, **changes)


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    """One to three groups of layers, interleaved, all layers of a group alike."""
    groups = []
    for group in range(draw(st.sampled_from([1, 1, 2, 3]))):
        kind = draw(st.sampled_from(["attention"] * 4 + ["latent", "state"]))
        heads = 1 if kind != "attention" else draw(st.sampled_from([1, 2, 2, 4, 6]))
        components = draw(st.sampled_from([1, 2, 2])) if kind == "attention" else 1
        split = components > 1 and draw(st.booleans())
        groups.append((kind, group, heads, components, draw(st.integers(1, 5)), split))
    count = draw(st.integers(len(groups), 7))
    return [Layer(f"layer.{i}", *groups[i % len(groups)]) for i in range(count)]


@st.composite
def sides(draw: st.DrawFn, layers: list[Layer], mirror: Side | None) -> Side:
    groups = 1 + max(layer.group for layer in layers)
    heads = [layer.total_heads for layer in layers if layer.kind == "attention"]
    tp = draw(
        st.sampled_from([1, 2, 3, 4]).filter(
            lambda tp: all(h % tp == 0 or tp % h == 0 for h in heads)
        )
    )
    cuts = None
    if heads and len(set(heads)) == 1 and 1 < tp <= heads[0] and draw(st.booleans()):
        inner = draw(
            st.lists(st.integers(1, heads[0] - 1), min_size=tp - 1, max_size=tp - 1, unique=True)
        )
        cuts = (0, *sorted(inner), heads[0])
    own = [draw(layouts(plain=draw(st.booleans()))) for _ in range(groups)]
    if mirror is not None and draw(st.booleans()):  # the usual case: much is equal on both sides
        own = [draw(near(layout, other)) for layout, other in zip(mirror.layouts, own, strict=True)]
    return Side(
        tp=tp,
        pp=draw(st.sampled_from([1, 1, 2])),
        head_cuts=cuts,
        groups=tuple(draw(st.permutations(range(groups)))),
        layouts=tuple(own),
    )


@st.composite
def block_lists(
    draw: st.DrawFn, length: int, pool: int, *, seed: int, hole_until: int
) -> list[int]:
    """Ids of `length` blocks: rising, falling, in rising pieces or anyhow."""
    how = draw(st.sampled_from(["rising", "falling", "pieces", "random"]))
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(pool)[:length]).tolist()
    if how in ("rising", "falling"):
        start = draw(st.integers(0, pool - length))
        ids = list(range(start, start + length))
    if how == "falling":
        ids.reverse()
    elif how == "pieces":
        cut = draw(st.integers(0, length))
        ids = ids[cut:] + ids[:cut]
    elif how == "random":
        rng.shuffle(ids)
    return [HOLE if i < hole_until else int(block) for i, block in enumerate(ids)]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, range]:
    """A number of tokens, and the span of them that is asked for."""
    # Drawn from lists: left to itself, hypothesis prefers prompts of next to nothing.
    tokens = draw(st.sampled_from([1, 7, 16, 24, 29, 35, 40]))
    begin = draw(st.one_of(st.sampled_from([0, 0, 1]), st.integers(0, tokens)))
    end = draw(st.one_of(st.sampled_from([tokens, tokens, tokens - 1]), st.integers(0, tokens)))
    return tokens, range(begin, max(begin, end))


@st.composite
def requests(
    draw: st.DrawFn,
    layers: list[Layer],
    producer: Side,
    consumer: Side,
    seed: int,
    prompt: tuple[int, range],
) -> tuple[Request, list[int], list[int]]:
    """A request, and the pool sizes of both sides by the model's groups."""
    tokens, span = prompt
    groups = len(producer.groups)
    tables: list[list[Blocks]] = [[Blocks(0, [])] * groups, [Blocks(0, [])] * groups]
    pools: list[list[int]] = [[], []]
    for group in range(groups):
        kind = next(layer.kind for layer in layers if layer.group == group)
        states = draw(st.integers(0, 3))
        state_holes = draw(st.integers(0, states))
        needed_from = span.start
        for which, side in ((1, consumer), (0, producer)):
            layout = side.layouts[group]
            size = layout.tokens_per_block
            if kind == "state":
                length, first, holes = states, 0, state_holes
            elif which == 1:
                # More blocks than the span needs; the first ones not listed, or holes.
                length = -(-span.stop // size) + draw(st.integers(0, 2))
                first = draw(st.integers(0, length))
                if span:
                    first = min(first, (span.stop - 1) // size)
                holes = draw(st.sampled_from([0, 0, 1, 3]))
                if first + holes:
                    needed_from = max(needed_from, min((first + holes) * size, span.stop))
            else:
                length = -(-tokens // size)
                first = draw(st.integers(0, needed_from // size))
                holes = draw(st.integers(0, max(0, needed_from // size - first)))
                first = min(first, length)
            length -= min(first, length)
            pool = max(1, length + layout.spare_blocks)
            pools[which].append(pool)
            ids = draw(block_lists(length, pool, seed=seed + 7 * group + which, hole_until=holes))
            tables[which][side.groups[group]] = Blocks(first, ids)
    return Request(tokens, span, tables[0], tables[1]), pools[0], pools[1]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    layers = draw(models())
    producer = draw(sides(layers, None))
    consumer = draw(sides(layers, producer))
    seed = draw(st.integers(0, 1 << 20))
    request, producer_pool, consumer_pool = draw(
        requests(layers, producer, consumer, seed, draw(prompts()))
    )
    world = World(layers, producer, consumer, request)
    # A state that is not shared belongs to one rank of as many on the other side.
    shared = producer.tp != consumer.tp or draw(st.booleans())
    world.producers = build_ranks(producer, layers, producer_pool, seed, shared_state=shared)
    world.consumers = build_ranks(consumer, layers, consumer_pool, seed + 1, shared_state=shared)
    return world


@st.composite
def halves(draw: st.DrawFn) -> World:
    """K and V as regions of their own, inside the blocks, and close to alike on both sides."""
    heads, size = draw(st.sampled_from([2, 4])), draw(st.integers(1, 4))
    count = draw(st.integers(1, 3))
    layers = [Layer(f"layer.{i}", "attention", 0, heads, 2, size, split=True) for i in range(count)]
    order = draw(
        st.sampled_from([o for o in REAL_ORDERS if o.index("component") < o.index("block")])
    )
    layout = Layout(
        tokens_per_block=draw(st.sampled_from([2, 4, 8])),
        pages=draw(st.sampled_from([1, 1, 2])),
        order=order,
        padding=(0,) * len(AXES),
        joined=draw(st.booleans()),
        slots="straight",
        packed=False,
        transposed=draw(st.booleans()),
        values_first=draw(st.booleans()),
        spare_blocks=2,
        device=False,
    )
    # One thing that keeps them apart, or lets fewer of them join, or none.
    odd = draw(st.sampled_from(["", "transposed", "values_first", "component", "head"]))
    other = replace(
        layout,
        transposed=layout.transposed != (odd == "transposed"),
        values_first=layout.values_first != (odd == "values_first"),
        padding=tuple(int(axis == odd) for axis in order),
    )
    own = [layout, other] if draw(st.booleans()) else [other, layout]
    tp = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]))
    producer, consumer = (Side(n, 1, None, (0,), (one,)) for n, one in zip(tp, own, strict=True))
    whole = draw(st.sampled_from([True, True, False]))
    prompt = (16, range(16)) if whole else draw(prompts())
    seed = draw(st.integers(0, 1 << 20))
    request, producer_pool, consumer_pool = draw(requests(layers, producer, consumer, seed, prompt))
    world = World(layers, producer, consumer, request)
    world.producers = build_ranks(producer, layers, producer_pool, seed, shared_state=True)
    world.consumers = build_ranks(consumer, layers, consumer_pool, seed + 1, shared_state=True)
    return world
