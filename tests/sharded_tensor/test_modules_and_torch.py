"""Modules that have ShardedTensors, and torch's own objects: taken everywhere, and given back."""

import io

import pytest
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
from familiar import BOTH, TORCH, check, columns, corners, grid, mine, numbers, part, placed, rows, same
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own
EITHER = pytest.mark.parametrize("kind", [ours, TORCH], ids=["ours", "torch"])  # whose objects are given to ours


# --- modules ---------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """It has a plain parameter, and room for a sharded tensor as an attribute."""

    def __init__(self, table=None, inner=None):
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(2))
        self.table = table
        if inner is not None:
            self.inner = inner


def hooked(module, api=ours):
    module._register_state_dict_hook(api.state_dict_hook)
    module._register_load_state_dict_pre_hook(api.pre_load_state_dict_hook, True)
    return module


def nested(*tables, api=ours):
    """Three modules, one inside the other."""
    first, second, third = tables or (None, None, None)
    return hooked(Part(first, Part(second, Part(third))), api)


SHARDED = ["table", "inner.table", "inner.inner.table"]
PLAIN = ["plain", "inner.plain", "inner.inner.plain"]


@BOTH
def test_sharded_tensors_of_submodules_go_into_state_dicts_and_back(ranks, api):  # noqa: F811
    def run(rank):
        tables = [api.full(rows(1, 0, api=api), (4, 3), float(number)) for number in range(3)]
        state = nested(*tables, api=api).state_dict()
        assert sorted(state) == sorted(SHARDED + PLAIN)
        assert all(state[key] is table for key, table in zip(SHARDED, tables, strict=True))
        other = nested(api=api)
        assert other.load_state_dict(state, strict=False).missing_keys == []
        found = (other.table, other.inner.table, other.inner.inner.table)
        assert all(got is table for got, table in zip(found, tables, strict=True))

    ranks(2, run)


def test_strict_loading_takes_sharded_tensors_and_still_finds_what_is_missing(ranks):  # noqa: F811
    def run(rank):
        torchs = TORCH.ones(columns(0, 1, api=TORCH), 4, 3)
        tables = [ours.ones(rows(1, 0), 4, 3), sw.ShardedTensor(torch.ones(3), "6/S0@2"), torchs]
        state = nested(*tables).state_dict()
        before, other = dict(state), nested()
        other.load_state_dict(state)
        found = (other.table, other.inner.table, other.inner.inner.table)
        assert all(got is table for got, table in zip(found, tables, strict=True))
        assert dict(state) == before  # as it was
        with pytest.raises(RuntimeError, match=r'Missing key.*"inner.plain"'):
            nested().load_state_dict({key: value for key, value in state.items() if key != "inner.plain"})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
            nested().load_state_dict({**state, "other": tables[0]})

    ranks(2, run)


def test_state_dicts_are_saved_resharded_and_loaded(ranks):  # noqa: F811
    def run(rank):
        whole, file = numbers(5, 3), io.BytesIO()
        torch.save(nested(*(ours.shard_tensor(whole + n, rows(0, 1)) for n in range(3))).state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=False)
        for key in SHARDED:
            state[key].reshard(columns(1, 0))
        other = nested()
        other.load_state_dict(state)
        check(other.inner.inner.table, whole + 2, columns(1, 0))

    ranks(2, run)


def test_keys_have_one_dot_wherever_the_hook_is(ranks):  # noqa: F811
    def run(rank):
        table, inner = ours.ones(rows(1, 0), 4, 3), hooked(Part(ours.ones(rows(0, 1), 4, 3)))
        state = nn.Sequential(inner).state_dict()
        assert sorted(state) == ["0.plain", "0.table"]
        other = nn.Sequential(hooked(Part()))
        other.load_state_dict(state)
        assert other[0].table is inner.table
        assert sorted(hooked(Part(table)).state_dict(prefix="model.")) == ["model.plain", "model.table"]

    ranks(2, run)


# --- torch's own objects ---------------------------------------------------------------------------------------------


def test_metadata_go_to_torch_and_back(ranks):  # noqa: F811
    properties = {"dtype": torch.bfloat16, "requires_grad": True}
    found = grid(6, 5, 3, 0, 2, 1, api=TORCH).build_metadata(torch.Size([6, 5]), TORCH.TensorProperties(**properties))
    mirrored = ours.ShardedTensorMetadata.of(found)
    expected = grid(6, 5, 3, 0, 2, 1).build_metadata(torch.Size([6, 5]), ours.TensorProperties(**properties))
    assert mirrored == expected
    assert mirrored.to_torch() == found
    assert isinstance(mirrored.to_torch(), TORCH.ShardedTensorMetadata)
    assert ours.ShardedTensorMetadata.of(mirrored) is mirrored
    assert mirrored.to_torch().shards_metadata[0] is not found.shards_metadata[0]


@pytest.mark.parametrize("width", [5, 12])
def test_tensors_go_to_torch_and_back_and_share_their_memory(ranks, width):  # noqa: F811
    def run(rank):
        whole = numbers(5, width)
        for spec in (rows(0, 1, 2, 3), columns(2, 1), rows(3, 0, 3, 1), grid(5, width, 3, 3, 0, 1), rows(1)):
            st = ours.shard_tensor(whole, spec)
            torchs = st.to_torch()
            assert isinstance(torchs, TORCH.ShardedTensor)
            back = ours.ShardedTensor.from_torch(torchs)
            for found in (torchs, back):
                assert tuple(found.size()) == (5, width)
                assert found.dtype == torch.float64
                pairs = zip(found.local_shards(), st.local_shards(), strict=True)
                assert all(a.tensor.data_ptr() == b.tensor.data_ptr() for a, b in pairs)
            assert sw.layout_of(torchs) == sw.layout_of(back) == st.layout
            back.reshard(columns(0, 1, 2, 3))
            check(back, whole, columns(0, 1, 2, 3))
            same(st.gather(None), whole)

    ranks(4, run)


def test_properties_and_groups_go_to_torch_and_back(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([2, 1])
        if rank == 0:
            return
        st = ours.ones(rows(2), 4, 3, dtype=torch.float16, requires_grad=True, process_group=group)
        torchs = st.to_torch()
        back = ours.ShardedTensor.from_torch(torchs)
        for found in (torchs, back):
            assert (found.dtype, found.requires_grad, len(found.local_shards())) == (torch.float16, True, rank - 1)
            assert found._process_group == group
        with torch.no_grad():
            check(back.reshard(rows(1, 2)), torch.ones(4, 3, dtype=torch.float16), rows(1, 2))

    ranks(3, run)


def test_what_torch_has_resharded_is_understood(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(8, 4)
        st = TORCH._shard_tensor(whole, rows(0, 1, api=TORCH)).reshard(columns(1, 0, api=TORCH))
        found = ours.ShardedTensor.from_torch(st)
        same(found.gather(None), whole)
        check(found.reshard(rows(1, 0, 1)), whole, rows(1, 0, 1))

    ranks(2, run)


@EITHER
def test_specs_shards_and_metadata_of_torch_are_taken_everywhere(ranks, kind):  # noqa: F811
    def run(rank):
        whole = numbers(6, 5)
        for spec in (rows(1, 0, api=kind), columns(0, 1, api=kind), grid(6, 5, 0, 1, 1, 0, api=kind)):
            check(ours.full(spec, (6, 5), 2.0), torch.full((6, 5), 2.0), spec)
            check(ours.shard_tensor(whole, spec), whole, spec)
            check(ours.ones(rows(0), 6, 5, dtype=torch.int8).reshard(spec), torch.ones(6, 5, dtype=torch.int8), spec)
            shards = mine(whole, spec, kind)
            made = ours.ShardedTensor._init_from_local_tensor([s.tensor for s in shards], spec, 6, 5)
            check(made, whole, spec)
            metadata = spec.build_metadata(whole.size(), kind.TensorProperties(dtype=torch.float64))
            given = ours.ShardedTensor.init_from_local_shards_and_global_metadata(shards, metadata, sharding_spec=spec)
            check(given, whole, spec)
            together = ours.init_from_local_shards(shards, 6, 5)
            assert corners(together.metadata().shards_metadata) == corners(metadata.shards_metadata)
            same(together.gather(None), whole)
            assert ours.EnumerableShardingSpec(metadata.shards_metadata).shards == given.metadata().shards_metadata

    ranks(2, run)


def test_shards_of_torch_become_ours(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(4, 3)
        theirs = mine(whole, rows(0, 1, api=TORCH), TORCH)
        expected = ours.init_from_local_shards(mine(whole, rows(0, 1)), 4, 3).metadata()
        assert ours.init_from_local_shards(theirs, 4, 3).metadata() == expected
        some = theirs if rank else mine(whole, rows(0, 1))
        assert ours.init_from_local_shards(some, 4, 3).metadata() == expected

    ranks(2, run)


@EITHER
def test_specs_are_targets_of_every_reshard(ranks, kind):  # noqa: F811
    def run(rank):
        whole = numbers(6, 5)
        local = whole[2 * rank : 2 * rank + 2]
        sources = [
            DTensor.from_local(local, init_device_mesh("cpu", (3,)), [Shard(0)], run_check=False),
            sw.ShardedTensor(local, "6x5/S0@3"),
            ours.shard_tensor(whole, rows(1, 2, 0)),
            TORCH._shard_tensor(whole, rows(0, 1, 2, api=TORCH)),
        ]
        for source in sources:
            name = sw.fingerprint(source)
            for spec in (columns(2, 1, api=kind), grid(6, 5, 0, 1, 1, 2, api=kind), rows(0, 1, 2, api=kind)):
                found = sw.reshard(source, spec, verify=True)
                assert (found is None) == (rank not in sw.layout_of(spec, (6, 5)))
                if found is not None:
                    assert type(found) is kind.ShardedTensor
                    check(found, whole, spec)
                assert sw.fingerprint(found) == name
                like = sw.reshard(source, found, verify=True) if len(sw.layout_of(spec, (6, 5)).owners()) == 3 else None
                assert like is None or type(like) is kind.ShardedTensor
            out = ours.zeros(rows(2, 1, 0), 6, 5, dtype=torch.float64)
            assert sw.reshard(source, out=out) is out
            check(out, whole, rows(2, 1, 0))

    ranks(3, run)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of FSDP's sharded state dicts
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_state_dicts_of_fsdp_are_resharded_and_loaded_again(ranks):  # noqa: F811
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    def run(rank):
        torch.manual_seed(7)  # the same on every rank
        plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        whole = {name: value.clone() for name, value in plain.state_dict().items()}
        model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
        how = ShardedStateDictConfig(_use_dtensor=False)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, how)
        state = model.state_dict()
        assert sorted(state) == sorted(whole)
        given = {}
        for name, value in state.items():
            st = ours.ShardedTensor.from_torch(value)
            same(st.gather(None), whole[name])
            by = st.sharding_spec()
            other = ours.ChunkShardingSpec(-1, placed(2, 0, 2))
            check(st.reshard(other), whole[name], other)
            for shard in st.local_shards():
                shard.tensor.mul_(2)
            check(st.reshard(by), 2 * whole[name], by)
            given[name] = st.to_torch()
        model.load_state_dict(given)
        for name, value in model.state_dict().items():
            same(ours.ShardedTensor.from_torch(value).gather(None), 2 * whole[name])

    ranks(3, run)


# --- workers of torch's RPC ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")  # torch's own, in starting its RPC
def test_placements_may_be_names_of_workers(ranks, tmp_path):  # noqa: F811
    def run(rank):
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc", _transports=["uv"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        whole, named = numbers(5, 4), ours.ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"])
        metadata = named.build_metadata(whole.size(), ours.TensorProperties()).shards_metadata
        st = ours.zeros(named, 5, 4, dtype=torch.float64)
        assert [s.metadata for s in st.local_shards()] == [metadata[1 - rank]]
        st.local_tensor().copy_(ours.narrow_tensor(whole, metadata[1 - rank]))
        same(st.gather(None), whole)
        check(st.reshard(columns(0, 1)), whole, columns(0, 1))
        assert st.reshard(named).sharding_spec() == named
        same(st.local_tensor(), part(whole, metadata[1 - rank]))
        check(ours.shard_tensor(whole, named).reshard(rows(0)), whole, rows(0))
        local = ours.Shard(part(whole, metadata[1 - rank]), metadata[1 - rank])
        found = ours.init_from_local_shards([local], 5, 4)
        assert found.sharding_spec() == named
        same(found.gather(None), whole)
        assert found.to(torch.int8).sharding_spec() == named
        assert str(found.to("meta").sharding_spec().placements) == "[worker1/meta, worker0/meta]"
        with pytest.raises(ValueError, match="Invalid worker name: nobody"):
            ours.zeros(ours.ChunkShardingSpec(0, ["nobody/cpu"]), 4)
        dist.barrier()
        rpc.shutdown()

    ranks(2, run)
