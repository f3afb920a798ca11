"""The container under torch's names: torch's own is the judge where it has the case, the whole tensor always."""

import pytest
import torch
import torch.distributed as dist
from familiar import (
    BOTH,
    TORCH,
    check,
    columns,
    corners,
    grid,
    mine,
    numbers,
    part,
    placed,
    refused,
    rows,
    same,
    same_refusals,
)
from ranks import ranks  # noqa: F401

from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own

FACTORIES = ("empty", "zeros", "ones", "rand", "randn")


# --- made from a spec ------------------------------------------------------------------------------------------------


@BOTH
def test_factories_make_the_shards_of_a_spec(ranks, api):  # noqa: F811
    def run(rank):
        for spec in (rows(1, 0, api=api), columns(0, 1, api=api), grid(6, 5, 0, 1, 1, 0, api=api)):
            check(api.zeros(spec, 6, 5), torch.zeros(6, 5), spec)
            check(api.ones(spec, [6, 5], dtype=torch.int32), torch.ones(6, 5, dtype=torch.int32), spec)
            check(api.full(spec, (6, 5), 2.5), torch.full((6, 5), 2.5), spec)
            for name in FACTORIES:
                st = getattr(api, name)(spec, torch.Size([6, 5]), requires_grad=True)
                assert all(s.tensor.requires_grad and s.tensor.is_leaf for s in st.local_shards())
                assert st.requires_grad
                assert st.metadata().tensor_properties.requires_grad
        assert all(0 <= float(s.tensor.min()) <= float(s.tensor.max()) < 1 for s in api.rand(spec, 6, 5).local_shards())

    ranks(2, run)


def test_random_numbers_are_those_of_torch(ranks):  # noqa: F811
    def run(rank):
        for name in ("rand", "randn"):
            found = []
            for api in (ours, TORCH):
                torch.manual_seed(rank)
                found.append(getattr(api, name)(rows(0, 1, api=api), 6, 4).local_tensor())
            same(*found)

    ranks(2, run)


@BOTH
def test_it_says_what_it_is(ranks, api):  # noqa: F811
    def run(rank):
        st = api.zeros(rows(0, 1, api=api), 6, 4, dtype=torch.float64)
        assert (st.size(), st.shape, st.size(0), st.size(-1)) == (torch.Size([6, 4]), torch.Size([6, 4]), 6, 4)
        assert (st.dim(), st.ndim, st.dtype, st.requires_grad) == (2, 2, torch.float64, False)
        assert (st.device, st.is_pinned()) == (torch.device("cpu"), False)
        assert st.local_tensor() is st.local_shards()[0].tensor
        assert st.local_shards()[0].metadata == st.metadata().shards_metadata[rank]
        assert st.metadata().size == torch.Size([6, 4])
        with pytest.raises(IndexError):
            st.size(2)
        several = api.zeros(rows(0, 1, 0, 1, api=api), 8)
        with pytest.raises(NotImplementedError, match=r"Only single local shard is supported\. Number of shards: 2"):
            several.local_tensor()

    ranks(2, run)


@BOTH
def test_what_cannot_be_made_is_refused(ranks, api):  # noqa: F811
    def run(rank):
        spec = rows(0, 1, api=api)
        for call in (
            lambda: api.zeros("rows", 4),
            lambda: api.zeros(spec, 4, layout=torch.sparse_coo),
            lambda: api.zeros(rows(0, 7, api=api), 4),
            lambda: api.zeros(columns(0, 1, api=api), 4),
            lambda: api.zeros(grid(6, 5, 0, 1, 1, 0, api=api), 6, 6),
        ):
            with pytest.raises(ValueError, match=r"ShardingSpec|strided|Global rank 7|sharding dim|cover"):
                call()
        with pytest.raises(TypeError, match="ints"):
            api.zeros(spec, 4.0)

    ranks(2, run)


@BOTH
def test_other_memory_formats_are_refused(ranks, api):  # noqa: F811
    def run(rank):
        with pytest.raises(ValueError, match="contiguous_format"):
            api.zeros(rows(0, 1, api=api), 4, memory_format=torch.channels_last)

    ranks(2, run)


# --- made from what ranks have ---------------------------------------------------------------------------------------


@BOTH
def test_local_shards_become_one_tensor(ranks, api):  # noqa: F811
    def run(rank):
        whole = numbers(6, 5)
        for spec in (rows(0, 1, 2, api=api), columns(2, 0, 1, api=api), grid(6, 5, 1, 0, 2, 2, api=api)):
            found = api.init_from_local_shards(mine(whole, spec, api), 6, 5)
            check(found, whole, found.sharding_spec())
            assert type(found.sharding_spec()) is type(spec)
            assert corners(found.metadata().shards_metadata) == corners(
                spec.build_metadata(whole.size(), api.TensorProperties()).shards_metadata
            )
        none = api.init_from_local_shards(mine(whole, rows(2, 0, api=api), api), [6, 5])
        assert len(none.local_shards()) == (rank != 1)
        assert none.dtype == torch.float64

    ranks(3, run)


@BOTH
def test_local_shards_of_a_sub_group_have_global_ranks(ranks, api):  # noqa: F811
    def run(rank):
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            whole, spec = numbers(5, 4), rows(3, 1, api=api)
            found = api.init_from_local_shards(mine(whole, spec, api), 5, 4, process_group=group)
            check(found, whole, spec)
            check(api.zeros(spec, 5, 4, process_group=group), torch.zeros(5, 4), spec)
            with pytest.raises(ValueError, match="Global rank 0 does not exist in input process group"):
                api.zeros(rows(0, 1, api=api), 4, process_group=group)

    ranks(4, run)


def test_a_size_of_none_is_computed_for_any_dim_and_number_of_shards(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(4, 7)
        widths = [[2, 1], [], [4]][rank]
        starts = [[0, 2], [], [3]][rank]
        shards = [
            ours.Shard.from_tensor_and_offsets(whole[:, start : start + width], [0, 0], rank)
            for start, width in zip(starts, widths, strict=True)
        ]
        for size in ((4, None), ([4, None],)):
            found = ours.init_from_local_shards(shards, *size)
            assert [s.metadata.shard_offsets for s in found.local_shards()] == [[0, start] for start in starts]
            same(found.gather(None), whole)
        rows_of = ours.Shard.from_tensor_and_offsets(whole[: rank + 1], [0, 0], rank)
        assert tuple(ours.init_from_local_shards([rows_of], None, 7).size()) == (6, 7)
        return {
            "other": refused(ValueError, lambda: ours.init_from_local_shards(shards, 5, None)),
            "widths": refused(ValueError, lambda: ours.init_from_local_shards(shards, None, None)),
        }

    same_refusals(ranks(3, run), other="size (4, 7)", widths="exceeds tensor dim")


def test_sizes_with_none_have_as_many_dims_as_the_shards(ranks):  # noqa: F811
    def run(rank):
        shard = ours.Shard.from_tensor_and_offsets(torch.zeros(2), [2 * rank], rank)
        return {"size": refused(ValueError, lambda: ours.init_from_local_shards([shard], None, 4))}

    same_refusals(ranks(2, run), size="size")


def test_tensors_without_dims_or_elements_are_tensors(ranks):  # noqa: F811
    def run(rank):
        point = ours.EnumerableShardingSpec([ours.ShardMetadata([], [], *placed(1))])
        check(ours.zeros(point), torch.zeros(()), point)
        shards = mine(torch.tensor(2.5), point)
        same(ours.init_from_local_shards(shards).gather(None), torch.tensor(2.5))
        empty = ours.zeros(rows(0, 1), 0, 3)
        check(empty.reshard(columns(1, 0)), torch.zeros(0, 3), columns(1, 0))
        same(empty.gather(None), torch.zeros(0, 3))

    ranks(2, run)


ACROSS = {  # what two ranks have that do not fit together: tensor, offsets and global size of each
    "dtype": lambda rank: (torch.zeros(2, 3, dtype=(torch.int8, torch.int16)[rank]), [2 * rank, 0], [4, 3]),
    "requires_grad": lambda rank: (torch.zeros(2, 3, requires_grad=rank == 1), [2 * rank, 0], [4, 3]),
    "global_size": lambda rank: (torch.zeros(2, 3), [2 * rank, 0], [4 + rank, 3]),
    "overlap": lambda rank: (torch.zeros(2, 3), [rank, 0], [4, 3]),
    "cover": lambda rank: (torch.zeros(2, 3), [2 * rank, 0], [5, 3]),
    "exceeds": lambda rank: (torch.zeros(2, 3), [3 * rank, 0], [4, 3]),
    "no local shards": lambda rank: (None, None, [4, 3]),
}


@BOTH
def test_shards_that_do_not_fit_together_are_refused_everywhere(ranks, api):  # noqa: F811
    def run(rank):
        found = {}
        for word, make in ACROSS.items():
            tensor, offsets, size = make(rank)
            shards = [] if tensor is None else [api.Shard.from_tensor_and_offsets(tensor, offsets, rank)]
            found[word] = refused(ValueError, lambda s=shards, size=size: api.init_from_local_shards(s, size))
        return found

    same_refusals(ranks(2, run), **{word: word for word in ACROSS})


def spoilt(shard, name, value):
    setattr(shard.metadata if name == "placement" else shard, name, value)
    return shard


ALONE = {  # what is wrong on one rank alone: of its good shard, the shards that it brings and the size
    "device": lambda s: ([spoilt(s, "placement", torch.distributed._remote_device("rank:1/cuda:0"))], [4, 3]),
    "rank": lambda s: ([spoilt(s, "placement", torch.distributed._remote_device("rank:0/cpu"))], [4, 3]),
    "Global rank 9": lambda s: ([spoilt(s, "placement", torch.distributed._remote_device("rank:9/cpu"))], [4, 3]),
    "size": lambda s: ([spoilt(s, "tensor", torch.zeros(3, 3))], [4, 3]),
    "strided": lambda s: ([spoilt(s, "tensor", torch.zeros(2, 3).to_sparse())], [4, 3]),
    "dtype": lambda s: ([s, ours.Shard.from_tensor_and_offsets(torch.zeros(2, 3).int(), [0, 0], 1)], [4, 3]),
    "requires_grad": lambda s: (
        [s, ours.Shard.from_tensor_and_offsets(torch.zeros(2, 3, requires_grad=True), [0, 0], 1)],
        [4, 3],
    ),
    "sequence of ints": lambda s: ([s], [4, 3.0]),
    "must be Shards": lambda s: ([s.tensor], [4, 3]),
}


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks):  # noqa: F811
    kinds = {"sequence of ints": TypeError, "must be Shards": TypeError}

    def run(rank):
        found = {}
        for word, spoil in ALONE.items():
            shard = ours.Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], rank)
            shards, size = spoil(shard) if rank == 1 else ([shard], [4, 3])
            call = lambda shards=shards, size=size: ours.init_from_local_shards(shards, size)  # noqa: E731
            found[word] = refused(kinds.get(word, ValueError), call)
        return found

    found = ranks(2, run)
    same_refusals(found, **{word: word for word in ALONE})
    same_refusals(found, **dict.fromkeys(ALONE, "rank 1 cannot take part in this init_from_local_shards"))


def test_nobody_waits_for_a_rank_that_asks_for_references(ranks):  # noqa: F811
    def run(rank):
        shard = ours.Shard.from_tensor_and_offsets(torch.zeros(2), [2 * rank], rank)
        call = lambda: ours.init_from_local_shards([shard], 4, init_rrefs=rank == 1)  # noqa: E731
        return {"rrefs": refused(RuntimeError, call)}

    same_refusals(ranks(2, run, timeout=20, patience=5), rrefs="rank 1 cannot take part")


@BOTH
def test_local_shards_and_global_metadata_are_believed(ranks, api):  # noqa: F811
    make = api.ShardedTensor._init_from_local_shards_and_global_metadata

    def run(rank):
        whole, spec = numbers(6, 5), grid(6, 5, 1, 0, 0, 1, api=api)
        properties = api.TensorProperties(dtype=torch.float64)
        metadata = spec.build_metadata(whole.size(), properties)
        shards = mine(whole, spec, api)
        check(make(shards, metadata), whole, spec)
        check(make(shards, metadata, sharding_spec=spec), whole, spec)
        narrow = api.ShardedTensorMetadata(metadata.shards_metadata[:-1], metadata.size, properties)
        count = sum(m.placement.rank() == rank for m in narrow.shards_metadata)
        with pytest.raises(ValueError, match="cover"):
            make(shards[:count], narrow)
        with pytest.raises(ValueError, match="must not be empty"):
            make([], api.ShardedTensorMetadata([], metadata.size, properties))
        with pytest.raises(RuntimeError, match=r"Number of local shards \(1\) does not match .* \(2\)"):
            make(shards[:1], metadata)
        for name, value in (("dtype", torch.int8), ("requires_grad", True)):
            other = spec.build_metadata(whole.size(), api.TensorProperties(**{"dtype": torch.float64, name: value}))
            with pytest.raises(ValueError, match=f"tensor {name} property is incompatible with tensor property"):
                make(shards, other)

    ranks(2, run)


def test_global_metadata_take_shards_in_any_order_and_of_any_strides(ranks):  # noqa: F811
    def run(rank):
        whole, spec = numbers(6, 5), grid(6, 5, 1, 0, 0, 1)
        metadata = spec.build_metadata(whole.size(), ours.TensorProperties(torch.float64))
        views = [ours.Shard(ours.narrow_tensor(whole, s.metadata), s.metadata) for s in mine(whole, spec)]
        found = ours.ShardedTensor.init_from_local_shards_and_global_metadata(views[::-1], metadata)
        check(found, whole, spec)
        same(found.gather(None), whole)
        check(found.reshard(columns(1, 0)), whole, columns(1, 0))
        other = [ours.Shard(s.tensor, ours.ShardMetadata([0, 0], s.metadata.shard_sizes, *placed(rank))) for s in views]
        with pytest.raises(ValueError, match="no local shard is"):
            ours.ShardedTensor.init_from_local_shards_and_global_metadata(other, metadata)

    ranks(2, run)


@BOTH
def test_a_local_tensor_becomes_a_part(ranks, api):  # noqa: F811
    make = api.ShardedTensor._init_from_local_tensor

    def run(rank):
        whole, spec = numbers(6, 5), columns(1, 0, api=api)
        local = part(whole, spec.build_metadata(whole.size(), api.TensorProperties()).shards_metadata[1 - rank])
        found = make(local.requires_grad_(), spec, 6, 5)
        check(found, whole, spec)
        assert found.requires_grad
        assert found.local_tensor() is local
        with pytest.raises(ValueError, match="size"):
            make(local, spec, 6, 8)
        with pytest.raises(ValueError, match="Global rank 7"):
            make(whole, rows(rank, 7, api=api), 12, 5)

    ranks(2, run)


@BOTH
def test_a_local_tensor_has_strides(ranks, api):  # noqa: F811
    def run(rank):
        with pytest.raises(ValueError, match=r"contiguous|strided"):
            api.ShardedTensor._init_from_local_tensor(torch.zeros(8).to_sparse(), rows(0, 1, api=api), 16)

    ranks(2, run)


def test_local_tensors_are_several_views_or_none(ranks):  # noqa: F811
    make = ours.ShardedTensor._init_from_local_tensor

    def run(rank):
        whole, spec = numbers(5, 7), rows(0, 1, 0, 1, 0, 1)  # of which the last is empty
        tensors = [ours.narrow_tensor(whole, s.metadata) for s in mine(whole, spec)]
        found = make(tensors, spec, [5, 7])
        check(found, whole, spec)
        same(found.gather(None), whole)
        alone = make(whole if rank == 0 else torch.zeros((), dtype=whole.dtype), rows(0), 5, 7)
        check(alone, whole, rows(0))

    ranks(2, run)


def test_local_tensors_have_one_dtype(ranks):  # noqa: F811
    def run(rank):
        with pytest.raises(ValueError, match="dtype"):
            ours.ShardedTensor._init_from_local_tensor([torch.zeros(2), torch.zeros(2).int()], rows(0, 1, 0, 1), 8)

    ranks(2, run)
