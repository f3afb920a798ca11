"""What every rank of a job on one host does: started by test_jobs.py, by torchrun or spawned."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from shardwise.job.session import group_transport


def rank_of_a_job(rank, world, folder, seed):
    """Reshard through shared memory, and write down who this was."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    assert group_transport(None).local_peers.all
    rows, columns = (sw.Layout.chunk((256, 512), dim, owners=world) for dim in (0, 1))
    for turn in range(20):
        whole = torch.arange(256.0 * 512).reshape(256, 512) + 1000 * seed + turn
        local = whole.chunk(world)[rank].clone()
        x = sw.ShardedTensor(sw.share_(local) if turn % 2 else local, rows)
        found = sw.reshard(x, columns, transport="shared")
        torch.testing.assert_close(found.local_tensor(), whole.chunk(world, dim=1)[rank], rtol=0, atol=0)
    with open(os.path.join(folder, f"rank {rank}"), "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, seed = sys.argv[1], int(sys.argv[2])
    if "RANK" in os.environ:
        rank_of_a_job(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder, seed)
    else:
        mp.spawn(rank_of_a_job, args=(2, folder, seed), nprocs=2)
