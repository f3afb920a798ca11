"""Tensors in shared memory: what lies there is known by its storage, whatever becomes of it."""

import mmap
import subprocess
import sys

import pytest
import torch
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, part

import shardwise as sw
from shardwise.errors import ExchangeError


def test_other_memory_at_the_address_of_a_shared_tensor_that_was_emptied_is_not_taken_for_it(ranks):  # noqa: F811
    def run(rank):
        local = part(VALUES, ROWS, rank).local_tensor()
        emptied = sw.share_(torch.full_like(local, -1.0))
        address = emptied.data_ptr()
        emptied.untyped_storage().resize_(0)  # as FSDP does; the tensor lives on
        other = torch.frombuffer(mmap.mmap(-1, local.nbytes), dtype=local.dtype).view_as(local)
        other.copy_(local)
        expect(sw.reshard(sw.ShardedTensor(other, ROWS), COLUMNS), VALUES, COLUMNS, rank)
        return address == other.data_ptr()

    assert any(ranks(2, run))  # else this has shown nothing


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
print(len(this_process.shared_tensors._segments), "left")
"""
