"""A directory with a file per rank, each with its own shards under the same names; rules say how they fit together.

Shapes come from the files: sizes along a sharded dim add up, even if they are uneven. Of replicas the first one is
read; a few cells are compared with the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
import torch

from shardwise.checkpoint.axis_rules import AxisRule, Known, Word
from shardwise.checkpoint.entry import Checkpoint, Entry, HashableBoxes, Positions
from shardwise.checkpoint.file_patterns import axis_positions, file_name, numbered_alike, numbers_in
from shardwise.checkpoint.files import FileLabel, Files
from shardwise.checkpoint.formats import safetensors, torch_save
from shardwise.checkpoint.rules import Rules, RulesSource, rules_for
from shardwise.checkpoint.sharding_rule import layout_on, ranks_of, without_heads
from shardwise.errors import CheckpointError, LayoutError
from shardwise.geometry import Box, Boxes, Ints, Places, ints, join, spread
from shardwise.job.names import missing
from shardwise.layout import Mesh, Partial, Replicate, Shard
from shardwise.layout.checks import checked_dim
from shardwise.state.traverse import OBJ_PATH
from shardwise.storage.paths import inside

SAMPLE = 1024  # cells of replicas that are compared
MAX_MISSING = 1024  # files that may be missing and are still listed by name


def open_rank_files(files: Files, source: RulesSource) -> Checkpoint:
    """The tensors of all rank files together. Other values come from the file of the first rank."""
    rules = rules_for(source, files)
    names = rank_files(files, rules)
    opened = [_open(files, name) for name in names]
    entries = join_ranks([_selected(checkpoint, rules) for checkpoint in opened], names, files, rules)
    return Checkpoint(
        files,
        "files of ranks",
        entries,
        paths=_paths(opened[0], rules),
        objects=lambda: _objects(opened[0], entries, rules),
        metadata={**opened[0].metadata, "rules": repr(rules)},
    )


def join_ranks(
    ranks: Sequence[Mapping[str, Entry]], names: Sequence[str], files: Files, rules: Rules
) -> dict[str, Entry]:
    """The whole tensors of which every rank of the mesh has a part, in the file of that number of `names`."""
    labels, meshes, entries = [files.label(name) for name in names], _meshes(ranks, rules), dict[str, Entry]()
    _check_names(ranks, labels, rules, meshes)
    for name, mesh in meshes.items():
        rule, known = rules.placed(name)
        here, words = mesh.ranks.reshape(-1).tolist(), rule.on(rules.known_mesh())
        shards, where = [ranks[rank][name] for rank in here], [labels[rank] for rank in here]
        tensor = RankTensors(name, shards, where, mesh, without_heads(words, mesh, known), rule.where, known)
        entries[name] = _entry(tensor, files, [names[rank] for rank in here])
    return entries


# --- the files -----------------------------------------------------------------------------------------------------


def rank_files(files: Files, rules: Rules) -> list[str]:
    """The name of every rank's file, in the order of the mesh."""
    if rules.pattern is None:
        return _numbered_files(files, rules.known_mesh())
    mesh, pattern, there = rules.known_mesh(), rules.pattern, set(files.names(recursive=True))
    if mesh.ranks.size > len(there) + MAX_MISSING:
        raise CheckpointError(f"{files.root} has {len(there)} files, too few for the {mesh.ranks.size} ranks of {mesh}")
    names = [inside(file_name(pattern, axis_positions(mesh, rank)), rules.where) for rank in range(mesh.ranks.size)]
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise LayoutError(
            f"{rules.where}, [files]: pattern {pattern!r} gives several ranks of {mesh} the file {twice!r}"
        )
    if absent := [name for name in names if name not in there]:
        raise CheckpointError(
            missing(f"{files.root}: {len(absent)} of the {len(names)} files of {mesh} are missing:", absent, there)
        )
    sizes = {"rank": mesh.ranks.size, **dict(zip(mesh.names, mesh.shape, strict=True))}
    for axis, size in sizes.items():
        beyond = file_name(pattern, axis_positions(mesh, 0) | {axis: size})
        if beyond in there - set(names):
            raise CheckpointError(f"{files.label(beyond)} does not belong to a rank of {mesh}: is the mesh larger?")
    return names


def _numbered_files(files: Files, mesh: Mesh) -> list[str]:
    """The files whose names differ in one number only, if there are as many as ranks."""
    groups = numbered_alike(name for name in files.names() if "/" not in name)
    fitting = [
        group
        for group in groups
        if len(group) == mesh.ranks.size and _count_up(map(numbers_in, group)) and _opener(files, min(group))
    ]
    if len(fitting) != 1:
        here = [name for group in groups for name in sorted(group)]
        names = ", ".join(here[:6]) + (" ..." if len(here) > 6 else "") if here else "none"
        which = "several sets of numbered files match" if fitting else "no set of numbered files matches"
        remedy = 'name the files in the rules, as in [files] pattern = "model_{rank}.pt"'
        raise CheckpointError(f"{files.root}: {which} {mesh}, among {names}: {remedy}")
    return fitting[0]


def _count_up(numbers: Iterable[tuple[int, ...]]) -> bool:
    """True if one of the numbers changes, by one from name to name."""
    changing = [column for column in zip(*sorted(numbers), strict=True) if len(set(column)) > 1]
    return len(changing) < 2 and all(b == a + 1 for column in changing for a, b in pairwise(column))


def _opener(files: Files, name: str) -> Callable[[Files, Sequence[str]], Checkpoint] | None:
    """What opens a file; None if it is not a rank file."""
    if torch_save.looks_like_one(files, name):
        return torch_save.open_files
    return safetensors.open_files if name.endswith(".safetensors") or safetensors.looks_like_one(files, name) else None


def _open(files: Files, name: str) -> Checkpoint:
    opener = _opener(files, name)
    if opener is None:
        raise CheckpointError(f"{files.label(name)} is neither a torch.save file nor a safetensors file")
    return opener(files, [name])


# --- the names -----------------------------------------------------------------------------------------------------


def _selected(checkpoint: Checkpoint, rules: Rules) -> dict[str, Entry]:
    """The tensors below the prefix that the rules do not skip."""
    start = rules.prefix
    named = {name.removeprefix(start): entry for name, entry in checkpoint.items() if name.startswith(start)}
    return {name: entry for name, entry in named.items() if not rules.rule(name).skip}


def _meshes(ranks: Sequence[Mapping[str, Entry]], rules: Rules) -> dict[str, Mesh]:
    """The ranks that should have each tensor, by the rules."""
    mesh = rules.known_mesh()
    every = Mesh.of(mesh.shape, mesh.names)  # of numbers of files
    placed = {name: rules.placed(name) for name in dict.fromkeys(name for rank in ranks for name in rank)}
    return {name: rule.submesh(every, known) for name, (rule, known) in placed.items()}


def _check_names(
    ranks: Sequence[Mapping[str, Entry]], labels: Sequence[FileLabel], rules: Rules, meshes: Mapping[str, Mesh]
) -> None:
    """Refuse ranks that lack tensors, or have those of others."""
    if not meshes:
        under = f" whose name begins with {rules.prefix!r}" if rules.prefix else ""
        raise CheckpointError(f"{labels[0]} has no tensor{under}, except those that the rules skip")
    holders = {name: set(mesh.ranks.reshape(-1).tolist()) for name, mesh in meshes.items()}
    absent = [(name, rank) for name, numbers in holders.items() for rank in sorted(numbers) if name not in ranks[rank]]
    if absent:
        first, rank = absent[0]
        names = [name for name, number in absent if number == rank]
        other = next(label for names, label in zip(ranks, labels, strict=True) if first in names)
        raise CheckpointError(f"{missing(f'{labels[rank]} has no', names, ranks[rank])}, but {other} has")
    for rank, names_there in enumerate(ranks):
        if more := [name for name in names_there if rank not in holders[name]]:
            where = rules.rule(more[0]).where
            raise CheckpointError(f"{labels[rank]} has {more[0]!r}, which {where} gives to other ranks")


def _objects(first: Checkpoint, entries: Mapping[str, Entry], rules: Rules) -> dict[str, object]:
    """Values that are not tensors, also outside the prefix: counters and settings are there."""
    names = _new_names(first.objects, rules)
    return {new: first.objects[name] for name, new in names if new not in entries}


def _new_names(names: Iterable[str], rules: Rules) -> list[tuple[str, str]]:
    """Pairs of old and new names; of equal new names the last one counts, which is below the prefix."""
    ordered = sorted(names, key=lambda name: name.startswith(rules.prefix))
    pairs = [(name, name.removeprefix(rules.prefix)) for name in ordered]
    return [(name, new) for name, new in pairs if not rules.skips(new)]


def _paths(first: Checkpoint, rules: Rules) -> dict[str, OBJ_PATH]:
    """The nested paths, without the prefix."""
    paths = dict[str, OBJ_PATH]()
    for name, new in _new_names(first.paths, rules):
        path = first.paths[name]
        if name.startswith(rules.prefix):
            depth = next((at for at in range(len(path)) if ".".join(map(str, (*path[:at], ""))) == rules.prefix), 0)
            paths[new] = path[depth:]
        elif name not in first:
            paths[new] = path
    return paths


# --- the tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankShards:
    """Boxes of a tensor. Box i is the box `local[i]` of the tensor of `rank[i]`, in the stored box `row[i]` of it."""

    entries: Sequence[Entry]  # of all ranks
    rank: Ints
    row: Ints
    local: Boxes
    boxes: Boxes

    @staticmethod
    def of(entries: Sequence[Entry], rank: int, local: Boxes, boxes: Boxes) -> RankShards:
        """The boxes that a rank has at `local`; a box may be in several stored boxes."""
        stored = entries[rank].boxes
        box, row = join(local, stored)
        parts, shift = local.take(box).overlap(stored.take(row)), (boxes.lo - local.lo)[box]
        return RankShards(entries, np.full(len(row), rank), row, parts, Boxes(parts.lo + shift, parts.hi + shift))

    @staticmethod
    def concat(parts: Sequence[RankShards]) -> RankShards:
        """All boxes of several."""
        rank, row = (np.concatenate(columns) for columns in zip(*((p.rank, p.row) for p in parts), strict=True))
        local, boxes = Boxes.concat([p.local for p in parts]), Boxes.concat([p.boxes for p in parts])
        return RankShards(parts[0].entries, rank, row, local, boxes)

    def locate(self, rows: Ints) -> Positions:
        """Where some boxes are in the files, one per rank."""
        ranks = np.unique(self.rank[rows]).tolist() or [0]
        numbers = [np.flatnonzero(self.rank[rows] == rank) for rank in ranks]
        parts = [self._of_rank(rank, rows[number]) for rank, number in zip(ranks, numbers, strict=True)]
        places = Places.concat(parts).take(np.argsort(np.concatenate(numbers)))
        return Positions(places.offset, places.strides // self.entries[0].dtype.itemsize)

    def _of_rank(self, rank: int, rows: Ints) -> Places:
        places = self.entries[rank].places(self.row[rows]).inside(np.arange(len(rows)), self.local.take(rows))
        return Places(self.boxes.take(rows), self.rank[rows], places.offset, places.strides)


@dataclass(frozen=True)
class RankTensors:
    """The tensors of all ranks under one name, and their placements on the mesh by the rules."""

    name: str
    entries: Sequence[Entry]
    labels: Sequence[FileLabel]  # of the files
    mesh: Mesh
    words: Sequence[Word]
    where: str  # in the rules
    known: Known

    @cached_property
    def dims(self) -> list[int | None]:
        """The dim that is split over each axis; None if the axis has replicas."""
        dims = list[int | None]()
        for word in self.words:
            if isinstance(word, Partial):
                raise LayoutError(f"a partial tensor ({word}) cannot be read from files")
            dims.append(None if isinstance(word, Replicate) else checked_dim(word.dim, self.entries[0].shape))
        return dims

    def axes(self, dim: int | None) -> list[int]:
        """The axes that split a dim; for None, those with replicas."""
        return [axis for axis, split in enumerate(self.dims) if split == dim]

    def mismatch(self, one: int, other: int, why: str) -> CheckpointError:
        """The error for two ranks whose tensors do not fit together."""
        first, second = (
            f"{self.entries[rank].dtype} of shape {self.entries[rank].shape} in {self.labels[rank]}"
            for rank in (one, other)
        )
        return CheckpointError(f"{self.name!r} is {first}, but {second}: {why}, by {self.where}")

    @cached_property
    def sizes(self) -> list[Ints]:
        """The sizes of the parts of every dim, in the order of the axes that split it."""
        for rank, entry in enumerate(self.entries):
            if entry.dtype != self.entries[0].dtype or len(entry.shape) != len(self.entries[0].shape):
                raise self.mismatch(0, rank, "dtype and number of dims should be equal")
        return [self._sizes(dim) for dim in range(len(self.entries[0].shape))]

    def _sizes(self, dim: int) -> Ints:
        axes = self.axes(dim)
        others = [axis for axis in range(len(self.words)) if axis not in axes]
        ranks = np.arange(len(self.entries)).reshape(self.mesh.shape).transpose(axes + others)
        ranks = ranks.reshape(prod(self.mesh.shape[axis] for axis in axes), -1)  # a row per part of the dim
        sizes = ints([entry.shape[dim] for entry in self.entries])[ranks]
        for part, at in np.argwhere(sizes != sizes[:, :1]).tolist():
            raise self.mismatch(int(ranks[part, 0]), int(ranks[part, at]), f"dim {dim} should have the same size")
        return sizes[:, 0]

    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._length(dim, int(sizes.sum())) for dim, sizes in enumerate(self.sizes))

    def _length(self, dim: int, stored: int) -> int:
        """The size of a dim: heads that lie on several ranks count once."""
        words = {self.words[axis] for axis in self.axes(dim)}
        for word in words:
            if isinstance(word, AxisRule):
                stored = word.length(stored, ranks_of(word, self.words, self.mesh), self.known)
        return stored

    def first(self) -> Ints:
        """The ranks to read: of replicas the first. An array with the axes that split a dim."""
        every = np.arange(len(self.entries)).reshape(self.mesh.shape)
        return every[tuple(0 if dim is None else slice(None) for dim in self.dims)]

    def check_replicas(self) -> None:
        """Refuse replicas that differ: the first cells of the first and the last are compared."""
        every = np.arange(len(self.entries)).reshape(self.mesh.shape)
        last = every[tuple(-1 if dim is None else slice(None) for dim in self.dims)]
        for one, other in zip(self.first().reshape(-1).tolist(), last.reshape(-1).tolist(), strict=True):
            if one != other and not same_sample(self.entries[one], self.entries[other]):
                raise CheckpointError(
                    f"{self.name!r} differs between {self.labels[one]} and {self.labels[other]}, but by {self.where} "
                    f"they are replicas: is it split over an axis?"
                )


def same_sample(one: Entry, other: Entry) -> bool:
    """True where the first cells of two tensors are equal."""
    return _sample(one) == _sample(other)


def first_cells(shape: Sequence[int]) -> Box:
    """The first cells along every dim: enough to compare two tensors."""
    hi, left = list[int](), SAMPLE
    for size in reversed(shape):
        hi.insert(0, min(size, max(left, 1)))
        left //= max(hi[0], 1)
    return Box.whole(hi)


def _sample(entry: Entry) -> bytes:
    cells = entry.read(first_cells(entry.shape))
    return cells.view(-1).view(torch.uint8).numpy().tobytes() if cells.numel() else b""


def _entry(tensors: RankTensors, files: Files, paths: Sequence[str]) -> Entry:
    """The tensor that the shards of all ranks make up."""
    try:
        simple = all(isinstance(word, Shard | Replicate) for word in tensors.words)
        shape, shards = tensors.shape(), _consecutive(tensors) if simple else _by_layout(tensors)
    except LayoutError as error:
        raise LayoutError(f"{tensors.where}: {tensors.name!r} in {tensors.labels[0]}: {error}") from None

    checked = list[bool]()

    def locate(rows: Ints) -> Positions:
        if not checked:
            tensors.check_replicas()
            checked.append(True)
        return shards.locate(rows)

    dtype = tensors.entries[0].dtype
    return Entry(tensors.name, shape, dtype, HashableBoxes(shards.boxes), shards.rank, locate, paths, files)


def _consecutive(tensors: RankTensors) -> RankShards:
    """Parts that follow each other along every dim, whatever their sizes."""
    ranks = tensors.first().reshape(-1)
    at, start = np.unravel_index(ranks, tensors.mesh.shape), np.zeros((len(ranks), len(tensors.sizes)), dtype=np.int64)
    for dim, sizes in enumerate(tensors.sizes):
        part = np.zeros_like(ranks)
        for axis in tensors.axes(dim):  # the first one makes the large parts
            part = part * tensors.mesh.shape[axis] + at[axis]
        start[:, dim] = (np.cumsum(sizes) - sizes)[part]
    every = [tensors.entries[rank].boxes for rank in ranks.tolist()]
    which, row = spread(ints([boxes.count for boxes in every]))
    local = Boxes.concat(every)
    return RankShards(
        tensors.entries, ranks[which], row, local, Boxes(local.lo + start[which], local.hi + start[which])
    )


def _by_layout(tensors: RankTensors) -> RankShards:
    """Strided and fused tensors: sizes are not enough, so the parts come from the layout."""
    shape, axes = tensors.shape(), [axis for axis, dim in enumerate(tensors.dims) if dim is not None]
    mesh = Mesh.of([tensors.mesh.shape[axis] for axis in axes], ranks=tensors.first())
    words = [tensors.words[axis] for axis in axes]
    layout, parts = layout_on(shape, mesh, words, tensors.known), list[RankShards]()
    for rank in layout.owners():
        local, pieces = layout.local_shape(rank), layout.pieces(rank)
        if local != tensors.entries[rank].shape:
            has = f"{tensors.name!r} has shape {tensors.entries[rank].shape} in {tensors.labels[rank]}"
            raise CheckpointError(f"{has}, but should have {local}, as rank {rank} of {layout}, by {tensors.where}")
        whole = Boxes.of([piece.box for piece in pieces], len(shape))
        lo = ints([np.unravel_index(piece.offset, local) for piece in pieces]).reshape(-1, len(shape))
        parts.append(RankShards.of(tensors.entries, rank, Boxes(lo, lo + whole.hi - whole.lo), whole))
    return RankShards.concat(parts)
