"""Trains a model under FSDP2, saves every 20 steps, and stops when it receives SIGTERM, as schedulers send it.

    torchrun --standalone --nproc-per-node 4 examples/resume_training.py /tmp/trained

Start it again, on any number of ranks: it resumes from the newest step that is whole.
"""

import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw

STEPS, EVERY = 2000, 20


def main(folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "random": sw.checkpoint.random_state(rng="first"),  # every rank draws the same batches
        }

    with sw.checkpoint.Run(folder, keep=3, keep_every=500) as run:
        run.save_on(signal.SIGTERM, signal.SIGINT)  # SIGINT: Ctrl-C
        resumed = state()
        start = run.resume(into=resumed) or 0
        if start:
            set_optimizer_state_dict(model, optimizer, resumed["optimizer"])
            scheduler.load_state_dict(resumed["scheduler"])
        tell("resumed", start, model)

        for step in range(start + 1, STEPS + 1):
            batch = torch.randn(32, 16)
            (model(batch) - batch[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            stop = run.should_stop()  # the same on all ranks
            if stop or step % EVERY == 0:
                run.save(step, state())
                tell("saved", step, model)
            if stop:
                break
            time.sleep(0.02)  # larger models take longer
    dist.destroy_process_group()


def tell(what, step, model):
    fingerprint = sw.fingerprint(model[0].weight)  # equal for equal values, under any sharding
    if dist.get_rank() == 0:
        print(f"{what} {step} on {dist.get_world_size()} ranks: {fingerprint}", flush=True)


main(*sys.argv[1:])
