"""Trains on two ranks and serves on two others. After every step the servers get the new weights.

torchrun --standalone --nproc-per-node 4 examples/push_weights.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

TRAINERS, SERVERS, LAYERS = [0, 1], [2, 3], range(2)
ROWS = {"q": 64, "k": 32, "v": 32}


def trained(mesh):
    """Rows of every weight on each trainer, as FSDP2 has them."""
    names = {f"model.layers.{n}.{part}.weight": rows for n in LAYERS for part, rows in ROWS.items()}
    weights = {name: distribute_tensor(torch.ones(rows, 64), mesh, [Shard(0)]) for name, rows in names.items()}
    return sw.share_(weights)  # servers on this host read them where they are


def served():
    """bfloat16; half of q, of k and of v in one weight on each server."""
    layout = sw.Layout.fused((128, 64), 0, list(ROWS.values()), owners=SERVERS)
    return {f"layers.{n}.qkv.weight": sw.empty(layout, dtype=torch.bfloat16) for n in LAYERS}


def main():
    dist.init_process_group("gloo")
    trains, mesh = dist.get_rank() in TRAINERS, DeviceMesh("cpu", TRAINERS)
    source, target = (trained(mesh), None) if trains else (None, served())  # None for what a rank does not have
    fuse = sw.Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])
    sync = sw.Resharder(source, target, rename={"model.*": "*"}, remap=[fuse], cast=True)  # planned once
    for step in range(3):
        for weight in (source or {}).values():
            weight.to_local().mul_(2)  # an optimizer's step
        sync.run()  # every rank calls
        if dist.get_rank() == SERVERS[0]:
            print(f"step {step}: a server has {target['layers.1.qkv.weight'].local_tensor().unique().tolist()}")
    dist.barrier()  # gloo may abort a process whose peers are still connected when it leaves
    dist.destroy_process_group()


main()
