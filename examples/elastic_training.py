"""Trains a model under FSDP2 on as many hosts as there are, and goes on from memory when one is lost or comes back.

On each host (here all on one machine, in terminals of their own, of which the first one says is_host=1):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise torch 2.13 waits for ever when a host joins again
    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        --rdzv-conf last_call_timeout=2,is_host=0 examples/elastic_training.py /tmp/elastic

Kill one of them with its worker: the others start again, and resume from memory. Start it again: it joins.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw

STEPS, EVERY = 2000, 100


def main(folder, steps=STEPS):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "random": sw.checkpoint.random_state(rng="first"),
        }

    with sw.checkpoint.Run(folder, memory=2, lease=120) as run:
        resumed = state()
        start = run.resume(into=resumed) or 0
        if start:
            set_optimizer_state_dict(model, optimizer, resumed["optimizer"])
        tell(f"resumed {start}: {run.resumed}", model)

        for step in range(start + 1, int(steps) + 1):
            batch = torch.randn(32, 16)
            (model(batch) - batch[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                run.save(step, state(), async_op=True)  # also on disk
            else:
                run.keep(step, state())  # in memory only, of two hosts
            tell(f"kept {step}", model)
            time.sleep(0.02)  # larger models take longer
    dist.destroy_process_group()


def tell(what, model):
    fingerprint = sw.fingerprint(model[0].weight)  # equal for equal values, under any sharding
    if dist.get_rank() == 0:
        print(f"{what} on {dist.get_world_size()} ranks, process {os.getpid()}: {fingerprint}", flush=True)


main(*sys.argv[1:])
