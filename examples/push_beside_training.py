"""As push_weights.py, but training continues while the weights are moved.

torchrun --standalone --nproc-per-node 4 examples/push_beside_training.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

TRAINERS, SERVERS = [0, 1], [2, 3]


def main():
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), DeviceMesh("cpu", TRAINERS)
    source = {"w": distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])} if rank in TRAINERS else None
    target = {"w": sw.empty("64x64/S1@2:2,3")} if rank in SERVERS else None  # columns on ranks 2 and 3
    sync = sw.Resharder(source, target)
    for step in range(3):
        if source:
            source["w"].to_local().mul_(2)  # an optimizer's step; the last move may still be running
        handle = sync.run(async_op=True)  # copies this rank's weights, and returns. It waits for the last move first
        if target:
            handle.wait()  # until then, do not read the target
            if rank == SERVERS[0]:
                print(f"step {step}: a server has {target['w'].local_tensor().unique().tolist()}")
    handle.wait()
    dist.barrier()  # gloo may abort a process whose peers are still connected when it leaves
    dist.destroy_process_group()


main()
