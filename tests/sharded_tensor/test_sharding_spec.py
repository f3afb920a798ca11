"""Sharding specs, held against torch's own where torch has the case."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard import sharding_spec as torchs
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import _internals

from shardwise import sharded_tensor as ours

TORCH = SimpleNamespace(
    **{name: getattr(torchs, name) for name in ("ChunkShardingSpec", "EnumerableShardingSpec", "DevicePlacementSpec")},
    ShardMetadata=torchs.ShardMetadata,
    infer=torchs._infer_sharding_spec_from_shards_metadata,
    check_tensor=_internals.check_tensor,
    validate=_internals.validate_non_overlapping_shards_metadata,
    get_split_size=_internals.get_split_size,
    get_chunked_dim_size=_internals.get_chunked_dim_size,
    get_chunk_sharding_params=_internals.get_chunk_sharding_params,
)
OURS = SimpleNamespace(
    **{name: getattr(ours, name) for name in ours.__all__},
    infer=ours._infer_sharding_spec_from_shards_metadata,
    validate=ours.validate_non_overlapping_shards_metadata,
)
BOTH = pytest.mark.parametrize("api", [OURS, TORCH], ids=["ours", "torch"])


def placements(*ranks):
    return [f"rank:{rank}/cpu" for rank in ranks]


def corners(metadata):
    return [(list(m.shard_offsets), list(m.shard_sizes), str(m.placement)) for m in metadata.shards_metadata]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
@settings(max_examples=60)
def test_chunks_are_those_of_torch(size, data):
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    found, expected = (
        corners(api.ChunkShardingSpec(dim, placements(*ranks)).build_metadata(torch.Size(size), TensorProperties()))
        for api in (OURS, TORCH)
    )
    assert found == expected


@given(st.integers(0, 40), st.integers(1, 9))
def test_sizes_of_chunks_are_those_of_torch_chunk(size, chunks):
    split = ours.get_split_size(size, chunks)
    sizes = [ours.get_chunked_dim_size(size, split, number) for number in range(chunks)]
    assert split == TORCH.get_split_size(size, chunks)
    assert sizes == [TORCH.get_chunked_dim_size(size, split, number) for number in range(chunks)]
    assert [s for s in sizes if s] == [len(part) for part in torch.arange(size).chunk(chunks) if len(part)]


@BOTH
def test_dims_are_checked(api):
    with pytest.raises(NotImplementedError, match="named dimension"):
        api.ChunkShardingSpec("N", placements(0))
    with pytest.raises(ValueError, match="needs to be an integer"):
        api.ChunkShardingSpec(0.5, placements(0))
    for dim in (2, -3):
        with pytest.raises(ValueError, match=f"Invalid sharding dim: {dim}"):
            api.ChunkShardingSpec(dim, placements(0)).build_metadata(torch.Size([4, 4]), TensorProperties())


@BOTH
def test_a_device_is_read(api):
    assert api.DevicePlacementSpec("rank:1/cpu").device == torch.distributed._remote_device("rank:1/cpu")


@BOTH
def test_params_of_a_rank(api):
    spec = api.ChunkShardingSpec(0, placements(1, 0, 2))
    assert [api.get_chunk_sharding_params(7, 3, spec, rank) for rank in range(3)] == [(3, 3), (0, 3), (6, 1)]


def test_params_count_placements_and_not_the_world():
    spec = ours.ChunkShardingSpec(0, placements(1, 0))
    assert [ours.get_chunk_sharding_params(8, 4, spec, rank) for rank in (1, 0)] == [(0, 4), (4, 4)]
    with pytest.raises(ValueError, match="rank 3 has no chunk"):
        ours.get_chunk_sharding_params(8, 4, spec, 3)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.data())
@settings(max_examples=40)
def test_shards_are_views_of_the_whole(size, data):
    dim, chunks = data.draw(st.integers(0, len(size) - 1)), data.draw(st.integers(1, 5))
    whole = torch.arange(torch.Size(size).numel()).reshape(size)
    spec = ours.ChunkShardingSpec(dim, placements(*range(chunks)))
    shards = spec.build_metadata(whole.size(), TensorProperties()).shards_metadata
    parts = [ours.narrow_tensor(whole, shard) for shard in shards]
    assert [list(part.shape) for part in parts] == [shard.shard_sizes for shard in shards]
    assert torch.equal(torch.cat(parts, dim), whole)


def metadata(api, boxes):
    return [api.ShardMetadata(list(lo), list(size), f"rank:{n}/cpu") for n, (lo, size) in enumerate(boxes)]


@st.composite
def rectangles(draw):
    """A few rectangles, which may overlap or not."""
    corner = st.tuples(st.integers(0, 5), st.integers(0, 5))
    return draw(st.lists(st.tuples(corner, st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=6))


@given(rectangles())
@settings(max_examples=150)
def test_overlaps_are_found_exactly(boxes):
    cells = [{(r, c) for r in range(a, a + h) for c in range(b, b + w)} for (a, b), (h, w) in boxes]
    overlap = any(x & y for n, x in enumerate(cells) for y in cells[:n])
    for api in (OURS, TORCH):
        shards = metadata(api, boxes)
        if overlap:
            with pytest.raises(ValueError, match=r"Shards .* and .* overlap"):
                api.validate(shards)
        else:
            api.validate(shards)


def test_an_overlap_is_named_with_its_cells():
    with pytest.raises(ValueError, match=r"rank:0/cpu\) and .*rank:2/cpu\) overlap in \[3:4, 2:6\]"):
        ours.EnumerableShardingSpec(metadata(OURS, [((0, 0), (4, 6)), ((4, 0), (4, 6)), ((3, 2), (1, 9))]))


def test_empty_shards_overlap_nothing():
    spec = ours.EnumerableShardingSpec(metadata(OURS, [((0,), (8,)), ((4,), (0,)), ((4,), (0,))]))
    assert len(spec.build_metadata(torch.Size([8]), TensorProperties()).shards_metadata) == 3


@BOTH
@pytest.mark.parametrize(
    ("boxes", "size", "words"),
    [
        ([((0, 0), (2, 4))], (4,), "Rank of tensor is 1, but shards rank is 2"),
        ([((0, 0), (2, 5))], (2, 4), "exceeds tensor dim: 4"),
        ([((0, 0), (2, 4))], (4, 4), "do not cover the entire tensor"),
    ],
)
def test_shards_that_do_not_cover_a_tensor_are_refused(api, boxes, size, words):
    with pytest.raises(ValueError, match=words):
        api.EnumerableShardingSpec(metadata(api, boxes)).build_metadata(torch.Size(size), TensorProperties())


def test_what_is_missing_is_named():
    spec = ours.EnumerableShardingSpec(metadata(OURS, [((0, 0), (2, 6)), ((2, 0), (2, 4))]))
    with pytest.raises(ValueError, match=r"no shard holds \[2:4, 4:6\]"):
        spec.build_metadata(torch.Size([4, 6]), TensorProperties())


@BOTH
def test_lists_of_shards_are_checked(api):
    with pytest.raises(ValueError, match="Empty shard list"):
        api.EnumerableShardingSpec([])
    with pytest.raises(ValueError, match="inconsistent ranks for shards: 1 and 2"):
        api.EnumerableShardingSpec([api.ShardMetadata([0], [1]), api.ShardMetadata([0, 1], [1, 1])])


@BOTH
@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
def test_chunks_are_recognized_in_any_order(api, ranks):
    spec = api.ChunkShardingSpec(1, placements(*ranks))
    shards = spec.build_metadata(torch.Size([3, 7]), TensorProperties()).shards_metadata
    found = api.infer([shards[1], shards[2], shards[0]])
    assert isinstance(found, api.ChunkShardingSpec)
    assert (found.dim, list(map(str, found.placements))) == (1, placements(*ranks))


@BOTH
def test_other_shards_are_enumerated(api):
    for boxes in ([((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 4), (4, 4))], [((0,), (1,)), ((1,), (5,))]):
        found = api.infer(metadata(api, boxes))
        assert isinstance(found, api.EnumerableShardingSpec)
        assert len(found.shards) == len(boxes)


def test_check_tensor_refuses_cells_that_are_held_twice_and_hide_a_gap():
    twice = [ours.ShardMetadata([0, 0], [5, 3], f"rank:{rank}/cpu") for rank in range(2)]
    with pytest.raises(ValueError, match=r"overlap in \[0:5, 0:3\]"):
        ours.check_tensor(twice, (10, 3))
