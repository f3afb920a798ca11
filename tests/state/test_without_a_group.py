"""State dicts are traversed and flattened where there is no process group."""

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as TorchsShard
from torch.distributed._shard.sharded_tensor import ShardedTensorBase as TorchsBase

import shardwise as sw
from shardwise import sharded_tensor as ours
from shardwise.state import _flatten_sharded_tensors, flatten_state_dict, unflatten_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own


def test_nothing_is_asked_of_a_process_group_that_is_not_there():
    placed = ours.ShardMetadata([0, 0], [2, 3], "rank:0/cpu")
    metadata = ours.ShardedTensorMetadata([placed], torch.Size([2, 3]), ours.TensorProperties())
    by_spec = ours.ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [ours.Shard(torch.zeros(2, 3), placed)], metadata
    )
    torchs = TorchsBase._init_from_local_shards_and_global_metadata(
        [TorchsShard(torch.ones(2, 3), metadata.to_torch().shards_metadata[0])],
        metadata.to_torch(),
    )
    flat = sw.ShardedTensor(torch.zeros(4), "4/S0@1")
    state_dict = {"a": {"b": [by_spec, torchs]}, "c": flat, 3: ({"d": torch.zeros(1)}, 5)}
    found = _flatten_sharded_tensors(state_dict)
    assert list(map(id, found["a"]["b"])) == [id(by_spec), id(torchs)]
    assert (found["c"] is flat, found[3][1]) == (True, 5)
    names, paths = flatten_state_dict(state_dict)
    assert list(names) == ["a.b.0", "a.b.1", "c", "3.0.d", "3.1"]
    assert list(map(id, unflatten_state_dict(names, paths)["a"]["b"])) == [id(by_spec), id(torchs)]


def test_nested_shards_are_flat_without_a_process_group():
    inner = sw.ShardedTensor(torch.arange(6.0).reshape(2, 3), "2x3/S0@1")
    found = _flatten_sharded_tensors({"w": sw.ShardedTensor([inner], "2x3/S1@1")})["w"]
    assert found.local_tensor().data_ptr() == inner.local_tensor().data_ptr()
    assert found.layout == sw.parse("2x3/S0@1")
