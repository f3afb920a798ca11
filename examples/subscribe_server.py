"""Serves the newest weights of a trainer that was started separately (publish_trainer.py).

    torchrun --standalone --nproc-per-node 3 examples/subscribe_server.py /tmp/policy

Start as many servers as you like, before or after the trainer. They run until you end them. Start one again: it gets
the newest version at once. While the trainer is away, servers keep the weights that they have.
"""

import sys
import time

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise as sw

SHAPES = {"policy.up.weight": (256, 64), "policy.down.weight": (64, 256)}


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(meeting):
    dist.init_process_group("gloo")  # the default group of this job alone
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {name: sw.empty((mesh, [Shard(1)]), shape) for name, shape in SHAPES.items()}  # columns on every rank
    with sw.subscribe(weights, at=meeting, name="policy", rename={"*": "policy.*"}, patience=5) as subscriber:
        subscriber.wait()  # for the first version
        while True:
            try:
                subscriber.pull()  # between requests: all ranks take over the newest version, or nothing changes
            except sw.ExchangeError as error:
                say(f"no new version: {error}")
            serve(weights, subscriber.version)


def serve(weights, version):
    """A request."""
    fingerprint = sw.fingerprint(weights["policy.up.weight"])  # the trainer prints the same one for this version
    say(f"version {version}: {fingerprint}")
    time.sleep(0.3)


main(*sys.argv[1:])
