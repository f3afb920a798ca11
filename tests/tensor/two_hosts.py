"""What every rank of two launchers does: started by test_launchers.py through torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw


def main(folder):
    """Reshard between and inside of hosts, and leave a mark."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank, per_host = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    assert (dist.get_world_size(), per_host) == (4, 2)
    whole = torch.arange(64.0).reshape(8, 8)
    x = sw.ShardedTensor(whole[2 * rank : 2 * rank + 2], "8x8/S0@4")
    for target in ("8x8/R@4", "8x8/S1@4", "8x8/S0,R@2x2"):
        move = sw.plan(x.layout, target, hosts=per_host)
        found = sw.reshard(x, target, hosts=per_host, verify=True)
        assert torch.equal(sw.reshard(found, "8x8/R@4").local_tensor(), whole)
        assert target != "8x8/R@4" or move.rounds > 1  # across once, then on inside of every host
    terms = sw.ShardedTensor(whole * (rank + 1), "8x8/P@4")
    assert torch.equal(sw.reshard(terms, "8x8/R@4", hosts=per_host, verify=True).local_tensor(), whole * 10)
    dist.barrier()
    (Path(folder) / str(rank)).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
