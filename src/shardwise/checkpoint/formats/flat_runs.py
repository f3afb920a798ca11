"""Tensors in flat buffers: runs of the cells of each, in 1-d tensors of archives that torch.save wrote."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.entry import Entry, HashableBoxes, Positions
from shardwise.checkpoint.files import FileLabel, Files
from shardwise.checkpoint.formats.archives import Archive, data_starts
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, Ints, cut, ints, row_major


class Buffer(NamedTuple):
    """A tensor in the archive of a file, by the number of the file."""

    file: int
    archive: Archive
    tensor: TensorStub
    what: str  # in messages

    @property
    def where(self) -> FileLabel:
        """Its file, in messages."""
        return self.archive.where._replace(bytes=None)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.tensor.shape)


class Run(NamedTuple):
    """Cells `start` to `stop` of a flattened tensor: they are in a buffer, from its element `offset` on."""

    start: int
    stop: int
    buffer: Buffer
    offset: int


def runs_across(start: int, count: int, buffers: Sequence[Buffer]) -> list[Run]:
    """The runs of a tensor that begins at an element of several buffers, which continue each other."""
    begins = [0, *accumulate(buffer.size for buffer in buffers)]
    first = max(int(np.searchsorted(begins, start, side="right")) - 1, 0)
    runs = list[Run]()
    for buffer, begin in zip(buffers[first:], begins[first:], strict=False):
        lo, hi = max(begin, start), min(begin + buffer.size, start + count)
        if begin >= start + count:
            break
        if lo < hi:
            runs.append(Run(lo - start, hi - start, buffer, lo - begin))
    return runs


def runs_of_each(offset: int, count: int, buffers: Sequence[Buffer]) -> list[Run]:
    """The runs of a tensor of which every buffer has an equal part, the last ones with padding."""
    part = -(-count // len(buffers))
    starts = [rank * part for rank in range(len(buffers))]
    parts = [(start, min(start + part, count), buffer) for start, buffer in zip(starts, buffers, strict=True)]
    return [Run(start, stop, buffer, offset) for start, stop, buffer in parts if start < stop]


def entry_of_runs(
    name: str,
    shape: tuple[int, ...],
    like: Buffer,
    runs: Sequence[Run],
    paths: Sequence[str],
    files: Files,
    shared: Hashable = None,
) -> Entry:
    """A tensor that runs make up, of the dtype of a buffer. Where an archive has its bytes is found when needed."""
    dtype = like.tensor.dtype
    for run in runs:
        if run.buffer.tensor.dtype != dtype:
            raise CheckpointError(
                f"{name!r} is {dtype} in {like.where}, but {run.buffer.tensor.dtype} in "
                f"{run.buffer.where}: the files are of different saves"
            )
    whole = Boxes.of([Box.whole(shape)] * len(runs), len(shape))
    row, boxes = cut(whole, ints([run.start for run in runs]), ints([run.stop for run in runs]))
    first = (boxes.lo * ints(row_major(shape))).sum(axis=1, dtype=np.int64)

    def locate(rows: Ints) -> Positions:
        numbers, of = np.unique(row[rows], return_inverse=True)
        needed = [runs[number] for number in numbers.tolist()]
        members = [run.buffer.archive.storage(run.buffer.tensor, name) for run in needed]
        cells = ints([run.buffer.tensor.offset + run.offset - run.start for run in needed])
        starts = ints(data_starts(files, members)) + cells * dtype.itemsize
        return Positions(starts[of] + first[rows] * dtype.itemsize)

    file = ints([run.buffer.file for run in runs])[row]
    return Entry(name, shape, dtype, HashableBoxes(boxes), file, locate, paths, files, shared)
