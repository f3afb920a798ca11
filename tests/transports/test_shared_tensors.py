"""Tensors in shared memory: what lies there is known by its storage, whatever becomes of it."""

import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, open_files, part

import shardwise as sw
from shardwise.errors import ExchangeError
from shardwise.transports import torch_groups
from shardwise.transports.segments import this_process


def test_other_memory_at_the_address_of_a_shared_tensor_that_was_emptied_is_not_taken_for_it(ranks):  # noqa: F811
    def run(rank):
        torch_groups.CAN_SWAP = False  # or it could not be emptied
        local = part(VALUES, ROWS, rank).local_tensor()
        emptied = sw.share_(torch.full_like(local, -1.0))
        address = emptied.data_ptr()
        emptied.untyped_storage().resize_(0)  # as FSDP does; the tensor lives on
        other = torch.frombuffer(mmap.mmap(-1, local.nbytes), dtype=local.dtype).view_as(local)
        other.copy_(local)
        expect(sw.reshard(sw.ShardedTensor(other, ROWS), COLUMNS), VALUES, COLUMNS, rank)
        return address == other.data_ptr()

    assert any(ranks(2, run))  # else this has shown nothing


def test_a_tensor_that_torch_has_moved_since_is_not_looked_for_in_its_segment(ranks):  # noqa: F811
    def run(rank):
        x = part(VALUES, ROWS, rank, shared=True)
        x.local_tensor().share_memory_()  # as multiprocessing does
        assert this_process.shared_tensors.place(x.local_tensor()) is None
        expect(sw.reshard(x, COLUMNS), VALUES, COLUMNS, rank)
        return True

    assert all(ranks(2, run))


def test_a_model_takes_one_descriptor_and_keeps_its_values():
    if not torch_groups.CAN_SWAP:
        pytest.skip("this torch cannot exchange the memory of storages")
    gc.collect()  # what other tests have left
    sizes = [1, 5, 1024, 1025, 3000, 0]
    tensors = [torch.randn(size) for size in sizes]
    views, values, before = [tensor[1:] for tensor in tensors], [tensor.clone() for tensor in tensors], open_files()
    sw.share_({"a": tensors[:3], "b": tuple(tensors[2:])})
    assert open_files() == before + 1
    for tensor, view, value in zip(tensors, views, values, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), value.numpy())
        tensor += 1
        np.testing.assert_array_equal(view.numpy(), value.numpy()[1:] + 1)
    assert len({this_process.shared_tensors.place(tensor).segment.number for tensor in tensors if tensor.numel()}) == 1
    del tensors, views, tensor, view
    gc.collect()
    assert open_files() == before


def test_what_a_forked_child_frees_stays_with_its_parent():
    tensors = sw.share_([torch.ones(2**18) for _ in range(2)])
    child = os.fork()
    if not child:
        tensors.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    np.testing.assert_array_equal(torch.cat(tensors).numpy(), 1.0)


def test_memory_of_a_shared_model_is_freed_tensor_by_tensor_unless_peers_may_still_read_it(ranks):  # noqa: F811
    def run(_):
        found = []
        for keep in (False, True):
            tensors = sw.share_([torch.ones(2**18) for _ in range(3)])
            if keep:
                this_process.shared_tensors.keep_pages()
            file = this_process.shared_tensors.place(tensors[0]).segment.file
            del tensors[1]
            found.append(os.fstat(file).st_blocks * 512 // 2**20)
            assert all(float(tensor.sum()) == 2**18 for tensor in tensors)
        return found

    assert ranks(1, run) == [[2, 3]]


MODEL = torch.nn.Linear(2, 2)
NOT_TAKEN = {
    "generator": MODEL.parameters(),
    "odict_values": MODEL.state_dict().values(),
    "SGD": torch.optim.SGD(MODEL.parameters()),
    "int": 3,
}


@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_what_cannot_be_shared_is_refused_and_not_left_as_it_is(kind):
    with pytest.raises(TypeError, match=f"share_ takes a tensor, a module, or a dict or list of tensors, not a {kind}"):
        sw.share_(NOT_TAKEN[kind])


def test_a_rank_that_has_nothing_to_share_may_say_so():
    assert sw.share_(None) is None


def test_more_than_the_machine_has_is_refused_before_anybody_is_killed_for_it():
    with pytest.raises(
        ExchangeError, match=r"4000000000000 bytes of shared memory cannot be allocated: \d+ bytes .* are left"
    ):
        sw.empty("1000000x1000000/S0@1", shared=True)


def test_storages_may_be_collected_at_any_time():
    found = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "0 left", found.stderr


COLLECTED = """
import faulthandler, gc, torch, shardwise as sw
from shardwise.transports.segments import this_process

class Ring: pass

faulthandler.dump_traceback_later(30, exit=True)
for turn in range(300):
    gc.set_threshold(1 + turn % 50)
    ring = Ring()
    ring.me, ring.moved = ring, sw.share_(torch.zeros(4))
    ring.made = sw.empty("4/S0@1", shared=True)
del ring
gc.collect()
print(len(this_process.shared_tensors._places), "left")
"""
