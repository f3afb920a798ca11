"""Turns rows into columns between four processes.

torchrun --standalone --nproc-per-node 4 examples/first_reshard.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardwise as sw

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
rows = distribute_tensor(torch.arange(48.0).reshape(8, 6), mesh, [Shard(0)])
columns = sw.reshard(rows, (mesh, [Shard(1)]))
if dist.get_rank() == 0:
    print(f"rank 0 had {tuple(rows.to_local().shape)}, and has {tuple(columns.to_local().shape)} now")
dist.barrier()
dist.destroy_process_group()
