"""Trains a model under FSDP2 on four ranks, and syncs it after every step into a server on two of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw

HEADS, KV, WIDTH, HIDDEN = 8, 4, 8, 64  # grouped heads: q has 64 rows, k and v have 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, heads * WIDTH, bias=False) for heads in (HEADS, KV, KV))
        self.o = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        k, v = (kv(x).repeat(1, HEADS // KV) for kv in (self.k, self.v))
        return x + self.o(self.q(x) * k + v)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, servers = dist.get_rank(), [1, 3]
    model = nn.Sequential(Layer(), Layer())
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(4))))  # all four train
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    target = None
    if rank in servers:  # two of them serve: parts of q, k and v in one tensor, columns of o
        qkv = sw.parse("128x64/fused0=64,32,32@2:1,3")
        o = sw.parse("64x64/S1@2:1,3")
        target = {}
        for n in range(2):
            for name, layout in ("qkv", qkv), ("o", o):
                (shape,) = layout.local_shapes(rank)
                target[f"{n}.{name}.weight"] = sw.ShardedTensor(torch.empty(shape, dtype=torch.bfloat16), layout)

    fuse = sw.Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])
    sync = sw.Resharder(model.state_dict(), target, remap=[fuse], cast=True)
    if rank == 0:
        print(sync.plan.explain())
    for _ in range(3):
        model(torch.randn(16, HIDDEN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.run()
        whole = model[0].k.weight.full_tensor().to(torch.bfloat16)
        if rank == 3:  # the second half of k comes after the second half of q
            assert torch.equal(target["0.qkv.weight"].local_tensor()[32:48], whole[16:])
    dist.barrier()  # gloo may abort a process whose peers are still connected when it leaves
    dist.destroy_process_group()


main()
