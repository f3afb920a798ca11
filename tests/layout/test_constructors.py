"""Every constructor against its definition, written a second time here with plain indexing."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, chunked, held, numbered, on_mesh
from rectangles import box_lists

from shardwise import Box, Layout, LayoutError, Mesh
from shardwise.testing import strategies

LARGE = [2**63 - 1, 0, 2**40, 7, 2**62]
owner_lists = st.lists(st.integers(0, 12) | st.sampled_from(LARGE), min_size=1, max_size=6, unique=True)
with_dims = strategies.shapes().filter(bool)


@st.composite
def cases(draw, owners=owner_lists):
    """A shape, one of its dims (from the front or from the back), and owners in any order."""
    shape = draw(with_dims)
    return shape, draw(st.integers(-len(shape), len(shape) - 1)), draw(owners)


@st.composite
def adding_up(draw, total, count):
    """As many sizes, zeros among them, that add up to the total."""
    at = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in zip([0, *at], [*at, total], strict=True)]


def rows(shape, dim, indices):
    """The cells at these indices along dim."""
    return numbered(shape).take(indices, axis=dim)


def assert_holds(layout, expected):
    """Every owner's buffers, read through its pieces, are these."""
    assert_same_buffers(buffers(layout, numbered(layout.shape)), expected)
    assert layout.owners() == tuple(sorted(expected))


@given(cases())
@settings(max_examples=50)
def test_chunk_is_torchs_chunk(case):
    shape, dim, owners = case
    parts = chunked(range(shape[dim]), len(owners))
    expected = {o: [rows(shape, dim, part)] for o, part in zip(owners, parts, strict=True)}
    assert_holds(Layout.chunk(shape, dim, owners), expected)


@given(cases(st.lists(st.integers(0, 3), min_size=1, max_size=7)))
@settings(max_examples=50)
def test_an_owner_named_several_times_has_as_many_buffers(case):
    shape, dim, owners = case
    expected = {o: [] for o in owners}
    for owner, part in zip(owners, chunked(range(shape[dim]), len(owners)), strict=True):
        expected[owner].append(rows(shape, dim, part))
    assert_holds(Layout.chunk(shape, dim, owners), expected)


@given(cases(), st.data())
@settings(max_examples=50)
def test_split_is_numpys_split(case, data):
    shape, dim, owners = case
    sizes = data.draw(adding_up(shape[dim], len(owners)))
    parts = np.split(numbered(shape), np.cumsum(sizes)[:-1], axis=dim)
    expected = {o: [part] for o, part in zip(owners, parts, strict=True)}
    assert_holds(Layout.split(shape, dim, sizes, owners), expected)


def test_split_counts_owners_by_its_sizes():
    layout = Layout.split((10, 6), 0, [3, 0, 7])
    assert layout.owners() == (0, 1, 2)
    assert [layout.local_shape(o) for o in layout.owners()] == [(3, 6), (0, 6), (7, 6)]


@given(cases(), st.integers(1, 4))
@settings(max_examples=50)
def test_cyclic_deals_out_blocks_in_turn(case, block):
    shape, dim, owners = case
    turn = [i // block % len(owners) for i in range(shape[dim])]
    expected = {o: [rows(shape, dim, [i for i, t in enumerate(turn) if t == n])] for n, o in enumerate(owners)}
    assert_holds(Layout.cyclic(shape, dim, block, owners), expected)


@given(cases())
@settings(max_examples=50)
def test_zigzag_pairs_chunks_from_both_ends(case):
    shape, dim, owners = case
    chunks = chunked(range(shape[dim]), 2 * len(owners))
    expected = {o: [rows(shape, dim, [*chunks[n], *chunks[-1 - n]])] for n, o in enumerate(owners)}
    assert_holds(Layout.zigzag(shape, dim, owners), expected)


def test_ulysses_splits_the_sequence_outside_and_heads_inside():
    outside, inside = Layout.ulysses((12, 8, 5), 0, 1, owners=[3, 4])
    assert (outside, inside) == (Layout.chunk((12, 8, 5), 0, [3, 4]), Layout.chunk((12, 8, 5), 1, [3, 4]))
    _, inside = Layout.ulysses((12, 40), 0, -1, 4, count=2)  # fewer kv heads than ranks
    assert inside == Layout.on_mesh((12, 40), (2, 2), ["S1", "R"])


@given(cases(), st.data())
@settings(max_examples=50)
def test_every_expert_is_on_its_owners(case, data):
    shape, dim, owners = case
    holders = st.lists(st.sampled_from(owners), min_size=1, unique=True)
    experts = data.draw(st.lists(holders, min_size=max(shape[dim], 1), max_size=max(shape[dim], 1)))
    held_by = {o: [e for e, at in enumerate(experts[: shape[dim]]) if o in at] for at in experts for o in at}
    expected = {owner: [rows(shape, dim, numbers)] for owner, numbers in held_by.items()}
    assert_holds(Layout.experts(shape, dim, experts).validate(), expected)


def test_experts_on_one_owner_each_are_a_plain_list():
    assert Layout.experts((4, 6), 0, [2, 0, 2, 5]) == Layout.experts((4, 6), 0, [[2], [0], [2], [5]])
    assert Layout.experts((8, 6), 0, [1, 0]) == Layout.chunk((8, 6), 0, [1, 0])  # experts of four rows


@given(strategies.layouts(kinds=["mesh"]))
@settings(max_examples=150)
def test_placements_split_dims_from_left_to_right(layout):
    said = layout.spelling
    mesh = Mesh.of(said.mesh, ranks=said.owners)
    assert_holds(layout.validate(), on_mesh(numbered(layout.shape), mesh, mesh.placements(said.items)))


@given(cases(), st.data())
@settings(max_examples=50)
def test_fused_splits_every_segment_over_all_owners(case, data):
    shape, dim, owners = case
    segments = data.draw(adding_up(shape[dim], data.draw(st.integers(1, 3))))
    ends = np.cumsum(segments).tolist()
    parts = [chunked(range(end - n, end), len(owners)) for n, end in zip(segments, ends, strict=True)]
    expected = {o: [rows(shape, dim, [i for p in parts for i in p[n]])] for n, o in enumerate(owners)}
    assert_holds(Layout.fused(shape, dim, segments, owners), expected)


@given(strategies.shapes(), st.lists(st.sampled_from([0, 1, 5, LARGE[0]]), min_size=1, max_size=5), st.data())
@settings(max_examples=50)
def test_flat_ranges_are_slices_of_the_flattened_tensor(shape, owners, data):
    cells, expected, ranges = math.prod(shape), {o: [] for o in owners}, []
    for owner in owners:
        start, stop = sorted(data.draw(st.tuples(st.integers(0, cells), st.integers(0, cells))))
        ranges.append((owner, start, stop))
        expected[owner].append(numbered(shape).reshape(-1)[start:stop])
    assert_holds(Layout.flat(shape, ranges), expected)


@given(strategies.shapes(), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.booleans(), st.data())
@settings(max_examples=50)
def test_boxes_are_buffers_of_their_owners_in_the_given_order(shape, owners, columns, data):
    count = len(owners)
    found = data.draw(st.lists(box_lists(shape, empty=True).filter(bool).map(min_box), min_size=count, max_size=count))
    expected = {o: [] for o in owners}
    for owner, box in zip(owners, found, strict=True):
        expected[owner].append(numbered(shape)[(*box.slices, ...)])
    pieces = [(owner, box.lo, box.hi) for owner, box in zip(owners, found, strict=True)]
    if columns:
        corner = [np.array([p[n] for p in pieces], dtype=int).reshape(count, len(shape)) for n in (1, 2)]
        pieces = (np.array(owners), *corner)
    assert_holds(Layout.boxes(shape, pieces), expected)


def min_box(found):
    return min(found, key=lambda box: box.volume)


@given(strategies.shapes(), owner_lists)
@settings(max_examples=50)
def test_replicated_gives_everybody_everything(shape, owners):
    assert_holds(Layout.replicated(shape, owners), {o: [numbered(shape)] for o in owners})


@given(strategies.shapes(), st.integers(1, 6))
@settings(max_examples=50)
def test_a_number_of_owners_counts_from_zero(shape, count):
    assert (
        Layout.replicated(shape, count)
        == Layout.replicated(shape, range(count))
        == Layout.replicated(shape, np.arange(count))
    )


@given(strategies.layouts(), st.data())
@settings(max_examples=80)
def test_owners_of_a_box_are_those_that_hold_one_of_its_cells(layout, data):
    box = data.draw(box_lists(layout.shape, empty=True, most=1))
    for asked in box:
        expected = [o for o, mask in held(layout).items() if mask[(*asked.slices, ...)].any()]
        assert layout.owners(asked) == tuple(expected)


@given(strategies.layouts())
@settings(max_examples=50)
def test_local_shape_is_the_shape_of_the_only_buffer(layout):
    for owner in layout.owners():
        shapes = layout.local_shapes(owner)
        if len(shapes) == 1:
            assert layout.local_shape(owner) == shapes[0]
        else:
            with pytest.raises(LayoutError, match=f"owner {owner} has {len(shapes)} buffers.*local_shapes"):
                layout.local_shape(owner)


@given(strategies.layouts(), st.permutations(range(13)), st.integers(0, 50))
@settings(max_examples=50)
def test_a_relabelled_layout_has_the_same_buffers_under_other_names(layout, order, above):
    names = {owner: order[i % 13] + 13 * (i // 13) + above for i, owner in enumerate(layout.owners())}
    whole = numbered(layout.shape)
    renamed = {names[owner]: arrays for owner, arrays in buffers(layout, whole).items()}
    assert_same_buffers(buffers(layout.relabel(names), whole), renamed)


def test_relabelling_some_owners_keeps_the_others():
    layout = Layout.chunk((8, 6), 0, [4, 5, 6]).relabel({5: 9})
    assert layout == Layout.chunk((8, 6), 0, [4, 9, 6])


def test_tensors_without_dims_are_one_cell():
    for layout in (
        Layout.replicated((), 2),
        Layout.boxes((), [(0, (), ()), (1, (), ())]),
        Layout.on_mesh((), (2,), ["R"]),
        Layout.flat((), [(0, 0, 1), (1, 0, 1)]),
    ):
        assert [layout.pieces(o)[0].box for o in (0, 1)] == [Box((), ())] * 2
        assert layout.owners(Box((), ())) == (0, 1)
        layout.validate()


def test_meshes_have_names_ranks_and_hosts():
    mesh = Mesh(fsdp=2, tp=3, ranks=np.array([[5, 4, 3], [2, 1, 0]]), hosts=3)
    assert (mesh.names, mesh.shape) == (("fsdp", "tp"), (2, 3))
    assert mesh.ranks.tolist() == [[5, 4, 3], [2, 1, 0]]
    assert mesh.hosts == {5: 0, 4: 0, 3: 0, 2: 1, 1: 1, 0: 1}
    assert mesh == Mesh(fsdp=2, tp=3, ranks=[5, 4, 3, 2, 1, 0], hosts=[0, 0, 0, 1, 1, 1])
    assert mesh != Mesh(fsdp=2, tp=3)
    assert len({mesh, Mesh(fsdp=2, tp=3, ranks=mesh.ranks, hosts=3)}) == 1


def test_placements_are_given_by_axis_name_by_text_or_in_order():
    mesh = Mesh(fsdp=4, tp=2)
    expected = Layout.on_mesh((8, 6), mesh, ["S0", "R"])
    assert expected == Layout.on_mesh((8, 6), mesh, {"fsdp": "S0"})
    assert expected == Layout.on_mesh((8, 6), mesh, "S(0), R")
    assert expected == Layout.on_mesh((8, 6), {"fsdp": 4, "tp": 2}, ("S-2", "R"))
    assert expected == Layout.on_mesh((8, 6), (4, 2), ["S0", "R"])


def test_arrays_that_a_layout_was_made_from_may_change_afterwards():
    owners, lo, hi = np.array([3, 4]), np.array([[0], [4]]), np.array([[4], [8]])
    layouts = [Layout.chunk((8,), 0, owners), Layout.boxes((8,), (owners, lo, hi))]
    mesh = Mesh(x=2, ranks=owners)
    owners += 1
    lo += 1
    assert [str(layout) for layout in layouts] == ["8/S0@2:3,4", "8/boxes=0:4+4:8@2:3,4"]
    assert mesh == Mesh(x=2, ranks=[3, 4])
