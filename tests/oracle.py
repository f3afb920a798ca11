"""What the answers must be, by brute force: every cell is looked at. Knows layouts by their pieces, and no plan."""

import math
from itertools import combinations, product

import numpy as np

from shardwise import Cyclic, Experts, Fused, Heads, StridedShard, Zigzag
from shardwise.geometry import Box, Boxes


def cover(boxes, shape):
    """How many of the boxes hold each cell."""
    count = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        count[(*box.slices, ...)] += 1
    return count


def listed(boxes):
    """A `Boxes` as a list of boxes."""
    return [boxes.box(i) for i in range(boxes.count)]


def pairs_that_meet(left, right):
    """Every pair of numbers whose boxes share a cell, by trying all."""
    return [(i, j) for (i, a), (j, b) in product(enumerate(left), enumerate(right)) if shares(a, b)]


def shares(a, b):
    """True where two boxes have a cell in common."""
    return all(max(p, r) < min(q, s) for p, q, r, s in zip(a.lo, a.hi, b.lo, b.hi, strict=True))


def touch(a, b):
    """True where two disjoint boxes together are a box."""
    apart = [n for n in range(len(a.lo)) if (a.lo[n], a.hi[n]) != (b.lo[n], b.hi[n])]
    return len(apart) == 1 and (a.hi[apart[0]] == b.lo[apart[0]] or b.hi[apart[0]] == a.lo[apart[0]])


def any_touch(boxes):
    """True where two boxes of the list together are a box."""
    return any(touch(a, b) for a, b in combinations(boxes, 2))


def chunked(items, count):
    """A list by torch.chunk's rule: ceil(n / count) each, the last ones shorter or empty."""
    size = max(1, math.ceil(len(items) / count))
    return [items[i * size : (i + 1) * size] for i in range(count)]


def strided(items, factor, count):
    """A list by `_StridedShard`'s rule: chunk i of every one of `factor` chunks."""
    rows = [chunked(part, count) for part in chunked(items, factor)]
    return [[x for row in rows for x in row[i]] for i in range(count)]


def split(items, placement, count, size):
    """The items of a dim that each of `count` ranks gets; the dim has `size` cells, of which these are a part."""
    match placement:
        case StridedShard(_, factor):
            return strided(items, factor, count)
        case Zigzag():
            chunks = chunked(items, 2 * count)
            return [chunks[i] + chunks[-1 - i] for i in range(count)]
        case Cyclic(_, block):
            return [[x for at, x in enumerate(items) if at // block % count == rank] for rank in range(count)]
        case Experts(_, ranks):
            each = len(items) // len(ranks)
            return [[x for at, x in enumerate(items) if rank in ranks[at // each]] for rank in range(count)]
        case Heads(_, heads):
            return by_heads(items, len(items) * heads // max(size, 1), count)
        case Fused(_, segments, heads):
            ends = np.cumsum(segments).tolist()
            parts = [items[end - n : end] for n, end in zip(segments, ends, strict=True)]
            each = heads or [None] * len(parts)
            cut = [by_heads(p, h, count) if h else chunked(p, count) for p, h in zip(parts, each, strict=True)]
            return [[x for segment in cut for x in segment[rank]] for rank in range(count)]
    return chunked(items, count)


def by_heads(items, heads, count):
    """The items of every rank: as many heads for each, or head `rank * heads // count` where there are fewer."""
    size, many = len(items) // max(heads, 1), max(heads // count, 1)
    first = [rank * heads // count for rank in range(count)]
    return [items[at * size : (at + many) * size] for at in first]


def on_mesh(whole, mesh, placements):
    """Every owner's one buffer: the dims split placement by placement, from left to right."""
    found = {}
    for place, owner in np.ndenumerate(mesh.ranks):
        lists = [list(range(size)) for size in whole.shape]
        for placement, count, at in zip(placements, mesh.shape, place, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                lists[dim] = split(lists[dim], placement, count, whole.shape[dim])[at]
        found[int(owner)] = [whole[np.ix_(*(np.array(one, dtype=int) for one in lists))] if lists else whole]
    return found


def numbered(shape):
    """An array whose cells are all different, and none is 0."""
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


def buffers(layout, whole):
    """Every owner's buffers, filled piece by piece as offsets and strides say; cells that no piece has are -1."""
    return {owner: _filled(layout, owner, whole) for owner in layout.owners()}


def _filled(layout, owner, whole):
    found = [np.full(math.prod(shape), -1, dtype=whole.dtype) for shape in layout.local_shapes(owner)]
    for piece in layout.pieces(owner):
        flat, shape = found[piece.buffer], piece.box.shape
        last = piece.offset + sum((n - 1) * s for n, s in zip(shape, piece.strides, strict=True))
        assert 0 <= piece.offset <= last < len(flat), f"{piece} of owner {owner} leaves its buffer"
        steps = [stride * flat.itemsize for stride in piece.strides]
        np.lib.stride_tricks.as_strided(flat[piece.offset :], shape, steps)[...] = whole[piece.box.slices]
    return [flat.reshape(shape) for flat, shape in zip(found, layout.local_shapes(owner), strict=True)]


def held(layout):
    """For every owner the cells that it holds, as a mask."""
    return {o: cover([p.box for p in layout.pieces(o)], layout.shape) > 0 for o in layout.owners()}


def missing(source, target):
    """For every target owner the cells that it wants and does not have, as a mask."""
    have, nothing = held(source), np.zeros(source.shape, dtype=np.bool_)
    return {owner: wants & ~have.get(owner, nothing) for owner, wants in held(target).items()}


def assert_same_buffers(found, expected):
    """Both have the same owners, and these the same buffers to the cell."""
    assert sorted(found) == sorted(expected)
    for owner, arrays in expected.items():
        assert len(found[owner]) == len(arrays), f"owner {owner} has {len(found[owner])} buffers, not {len(arrays)}"
        for ours, theirs in zip(found[owner], arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"owner {owner}", strict=True)


def as_boxes(boxes, ndim):
    """A list of boxes as the arrays that the library works on."""
    return Boxes.of(boxes, ndim)


def box_of(sides):
    """A box from its (lo, hi) on every axis."""
    return Box(tuple(lo for lo, _ in sides), tuple(hi for _, hi in sides))


def in_a_tree(combine, values):
    """The reduction of n values: of the first 2**k (the largest power of two below n), of the others, of both."""
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return combine(in_a_tree(combine, values[:half]), in_a_tree(combine, values[half:]))
