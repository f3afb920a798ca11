"""Code written for torch, with its imports changed: the same bodies run against torch's names and ours."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from familiar import BOTH, TORCH, check, columns, listed, mine, numbers, placed, refused, rows, same, same_refusals
from ranks import ranks  # noqa: F401
from torch.distributed._shard.sharded_tensor import api as torchs_api
from torch.distributed._shard.sharded_tensor import reshard as torchs_reshard

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own

TORCH._create_tensor_from_params = torchs_api._create_tensor_from_params
TORCH.build_reshard_metadata = torchs_reshard.build_reshard_metadata


def told(metadata):
    """Shards in the order in which they are listed."""
    return [(list(m.shard_offsets), list(m.shard_sizes), str(m.placement)) for m in metadata]


def shard(api, tensor, offsets, rank):
    return api.Shard.from_tensor_and_offsets(tensor, list(offsets), rank)


# --- a size that is computed -----------------------------------------------------------------------------------------


@BOTH
def test_sizes_of_none_alone_are_rows_whatever_the_offsets_say(ranks, api):  # noqa: F811
    def one(rank, height, dims):
        tensor = torch.full((height, 2, 3)[:dims], float(rank))
        st = api.init_from_local_shards([shard(api, tensor, [rank] * dims, rank)], *[None] * dims)
        listed_by_rank = [
            ([r * height, 0, 0][:dims], [height, 2, 3][:dims], f"rank:{r}/cpu") for r in range(dist.get_world_size())
        ]
        assert tuple(st.size()) == (3 * height, 2, 3)[:dims]
        assert told(st.metadata().shards_metadata) == listed_by_rank
        assert told([st.local_shards()[0].metadata]) == listed_by_rank[rank : rank + 1]
        same(st.local_tensor(), tensor)

    def run(rank):
        for height, dims in product((0, 1, 5), (1, 2, 3)):
            one(rank, height, dims)

    ranks(3, run)


def test_tables_on_one_rank_and_several_shards_of_a_rank_have_computed_sizes_too(ranks):  # noqa: F811
    def run(rank):
        table = numbers(4, 3)
        held = [[], [shard(ours, table, (0, 0), 1)], []][rank]
        check(ours.init_from_local_shards(held, None, None), table, listed(((0, 0), (4, 3), 1)))
        whole = numbers(12, 3)
        several = [shard(ours, whole[at : at + 2].clone(), (0, 0), rank) for at in (4 * rank, 4 * rank + 2)]
        for size in (None, None), ([None, None],), (None, 3):
            same(ours.init_from_local_shards(several, *size).gather(None), whole)

    ranks(3, run)


def test_of_several_nones_the_first_is_computed_and_the_others_are_those_of_the_shards(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(2, 6, 5)
        part = whole[:, 3 * rank : 3 * rank + 3].clone()
        same(ours.init_from_local_shards([shard(ours, part, (0, 0, 0), rank)], 2, None, None).gather(None), whole)
        uneven = [shard(ours, torch.zeros(2, 3 + rank), (0, 0), rank)]
        return {"widths": refused(ValueError, lambda: ours.init_from_local_shards(uneven, None, None))}

    same_refusals(ranks(2, run), widths="exceeds tensor dim: 3")


@BOTH
def test_sizes_that_are_given_are_not_computed(ranks, api):  # noqa: F811
    def run(rank):
        for offsets in ([0, 0], [5 * rank, 0]):
            shards = [shard(api, torch.zeros(5, 5), offsets, rank)]
            for size in (0, 0), ():
                with pytest.raises(ValueError, match=r"exceeds tensor dim|Rank of tensor|does not fit|overlap"):
                    api.init_from_local_shards(shards, *size)

    ranks(2, run)


# --- without a process group -----------------------------------------------------------------------------------------


def block(api, rank, world=4):
    """The shards of one rank, or of all of them, of a 10 x 10 tensor in four blocks; and the metadata of all."""
    metadata = [api.ShardMetadata([(r // 2) * 5, (r % 2) * 5], [5, 5], f"rank:{r}/cpu") for r in range(world)]
    properties = api.TensorProperties(torch.float64)
    held = [api.Shard(numbers(5, 5) + m.placement.rank(), m) for m in metadata if rank in (None, m.placement.rank())]
    return held, api.ShardedTensorMetadata(metadata, torch.Size([10, 10]), properties)


@BOTH
@pytest.mark.parametrize("rank", [None, 0, 3])
def test_the_base_class_makes_one_from_shards_of_any_ranks_without_a_process_group(api, rank):
    held, metadata = block(api, rank)
    st = api.ShardedTensorBase._init_from_local_shards_and_global_metadata(held, sharded_tensor_metadata=metadata)
    assert isinstance(st, api.ShardedTensor)
    assert isinstance(st, api.ShardedTensorBase)
    assert (tuple(st.metadata().size), st.metadata().tensor_properties.dtype) == ((10, 10), torch.float64)
    assert told(s.metadata for s in st.local_shards()) == told(s.metadata for s in held)
    assert told(st.metadata().shards_metadata) == told(metadata.shards_metadata)
    assert told(st.sharding_spec().shards) == told(metadata.shards_metadata)
    for one, other in zip(st.local_shards(), held, strict=True):
        assert one.tensor.data_ptr() == other.tensor.data_ptr()


@BOTH
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.shards_metadata.clear(), "shards_metadata must not be empty"),
        (lambda m: m.shards_metadata.pop(), "does not match tensor volume: 100"),
        (lambda m: setattr(m, "size", torch.Size([9, 10])), "exceeds tensor dim"),
        (lambda m: setattr(m.shards_metadata[1], "shard_offsets", [0, 4]), "overlap"),
        (lambda m: setattr(m.tensor_properties, "layout", torch.sparse_coo), "Only torch.strided layout is currently"),
    ],
)
def test_metadata_that_make_no_tensor_are_refused_in_torchs_words(api, change, words):
    held, metadata = block(api, 0)
    change(metadata)
    with pytest.raises(ValueError, match=words):
        api.ShardedTensorBase._init_from_local_shards_and_global_metadata(held, metadata)


def test_what_has_no_process_group_can_be_copied_cast_and_shown():
    held, metadata = block(ours, 3)
    st = ours.ShardedTensorBase._init_from_local_shards_and_global_metadata(held, metadata)
    for found in copy.deepcopy(st), st.to(torch.float64, copy=True), st.clone():
        assert told(s.metadata for s in found.local_shards()) == told(s.metadata for s in held)
        same(found.local_tensor(), held[0].tensor)
    assert st.to(torch.int32).local_tensor().dtype == torch.int32
    assert "[5:10, 5:10]" in repr(st)


def test_what_has_no_process_group_keeps_its_own_shards_in_pickles(ranks):  # noqa: F811
    def run(rank):
        held, metadata = block(ours, 3)
        st = ours.ShardedTensorBase._init_from_local_shards_and_global_metadata(held, metadata)
        found = pickle.loads(pickle.dumps(st))
        assert told(s.metadata for s in found.local_shards()) == told(s.metadata for s in held)
        same(found.local_tensor(), held[0].tensor)

    ranks(1, run)


def test_what_has_no_process_group_is_copied_between_the_same_shards_alone():
    one, other = (ours.ShardedTensorBase._init_from_local_shards_and_global_metadata(*block(ours, r)) for r in (0, 3))
    one.copy_(one.clone())
    assert not torch.equal(one, other)
    with pytest.raises(sw.UnsupportedError, match="same metadata"):
        one.copy_(other)


@BOTH
@pytest.mark.parametrize("before", [0, 1], ids=["valid", "outside"])
def test_metadata_of_a_rank_may_show_its_own_shard_alone(ranks, api, before):  # noqa: F811
    def run(rank):
        own = api.ShardMetadata([before, 0], [5, 5], f"rank:{rank}/cpu")
        others = [api.ShardMetadata([0 if r < rank else 5, 0], [0, 0], f"rank:{r}/cpu") for r in range(3)]
        shards = [own if r == rank else other for r, other in enumerate(others)]
        metadata = api.ShardedTensorMetadata(shards, torch.Size([5, 5]), api.TensorProperties())
        held = [api.Shard(torch.full((5, 5), float(rank)), own)]
        if before:
            with pytest.raises(ValueError, match="exceeds tensor dim"):
                api.ShardedTensor._init_from_local_shards_and_global_metadata(held, metadata)
            return
        st = api.ShardedTensor._init_from_local_shards_and_global_metadata(held, metadata)
        assert told(st.metadata().shards_metadata) == told(shards)
        whole = api.init_from_local_shards(st.local_shards(), None, None)
        assert [offsets for offsets, _, _ in told(whole.metadata().shards_metadata)] == [[0, 0], [5, 0], [10, 0]]

    ranks(3, run)


@BOTH
def test_tensors_are_created_from_properties(api):
    properties = api.TensorProperties(torch.int8, memory_format=torch.contiguous_format)
    for size in ((2, 3), ([2, 3],)):
        made = api._create_tensor_from_params(*size, local_device=torch.device("cpu"), tensor_properties=properties)
        assert (made.shape, made.dtype, made.requires_grad) == ((2, 3), torch.int8, False)
    followed = api.TensorProperties(torch.float16, requires_grad=True)
    assert api._create_tensor_from_params(4, local_device="cpu", tensor_properties=followed).requires_grad


# --- names with an underscore, and references ------------------------------------------------------------------------


@BOTH
def test_metadata_and_specs_can_be_read_and_set_under_private_names(ranks, api):  # noqa: F811
    def run(rank):
        spec = rows(0, 1, api=api)
        st = api.init_from_local_shards(
            mine(numbers(5, 4), listed(((0, 0), (3, 4), 0), ((3, 0), (2, 4), 1), api=api), api), 5, 4
        )
        assert st._sharding_spec == st.sharding_spec()
        st._sharding_spec = copy.deepcopy(spec)
        assert st.sharding_spec() == spec
        assert st._metadata == st.metadata()
        st._metadata = copy.deepcopy(st.metadata())
        assert told(st.metadata().shards_metadata) == told(spec.build_metadata(st.size(), None).shards_metadata)
        assert st._process_group is dist.group.WORLD
        st.reshard(columns(1, 0, api=api))
        assert st._sharding_spec == columns(1, 0, api=api)
        with pytest.raises(RuntimeError, match="created with init_rrefs=False, no RRefs to remote shards available"):
            st.remote_shards()

    ranks(2, run)


def test_what_contradicts_the_shards_is_not_set(ranks):  # noqa: F811
    def run(rank):
        st = ours.shard_tensor(numbers(4, 4), rows(0, 1))
        for spec in rows(1, 0), columns(0, 1), listed(((0, 0), (4, 4), 0)):
            with pytest.raises(ValueError, match="reshard"):
                st._sharding_spec = spec
            with pytest.raises(ValueError, match="reshard"):
                st._metadata = spec.build_metadata(torch.Size([4, 4]), ours.TensorProperties())
        check(st, numbers(4, 4), rows(0, 1))

    ranks(2, run)


# --- resharded -------------------------------------------------------------------------------------------------------


@BOTH
def test_metadata_are_listed_by_rank_after_a_reshard(ranks, api):  # noqa: F811
    def one(rank, order, width):
        expected = TORCH.build_reshard_metadata(torch.Size([6, width]), columns(*order, api=TORCH), 3)[0]
        st = api._shard_tensor(numbers(6, width), rows(2, 1, 0, api=api))
        before = st.local_tensor()
        st.reshard(rows(2, 1, 0, api=api))  # nothing changes
        assert st.local_tensor() is before
        assert [m.placement.rank() for m in st.metadata().shards_metadata] == [2, 1, 0]
        st.reshard(columns(*order, api=api))
        assert told(st.metadata().shards_metadata) == told(expected)
        assert told(shard.metadata for shard in st.local_shards()) == told(expected[rank : rank + 1])

    def run(rank):
        widths = (6, 4) if api is ours else (6,)  # of 4 columns one rank has none: torch's ranks wait for each other
        for order, width in product([(0, 1, 2), (2, 0, 1), (1, 2, 0)], widths):
            one(rank, order, width)

    ranks(3, run)


# --- specs with their own way ----------------------------------------------------------------------------------------


def own_spec(api):
    class Doubling(api.ChunkShardingSpec):
        """Shards twice the tensor."""

        def shard(self, tensor, src_rank=0, process_group=None):
            assert process_group is not None
            return super().shard(2 * tensor, src_rank=src_rank, process_group=process_group)

    return Doubling(0, placed(1, 0))


@BOTH
def test_a_spec_with_its_own_way_to_shard_is_asked(ranks, api):  # noqa: F811
    globals()["Doubling"] = type(own_spec(api))  # torch pickles specs
    globals()["Doubling"].__qualname__ = "Doubling"

    def run(rank):
        st = api._shard_tensor(numbers(4, 3), own_spec(api) if api is ours else globals()["Doubling"](0, placed(1, 0)))
        same(st.local_tensor(), 2 * numbers(4, 3)[2 * (1 - rank) : 2 * (1 - rank) + 2])
        assert isinstance(st, api.ShardedTensor)

    ranks(2, run)


def test_torchs_specs_with_their_own_way_make_a_tensor_of_ours(ranks):  # noqa: F811
    def run(rank):
        st = ours.shard_tensor(numbers(4, 3), own_spec(TORCH))
        assert isinstance(st, ours.ShardedTensor)
        same(st.gather(None), 2 * numbers(4, 3))

    ranks(2, run)


def test_ranks_with_other_ways_to_shard_are_told(ranks):  # noqa: F811
    def run(rank):
        spec = own_spec(ours) if rank else rows(1, 0)
        return {"way": refused(ValueError, lambda: ours.shard_tensor(numbers(4, 3), spec))}

    same_refusals(ranks(2, run), way="does not match with sharding_spec")
