"""A trainer and a server that are started separately, with the weights moved between them after every step.

On one machine, in two terminals:

    torchrun --standalone --nproc-per-node 2 examples/separate_jobs.py trainer /tmp/meeting
    torchrun --standalone --nproc-per-node 3 examples/separate_jobs.py server /tmp/meeting

/tmp/meeting must not exist before; on several machines give a file that all of them see, or host:port of the machine
where the trainer's first rank runs.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

TRAINERS, SERVERS, STEPS = 2, 3, 3


def joined(job, meeting):
    """One group over both jobs: first the ranks of the trainer, then those of the server."""
    rank = dist.get_rank() + (TRAINERS if job == "server" else 0)
    size = TRAINERS + SERVERS
    if ":" in meeting:
        host, port = meeting.split(":")
        store = dist.TCPStore(host, int(port), size, is_master=rank == 0)
    else:
        store = dist.FileStore(meeting, size)
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def main(job, meeting):
    dist.init_process_group("gloo")  # the default group of this job alone: ranks begin with 0 in both
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    rows_or_columns = Shard(0) if job == "trainer" else Shard(1)
    weights = {f"layer{n}": distribute_tensor(torch.zeros(64, 48), mesh, [rows_or_columns]) for n in range(4)}

    group = joined(job, meeting)
    source, target = (weights, None) if job == "trainer" else (None, weights)
    sync = sw.Resharder(source, target, group=group)  # planned once
    for step in range(STEPS):
        if job == "trainer":
            for weight in weights.values():
                weight.to_local().add_(torch.randn(weight.to_local().shape))  # an optimizer's step
        sync.run()
        fingerprint = sw.fingerprint(weights["layer0"])  # the same number under every sharding
        if dist.get_rank() == 0:
            print(f"step {step}: {fingerprint}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
