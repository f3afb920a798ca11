"""ShardedTensors are tensors: what torch's own does on the CPU, ours does; what none can do is refused."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from familiar import BOTH, TORCH, columns, listed, rows
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


def filled(api=ours, order=(0, 1), shape=(6, 4), **how):
    """Rows, each shard with its own values."""
    st = api.zeros(rows(*order, api=api), *shape, **how)
    for at, shard in enumerate(st.local_shards()):
        with torch.no_grad():
            shard.tensor += 10 * dist.get_rank() + at + 1
    return st


def parts(st):
    return [shard.tensor.tolist() for shard in st.local_shards()]


@BOTH
def test_it_says_what_it_is_as_torchs_own_does(ranks, api):  # noqa: F811
    def run(rank):
        st = filled(api)
        assert torch.is_tensor(st)
        assert isinstance(st, torch.Tensor)
        assert (st.shape, st.size(), st.size(1), st.dim(), st.ndim) == ((6, 4), (6, 4), 4, 2, 2)
        assert (st.dtype, st.device, st.is_floating_point()) == (torch.float32, torch.device("cpu"), True)
        assert (st.is_meta, st.is_leaf, st.grad, st.grad_fn, st.requires_grad) == (False, True, None, None, False)
        assert st.is_contiguous()
        assert st.contiguous() is st
        assert hash(st) == id(st)
        assert not api.zeros(rows(0, 1, api=api), 2, dtype=torch.int8).is_floating_point()

    ranks(2, run)


def test_it_also_knows_its_bytes(ranks):  # noqa: F811
    def run(rank):
        st = filled()
        assert (st.numel(), st.element_size(), st.nbytes, st.stride(), st.is_complex()) == (24, 4, 96, (4, 1), False)
        assert f"{st}" == repr(st)

    ranks(2, run)


@BOTH
def test_values_are_copied_in_place_between_equal_layouts(ranks, api):  # noqa: F811
    def run(rank):
        st, other = filled(api), api.ones(rows(0, 1, api=api), 6, 4)
        assert st.copy_(other) is st
        assert parts(st) == parts(other)
        with pytest.raises(
            RuntimeError, match="inplace copy can only happen between two ShardedTensor with same metadata"
        ):
            st.copy_(api.ones(columns(0, 1, api=api), 6, 4))
        assert parts(st) == parts(other)

    ranks(2, run)


@BOTH
def test_copies_are_copies(ranks, api):  # noqa: F811
    def run(rank):
        st = filled(api, requires_grad=True)
        for copied in (st.clone(), torch.Tensor.clone(st), copy.deepcopy(st)):
            assert type(copied) is type(st)
            assert parts(copied) == parts(st)
            assert copied.local_tensor().data_ptr() != st.local_tensor().data_ptr()
            assert copied.requires_grad
        for shared in (st.detach(), torch.Tensor.detach(st)):
            assert shared.local_tensor().data_ptr() == st.local_tensor().data_ptr()
            assert not shared.requires_grad

    ranks(2, run)


@BOTH
def test_pickles_and_files_bring_it_back(ranks, api):  # noqa: F811
    def run(rank):
        st, file = filled(api), io.BytesIO()
        torch.save({"st": st}, file)
        file.seek(0)
        for back in (pickle.loads(pickle.dumps(st)), torch.load(file, weights_only=False)["st"]):
            assert type(back) is type(st)
            assert parts(back) == parts(st)
            assert back.metadata() == st.metadata()

    ranks(2, run)


@BOTH
def test_modules_have_it_as_a_parameter_and_a_buffer(ranks, api):  # noqa: F811
    def run(rank):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(filled(api))
        module.register_buffer("table", filled(api))
        assert [name for name, _ in module.named_parameters()] == ["weight"]
        assert module.weight.requires_grad
        assert module.weight.local_tensor().requires_grad
        state = module.state_dict()
        assert list(state) == ["weight", "table"]
        assert parts(state["weight"]) == parts(module.weight)
        assert not state["weight"].requires_grad

    ranks(2, run)


def test_such_modules_are_loaded_copied_and_cast(ranks):  # noqa: F811
    def run(rank):
        module, other = torch.nn.Module(), torch.nn.Module()
        for one, value in (module, 1.0), (other, 2.0):
            one.weight = torch.nn.Parameter(ours.full(rows(0, 1), (6, 4), value))
            one.register_buffer("table", sw.ShardedTensor(torch.full((3,), value), "6/S0@2"))
        module.load_state_dict(other.state_dict())
        assert (parts(module.weight), module.table.shards[0].tolist()) == (parts(other.weight), [2.0] * 3)
        loaded = pickle.loads(pickle.dumps(module))
        assert [name for name, _ in loaded.named_parameters()] == ["weight"]
        assert isinstance(loaded.weight, torch.nn.Parameter)
        assert parts(loaded.weight) == parts(module.weight)
        again = copy.deepcopy(module).half()
        assert isinstance(again.weight, torch.nn.Parameter)
        assert (again.weight.dtype, again.table.dtype, again.weight.requires_grad) == (
            torch.float16,
            torch.float16,
            True,
        )
        again.to(torch.float64)
        assert (again.weight.dtype, again.table.dtype) == (torch.float64, torch.float64)
        (module.weight.local_tensor() * 3).sum().backward()
        assert parts(module.weight.grad) == [[[3.0] * 4] * 3]
        module.zero_grad()
        assert module.weight.grad is None

    ranks(2, run)


def test_likenesses_lie_in_the_same_way(ranks):  # noqa: F811
    def run(rank):
        for x in (filled(order=(1, 0, 1)), sw.ShardedTensor(torch.ones(3), "6/S0@2"), sw.ShardedTensor([], "2/R@1:5")):
            for found in (torch.zeros_like(x, dtype=torch.int16), torch.empty_like(x, dtype=torch.int16)):
                assert type(found) is type(x)
                assert found.layout == x.layout
                assert all(shard.dtype == torch.int16 for shard in found.shards)
            assert all(not shard.any() for shard in torch.zeros_like(x).shards)

    ranks(2, run)


def test_equal_means_the_same_values_on_every_rank(ranks):  # noqa: F811
    def run(rank):
        st = filled()
        other = st.clone()
        assert torch.equal(st, other)
        assert torch.allclose(st, other)
        if rank == 1:
            other.local_tensor()[0, 0] += 1e-6
        assert not torch.equal(st, other)
        assert torch.allclose(st, other)
        assert not torch.equal(st, ours.zeros(columns(0, 1), 6, 4))
        with pytest.raises(TypeError, match=r"Both arguments to torch\.equal need to be of type ShardedTensor"):
            torch.equal(st, torch.zeros(6, 4) if rank else other)
        with pytest.raises(TypeError, match=r"Both arguments to torch\.allclose need to be of type ShardedTensor"):
            torch.allclose(torch.zeros(6, 4) if rank else st, other)
        partial = sw.ShardedTensor(torch.ones(2), "2/Psum@2")
        with pytest.raises(ValueError, match="partial"):
            torch.equal(partial, partial.clone())
        assert torch.equal(sw.ShardedTensor([], "2/R@1:5"), sw.ShardedTensor([], "2/R@1:5"))

    ranks(2, run)


def test_gradients_are_set_as_they_lie():
    x = sw.ShardedTensor(torch.ones(2), "2/Psum@2").requires_grad_()
    x.grad = sw.ShardedTensor(torch.full((2,), 3.0), "2/R@2")
    assert x.local_tensor().grad.tolist() == [3.0, 3.0]
    assert x.grad.layout == sw.parse("2/R@2")
    with pytest.raises(sw.UnsupportedError, match=r"grad: .* same metadata"):
        x.grad = x.detach()
    x.grad = None
    assert x.grad is None


def test_arguments_may_be_named():
    x = sw.ShardedTensor(torch.ones(2), "2/R@1")
    assert torch.zeros_like(input=x).local_tensor().tolist() == [0.0, 0.0]


def test_equal_needs_no_process_group():
    x = sw.ShardedTensor(torch.ones(2), "2/R@1")
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, torch.zeros_like(x))


OPERATIONS = {
    "add": lambda x: x + 1,
    "relu": lambda x: torch.nn.functional.relu(x),
    "__getitem__": lambda x: x[0],
    "__len__": len,
    "__eq__": lambda x: x == x,
    "__bool__": bool,
    "T": lambda x: x.T,
    "data": lambda x: x.data,
    "numpy": lambda x: x.numpy(),
    "__array__": np.asarray,
    "sum": lambda x: x.sum(),
    "cat": lambda x: torch.cat([x, x]),
    "tolist": lambda x: x.tolist(),
    "add_": lambda x: torch.zeros(2, 3).add_(x),
    "untyped_storage": lambda x: x.untyped_storage(),
    "ones_like": torch.ones_like,
    "randn_like": torch.randn_like,
    "gather": lambda x: torch.gather(x, 0, torch.zeros(1, 1, dtype=torch.int64)),
    "mul_": lambda x: x.mul_(2),
    "fill_": lambda x: x.fill_(2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_computed_with_memory_that_is_not_there(name):
    x = sw.ShardedTensor(torch.ones(2, 3), "2x3/R@1")
    with pytest.raises(sw.UnsupportedError, match=f"torch function '{name}' is not supported for ShardedTensor!"):
        OPERATIONS[name](x)
    assert x.local_tensor().tolist() == [[1.0] * 3] * 2


def test_operations_of_the_dispatcher_are_refused_as_well():
    x = sw.ShardedTensor(torch.ones(2, 3), "2x3/R@1")
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(sw.UnsupportedError, match="not supported"):
        torch.add(x, 1)


def test_a_rank_that_holds_nothing_does_not_invent_a_dtype():
    nothing = sw.ShardedTensor([], "2x6/S0@1:3")
    assert (nothing.dtype, nothing.numel(), nothing.is_leaf, nothing.is_meta) == (None, 12, True, False)
    for asked in (nothing.is_floating_point, nothing.element_size, lambda: nothing.nbytes):
        with pytest.raises(sw.UnsupportedError, match="holds no shard, and so does not know the dtype"):
            asked()


def test_a_whole_replica_is_copied_into_a_plain_tensor_and_a_part_is_not():
    whole = sw.ShardedTensor(torch.ones(2, 3), "2x3/R@2")
    assert torch.zeros(2, 3).copy_(whole).tolist() == [[1.0] * 3] * 2
    part = sw.ShardedTensor(torch.ones(1, 3), "2x3/S0@2")
    with pytest.raises(sw.UnsupportedError, match=r"does not hold the whole of .*: gather it"):
        torch.zeros(1, 3).copy_(part)
    with pytest.raises(sw.UnsupportedError, match="Give a ShardedTensor of the layout"):
        part.copy_(torch.zeros(1, 3))


def test_strided_shards_become_contiguous():
    x = sw.ShardedTensor(torch.arange(6).reshape(3, 2).T, "2x3/R@1")
    assert not x.is_contiguous()
    assert x.contiguous().is_contiguous()
    assert x.contiguous().local_tensor().tolist() == x.local_tensor().tolist()


def torchs_objects():
    st = TORCH.zeros(rows(0, api=TORCH), 4, 2)
    return {
        "ShardedTensor": st,
        "Shard": st.local_shards()[0],
        "ShardMetadata": st.local_shards()[0].metadata,
        "ShardedTensorMetadata": st.metadata(),
        "TensorProperties": st.metadata().tensor_properties,
        "ChunkShardingSpec": st.sharding_spec(),
        "EnumerableShardingSpec": listed(((0, 0), (4, 2), 0), api=TORCH),
        "DevicePlacementSpec": TORCH.DevicePlacementSpec("rank:0/cpu"),
    }


BASES = {
    "ShardedTensor": {"ShardedTensorBase"},
    "ChunkShardingSpec": {"ShardingSpec"},
    "EnumerableShardingSpec": {"ShardingSpec"},
    "DevicePlacementSpec": {"PlacementSpec"},
}


def test_isinstance_knows_torchs_own_objects_and_no_others(ranks):  # noqa: F811
    def run(rank):
        classes = {name: getattr(ours, name) for name in dir(ours) if isinstance(getattr(ours, name), type)}
        for name, one in torchs_objects().items():
            assert {known for known, cls in classes.items() if isinstance(one, cls)} == {name, *BASES.get(name, ())}
            assert not isinstance(one, sw.ShardedTensor)  # it has no .shards, and another .layout
        for other in (torch.zeros(2), None, "rank:0/cpu", sw.parse("2/R@1")):
            assert not any(isinstance(other, cls) for cls in classes.values())

    ranks(1, run)


def test_subclasses_of_users_stay_their_own(ranks):  # noqa: F811
    class Shard(ours.Shard):
        pass

    def run(rank):
        assert not isinstance(torchs_objects()["Shard"], Shard)

    ranks(1, run)


def test_a_loop_over_an_fsdp_state_dict_finds_every_sharded_tensor(ranks):  # noqa: F811
    def run(rank):
        spec = rows(0, 1, api=TORCH)
        state = {"torchs": TORCH.ones(spec, 4, 2), "ours": ours.ones(spec, 4, 2), "plain": torch.ones(2), "step": 3}
        found = {name: len(v.local_shards()) for name, v in state.items() if isinstance(v, ours.ShardedTensor)}
        assert found == {"torchs": 1, "ours": 1}

    ranks(2, run)


@pytest.mark.parametrize("name", ["ShardMetadata", "TensorProperties", "ShardedTensorMetadata"])
def test_what_isinstance_knows_is_still_converted(name):
    torchs = {
        "ShardMetadata": TORCH.ShardMetadata([0], [2], "rank:0/cpu"),
        "TensorProperties": TORCH.TensorProperties(),
        "ShardedTensorMetadata": TORCH.ShardedTensorMetadata(),
    }[name]
    assert type(getattr(ours, name).of(torchs)) is getattr(ours, name)
