"""DTensors from any placements to any others, on real ranks. The judges: torch's redistribute, and the whole tensor."""

from itertools import product
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import device_type
from dtensors import PLACEMENTS, assert_lies, dtensor, layout_on, local_of, numbers, torch_can
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw

WITH_OPS = (*PLACEMENTS, Partial("avg"), Partial("max"), Partial("min"))
NESTED = [  # dim 0 split by several axes, from left to right and from right to left
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(0, split_factor=3), Shard(0)),
    (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)),
    (_StridedShard(0, split_factor=2), Replicate()),
    (Partial(), _StridedShard(1, split_factor=3)),
]


def check_move(whole, mesh, source, target, *, ask_torch):
    """One move, held against the whole tensor, and against torch's where it can make the move."""
    x = dtensor(whole, mesh, source)
    found = sw.reshard(x, (mesh, target))
    assert_lies(found, whole, mesh, target)
    if ask_torch and torch_can(source, target):
        theirs = x.redistribute(mesh, target)
        assert found.placements == theirs.placements
        if not any(p.is_partial() for p in target):  # terms are ours to choose
            np.testing.assert_array_equal(found.to_local().numpy(), theirs.to_local().numpy(), strict=True)


def check_moves(ranks, mesh_shape, cases, *, ask_every=1):  # noqa: F811
    """All these moves (shape, source, target) in one run of the ranks. torch is slow: it may be asked less often."""

    def run(rank):
        mesh = init_device_mesh(device_type(), mesh_shape)
        for number, (shape, source, target) in enumerate(cases):
            check_move(numbers(shape), mesh, source, target, ask_torch=number % ask_every == 0)
        return len(cases)

    n = int(np.prod(mesh_shape))
    assert ranks(n, run) == [len(cases)] * n


@pytest.mark.devices
@pytest.mark.parametrize("n", [2, 3])
def test_every_pair_of_placements_on_one_axis_gives_what_torch_gives(ranks, n):  # noqa: F811
    shapes = [(5, 7), (7, 3, 4), (1, 2), (0, 3), (4, 0)]  # uneven, fewer rows than ranks, and no cells at all
    cases = [(s, (a,), (b,)) for s in shapes[:1] for a, b in product(WITH_OPS, repeat=2)]
    cases += [(s, (a,), (b,)) for s in shapes[1:] for a, b in product(PLACEMENTS, repeat=2)]
    check_moves(ranks, (n,), cases)


def test_every_pair_of_placements_on_two_axes_gives_what_torch_gives(ranks):  # noqa: F811
    both = list(product(PLACEMENTS, repeat=2))
    check_moves(ranks, (2, 2), [((5, 7), a, b) for a, b in product(both, repeat=2)], ask_every=2)


def test_a_sample_of_placements_on_axes_of_different_sizes_gives_what_torch_gives(ranks):  # noqa: F811
    both, draw = list(product(PLACEMENTS, repeat=2)), Random(2)
    check_moves(ranks, (2, 3), [((7, 3, 4), draw.choice(both), draw.choice(both)) for _ in range(60)], ask_every=3)


@pytest.mark.devices
def test_small_and_empty_tensors_move_on_two_axes(ranks):  # noqa: F811
    both, draw = list(product(PLACEMENTS, repeat=2)), Random(1)
    shapes = [(1, 1), (3, 2), (0, 3), (4, 0), (1, 0, 5)]
    check_moves(ranks, (2, 3), [(draw.choice(shapes), draw.choice(both), draw.choice(both)) for _ in range(40)])


@pytest.mark.devices
def test_nested_and_strided_shards_move_to_all_others_and_back(ranks):  # noqa: F811
    plain = [(Replicate(), Replicate()), (Shard(1), Shard(0)), (Partial(), Shard(0))]
    pairs = [*product(NESTED, plain), *product(plain, NESTED), *product(NESTED, repeat=2)]
    check_moves(ranks, (2, 2), [((13, 5), a, b) for a, b in pairs])


def test_nested_and_strided_shards_move_between_axes_of_different_sizes(ranks):  # noqa: F811
    check_moves(ranks, (2, 3), [((4, 3, 2), a, b) for a, b in product(NESTED, repeat=2)])


def test_a_sample_of_all_placements_moves_on_three_axes(ranks):  # noqa: F811
    draw, words = Random(3), [*PLACEMENTS, Shard(0), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    threes, shapes = list(product(words, repeat=3)), [(5, 7), (7, 3, 4), (13, 2), (1, 3)]
    cases = [(draw.choice(shapes), draw.choice(threes), draw.choice(threes)) for _ in range(24)]
    cases += [((13, 7), (Shard(0), Shard(0), Shard(0)), (Shard(1), Shard(1), Shard(1)))]
    cases += [((13, 7), (Partial(), Partial(), Partial()), (Shard(0), Shard(1), Shard(0)))]
    check_moves(ranks, (2, 2, 2), cases)


# --- from mesh to mesh ------------------------------------------------------------------------------------------------

MESHES = {  # of a world of six: disjoint, overlapping, inside each other, and not in the order of the ranks
    "0-3": ([0, 1, 2, 3], [(Shard(0),), (Partial(),)]),
    "4-5": ([4, 5], [(Shard(1),), (Replicate(),)]),
    "2-5": ([[2, 3], [4, 5]], [(Shard(0), Shard(1)), (Partial(), Shard(0))]),
    "mixed": ([3, 0, 5], [(Shard(0),)]),
    "turned": ([[0, 2], [1, 4]], [(_StridedShard(0, split_factor=2), Shard(0))]),
    "all": ([[0, 1, 2], [3, 4, 5]], [(Shard(1), Shard(0)), (Replicate(), Partial())]),
    "one": ([3], [(Replicate(),)]),
}


def meshes():
    """All of these, made by every rank in one order."""
    return {name: DeviceMesh(device_type(), torch.tensor(places)) for name, (places, _) in MESHES.items()}


def calls(source, target):
    """True on ranks that call: those of the mesh where the tensor stays on it, else all."""
    return source.get_coordinate() is not None or source != target


@pytest.mark.devices
def test_tensors_move_between_meshes_of_other_ranks_and_sizes(ranks):  # noqa: F811
    draw = Random(5)
    cases = [(a, b, draw.choice(MESHES[a][1]), draw.choice(MESHES[b][1])) for a, b in product(MESHES, repeat=2)]

    def run(rank):
        known, whole = meshes(), numbers((7, 5))
        for a, b, there, back in cases:
            if calls(known[a], known[b]):
                found = sw.reshard(dtensor(whole, known[a], there), (known[b], back))
                assert_lies(found, whole, known[b], back)
        return len(cases)

    assert ranks(6, run) == [49] * 6


def test_a_tensor_without_cells_still_becomes_a_dtensor_on_every_rank_of_another_mesh(ranks):  # noqa: F811
    def run(rank):
        known, whole = meshes(), numbers((0, 5))
        found = sw.reshard(dtensor(whole, known["0-3"], [Shard(1)]), (known["4-5"], [Shard(1)]))
        assert_lies(found, whole, known["4-5"], [Shard(1)])
        return None if found is None else tuple(found.to_local().shape)

    assert ranks(6, run) == [None] * 4 + [(0, 3), (0, 2)]


def test_what_the_source_is_may_change_from_call_to_call(ranks):  # noqa: F811
    """Ranks without the source take it to be what it was the last time, and are told otherwise."""
    shapes, dtypes = [(7, 5), (7, 5), (2, 3, 5), (7, 5)], [torch.float64, torch.int16]

    def run(rank):
        known, count = meshes(), 0
        for dtype, shape, placements in product(dtypes, shapes, [[Shard(0)], [Replicate()]]):
            whole = numbers(shape).to(dtype)
            found = sw.reshard(dtensor(whole, known["0-3"], placements), (known["4-5"], [Shard(0)]))
            assert_lies(found, whole, known["4-5"], [Shard(0)])
            count += 1
        return count

    assert ranks(6, run) == [16] * 6


@pytest.mark.devices
def test_several_moves_between_meshes_may_be_under_way(ranks):  # noqa: F811
    ways = [("0-3", "4-5", (Shard(1),)), ("4-5", "2-5", (Shard(0), Shard(1))), ("2-5", "0-3", (Partial(),))]

    def run(rank):
        known = meshes()
        wholes = [numbers((9, 4)) * n for n in range(1, 7)]
        handles = [
            (sw.reshard(dtensor(w, known[a], MESHES[a][1][0]), (known[b], to), async_op=True), w, b, to)
            for w, (a, b, to) in zip(wholes, ways * 2, strict=True)
        ]
        for handle, whole, b, to in reversed(handles):
            assert_lies(handle.wait(), whole, known[b], to)
            assert handle.done()
        return len(handles)

    assert ranks(6, run, timeout=20) == [6] * 6


# --- how a target is asked for ----------------------------------------------------------------------------------------


def test_placements_are_words_ours_or_torchs(ranks):  # noqa: F811
    one = [
        (Shard(1), ["S1", ["S1"], ("S(1)",), [sw.Shard(-1)], Shard(1), [Shard(-1)], {"tp": "S1"}]),
        (Replicate(), ["R", ["R"], [sw.Replicate()], Replicate(), [Replicate()], {}]),
        (Partial(), ["P", ["P"], [sw.Partial()], Partial(), "Psum", ["P(sum)"]]),
        (Partial("max"), ["Pmax", [sw.Partial("max")], [Partial("max")]]),
        (_StridedShard(0, split_factor=2), ["S0:2", [sw.StridedShard(0, 2)], [sw.StridedShard(-2, 2)]]),
    ]
    two = [
        ((Shard(0), Shard(1)), ["S0,S1", ["S0", Shard(-1)], (sw.Shard(-2), "S1"), {"tp": "S1", "dp": Shard(0)}]),
        ((Shard(0), Replicate()), ["S0,R", ["S0", sw.Replicate()], {"dp": "S0"}, [Shard(-2), "R"]]),
        ((Partial(), Shard(0)), ["P,S0", [Partial(), sw.Shard(0)], {"tp": "S0", "dp": "P"}]),
    ]

    def run(rank):
        whole, count = numbers((7, 5)), 0
        line = init_device_mesh(device_type(), (4,), mesh_dim_names=("tp",))
        square = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        for mesh, table in (line, [((p,), asked) for p, asked in one]), (square, two):
            for placements, asked in table:
                for words in asked:
                    found = sw.reshard(dtensor(whole, line, [Shard(0)]), (mesh, words))
                    assert_lies(found, whole, mesh, placements)
                    count += 1
        return count

    assert ranks(4, run) == [36] * 4


def test_the_order_in_which_axes_split_a_dim_is_kept(ranks):  # noqa: F811
    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (2, 2)), numbers((8, 3))
        order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)  # the second axis first
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
        lies = layout_on(mesh, (_StridedShard(0, split_factor=2), Shard(0)), (8, 3))
        x = DTensor(local_of(whole, lies).clone(), spec, requires_grad=True)
        y = sw.reshard(x, (mesh, "R,R"))
        assert torch.equal(y.to_local(), whole)
        assert torch.equal(sw.reshard(dtensor(whole, mesh, (Shard(1), Shard(0))), x).full_tensor(), whole)
        (gradient,) = torch.autograd.grad((y * y).sum(), x)  # torch's own detach, as in x.grad, would lose the order
        return torch.equal(gradient.full_tensor(), 2 * whole)

    assert ranks(4, run) == [True] * 4


@pytest.mark.devices
def test_another_dtensor_says_what_the_result_looks_like(ranks):  # noqa: F811
    def run(rank):
        whole, count = numbers((7, 5)), 0
        line, square = init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
        for mesh, placements in (line, [Shard(1)]), (square, NESTED[1]), (square, [Partial(), Shard(0)]):
            model = dtensor(torch.zeros_like(whole), mesh, placements)
            assert_lies(sw.reshard(dtensor(whole, line, [Shard(0)]), model), whole, mesh, placements)
            assert_lies(sw.reshard(dtensor(whole, square, NESTED[0]), to=model), whole, mesh, placements)
            count += 2
        return count

    assert ranks(4, run) == [6] * 4


# --- only the ranks of the mesh call ----------------------------------------------------------------------------------


def test_a_slice_of_a_mesh_moves_its_own_tensors_while_other_slices_move_theirs(ranks):  # noqa: F811
    def run(rank):
        world = init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        count = 0
        for name in ("tp", "pp"):
            whole = numbers((5, 3)) + 100 * (rank - world[name].get_local_rank() * world[name].mesh.diff().item())
            for there, back in product(PLACEMENTS[1:], repeat=2):
                found = sw.reshard(dtensor(whole, world[name], [there]), (world[name], [back]))
                assert_lies(found, whole, world[name], [back])
                count += 1
        return count

    assert ranks(8, run) == [18] * 8


def test_slices_of_two_axes_move_at_once_and_one_after_the_other_though_their_ranks_overlap(ranks):  # noqa: F811
    pairs = [((Shard(0), Shard(1)), (Shard(1), Shard(1))), ((Partial(), Shard(0)), (Replicate(), Replicate()))]

    def run(rank):
        world = init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        count = 0
        for names in [("dp", "tp"), ("pp", "tp"), ("pp", "dp"), ("dp", "tp")]:
            mesh = world[names]
            whole = numbers((5, 7)) + 1000 * int(mesh.mesh.min())  # every slice has values of its own
            for there, back in pairs:
                assert_lies(sw.reshard(dtensor(whole, mesh, there), (mesh, back)), whole, mesh, back)
                count += 1
        return count

    assert ranks(8, run) == [8] * 8


def test_only_the_ranks_of_a_mesh_call_while_the_others_do_something_else(ranks):  # noqa: F811
    def run(rank):
        square, line = DeviceMesh(device_type(), [[1, 2], [4, 5]]), DeviceMesh(device_type(), [2, 1, 5])
        whole, found, group = numbers((7, 5)), [], dist.new_group([1, 2, 4, 5])
        if square.get_coordinate() is not None:
            x = dtensor(whole, square, [Shard(0), Shard(0)])
            found = [sw.reshard(x, (square, "S1,R")), sw.reshard(x, (line, "S0"), group=group)]
            assert_lies(found[0], whole, square, [Shard(1), Replicate()])
            assert_lies(found[1], whole, line, [Shard(0)])
        return [None if y is None else tuple(y.to_local().shape) for y in found]

    assert ranks(6, run) == [[], [(7, 3), (3, 5)], [(7, 3), (3, 5)], [], [(7, 2), None], [(7, 2), (1, 5)]]


# --- sources of every make --------------------------------------------------------------------------------------------


def test_the_layout_of_a_dtensor_is_where_its_cells_are(ranks):  # noqa: F811
    def run(rank):
        mesh = DeviceMesh(device_type(), [[0, 2], [1, 3]])
        made = [(dtensor(numbers((7, 5)), mesh, p), p) for p in [*NESTED, *product(PLACEMENTS, repeat=2)]]
        assert all(sw.layout_of(x) == layout_on(mesh, p, (7, 5)) for x, p in made)
        return len(made)

    assert ranks(4, run) == [22] * 4


@pytest.mark.devices
def test_views_parameters_and_other_dtypes_move_too(ranks):  # noqa: F811
    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (4,)), numbers((7, 5))
        x = dtensor(whole, mesh, [Shard(0)])
        assert_lies(sw.reshard(x.t(), (mesh, "S0")), whole.t().contiguous(), mesh, [Shard(0)])
        assert_lies(sw.reshard(torch.nn.Parameter(x), (mesh, "R")).detach(), whole, mesh, [Replicate()])
        for dtype in torch.bfloat16, torch.uint8, torch.bool, torch.complex64:
            found = sw.reshard(x.to(dtype), (mesh, "S1"))
            assert_lies(found.to(torch.complex128), whole.to(dtype).to(torch.complex128), mesh, [Shard(1)])
            assert found.dtype == dtype
        scalar = torch.tensor(3.0, dtype=torch.float64)
        for there, back in product([Replicate(), Partial(), Partial("avg")], repeat=2):
            assert_lies(sw.reshard(dtensor(scalar, mesh, [there]), (mesh, [back])), scalar, mesh, [back])
        return True

    assert ranks(4, run) == [True] * 4


def test_the_result_is_an_ordinary_dtensor(ranks):  # noqa: F811
    """torch computes with it, redistributes it, and gathers it."""

    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (2, 2)), numbers((7, 5))
        found = sw.reshard(dtensor(whole, mesh, [Partial(), Shard(0)]), (mesh, [Shard(1), Shard(0)]))
        assert isinstance(found, DTensor)
        doubled = (found + dtensor(whole, mesh, [Shard(1), Shard(0)])).full_tensor()
        np.testing.assert_array_equal(doubled.numpy(), 2 * whole.numpy(), strict=True)
        again = found.redistribute(mesh, [Replicate(), Shard(1)])
        assert_lies(again, whole, mesh, [Replicate(), Shard(1)])
        return True

    assert ranks(4, run) == [True] * 4
