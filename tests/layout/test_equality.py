"""Layouts are values: equal where they mean the same, the same on every machine, and frozen."""

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import buffers, chunked, numbered

from shardwise import Layout, Mesh, Partial, Replicate, Shard, StridedShard, parse
from shardwise.testing import strategies


def assert_equal(*layouts):
    """All of them compare, hash and fingerprint as one."""
    assert len(set(layouts)) == len({layout.fingerprint for layout in layouts}) == 1, [str(x) for x in layouts]


def one_buffer_each(layout):
    """The layout as boxes, where every owner has one piece that fills its one buffer."""
    return Layout.boxes(layout.shape, [(o, p.box.lo, p.box.hi) for o in layout.owners() for p in layout.pieces(o)])


@given(strategies.shapes().filter(bool), st.integers(1, 6), st.data())
@settings(max_examples=50)
def test_chunk_split_boxes_and_mesh_agree(shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = [len(part) for part in chunked(range(shape[dim]), count)]
    at = [sum(sizes[:i]) for i in range(count + 1)]
    rows = [
        (o, (*(0,) * dim, at[o], *(0,) * (len(shape) - dim - 1)), (*shape[:dim], at[o + 1], *shape[dim + 1 :]))
        for o in range(count)
    ]
    assert_equal(
        Layout.chunk(shape, dim, count),
        Layout.chunk(shape, dim - len(shape), range(count)),
        Layout.split(shape, dim, sizes),
        Layout.boxes(shape, rows),
        Layout.boxes(shape, rows[::-1]),
        Layout.on_mesh(shape, (count,), [Shard(dim)]),
        Layout.on_mesh(shape, (count,), [StridedShard(dim, 1)]),
        Layout.on_mesh(shape, Mesh(x=count), {"x": f"S{dim}"}),
        Layout.on_mesh(shape, (1, count, 1), ["R", Shard(dim), Shard(dim)]),
        Layout.fused(shape, dim, [shape[dim]], count),
    )


@pytest.mark.parametrize(
    "layouts",
    [
        ("8x6/S0,S0@2x2", "8x6/S0@4"),
        ("8x6/S0,S1@2x2", "8x6/boxes=0:4,0:3+0:4,3:6+4:8,0:3+4:8,3:6@4"),
        ("8x6/S1,S0@2x2", "8x6/S0,S1@2x2:0,2,1,3"),
        ("8x6/S0:2,S0@2x2", "8x6/S0@4:0,2,1,3"),
        ("8x6/S0:2@2", "8x6/fused0=4,4@2", "8x6/cyclic0=2@2"),
        ("8x6/R@3", "8x6/R@3:2,0,1", "8x6/boxes=0:8,0:6+0:8,0:6+0:8,0:6@3", "8x6/R,R@1x3"),
        ("8x6/S0,R@2x2", "8x6/boxes=4:8,0:6+0:4,0:6+4:8,0:6+0:4,0:6@4:2,0,3,1"),
        ("8x6/cyclic0=8@3", "8x6/split0=8,0,0@3", "8x6/boxes=0:8,0:6+0:0,0:6+8:8,0:6@3"),
        ("5x0/S0@2", "5x0/split0=3,2@2", "5x0/boxes=0:3,0:0+3:5,0:0@2"),
        ("8/S0@2:5,5", "8/boxes=0:4+4:8@2:5,5"),
        ("9/S0@2", "9/flat=0-5,5-9@2", "9/split0=5,4@2"),
        ("scalar/R@2", "scalar/boxes=.+.@2", "scalar/R@2:1,0"),
        ("8x6/P@2", "8x6/Psum,R@2x1"),
        ("8x6/overlapping=0:4,0:6+4:8,0:6@2", "8x6/S0@2"),
        ("8x6/heads0=4@2", "8x6/S0@2", "8x6/fused0=8:4@2", "8x6/fused0=8:2@2"),
        ("8x6/heads0=2@4", "8x6/S0,R@2x2", "8x6/heads0=2,heads0=2@2x2", "8x6/S0,heads0=2@2x2"),
        ("8x6/heads0=2@4:3,1,0,2", "8x6/S0,R@2x2:1,3,2,0"),
        ("8x6/heads0=2,S0@4x8", "8x6/S0,R,S0@2x2x8", "8x6/heads0=2,S0@4x8:8-15,0-7,24-31,16-23"),
        ("8x6/fused0=4,4:2,2@4", "8x6/fused0=4,4,R@2x2"),
        ("8x6/fused0=4,4:4,2@4", "8x6/R,fused0=4,4:4,2@1x4", "8x6/fused0=4,0,4:4,1,2@4:0,1,2,3"),
        ("8x6/zigzag0@2", "8x6/R,zigzag0@1x2"),
        ("8x6/experts0=0,1,0,1@2", "8x6/cyclic0=2@2"),
        ("8x6/experts0=1+0,2+3@4", "8x6/S0,R@2x2"),
        ("8x6/experts0=0+1,1+2@3", "8x6/overlapping=0:4,0:6+0:8,0:6+4:8,0:6@3"),
        ("2/experts0=0+1,0+2,S0@3x3", "2/boxes=0:1+1:2+2:2+0:1+0:0+0:0+1:2+0:0+0:0@9"),
        ("8x6/zigzag0@1", "8x6/cyclic0=3@1", "8x6/R@1"),
        ("8x6/cyclic0=1,S1@2x2", "8x6/cyclic0=1,cyclic1=3@2x2"),
    ],
    ids=lambda layouts: layouts[0],
)
def test_texts_of_one_meaning_are_equal(layouts):
    assert_equal(*map(parse, layouts))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("8x6/S0@4", "8x6/S1@4"),
        ("8x6/S0@4", "8x6/S0@2"),
        ("8x6/S0@2:0,1", "8x6/S0@2:1,0"),
        ("8x6/P@2", "8x6/R@2"),
        ("8x6/P@2", "8x6/Pmax@2"),
        ("8x6/P@2", "8x6/P@2:1,0"),  # the order of the terms
        ("8x6/P,R@2x2", "8x6/P@4"),
        ("8x6/cyclic0=4@2", "8x6/boxes=0:4,0:6+4:8,0:6@2:1,0"),
        ("8x6/cyclic0=2@2", "8x6/boxes=0:2,0:6+4:6,0:6+2:4,0:6+6:8,0:6@4:0,0,1,1"),  # one buffer, two buffers
        ("8/S0@2:5,5", "8/boxes=4:8+0:4@2:5,5"),  # the order of the buffers
        ("8x6/S0@9", "8x6/S0@8"),  # an owner with nothing
        ("5x0/S0@2", "5x0/R@2"),
        ("8x0/S0@2", "9x0/S0@2"),
        ("4x2/flat=0-4,4-8@2", "4x2/S0@2"),  # a 1-d buffer is not a 2-d one
    ],
)
def test_texts_of_different_meaning_differ(one, other):
    assert parse(one) != parse(other)
    assert parse(one).fingerprint != parse(other).fingerprint


WHOLE_VALUES = [kind for kind in strategies.KINDS if kind != "partial"]


@given(st.sampled_from([(), (0,), (2,), (3,), (2, 2), (0, 2)]), st.data())
@settings(max_examples=120)
def test_layouts_are_equal_exactly_where_all_buffers_are(shape, data):
    one, other = (data.draw(strategies.layouts(shape, WHOLE_VALUES, max_owners=1 + len(shape))) for _ in range(2))
    mine, theirs = (spelled(buffers(layout, numbered(shape))) for layout in (one, other))
    assert (one == other) == (mine == theirs)


def spelled(shards):
    """Every buffer of every owner, as plain values."""
    return {owner: [(array.shape, array.tolist()) for array in arrays] for owner, arrays in shards.items()}


@given(strategies.layouts(kinds=["chunk", "split", "mesh", "replicated"]))
@settings(max_examples=50)
def test_layouts_of_one_box_per_owner_equal_the_list_of_their_boxes(layout):
    if all(len(layout.pieces(o)) == 1 for o in layout.owners()):
        assert_equal(layout, one_buffer_each(layout))


@given(strategies.layouts())
@settings(max_examples=50)
def test_pickles_come_back_equal(layout):
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_layout_equals_no_other_thing():
    assert Layout.replicated((2,), 1) != "2/R@1"
    assert Mesh(x=2) != (2,)


KNOWN = {
    "8x6/S0@4": "21d32fe8c7a49f0d2381896f2b1188fc",
    "8x6/S0:2,S0@2x2": "3bd83094ff3ecfbdd4bd499d62943d9f",
    "8x6/Pmax,R@fsdp=2,tp=2": "2e915e05d7a808be9096823d8e41ee58",
    "5x0/S0@2": "e4b4042971fb282cc0e2b0a95ee15660",
    "scalar/R@2:3,7": "a51ee063f8f2540483d3e3214db8afef",
    "8x6/flat=0-20,20-48@2": "a9805dc4d092d8ed6ed06bc59809f300",
    "8x6/boxes=0:4,0:6+4:8,0:2+4:8,2:6@3": "180bd3205ecb9f40dcc6810a71699fad",
    "8x6/overlapping=0:5,0:6+3:8,0:6@2": "f54ced2d7b2293076595a0705ddc51cc",
    "100x6/cyclic0=8@4": "ca6087455fe9eaa5b74e9f14ac939673",
}


def test_fingerprints_are_those_of_earlier_versions():
    assert {text: parse(text).fingerprint for text in KNOWN} == KNOWN


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_fingerprints_and_hashes_are_the_same_in_every_process(seed):
    script = "import sys; from shardwise import parse; print([hash(parse(t)) for t in sys.argv[1:]])"
    command = [sys.executable, "-c", script, *KNOWN]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert printed.strip() == str([hash(parse(text)) for text in KNOWN])


def test_layouts_are_frozen():
    layout = Layout.chunk((8, 6), 0, 4)
    with pytest.raises(AttributeError, match="frozen"):
        layout.shape = (6, 8)
    with pytest.raises(AttributeError, match="frozen"):
        del layout.shape


def test_placements_are_values():
    assert Shard(0) == Shard(0) != Shard(1)
    assert Partial() == Partial("sum") != Partial("max")
    assert len({Replicate(), Replicate(), StridedShard(0, 2), StridedShard(0, 2)}) == 2


@pytest.mark.parametrize(
    "name", ["8x6/S0@2", "8x6/S0@2:1,0", "8x6/S1@3", "7x5/S0,S1@2x2", "8x6/S0,S1@4x2:7,6,5,4,3,2,1,0"]
)
def test_boxes_that_are_the_chunks_of_some_dims_have_a_shorter_name(name):
    chunks = parse(name)
    boxes = [(owner, piece.box.lo, piece.box.hi) for owner in chunks.owners() for piece in chunks.pieces(owner)]
    assert str(Layout.boxes(chunks.shape, boxes).shortest()) == name


@pytest.mark.parametrize(
    "boxes",
    [
        [(0, (0, 0), (4, 6)), (0, (6, 0), (8, 6)), (1, (4, 0), (6, 6))],  # one owner has two
        [(0, (0, 0), (3, 6)), (1, (3, 0), (8, 6))],  # not where torch.chunk cuts
        [(0, (0, 0), (8, 3)), (1, (0, 3), (4, 6)), (2, (4, 3), (8, 6))],  # no grid
        [(0, (0, 0), (8, 6)), (1, (8, 0), (8, 6))],  # one has nothing
    ],
)
def test_other_boxes_keep_their_name(boxes):
    layout = Layout.boxes((8, 6), boxes)
    assert layout.shortest() is layout
