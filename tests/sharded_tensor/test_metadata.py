"""Metadata and shards, held against torch's own where torch has the case."""

import pickle

import pytest
import torch
from torch.distributed._shard import metadata as torchs
from torch.distributed._shard.sharded_tensor import metadata as torchs_tensor
from torch.distributed._shard.sharded_tensor import shard as torchs_shard

from shardwise import sharded_tensor as ours

BOTH = pytest.mark.parametrize("metadata", [ours.ShardMetadata, torchs.ShardMetadata], ids=["ours", "torch"])
SHARDS = pytest.mark.parametrize("shard", [ours.Shard, torchs_shard.Shard], ids=["ours", "torch"])
PROPERTIES = pytest.mark.parametrize(
    "properties", [ours.TensorProperties, torchs_tensor.TensorProperties], ids=["ours", "torch"]
)


@BOTH
@pytest.mark.parametrize(
    ("placement", "rank", "worker", "device"),
    [
        ("rank:1/cpu", 1, None, "cpu"),
        ("rank:1/cuda:0", 1, None, "cuda:0"),
        ("rank:12", 12, None, "cpu"),
        ("worker3/cpu", None, "worker3", "cpu"),
        ("worker3", None, "worker3", "cpu"),
        ("cpu", None, None, "cpu"),
    ],
)
def test_placements_are_read(metadata, placement, rank, worker, device):
    found = metadata([0], [1], placement).placement
    assert (found.rank(), found.worker_name(), found.device()) == (rank, worker, torch.device(device))
    assert found == torch.distributed._remote_device(placement)


@BOTH
def test_it_prints_and_compares_by_its_fields(metadata):
    made = metadata([0, 4], [8, 4], "rank:1/cpu")
    assert repr(made) == "ShardMetadata(shard_offsets=[0, 4], shard_sizes=[8, 4], placement=rank:1/cpu)"
    assert made == metadata([0, 4], [8, 4], torch.distributed._remote_device("rank:1/cpu"))
    assert made != metadata([0, 4], [8, 4], "rank:2/cpu")
    assert len({made, metadata([0, 4], [8, 4], "rank:1/cpu")}) == 1
    assert metadata([0], [1]).placement is None
    assert pickle.loads(pickle.dumps(made)) == made


@BOTH
@pytest.mark.parametrize(
    ("offsets", "sizes", "words"),
    [
        ([0], [1, 2], "same number of elements"),
        ([-1], [1], "shard_offsets should be >="),
        ([0], [-1], "shard_sizes should be >="),
    ],
)
def test_lengths_and_signs_are_checked(metadata, offsets, sizes, words):
    with pytest.raises(ValueError, match=words):
        metadata(offsets, sizes)


@BOTH
@pytest.mark.parametrize("placement", ["a/b/c", "rank:x/cpu", "/cpu", "rank:1:2/cpu"])
def test_placements_that_cannot_be_read_are_refused(metadata, placement):
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        metadata([0], [1], placement)


@pytest.mark.parametrize("values", [[0.5], ["0"], 3, None])
def test_types_are_checked(values):
    with pytest.raises(TypeError, match="shard_offsets should be a sequence of ints"):
        ours.ShardMetadata(values, [1])


@SHARDS
def test_shards_know_their_part(shard):
    found = shard.from_tensor_and_offsets(torch.zeros(2, 4), [2, 0], 3)
    assert (found.metadata.shard_offsets, found.metadata.shard_sizes) == ([2, 0], [2, 4])
    assert str(found.metadata.placement) == "rank:3/cpu"


@SHARDS
def test_shards_that_are_not_what_they_say_are_refused(shard):
    with pytest.raises(ValueError, match="Shard tensor size does not match"):
        shard(torch.zeros(2), ours.ShardMetadata([0], [3], "rank:0/cpu"))
    with pytest.raises(ValueError, match="tensor device does not match"):
        shard(torch.zeros(3), ours.ShardMetadata([0], [3], "rank:0/cuda:0"))


def test_the_cpu_has_no_numbers_that_matter():
    assert ours.Shard(torch.zeros(3), ours.ShardMetadata([0], [3], "rank:0/cpu:0")).tensor.shape == (3,)


@PROPERTIES
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last, torch.preserve_format], ids=str)
def test_properties_pickle(properties, form):
    made = properties(torch.int8, requires_grad=False, memory_format=form, pin_memory=True)
    assert pickle.loads(pickle.dumps(made)) == made


@PROPERTIES
def test_properties_are_those_of_a_tensor(properties):
    found = properties.create_from_tensor(torch.zeros(2, dtype=torch.float64, requires_grad=True))
    assert (found.dtype, found.layout, found.requires_grad, found.pin_memory) == (
        torch.float64,
        torch.strided,
        True,
        False,
    )


def test_the_default_dtype_is_that_of_the_moment():
    torch.set_default_dtype(torch.float64)
    try:
        assert ours.TensorProperties().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.TensorProperties().dtype == torch.float32


def test_metadata_of_different_tensors_share_nothing():
    first, second = ours.ShardedTensorMetadata(), ours.ShardedTensorMetadata()
    first.shards_metadata.append(ours.ShardMetadata([0], [1]))
    assert second.shards_metadata == []
    assert second.size == torch.Size([])
