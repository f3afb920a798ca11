"""Layouts on meshes mean what DTensor means: torch is the judge, by its arithmetic and by real scattered tensors."""

import importlib
import random
from itertools import product
from math import prod

import numpy as np
import pytest
from oracle import assert_same_buffers, buffers, numbered
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name

from shardwise import Layout, Mesh, Partial, Replicate, Shard, StridedShard
from shardwise.notation import OPERATIONS


@pytest.fixture(scope="module")
def torch():
    return importlib.import_module("torch.distributed.tensor") and importlib.import_module("torch")  # before any fork


def drawn(seed, count, meshes):
    """Cases (shape, mesh, placements): shards of one dim or several, nested, strided, uneven, empty, and replicas."""
    draw = random.Random(seed)
    for _ in range(count):
        mesh = draw.choice(meshes)
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 8, 12, 13]) for _ in range(draw.randint(1, 3)))
        yield shape, mesh, [_placement(draw, len(shape)) for _ in mesh]


def _placement(draw, ndim):
    dim = draw.choice([0, draw.randrange(ndim)])  # dim 0 more often: nesting is where the rules are
    return draw.choice([Shard(dim), Shard(dim), StridedShard(dim, draw.randint(1, 4)), Replicate()])


MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (3, 2, 2), (2, 1, 3)]
CASES = list(drawn(seed=1, count=400, meshes=MESHES))


def as_torch(torch, placement):
    """The same placement in torch's words."""
    from torch.distributed.tensor import placement_types as torchs

    match placement:
        case Shard(dim):
            return torchs.Shard(dim)
        case StridedShard(dim, factor):
            return torchs._StridedShard(dim, split_factor=factor)
        case Partial(op):
            return torchs.Partial(op)
    return torchs.Replicate()


def split_by_torch(torch, whole, mesh, placements):
    """Every coordinate's local tensor, split placement by placement with torch's own `_split_tensor`."""
    found = {}
    for coordinate in product(*map(range, mesh)):
        local = torch.from_numpy(whole)
        for placement, size, at in zip(placements, mesh, coordinate, strict=True):
            if not isinstance(placement, Replicate):
                parts, _ = as_torch(torch, placement)._split_tensor(local, size, with_padding=False)
                local = parts[at]
        found[int(np.ravel_multi_index(coordinate, mesh))] = [local.numpy()]
    return found


def test_local_tensors_are_what_torchs_placements_split(torch):
    for shape, mesh, placements in CASES:
        layout = Layout.on_mesh(shape, mesh, placements)
        expected = split_by_torch(torch, numbered(shape), mesh, placements)
        assert_same_buffers(buffers(layout, numbered(shape)), expected)


def test_local_shapes_and_offsets_are_what_torch_computes(torch):
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for shape, mesh, placements in CASES:
        layout = Layout.on_mesh(shape, mesh, placements)
        theirs = [as_torch(torch, p) for p in placements]
        for owner, coordinate in enumerate(product(*map(range, mesh))):
            local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), theirs)
            assert layout.local_shape(owner) == tuple(local), (shape, mesh, placements, coordinate)
            if prod(local):  # torch puts empty shards at the end; we have no piece for them
                assert layout.pieces(owner)[0].box.lo == tuple(offset), (shape, mesh, placements, coordinate)
            else:
                assert layout.pieces(owner) == ()


def test_torchs_own_placements_mean_the_same(torch):
    for shape, mesh, placements in CASES[:100]:
        theirs = [as_torch(torch, p) for p in placements]
        assert Layout.on_mesh(shape, mesh, theirs) == Layout.on_mesh(shape, mesh, placements)


def test_torchs_words_for_placements_are_read(torch):
    for shape, mesh, placements in CASES[:100]:
        words = [str(as_torch(torch, p)) for p in placements]
        assert Layout.on_mesh(shape, mesh, words) == Layout.on_mesh(shape, mesh, placements)


@pytest.mark.parametrize("op", OPERATIONS)
def test_partial_layouts_have_terms_on_the_axes_that_torch_calls_partial(torch, op):
    theirs = [as_torch(torch, p) for p in (Shard(0), Partial(op), Replicate())]
    layout = Layout.on_mesh((5, 3), Mesh(a=2, b=3, c=2), theirs)
    assert (layout.op, layout.terms) == (op, 3)
    assert layout.owners() == tuple(range(12))
    assert [layout.pieces(o)[0].box.lo[0] for o in range(12)] == [0] * 6 + [3] * 6


def test_a_mesh_of_any_ranks_places_shards_by_coordinate(torch):
    for shape, mesh, placements in CASES[:60]:
        order = random.Random(prod(mesh)).sample(range(100), prod(mesh))
        layout = Layout.on_mesh(shape, Mesh.of(mesh, ranks=order), placements)
        expected = split_by_torch(torch, numbered(shape), mesh, placements)
        assert_same_buffers(
            buffers(layout, numbered(shape)), {order[place]: arrays for place, arrays in expected.items()}
        )


@pytest.mark.parametrize(("mesh", "order"), [((4,), [0, 1, 2, 3]), ((2, 2), [0, 1, 2, 3]), ((2, 2), [3, 1, 0, 2])])
def test_real_dtensors_lie_where_the_layout_says(torch, ranks, mesh, order):  # noqa: F811
    cases = list(drawn(seed=sum(mesh) + order[0], count=40, meshes=[mesh]))

    def scattered(rank):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import distribute_tensor

        devices = DeviceMesh("cpu", torch.tensor(order).reshape(mesh))
        found = []
        for shape, _, placements in cases:
            strided = any(isinstance(p, StridedShard) for p in placements)
            # torch scatters neither strided shards of different sizes nor to ranks that do not rise
            source = None if strided or order != sorted(order) else 0
            theirs = [as_torch(torch, p) for p in placements]
            whole = torch.from_numpy(numbered(shape) + (0 if source is None or rank == 0 else 1000))
            found.append(distribute_tensor(whole, devices, theirs, src_data_rank=source).to_local().numpy())
        return found

    locals_of = ranks(4, scattered)
    for n, (shape, _, placements) in enumerate(cases):
        layout = Layout.on_mesh(shape, Mesh.of(mesh, ranks=order), placements)
        expected = {rank: [locals_of[rank][n]] for rank in range(4)}
        assert_same_buffers(buffers(layout, numbered(shape)), expected)
