"""Copies, casts and pickles of the container under torch's names, held against torch's own."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from familiar import BOTH, check, columns, grid, mine, numbers, rows
from ranks import ranks  # noqa: F401

from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own


# --- copies ----------------------------------------------------------------------------------------------------------


@BOTH
def test_copies_keep_the_spec_and_the_group(ranks, api):  # noqa: F811
    def run(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        spec = rows(2, 1, api=api)
        st = api.ones(spec, 5, 4, requires_grad=True, process_group=group)
        deep, apart, cloned = copy.deepcopy(st), st.detach(), st.clone()
        for found in (deep, apart, cloned):
            check(found, torch.ones(5, 4), spec)
            assert found is not st
            assert found._process_group == group
        assert (deep.requires_grad, apart.requires_grad, cloned.requires_grad) == (True, False, True)
        assert not apart.metadata().tensor_properties.requires_grad
        with torch.no_grad():
            st.local_tensor().zero_()
        check(deep, torch.ones(5, 4), spec)
        check(cloned, torch.ones(5, 4), spec)
        check(apart, torch.zeros(5, 4), spec)  # of one memory

    ranks(3, run)


def test_a_shallow_copy_is_another_container_of_the_same_shards(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(0, 1), 4, 4)
        found = copy.copy(st).reshard(columns(1, 0))
        check(st, torch.ones(4, 4), rows(0, 1))
        check(found, torch.ones(4, 4), columns(1, 0))
        assert copy.copy(st).local_tensor() is st.local_tensor()

    ranks(2, run)


@BOTH
def test_dtypes_and_devices_change_as_those_of_tensors(ranks, api):  # noqa: F811
    def run(rank):
        whole, spec = numbers(5, 4), rows(1, 0, api=api)
        st = api.init_from_local_shards(mine(whole, spec, api), 5, 4)
        for found in (st.cpu(), st.to("cpu"), st.to(torch.float64), st.to(torch.device("cpu")), st.to(whole)):
            assert found is st
        for found in (st.to(torch.int16), st.to("cpu", torch.int16), st.to(dtype=torch.int16)):
            check(found, whole.to(torch.int16), spec)
            assert found.metadata().tensor_properties.dtype == torch.int16
        check(st, whole, spec)
        again = st.to(torch.float64, copy=True)
        check(again, whole, spec)
        assert again.local_tensor().data_ptr() != st.local_tensor().data_ptr()
        away = st.to("meta")
        assert away.local_tensor().is_meta
        assert {str(m.placement) for m in away.metadata().shards_metadata} == {"rank:0/meta", "rank:1/meta"}
        assert away.sharding_spec() == api.ChunkShardingSpec(0, ["rank:1/meta", "rank:0/meta"])
        with pytest.raises(RuntimeError, match="is supported"):
            st.cpu(memory_format=torch.channels_last)

    ranks(2, run)


def test_ranks_without_shards_know_what_the_others_have(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(1), 4, 4, requires_grad=True)
        assert (st.requires_grad, st.dtype, st.local_shards() == []) == (True, torch.float32, rank == 0)
        for found in (st.to(torch.float64), copy.deepcopy(st), st.detach(), st.clone(), copy.copy(st)):
            properties = found.metadata().tensor_properties
            assert (found.dtype, found.requires_grad) == (properties.dtype, properties.requires_grad)
            assert found.sharding_spec() == rows(1)
        assert st.to(torch.float64).dtype == torch.float64
        assert not st.detach().requires_grad
        assert not st.requires_grad_(False).metadata().tensor_properties.requires_grad

    ranks(2, run)


@BOTH
def test_ranks_without_shards_know_where_the_others_went(ranks, api):  # noqa: F811
    def run(rank):
        found = api.ones(rows(1, api=api), 4).to("meta")
        assert [str(m.placement) for m in found.metadata().shards_metadata] == ["rank:1/meta"]
        assert (
            str(found.sharding_spec().build_metadata(torch.Size([4]), None).shards_metadata[0].placement)
            == "rank:1/meta"
        )

    ranks(2, run)


@BOTH
def test_a_deep_copy_has_metadata_of_its_own(ranks, api):  # noqa: F811
    def run(rank):
        st = api.ones(rows(0, 1, api=api), 4)
        found = copy.deepcopy(st)
        found.metadata().shards_metadata[0].shard_offsets[0] = 100
        check(st, torch.ones(4), rows(0, 1, api=api))

    ranks(2, run)


def test_the_cpu_has_no_numbers_that_matter(ranks):  # noqa: F811
    def run(rank):
        spec = ours.ChunkShardingSpec(0, ["rank:0/cpu:0", "rank:1/cpu:0"])
        st = ours.ones(spec, 4, 4)
        assert copy.deepcopy(st).sharding_spec() == st.detach().sharding_spec() == spec
        assert st.cpu() is st

    ranks(2, run)


# --- pickles ---------------------------------------------------------------------------------------------------------


@BOTH
def test_pickles_are_loaded_in_their_place(ranks, api):  # noqa: F811
    def run(rank):
        spec = grid(6, 5, 0, 1, 1, 0, api=api)
        st = api.ones(spec, 6, 5, requires_grad=True)
        dumped = pickle.dumps(st)
        found = pickle.loads(dumped)
        check(found, torch.ones(6, 5), spec)
        assert found.metadata() == st.metadata()
        assert found.requires_grad
        others = [b"", b""]
        dist.all_gather_object(others, dumped)
        with pytest.raises(RuntimeError, match=f"rank at save time was {1 - rank}, but at load time was {rank}"):
            pickle.loads(others[1 - rank])
        return dumped

    for dumped in ranks(2, run):
        with pytest.raises(RuntimeError, match="Need to initialize default process group"):
            pickle.loads(dumped)


@BOTH
def test_pickles_are_loaded_into_their_group(ranks, api):  # noqa: F811
    def run(rank):
        group = dist.new_group([2, 1])
        if rank == 0:
            return
        spec = rows(2, 1, api=api)
        dumped = pickle.dumps(api.ones(spec, 4, process_group=group))
        with api.load_with_process_group(group) as entered:
            found = pickle.loads(dumped)
            with pytest.raises(RuntimeError, match="already set"), api.load_with_process_group(group):
                pass
        assert (entered, found._process_group) == (group, group)
        check(found, torch.ones(4), spec)
        with pytest.raises(RuntimeError, match=r"at save time was \d, but at load time was \d"):
            pickle.loads(dumped)
        with pytest.raises(ZeroDivisionError), api.load_with_process_group(group):
            raise ZeroDivisionError
        with api.load_with_process_group(group):  # also after an error
            pickle.loads(dumped)

    ranks(3, run)
