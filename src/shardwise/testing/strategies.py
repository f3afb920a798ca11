"""Hypothesis strategies for layouts of every kind and for pairs of layouts. Needs the extra `shardwise[testing]`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from shardwise.geometry import Box
from shardwise.layout import Layout, Mesh
from shardwise.notation import OPERATIONS

NEED_A_DIM = ("chunk", "split", "cyclic", "zigzag", "experts", "fused")
KINDS = ("mesh", "partial", "boxes", "overlapping", "replicated", "flat", *NEED_A_DIM)


def shapes(max_dims: int = 3, max_size: int = 9, min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with 0-d tensors and empty dims among them."""
    sizes = st.integers(0, max_size) | st.integers(1, max_size)
    return st.lists(sizes, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn, shape: Sequence[int] | None = None, kinds: Sequence[str] = KINDS, max_owners: int = 6
) -> Layout:
    """A valid layout of one of the kinds."""
    kind = draw(st.sampled_from([k for k in kinds if shape is None or len(shape) or k not in NEED_A_DIM]))
    size = tuple(draw(shapes(min_dims=int(kind in NEED_A_DIM))) if shape is None else shape)
    owners = draw(_owners(max_owners))
    dim = draw(st.integers(-len(size), len(size) - 1)) if size else 0
    match kind:
        case "chunk":
            return Layout.chunk(size, dim, owners)
        case "split":
            return Layout.split(size, dim, draw(_cuts(size[dim], len(owners))), owners)
        case "mesh":
            return draw(_meshes(size, partial=False))
        case "partial":
            return draw(_meshes(size, partial=True))
        case "boxes":
            return Layout.boxes(size, draw(_tilings(size, owners)))
        case "overlapping":
            return Layout.boxes(size, draw(_overlapping(size, owners)), overlap="replicas")
        case "replicated":
            return Layout.replicated(size, owners)
        case "cyclic":
            return Layout.cyclic(size, dim, draw(st.integers(1, 4)), owners)
        case "zigzag":
            return Layout.zigzag(size, dim, owners)
        case "experts":
            ranks = draw(_experts(size[dim], len(owners)))
            return Layout.experts(size, dim, [[owners[rank] for rank in row] for row in ranks])
        case "flat":
            ends = draw(_cuts(prod(size), len(owners)))
            starts = [sum(ends[:i]) for i in range(len(ends))]
            return Layout.flat(size, [(o, a, a + n) for o, a, n in zip(owners, starts, ends, strict=True)])
    return Layout.fused(size, dim, draw(_cuts(size[dim], draw(st.integers(1, 3)))), owners)


@st.composite
def pairs(
    draw: st.DrawFn, kinds: Sequence[str] = KINDS, target_kinds: Sequence[str] | None = None
) -> tuple[Layout, Layout]:
    """A source and a target layout of one tensor."""
    both = [kinds, kinds if target_kinds is None else target_kinds]
    flat = any(set(side) <= set(NEED_A_DIM) for side in both)
    shape = draw(shapes(min_dims=int(flat)))
    return draw(layouts(shape, kinds)), draw(layouts(shape, kinds if target_kinds is None else target_kinds))


def _owners(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2 * most), min_size=1, max_size=most, unique=True)


@st.composite
def _cuts(draw: st.DrawFn, size: int, count: int) -> list[int]:
    """Sizes that add up, zeros among them."""
    at = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in zip([0, *at], [*at, size], strict=True)]


@st.composite
def _meshes(draw: st.DrawFn, shape: tuple[int, ...], *, partial: bool) -> Layout:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    op = draw(st.sampled_from(OPERATIONS))
    terms = draw(st.integers(0, len(sizes) - 1)) if partial else None
    words, whole = list[str](), set(range(len(shape)))
    for axis, count in enumerate(sizes):
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        if axis == terms:
            words.append(f"P{op}")
            sizes[axis] = max(count, 2)  # one term would be the value itself
        elif dim is None:
            words.append("R")
        else:
            words.append(draw(_splits(dim, shape[dim], count, whole=dim in whole, replicas=not partial)))
            whole.discard(dim)
    ranks = draw(st.permutations(range(prod(sizes))) | st.just(range(prod(sizes))))
    return Layout.on_mesh(shape, Mesh.of(sizes, ranks=list(ranks)), words)


@st.composite
def _splits(draw: st.DrawFn, dim: int, size: int, count: int, *, whole: bool, replicas: bool) -> str:
    """The word of a split of a dim over `count` ranks; some need a dim that is `whole`, and may give `replicas`."""
    kind = draw(st.sampled_from(["S", "S:", "zigzag", "cyclic", *["fused", "heads", "experts"] * whole]))
    match kind:
        case "S:" | "cyclic":
            number = draw(st.integers(1, 3))
            return f"S{dim}:{number}" if kind == "S:" else f"cyclic{dim}={number}"
        case "experts":
            ranks = draw(_experts(size, count)) if replicas else [(n % count,) for n in range(size or 1)]
            return f"experts{dim}={','.join('+'.join(map(str, row)) for row in ranks)}"
        case "heads":
            return f"heads{dim}={draw(_heads(size, count))}"
        case "fused":
            segments = draw(_cuts(size, draw(st.integers(1, 3))))
            heads = [draw(_heads(segment, count)) for segment in segments] if replicas and draw(st.booleans()) else []
            return f"fused{dim}={','.join(map(str, segments))}" + f":{','.join(map(str, heads))}" * bool(heads)
    return f"{kind}{dim}"


def _heads(size: int, count: int) -> st.SearchStrategy[int]:
    """Numbers of heads that a size may have on so many ranks."""
    return st.sampled_from([n for n in range(1, 10) if size % n == 0 and (n % count == 0 or count % n == 0)])


def _experts(size: int, ranks: int) -> st.SearchStrategy[list[list[int]]]:
    """The ranks of every expert; they have equal sizes."""
    row = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    counts = st.sampled_from([n for n in range(1, 10) if size % n == 0])
    return counts.flatmap(lambda count: st.lists(row, min_size=count, max_size=count))


@st.composite
def _tilings(
    draw: st.DrawFn, shape: tuple[int, ...], owners: list[int]
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The whole, halved a few times; every box to one owner or to several."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [a for a in range(len(shape)) if box.shape[a] > 1]
        if not wide:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(wide))
        at = draw(st.integers(box.lo[axis] + 1, box.hi[axis] - 1))
        boxes.append(Box(box.lo, (*box.hi[:axis], at, *box.hi[axis + 1 :])))
        boxes.append(Box((*box.lo[:axis], at, *box.lo[axis + 1 :]), box.hi))
    pieces = []
    for box in boxes:
        who = draw(st.lists(st.sampled_from(owners), min_size=1, max_size=2, unique=True))
        pieces += [(owner, box.lo, box.hi) for owner in who]
    return pieces


@st.composite
def _overlapping(
    draw: st.DrawFn, shape: tuple[int, ...], owners: list[int]
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """A tiling, every box grown by a margin."""
    boxes = []
    for owner, lo, hi in draw(_tilings(shape, owners)):
        margin = draw(st.integers(0, 2))
        low = tuple(max(0, a - margin) for a in lo)
        high = tuple(min(size, b + margin) for b, size in zip(hi, shape, strict=True))
        boxes.append((owner, low, high))
    return boxes
