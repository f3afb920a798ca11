"""Hypothesis strategies for boxes inside a shape. (Those for layouts are public: `shardwise.testing.strategies`.)"""

from hypothesis import strategies as st
from oracle import box_of

from shardwise.geometry import Box


def full_shapes(max_dims=3, max_size=8):
    """Shapes that have at least one cell."""
    return st.lists(st.integers(1, max_size), max_size=max_dims).map(tuple)


@st.composite
def sides(draw, size, empty=False):
    """An interval inside `0:size`."""
    lo = draw(st.integers(0, size if empty else size - 1))
    return lo, draw(st.integers(lo if empty else lo + 1, size))


def boxes(shape, *, empty=False):
    """A box inside the shape; without cells only if `empty`."""
    return st.tuples(*(sides(size, empty) for size in shape)).map(box_of)


def box_lists(shape, *, empty=False, most=8):
    """Any boxes inside the shape, equal and overlapping ones among them."""
    return st.lists(boxes(shape, empty=empty), max_size=most)


@st.composite
def tilings(draw, shape, most=8):
    """Boxes that cover every cell of the shape exactly once: the whole, cut in two again and again."""
    found = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        wide = [axis for axis, size in enumerate(box.shape) if size > 1]
        found += halves(box, *draw(_places(box, wide))) if wide else [box]
    return draw(st.permutations(found))


@st.composite
def _places(draw, box, axes):
    axis = draw(st.sampled_from(axes))
    return axis, draw(st.integers(box.lo[axis] + 1, box.hi[axis] - 1))


def halves(box, axis, at):
    """The box cut in two."""
    below, above = list(box.hi), list(box.lo)
    below[axis] = above[axis] = at
    return [Box(box.lo, tuple(below)), Box(tuple(above), box.hi)]
