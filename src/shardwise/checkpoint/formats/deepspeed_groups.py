"""How DeepSpeed's ZeRO lays parameters out in the flat groups of its ranks. Only arithmetic; nothing is read.

An optimizer has groups of parameters; each is flattened, and every rank has a partition of it:

    ZeRO-1 and 2   the whole group is cut into equal partitions; the last one is padded, or lacks the padding
    ZeRO-3         every parameter is cut into equal parts, padded; a partition has the part of each, one after another
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.checkpoint.formats.flat_runs import Buffer, Run, runs_across, runs_of_each
from shardwise.errors import CheckpointError

Shape = tuple[int, ...]
ALIGNMENT = 2  # ZeRO-1 and 2 pad groups to a multiple of so many elements per rank


@dataclass(frozen=True)
class FlatGroup:
    """The parameters of a group in order. `padding`: elements after each of them, of ZeRO-1 and 2."""

    shapes: Mapping[str, Shape]
    padding: Sequence[int]
    stage: int
    ranks: int
    where: object  # the file that says so

    def starts(self) -> Iterator[tuple[str, Shape, int]]:
        """Every parameter with its first element: in the whole group, in ZeRO-3 in each partition."""
        at = 0
        for (name, shape), padding in zip(self.shapes.items(), self.padding, strict=True):
            yield name, shape, at
            at += -(-prod(shape) // self.ranks) if self.stage == 3 else prod(shape) + padding

    @property
    def size(self) -> int:
        """Elements of the whole group, in ZeRO-3 of each partition."""
        total = sum(map(prod, self.shapes.values())) + sum(self.padding)
        return sum(-(-prod(shape) // self.ranks) for shape in self.shapes.values()) if self.stage == 3 else total

    def runs(self, partitions: Sequence[Buffer]) -> Iterator[tuple[str, Shape, list[Run]]]:
        """Where each parameter is in the partitions of all ranks."""
        self._check(partitions)
        split = runs_of_each if self.stage == 3 else runs_across
        for name, shape, start in self.starts():
            yield name, shape, split(start, prod(shape), partitions)

    def _check(self, partitions: Sequence[Buffer]) -> None:
        """Refuse partitions that these parameters cannot make up."""
        for buffer in partitions:
            if len(buffer.tensor.shape) != 1 or buffer.tensor.strides != (1,):
                raise CheckpointError(f"{buffer.where}: {buffer.what} has shape {buffer.tensor.shape}, not flat")
        sizes = [buffer.size for buffer in partitions]
        odd = self._odd(sizes)
        if odd is not None:
            buffer = partitions[odd]
            raise CheckpointError(
                f"{buffer.where}: {buffer.what} has {sizes[odd]} elements (rank by rank: "
                f"{', '.join(map(str, sizes[:8]))}{' ...' if len(sizes) > 8 else ''}), but the {len(self.shapes)} "
                f"parameters from {next(iter(self.shapes), None)!r} on, by {self.where}, need {self.size} "
                f"{'on every rank' if self.stage == 3 else 'in all'}: the files are of different checkpoints"
            )

    def _odd(self, sizes: Sequence[int]) -> int | None:
        """The rank whose partition has a size that cannot be; None if there is none."""
        if self.stage == 3:
            return next((rank for rank, size in enumerate(sizes) if size != self.size), None)
        for rank, size in enumerate(sizes):
            if size > sizes[0] or (size < sizes[0] and rank < len(sizes) - 1):
                return rank
        step = ALIGNMENT * len(sizes)
        fits = self.size <= sum(sizes) and -(-self.size // step) == -(-sum(sizes) // step)
        return None if fits else len(sizes) - 1


def check_order(
    group: FlatGroup, partitions: Sequence[Buffer], listed: Sequence[Mapping[str, tuple[int, int]]]
) -> None:
    """Refuse partitions in which a rank lists its parameters at other places: another order, or another iteration."""
    expected = [dict[str, tuple[int, int]]() for _ in partitions]
    numbers = {id(buffer): rank for rank, buffer in enumerate(partitions)}
    for name, _, runs in group.runs(partitions):
        for run in runs:
            expected[numbers[id(run.buffer)]][name] = run.offset, run.stop - run.start
    for buffer, ours, theirs in zip(partitions, expected, listed, strict=True):
        for name in (*theirs, *ours):
            if ours.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"{buffer.where} has {_place(theirs.get(name))} of {name!r}, but by {group.where} it has "
                    f"{_place(ours.get(name))}: its parameters are in another order, as those of another save. "
                    f"Remedy: give the files of one save"
                )


def _place(place: tuple[int, int] | None) -> str:
    return "nothing" if place is None else f"elements {place[0]} to {sum(place)}"
