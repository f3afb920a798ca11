"""Several jobs on forked ranks, each with a default group of its own, and groups over some ranks of them."""

import os
from datetime import timedelta

import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

LIMIT = timedelta(seconds=30)


def leave_the_first_group():
    """The ranks of a test begin with a group over all: they are no job of their own yet."""
    dist.barrier()
    dist.destroy_process_group()


def start_job(folder, name, rank, size):
    """This process becomes a rank of a job."""
    store = dist.FileStore(os.path.join(folder, f"job {name}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)


def custom_group(folder, name, rank, size):
    """A group with a store of its own, as frameworks of reinforcement learning make it: in torch's registry."""
    store = c10d.PrefixStore(name, dist.FileStore(os.path.join(folder, f"group {name}"), size))
    made, _ = c10d._new_process_group_helper(size, rank, [], "gloo", store, group_name=name, timeout=LIMIT)
    c10d._world.pg_group_ranks[made] = {at: at for at in range(size)}
    return made


def bare_group(folder, name, rank, size):
    """A group that torch's registry does not know, as serving frameworks make it."""
    store = dist.PrefixStore(name, dist.FileStore(os.path.join(folder, f"group {name}"), size))
    made = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=LIMIT)
    backend._set_sequence_number_for_group()
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


GROUPS = {"custom": custom_group, "bare": bare_group}
