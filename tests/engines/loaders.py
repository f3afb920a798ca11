"""Loaders for tests: what they really do, and what a recording says that they do."""

import torch

NAN = float("nan")


def fill(recorded, values):
    """Fill recorded targets of one process by their layouts, with no help of the library's own moves."""
    for name, target in recorded.items():
        if target.shards:
            pieces = sorted(target.layout.pieces(0), key=lambda piece: piece.buffer)
            for piece, shard in zip(pieces, target.shards, strict=True):
                shard.copy_(values[name][piece.box.slices])
        elif hasattr(target, "delivery") and name == target.delivery.names[0]:
            with torch.no_grad():
                target.delivery.take({one: [values[one].clone()] for one in target.delivery.names})


def bits(tensor):
    """The bytes of a tensor: NaN is compared, and -0.0 is not 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


class Engine(torch.nn.Module):
    """Two ranks' worth of what engines do: fused, transposed, padded, cast, computed, dropped."""

    shapes = {  # noqa: RUF012
        **dict.fromkeys(("q", "k", "v"), (8, 6)),
        "down": (8, 6),
        "emb": (11, 6),
        "norm": (6,),
        "A": (6,),
        "unused": (3,),
    }

    def __init__(self, rank=0, tp=1):
        super().__init__()
        self.rank, self.tp = rank, tp
        self.qkv = torch.nn.Parameter(torch.full((24 // tp, 6), NAN))
        self.down = torch.nn.Parameter(torch.full((6, 8 // tp), NAN, dtype=torch.bfloat16))
        self.emb = torch.nn.Parameter(torch.full((12 // tp, 6), NAN))
        self.norm = torch.nn.Parameter(torch.full((6,), NAN))
        self.a = torch.nn.Parameter(torch.full((6,), NAN))

    @classmethod
    def values(cls, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in cls.shapes.items()}

    @classmethod
    def like(cls):
        return {name: (shape, torch.float32) for name, shape in cls.shapes.items()}

    @torch.no_grad()
    def load_weights(self, weights):
        rank, tp = self.rank, self.tp
        for name, weight in weights:
            if name in "qkv":
                rows = 8 // tp
                self.qkv[rows * "qkv".index(name) :][:rows].copy_(weight.chunk(tp)[rank])
            elif name == "down":
                self.down.copy_(weight.t().narrow(1, rank * 8 // tp, 8 // tp))
            elif name == "emb":
                rows = 12 // tp
                part = weight[rank * rows : (rank + 1) * rows]
                self.emb[: len(part)].copy_(part)
                self.emb[len(part) :].fill_(0)
            elif name == "norm":
                self.norm.copy_(weight)
            elif name == "A":
                self.a.copy_(-torch.exp(weight))

    def assert_equals(self, other):
        for (name, mine), theirs in zip(self.named_parameters(), other.parameters(), strict=True):
            assert bits(mine) == bits(theirs), name
