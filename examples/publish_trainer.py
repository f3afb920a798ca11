"""Trains a model under FSDP2, and publishes its weights after every step to servers that are started separately.

    torchrun --standalone --nproc-per-node 2 examples/publish_trainer.py /tmp/policy /tmp/policy-checkpoint

The jobs of one machine meet in a file, here /tmp/policy. It runs until you end it. Start it again: it resumes from its
checkpoint, and the servers (subscribe_server.py) pull from it as before.
"""

import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main(meeting, checkpoint):
    dist.init_process_group("gloo")  # the default group of this job alone
    torch.manual_seed(0)
    model = Policy()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model.state_dict(), "step": 0}
    if Path(checkpoint).exists():
        sw.checkpoint.load(checkpoint, into=state)

    with sw.publish(model.state_dict(), at=meeting, name="policy") as publisher:
        for step in count(state["step"] + 1):
            batch = torch.randn(8, 64)
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sw.checkpoint.save({"model": model.state_dict(), "step": step}, checkpoint)
            fingerprint = sw.fingerprint(model.up.weight)  # equal for equal values, under any sharding
            if dist.get_rank() == 0:
                print(f"version {step}: {fingerprint}", flush=True)
            publisher.commit(step)  # returns when the weights may change again
            time.sleep(0.2)  # larger models take longer


main(*sys.argv[1:])
