"""Weights whose cells tell which step wrote them, and where they belong: a mixture of two steps cannot hide."""

from zlib import crc32

import numpy as np
import torch

import shardwise as sw
from shardwise.testing import scatter

WIDE = 4096, None  # one step after the other, so far apart; every whole number up to 2**24 fits into float32
NARROW = 16, 8  # whole numbers up to 127 fit into bf16, fp16 and int8: steps count modulo 8
GARBAGE = 2345  # a step that is never committed


def room(dtype):
    """How far apart the steps are, and after how many they repeat."""
    return WIDE if dtype.itemsize >= 4 else NARROW


def positions(name, shape, dtype):
    """A number for every cell of a tensor. Tensors of other names have others."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) + crc32(name.encode())).reshape(shape) % room(dtype)[0]


def cells(name, shape, dtype, step):
    """The values of a whole tensor at a step."""
    apart, modulo = room(dtype)
    whole = positions(name, shape, dtype) + apart * (step % modulo if modulo else step)
    return torch.from_numpy(whole).to(dtype)


class Weights:
    """One rank's part of a model: `layouts` and `dtypes` by name. The first step is 0.

    `kind`: "sharded" for ShardedTensor, "plain" for a tensor that is whole on every rank.
    """

    def __init__(self, rank, layouts, dtypes=None, *, kind="sharded"):
        self.rank, self.layouts = rank, layouts
        self.dtypes = {name: (dtypes or {}).get(name, torch.int32) for name in layouts}
        self._positions = {
            name: self._part(name, positions(name, layouts[name].shape, self.dtypes[name])) for name in layouts
        }
        self.shards = {
            name: [torch.empty(part.shape, dtype=self.dtypes[name], device="cpu") for part in parts]
            for name, parts in self._positions.items()
        }
        whole = {name: sw.ShardedTensor(self.shards[name], layouts[name]) for name in layouts}
        self.state = whole if kind == "sharded" else {name: shards[0] for name, shards in self.shards.items()}
        self.fill(0)

    def _part(self, name, array):
        layout = self.layouts[name]
        return scatter(array, layout).get(self.rank, []) if self.rank in layout else []

    def fill(self, step):
        """Write a step into all cells."""
        for name, shards in self.shards.items():
            apart, modulo = room(self.dtypes[name])
            for shard, part in zip(shards, self._positions[name], strict=True):
                shard.copy_(torch.from_numpy(part + apart * (step % modulo if modulo else step)))

    def step(self):
        """The step of all cells of this rank, or None if it has none. Raises if they are a mixture."""
        found, narrow = set(), set()
        for name, shards in self.shards.items():
            apart, modulo = room(self.dtypes[name])
            for shard, part in zip(shards, self._positions[name], strict=True):
                numbers = shard.to(torch.float64).numpy() - part
                assert not (numbers % apart).any(), f"cells of {name!r} lie at wrong places: {shard}"
                (narrow if modulo else found).update(np.unique(numbers // apart).astype(int).tolist())
        assert len(found) < 2, f"cells of the steps {sorted(found)} are mixed"
        assert not found or narrow <= {step % NARROW[1] for step in found}, f"{found} is mixed with {narrow} (modulo 8)"
        assert len(narrow) < 2, f"cells of the steps {sorted(narrow)} (modulo 8) are mixed"
        return next(iter(found or narrow), None)


class Derived:
    """One rank's part of a model that another one becomes: `whole(step)` has its tensors by name.

    Cells are compared with those of the steps up to `steps`; 0 is the first.
    """

    def __init__(self, rank, layouts, whole, *, kind="sharded", steps=8):
        self.steps = range(steps)
        self._expected = [self._parts(rank, layouts, whole(step)) for step in self.steps]
        self.shards = {name: [shard.clone() for shard in shards] for name, shards in self._expected[0].items()}
        whole = {name: sw.ShardedTensor(self.shards[name], layouts[name]) for name in layouts}
        self.state = whole if kind == "sharded" else {name: shards[0] for name, shards in self.shards.items()}

    @staticmethod
    def _parts(rank, layouts, whole):
        found = {}
        for name, layout in layouts.items():
            numbers = np.arange(int(np.prod(layout.shape, dtype=np.int64))).reshape(layout.shape)
            parts = scatter(numbers, layout).get(rank, []) if rank in layout else []
            bytes_of = whole[name].contiguous().view(-1).view(torch.uint8).view(-1, whole[name].element_size())
            found[name] = [
                bytes_of[torch.from_numpy(part.reshape(-1))].view(-1).view(whole[name].dtype).view(part.shape)
                for part in parts
            ]
        return found

    def step(self):
        """The step that all cells of this rank are of. Raises if they are of none."""
        for step in self.steps:
            pairs = [
                pair for name in self.shards for pair in zip(self.shards[name], self._expected[step][name], strict=True)
            ]
            if all(a.contiguous().view(-1).view(torch.uint8).equal(b.view(-1).view(torch.uint8)) for a, b in pairs):
                return step
        raise AssertionError(f"the cells are of no step: {self.shards}")


class Sparse:
    """One rank's part of a model of which a step changes few cells: each has the step that wrote it last."""

    EVERY = 50

    def __init__(self, rank, layouts, dtype=torch.int32):
        self._numbers = {}
        for name, layout in layouts.items():
            numbers = (np.arange(int(np.prod(layout.shape))) + crc32(name.encode())).reshape(layout.shape) % self.EVERY
            self._numbers[name] = scatter(numbers, layout).get(rank, []) if rank in layout else []
        self.shards = {
            name: [torch.zeros(part.shape, dtype=dtype) for part in parts] for name, parts in self._numbers.items()
        }
        self.state = {name: sw.ShardedTensor(self.shards[name], layout) for name, layout in layouts.items()}

    def _expected(self, name, step):
        """The last step up to this one that has the number of the cell, from 1 on; 0 before."""
        return [np.maximum(step - (step - part) % self.EVERY, 0) for part in self._numbers[name]]

    def fill(self, step):
        """Write a step. (Cells that it does not change keep what they have.)"""
        for name, shards in self.shards.items():
            for shard, values in zip(shards, self._expected(name, step), strict=True):
                shard.copy_(torch.from_numpy(values))

    def step(self):
        """The step of all cells of this rank. Raises if they are a mixture."""
        step = max(int(shard.max()) for shards in self.shards.values() for shard in shards if shard.numel())
        for name, shards in self.shards.items():
            for shard, values in zip(shards, self._expected(name, step), strict=True):
                wrong = (shard.numpy() != values).sum()
                assert not wrong, f"{wrong} of {values.size} cells of {name!r} are not of step {step}"
        return step
