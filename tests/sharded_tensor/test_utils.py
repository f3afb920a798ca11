"""The checks of shards and metadata, held against torch's own where torch has the case."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from torch.distributed._shard.sharded_tensor import utils as torchs

from shardwise import sharded_tensor as ours

BOTH = pytest.mark.parametrize("api", [ours, torchs], ids=["ours", "torch"])


def remote(text):
    return torch.distributed._remote_device(text)


def gathered(*listed, size=(0, 0), **properties):
    """Metadata of every rank: lists of (offsets, sizes), or None."""
    return [
        None
        if boxes is None
        else ours.ShardedTensorMetadata(
            [ours.ShardMetadata(lo, shape, f"rank:{rank}/cpu") for lo, shape in boxes],
            torch.Size(size),
            ours.TensorProperties(**properties),
        )
        for rank, boxes in enumerate(listed)
    ]


def corners(metadata):
    return [(m.shard_offsets, m.shard_sizes) for m in metadata.shards_metadata]


# --- placements ------------------------------------------------------------------------------------------------------


def test_ranks_are_looked_for_in_the_group(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([0, 2])
        found = []
        for api in (ours, torchs):
            if rank != 1:
                assert api._parse_and_validate_remote_device(group, remote("rank:2/cpu")) == (2, torch.device("cpu"))
                with pytest.raises(ValueError, match=r"Global rank 1 does not exist in input process group: \[0, 2\]"):
                    api._parse_and_validate_remote_device(group, remote("rank:1/cpu"))
            found.append(api._parse_and_validate_remote_device(dist.group.WORLD, remote("rank:1/cuda:0")))
        return found

    assert ranks(3, run) == [[(1, torch.device("cuda:0"))] * 2] * 3


@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")  # torch's own, in starting its RPC
def test_workers_are_found_through_rpc(ranks, tmp_path):  # noqa: F811
    def run(rank):
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc", _transports=["uv"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        group = dist.group.WORLD
        found = [api._parse_and_validate_remote_device(group, remote("worker1/cpu")) for api in (ours, torchs)]
        with pytest.raises(ValueError, match=r"Invalid worker name: nobody; there are \['worker0', 'worker1'\]"):
            ours._parse_and_validate_remote_device(None, remote("nobody/cpu"))
        rpc.shutdown()
        return found

    assert ranks(2, run) == [[(1, torch.device("cpu"))] * 2] * 2


@BOTH
def test_without_rpc_there_are_no_workers(api):
    with pytest.raises(RuntimeError, match="RPC framework needs to be initialized for using worker names: worker1"):
        api._parse_and_validate_remote_device(None if api is ours else dist.group.WORLD, remote("worker1/cpu"))
    with pytest.raises(ValueError, match="remote device is None"):
        api._parse_and_validate_remote_device(None, None)


# --- small checks ----------------------------------------------------------------------------------------------------


@BOTH
def test_the_gathering_rank_gives_the_room(api):
    api._validate_output_tensor_for_gather(0, 0, torch.Size([2, 3]), torch.zeros(2, 3))
    api._validate_output_tensor_for_gather(1, 0, torch.Size([2, 3]), None)
    with pytest.raises(ValueError, match="must be specified on destination rank 0"):
        api._validate_output_tensor_for_gather(0, 0, torch.Size([2, 3]), None)
    with pytest.raises(ValueError, match=r"have size \(3, 2\),.*should be \(2, 3\)"):
        api._validate_output_tensor_for_gather(0, 0, torch.Size([2, 3]), torch.zeros(3, 2))


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.zeros(1), torch.zeros(0), torch.ones(())])
def test_other_ranks_give_none_whatever_it_holds(tensor):
    with pytest.raises(ValueError, match="must NOT be specified on non-destination ranks"):
        ours._validate_output_tensor_for_gather(1, 0, torch.Size([2, 3]), tensor)


@BOTH
@pytest.mark.parametrize("size", [(2, 3), ([2, 3],), ((2, 3),), (torch.Size([2, 3]),)])
def test_sizes_are_numbers_or_one_sequence(api, size):
    assert api._flatten_tensor_size(size) == torch.Size([2, 3])


@BOTH
@pytest.mark.parametrize("size", [(2.0, 3), ("2", 3), ([2, [3]],), (None,)])
def test_other_sizes_are_refused(api, size):
    with pytest.raises(TypeError):
        api._flatten_tensor_size(size)


def test_numpy_numbers_are_sizes_and_truth_values_are_not():
    assert ours._flatten_tensor_size((np.int64(2), np.int32(3))) == torch.Size([2, 3])
    assert ours._flatten_tensor_size(()) == torch.Size([])
    with pytest.raises(TypeError, match=r"found: \[True, 3\]"):
        ours._flatten_tensor_size((True, 3))


@BOTH
def test_mismatches_name_property_ranks_expected_and_found(api):
    api._raise_if_mismatch(1, 1, "dtype", 0)
    api._raise_if_mismatch(1, 1, "dtype", [0, 1], is_local=False)
    with pytest.raises(ValueError, match=r"tensor dtype property need to be the same on rank:3! .*dtype=a.*dtype=b"):
        api._raise_if_mismatch("a", "b", "dtype", 3)
    with pytest.raises(ValueError, match=r"dtype=a on rank:1, and dtype=b on rank:4"):
        api._raise_if_mismatch("a", "b", "dtype", [1, 4], is_local=False)


# --- metadata of one rank --------------------------------------------------------------------------------------------


def shard(tensor, offsets, rank=0):
    return ours.Shard.from_tensor_and_offsets(tensor, offsets, rank)


@BOTH
def test_local_shards_become_metadata(api):
    shards = [shard(torch.zeros(2, 3), [0, 0]), shard(torch.zeros(2, 3), [4, 0])]
    found = api.build_metadata_from_local_shards(shards, torch.Size([6, 3]), 0, dist.GroupMember.NON_GROUP_MEMBER)
    assert corners(found) == [([0, 0], [2, 3]), ([4, 0], [2, 3])]
    assert (tuple(found.size), found.tensor_properties.dtype) == ((6, 3), torch.float32)


@BOTH
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda: shard(torch.zeros(2, 3, dtype=torch.int8), [2, 0]), "dtype"),
        (lambda: shard(torch.zeros(2, 3, requires_grad=True), [2, 0]), "requires_grad"),
        (lambda: shard(torch.zeros(2, 3), [2, 0], rank=1), "rank does not match"),
        (
            lambda: ours.Shard(torch.zeros(2, 3).to_sparse(), ours.ShardMetadata([2, 0], [2, 3], "rank:0/cpu")),
            "strided",
        ),
    ],
)
def test_local_shards_that_do_not_fit_together_are_refused(api, second, words):
    shards = [shard(torch.zeros(2, 3), [0, 0]), second()]
    with pytest.raises(ValueError, match=words):
        api.build_metadata_from_local_shards(shards, torch.Size([4, 3]), 0, dist.GroupMember.NON_GROUP_MEMBER)


def test_views_may_be_shards():
    local = torch.zeros(2, 6)[:, ::2]
    found = ours.build_metadata_from_local_shards([shard(local, [0, 0])], (2, 3), 0, None)
    assert corners(found) == [([0, 0], [2, 3])]


# --- metadata of all ranks -------------------------------------------------------------------------------------------


@BOTH
def test_all_ranks_metadata_become_one(api):
    listed = gathered([([0, 0], [2, 3])], None, [([4, 0], [2, 3]), ([2, 0], [2, 3])], size=(6, 3))
    before = corners(listed[0])
    found = api.build_global_metadata(listed)
    assert corners(found) == [([0, 0], [2, 3]), ([4, 0], [2, 3]), ([2, 0], [2, 3])]
    assert corners(listed[0]) == before  # what was given stays as it is


@BOTH
@pytest.mark.parametrize(
    ("name", "values"),
    [("dtype", (torch.int8, torch.int16)), ("requires_grad", (True, False)), ("pin_memory", (True, False))],
)
def test_properties_must_agree_across_ranks(api, name, values):
    first, second = (gathered(None, [([0], [2])], None, [([2], [2])], size=(4,), **{name: value}) for value in values)
    with pytest.raises(ValueError, match=rf"{name}={values[0]} on rank:1, and {name}={values[1]} on rank:3"):
        api.build_global_metadata([*first[:2], *second[2:]])


@BOTH
def test_sizes_must_agree_and_be_covered(api):
    with pytest.raises(ValueError, match="global_size"):
        api.build_global_metadata([*gathered([([0], [2])], size=(4,)), *gathered([([2], [2])], size=(5,))])
    with pytest.raises(ValueError, match="overlap"):
        api.build_global_metadata(gathered([([0], [2])], [([1], [2])], size=(4,)))
    with pytest.raises(ValueError, match="do not cover the entire tensor"):
        api.build_global_metadata(gathered([([0], [2])], size=(4,)))
    with pytest.raises(ValueError, match="no local shards on all ranks"):
        api.build_global_metadata([None, None])


@BOTH
def test_offsets_are_calculated_by_rank(api):
    found = api.build_global_metadata(gathered([([0, 0], [2, 3])], [([0, 0], [4, 3])]), recalc_metadata=True)
    assert corners(found) == [([0, 0], [2, 3]), ([2, 0], [4, 3])]
    assert tuple(found.size) == (6, 3)


def test_offsets_are_right_for_any_order_dim_and_number_of_shards():
    listed = gathered([([0, 0], [4, 1])], [([0, 0], [4, 2]), ([9, 9], [4, 3])], [([0, 0], [4, 0])])
    metadata = ours.build_global_metadata(listed, recalc_metadata=True, sharded_dim=-1)
    assert corners(metadata) == [([0, 0], [4, 1]), ([0, 1], [4, 2]), ([0, 3], [4, 3]), ([0, 6], [4, 0])]
    assert tuple(metadata.size) == (4, 6)
    metadata.shards_metadata.reverse()  # in whatever order they are listed
    ours.recalc_global_sharded_tensor_metadata(metadata, 1)
    placed = {str(m.placement): [] for m in metadata.shards_metadata}
    for m in metadata.shards_metadata:
        placed[str(m.placement)].append(m.shard_offsets[1])
    assert placed == {"rank:0/cpu": [0], "rank:1/cpu": [1, 4], "rank:2/cpu": [6]}
    ours.validate_non_overlapping_shards_metadata(metadata.shards_metadata)


def test_shards_without_ranks_cannot_be_put_in_order():
    metadata = ours.ShardedTensorMetadata([ours.ShardMetadata([0], [2])], torch.Size([2]))
    with pytest.raises(ValueError, match="does not say where it lives"):
        ours.recalc_global_sharded_tensor_metadata(metadata, 0)
    with pytest.raises(ValueError, match="Invalid sharding dim: 1"):
        ours.recalc_global_sharded_tensor_metadata(metadata, 1)
