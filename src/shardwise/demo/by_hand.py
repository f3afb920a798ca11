"""The sync written with torch alone: ours is compared with it, in values and in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.demo.model import FUSED, SERVERS, TENSOR_PARALLEL, TRAINERS, Llama, Weights
from shardwise.layout import Shard
from shardwise.tensor import ShardedTensor

SENDER, SERVING = int(TRAINERS.ranks[0]), SERVERS.ranks.tolist()


@dataclass(frozen=True)
class ByHand:
    """One rank's view: the weights at the beginning, and where a server keeps its part of each."""

    rank: int
    weights: Weights
    slots: Mapping[str, torch.Tensor]
    line: dist.ProcessGroup  # the group of one trainer and all servers

    @staticmethod
    def of(rank: int, llama: Llama, weights: Weights, target: Mapping[str, ShardedTensor] | None) -> ByHand:
        """Every rank calls, for the group."""
        return ByHand(rank, weights, _slots(llama, target or {}), dist.new_group([SENDER, *SERVING]))

    def sync(self, source: Mapping[str, DTensor] | None) -> None:
        """Gather a weight on the trainers, send it whole to all servers, and cut it there: one after the other."""
        for name, like in self.weights.items():
            whole = torch.empty_like(like) if source is None else source[name].full_tensor()
            if self.rank in (SENDER, *SERVING):
                dist.broadcast(whole, SENDER, group=self.line)
            if name in self.slots:
                self.slots[name].copy_(self._part(name, whole))

    def compare(self, scale: float) -> None:
        """Raise unless a server has its part of the weights times a number, bit-for-bit; then clear it."""
        for name, slot in self.slots.items():
            torch.testing.assert_close(slot, self._part(name, self.weights[name]) * scale, rtol=0, atol=0)
            slot.zero_()

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        (placement,) = TENSOR_PARALLEL.with_mesh(tp=len(SERVING)).placements(name)
        if not isinstance(placement, Shard):
            return whole
        return whole.chunk(len(SERVING), placement.dim)[SERVING.index(self.rank)]


def _slots(llama: Llama, target: Mapping[str, ShardedTensor]) -> Weights:
    """Where a server keeps each weight of the trainers: q, k and v one after the other."""
    slots, rows = Weights(), [length // len(SERVING) for length in llama.segments]
    for name, tensor in target.items():
        local = tensor.local_tensor()
        if FUSED in name:
            parts = zip("qkv", torch.split(local, rows), strict=True)
            slots |= {name.replace(FUSED, f"{part}_proj"): slot for part, slot in parts}
        else:
            slots[name] = local
    return slots
