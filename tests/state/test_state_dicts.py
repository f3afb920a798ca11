"""reshard_state_dict: all tensors to what is asked for, in every way of asking; everything else keeps its place."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from devices import device_type
from models import Llama, all_same, dtensor, full, held, lies, meshes, numbers, same, sharded, state, weights
from nested import TORCH
from ranks import ranks  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own
WHOLE = numbers(8, 6)


def by_rows(api, *order):
    return api.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in order])


def checkpoint(row, square):
    """Something of every kind, nested."""
    spec = by_rows(ours, 3, 1, 0, 2)
    metadata = spec.build_metadata(torch.Size([8, 6]), ours.TensorProperties()).shards_metadata
    mine = [
        ours.Shard(ours.narrow_tensor(WHOLE, m).clone(), m) for m in metadata if m.placement.rank() == dist.get_rank()
    ]
    sharded_tensor = ours.init_from_local_shards(mine, 8, 6)
    return {
        "model": {
            "d": dtensor(WHOLE.clone(), row, Shard(0)),
            "s": dtensor(WHOLE.clone() + 1, square, Shard(0), Shard(1)),
            "o": held(WHOLE + 2, "8x6/S1@4"),
            "p": WHOLE + 3,
        },
        "lists": [sharded_tensor, {"t": sharded_tensor.to_torch()}, (torch.tensor(5.0), "text")],
        "step": 7,
        "betas": [0.9, 0.999],
        "empty": {},
        3: {"scalar": torch.tensor(3), "3": "three"},
    }


NAMES = ["model.d", "model.s", "model.o", "model.p", "lists.0", "lists.1.t", "lists.2.0", "3.scalar"]
VALUES = [WHOLE, WHOLE + 1, WHOLE + 2, WHOLE + 3, WHOLE, WHOLE, torch.tensor(5.0), torch.tensor(3)]


def leaves(found):
    return [
        *found["model"].values(),
        *(found["lists"][0], found["lists"][1]["t"], found["lists"][2][0], found[3]["scalar"]),
    ]


def rest_is_kept(found, given):
    assert list(found) == list(given)
    assert list(found["model"]) == list(given["model"])
    assert (found["step"], found["betas"], found["empty"]) == (7, [0.9, 0.999], {})
    assert (found["lists"][2][1], found[3]["3"]) == ("text", "three")
    assert type(found["lists"][2]) is tuple
    assert found["betas"] is given["betas"]


def asked(name, value):
    return "scalar/R@4" if not value.ndim else f"8x6/S{len(name) % 2}@4:2,3,0,1"


WAYS = [
    dict(zip(NAMES, map(asked, NAMES, VALUES), strict=True)),
    lambda name: asked(name, VALUES[NAMES.index(name)]),
    [(name, asked(name, value)) for name, value in zip(NAMES, VALUES, strict=True)] + [("*", "8x6/R@4")],
    {  # nested as the state dict is
        "model": {name[6:]: asked(name, value) for name, value in zip(NAMES[:4], VALUES[:4], strict=True)},
        **{name: asked(name, value) for name, value in zip(NAMES[4:7], VALUES[4:7], strict=True)},
        3: {"scalar": "scalar/R@4"},
    },
]


def test_every_way_of_asking(ranks):  # noqa: F811
    def run(rank):
        row, square = meshes()
        for to in WAYS:
            given = checkpoint(row, square)
            found = sw.reshard_state_dict(given, to)
            for name, one, value in zip(NAMES, leaves(found), VALUES, strict=True):
                lies(one, value, asked(name, value))
            rest_is_kept(found, given)
            for one, value in zip(leaves(given), VALUES, strict=True):  # which nobody has changed
                same(gathered(one), value)

    ranks(4, run)


def gathered(value):
    """The whole tensor, whatever it is."""
    if hasattr(value, "local_shards") and isinstance(value, torch.Tensor):
        value = ours.ShardedTensor.from_torch(value)
    return value.gather(None) if isinstance(value, sw.ShardedTensor) else full(value)


def test_placements_on_a_mesh_by_rules(ranks):  # noqa: F811
    by_row = [("*.d", "S1"), ("*.s", Shard(1)), ("*.o", sw.Shard(1)), ("*scalar", "R")]
    by_row += [("lists.2.*", [Replicate()]), ("*", [Shard(1)])]
    by_both = [("lists.2*", None), ("*scalar", ("R", "R")), ("model.*", ["S1", "S0"]), ("*", ["S1", "R"])]

    def run(rank):
        row, square = meshes()
        for options in {}, {"verify": True}, {"max_bytes": 100}, {"verify": True, "max_bytes": 64, "free": True}:
            found = sw.reshard_state_dict(checkpoint(row, square), by_row, mesh=row, **options)
            for name, one, value in zip(NAMES, leaves(found), VALUES, strict=True):
                assert type(one) is DTensor
                assert one.device_mesh is row
                assert one.placements == ((Replicate() if not value.ndim else Shard(1)),), name
                same(one.full_tensor(), value)
            found = sw.reshard_state_dict(checkpoint(row, square), by_both, mesh=square, **options)
            assert found["model"]["o"].placements == (Shard(1), Shard(0))
            assert found["lists"][0].placements == (Shard(1), Replicate())
            same(found["model"]["p"].full_tensor(), WHOLE + 3)

    ranks(4, run)


@pytest.mark.devices
def test_placements_by_the_names_of_the_axes(ranks):  # noqa: F811
    def run(rank):
        _, square = meshes()
        by_name = {"dp": "S1", "tp": "R"}
        assert sw.reshard(held(WHOLE, "8x6/S0@4"), (square, by_name)).placements == (Shard(1), Replicate())
        found = sw.reshard_state_dict({"w": held(WHOLE, "8x6/S0@4")}, [("*", by_name)], mesh=square)
        assert found["w"].placements == (Shard(1), Replicate())
        same(found["w"].full_tensor(), WHOLE)

    ranks(4, run)


def test_none_keeps_a_tensor_and_all_kinds_can_be_asked_for(ranks):  # noqa: F811
    def run(rank):
        row, square = meshes()
        given = checkpoint(row, square)
        to = {
            **dict.fromkeys(NAMES),
            "model.d": (square, [Replicate(), Shard(1)]),
            "model.s": by_rows(ours, 2, 1),
            "model.o": by_rows(TORCH, 0, 3),
            "model.p": sw.Layout.cyclic((8, 6), 0, 1, 4),
            "lists.0": WHOLE,  # a plain tensor: whole on all ranks
            "lists.1.t": given["model"]["o"],
        }
        found = sw.reshard_state_dict(given, to)
        lies(found["model"]["d"], WHOLE, "8x6/R,S1@2x2")
        assert found["model"]["d"].device_mesh is square
        assert (found["model"]["s"] is None) == (rank not in (1, 2))
        assert (found["model"]["o"] is None) == (rank not in (0, 3))
        if rank in (0, 3):
            assert type(found["model"]["o"]) is TORCH.ShardedTensor
            same(found["model"]["o"].local_shards()[0].tensor, (WHOLE + 2).chunk(2)[rank == 3])
        lies(found["model"]["p"], WHOLE + 3, to["model.p"])
        same(found["lists"][0], WHOLE)
        lies(found["lists"][1]["t"], WHOLE, "8x6/S1@4")
        assert found["lists"][2][0] is given["lists"][2][0]
        assert found[3]["scalar"] is given[3]["scalar"]

    ranks(4, run)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_model_to_look_like(ranks):  # noqa: F811
    def run(rank):
        source, target = sharded("fsdp", 1), sharded("both", 2)
        like = {**target.state_dict(), "step": 3, "other": {"values": [1]}}
        found = sw.reshard_state_dict(OrderedDict(source.state_dict(), step=5), like)
        assert found.pop("step") == 5
        for name, value in target.state_dict().items():
            assert (found[name].placements, found[name].device_mesh) == (value.placements, value.device_mesh)
        target.load_state_dict(found)
        all_same(weights(target), weights(Llama(1)))

    ranks(4, run)


@pytest.mark.devices
def test_floating_point_tensors_are_cast(ranks):  # noqa: F811
    def run(rank):
        given = {
            "w": held(WHOLE, "8x6/S0@4"),
            "i": held(WHOLE.long(), "8x6/S0@4"),
            "c": held(WHOLE.cfloat(), "8x6/S0@4"),
        }
        for options in {}, {"verify": True, "max_bytes": 64}:
            found = sw.reshard_state_dict(given, [("*", "8x6/S1@4")], dtype=torch.bfloat16, **options)
            lies(found["w"], WHOLE.bfloat16(), "8x6/S1@4")
            lies(found["i"], WHOLE.long(), "8x6/S1@4")
            lies(found["c"], WHOLE.cfloat(), "8x6/S1@4")

    ranks(4, run)


def test_ranks_without_a_state_dict_get_one(ranks):  # noqa: F811
    def run(rank):
        mesh, other = DeviceMesh(device_type(), [0, 1]), DeviceMesh(device_type(), [2, 3])
        given = None
        if rank < 2:
            given = {
                "a": {"w": dtensor(WHOLE.clone(), mesh, Shard(0)), "t": WHOLE + 1},
                "step": 3,
                "list": [1, {"x": ()}],
            }
        rules = [("*w", (other, "S1")), ("*", "8x6/S0@4")]
        found = sw.reshard_state_dict(given, rules)
        assert (list(found), found["step"], found["list"]) == (["a", "step", "list"], 3, [1, {"x": ()}])
        lies(found["a"]["w"], WHOLE, "8x6/S1@2:2,3")
        lies(found["a"]["t"], WHOLE + 1, "8x6/S0@4")
        after = sw.reshard_state_dict(found, lambda name: "8x6/R@1:3")
        lies(after["a"]["w"], WHOLE, "8x6/R@1:3")
        lies(after["a"]["t"], WHOLE + 1, "8x6/R@1:3")

    ranks(4, run)


@pytest.mark.devices
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_trainers_give_their_state_to_servers(ranks):  # noqa: F811
    def run(rank):
        trainers, mesh = sharded("fsdp", 1, [0, 1]), DeviceMesh(device_type(), [2, 3])
        rules = [("*norm.weight", "R"), ("*.o.weight", "S1"), ("*", "S0")]
        found = sw.reshard_state_dict(state(trainers), rules, mesh=mesh, free=True, max_bytes=4000)
        expected = weights(Llama(1))
        assert list(found) == list(expected)
        if rank < 2:
            assert set(found.values()) == {None}
        else:
            all_same({name: value.full_tensor() for name, value in found.items()}, expected)

    ranks(4, run)


@pytest.mark.devices
def test_in_a_sub_group(ranks):  # noqa: F811
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = rank // 2
        source, target = (sw.Layout.chunk((8, 6), dim, [2 * pair, 2 * pair + 1]) for dim in (0, 1))
        whole = WHOLE + pair
        given = {"w": held(whole, source, groups[pair]), "t": whole[0].clone(), "n": {"step": pair}}
        found = sw.reshard_state_dict(given, {"w": target, "t": None}, group=groups[pair], verify=True)
        lies(found["w"], whole, target)
        same(found["w"].gather(None), whole)
        assert found["t"] is given["t"]
        assert found["n"] == {"step": pair}
        plain = sw.reshard_state_dict(given, {"w": whole, "t": whole[0]}, group=groups[pair])
        same(plain["w"], whole)
        same(plain["t"], whole[0])

    ranks(4, run)


@pytest.mark.devices
def test_terms_are_added_up(ranks):  # noqa: F811
    def run(rank):
        row, _ = meshes()
        local = DTensor.from_local(WHOLE / 4, row, [Partial()], run_check=False)
        found = sw.reshard_state_dict({"w": local}, [("*", "S1")], mesh=row)
        same(found["w"].full_tensor(), WHOLE)

    ranks(4, run)


def test_a_rule_that_is_the_name_of_a_tensor_means_that_tensor(ranks):  # noqa: F811
    def run(rank):
        state = {name: sw.ShardedTensor(torch.zeros(2, 4), "4x4/S0@2") for name in ("a0", "a[0]")}
        found = sw.reshard_state_dict(state, [("a[0]", "4x4/R@2"), ("*", "4x4/S1@2")], dtype=[("a[0]", torch.float16)])
        return {name: (str(one.layout), one.dtype) for name, one in found.items()}

    for found in ranks(2, run):
        assert found == {"a0": ("4x4/S1@2", torch.float32), "a[0]": ("4x4/R@2", torch.float16)}
