"""A directory with a file per rank, each with its own shards under the same names: rules say how they belong together.

Shapes are those of the files: sizes along a sharded dim add up, also where they are uneven. Of replicas the first
counts, which the rules have to be right about: nothing here compares values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.entry import Alike, Checkpoint, Entry, Located
from shardwise.checkpoint.files import Files, inside
from shardwise.checkpoint.formats import safetensors, torch_save
from shardwise.checkpoint.rules import Rules, Word, axis_positions, file_name, layout_on, read_rules
from shardwise.errors import CheckpointError, LayoutError
from shardwise.geometry import Box, Boxes, Ints, Places, ints, join, spread
from shardwise.job.names import missing
from shardwise.layout import Mesh, Partial, Replicate, Shard
from shardwise.layout.checks import checked_dim

NUMBER = re.compile("[0-9]+")
SAMPLE = 1024  # cells of replicas that are compared
NAMED = 1024  # files that may be missing and are still named one by one


def open_ranks(files: Files, rules: Any) -> Checkpoint:
    """The tensors that the files of ranks make up together. What is no tensor comes from the file of the first rank."""
    rules = read_rules(rules)
    names = rank_files(files, rules)
    opened = [_open(files, name) for name in names]
    ranks = [_meant(checkpoint, rules) for checkpoint in opened]
    shown = [files.shown(name) for name in names]
    _check_names(ranks, shown, rules)
    entries = dict[str, Entry]()
    for name in ranks[0]:
        mesh, rule = rules.known_mesh(), rules.rule(name)
        held = Held(name, [rank[name] for rank in ranks], shown, mesh, rule.on(mesh), rule.where)
        entries[name] = _entry(held, files, names)
    return Checkpoint(
        files,
        "files of ranks",
        entries,
        paths=_paths(opened[0], rules),
        objects=lambda: _objects(opened[0], entries, rules),
        metadata={**opened[0].metadata, "rules": repr(rules)},
    )


# --- the files -----------------------------------------------------------------------------------------------------


def rank_files(files: Files, rules: Rules) -> list[str]:
    """The name of every rank's file, in the order of the mesh."""
    if rules.pattern is None:
        return _numbered_files(files, rules.known_mesh())
    mesh, pattern, there = rules.known_mesh(), rules.pattern, set(files.names(below=True))
    if mesh.ranks.size > len(there) + NAMED:
        raise CheckpointError(f"{files.root} has {len(there)} files, too few for the {mesh.ranks.size} ranks of {mesh}")
    names = [inside(file_name(pattern, axis_positions(mesh, rank)), rules.where) for rank in range(mesh.ranks.size)]
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise LayoutError(f"{rules.where}, [files]: by pattern {pattern!r} several ranks of {mesh} have {twice!r}")
    if absent := [name for name in names if name not in there]:
        raise CheckpointError(
            missing(f"{files.root}: of the files of {mesh}, {len(absent)} of {len(names)} are missing:", absent, there)
        )
    sizes = {"rank": mesh.ranks.size, **dict(zip(mesh.names, mesh.shape, strict=True))}
    for axis, size in sizes.items():
        beyond = file_name(pattern, axis_positions(mesh, 0) | {axis: size})
        if beyond in there - set(names):
            raise CheckpointError(f"{files.shown(beyond)} belongs to no rank of {mesh}: is the mesh larger?")
    return names


def _numbered_files(files: Files, mesh: Mesh) -> list[str]:
    """Those whose names differ in one number only, if it counts as many ranks as there are."""
    groups = dict[str, dict[tuple[int, ...], str]]()
    for name in files.names():
        if "/" not in name:
            groups.setdefault(NUMBER.sub("0", name), {})[tuple(map(int, NUMBER.findall(name)))] = name
    fitting = [
        group
        for group in groups.values()
        if len(group) == mesh.ranks.size and _count_up(group) and _kind(files, min(group.values())) is not None
    ]
    if len(fitting) != 1:
        here = [name for group in groups.values() for name in sorted(group.values())]
        found = ", ".join(here[:6]) + (" ..." if len(here) > 6 else "") if here else "none"
        which = "several files could be those" if fitting else "no files that count up one by one are those"
        remedy = 'say which it is in the rules, as in [files] pattern = "model_{rank}.pt"'
        raise CheckpointError(f"{files.root}: {which} of {mesh}, among {found}: {remedy}")
    return [fitting[0][key] for key in sorted(fitting[0])]


def _count_up(numbers: Iterable[tuple[int, ...]]) -> bool:
    """True where one of the numbers changes, by one from name to name."""
    changing = [column for column in zip(*sorted(numbers), strict=True) if len(set(column)) > 1]
    return len(changing) < 2 and all(b == a + 1 for column in changing for a, b in pairwise(column))


def _kind(files: Files, name: str) -> Any:
    """The format of a file; None where it is none of a rank's."""
    if torch_save.looks_like_one(files, name):
        return torch_save
    return safetensors if name.endswith(".safetensors") or safetensors.looks_like_one(files, name) else None


def _open(files: Files, name: str) -> Checkpoint:
    kind = _kind(files, name)
    if kind is None:
        raise CheckpointError(f"{files.shown(name)} is neither a torch.save file nor a safetensors one")
    return kind.open_files(files, [name])


# --- the names -----------------------------------------------------------------------------------------------------


def _meant(checkpoint: Checkpoint, rules: Rules) -> dict[str, Entry]:
    """The tensors that the rules speak of."""
    start = rules.prefix
    named = {name.removeprefix(start): entry for name, entry in checkpoint.items() if name.startswith(start)}
    return {name: entry for name, entry in named.items() if not rules.rule(name).skip}


def _check_names(ranks: Sequence[Mapping[str, Entry]], shown: Sequence[str], rules: Rules) -> None:
    """All ranks have the same."""
    if not ranks[0]:
        under = f" whose name begins with {rules.prefix!r}" if rules.prefix else ""
        raise CheckpointError(f"{shown[0]} has no tensor{under} that the rules do not leave out")
    for rank, file in zip(ranks, shown, strict=True):
        if absent := [name for name in ranks[0] if name not in rank]:
            raise CheckpointError(f"{missing(f'{file} has no', absent, rank)}, but {shown[0]} has")
        if more := [name for name in rank if name not in ranks[0]]:
            raise CheckpointError(f"{missing(f'{shown[0]} has no', more, ranks[0])}, but {file} has")


def _objects(first: Checkpoint, entries: Mapping[str, Entry], rules: Rules) -> dict[str, Any]:
    """What is no tensor, also beside the prefix: there are counters and settings."""
    found = dict[str, Any]()
    for name, called in _called(first.objects, rules):
        if called not in entries:
            found[called] = first.objects[name]
    return found


def _called(names: Iterable[str], rules: Rules) -> list[tuple[str, str]]:
    """Names with those that they get; of equal ones the last counts, which is below the prefix."""
    ordered = sorted(names, key=lambda name: name.startswith(rules.prefix))
    called = [(name, name.removeprefix(rules.prefix)) for name in ordered]
    return [(name, new) for name, new in called if not rules.skips(new)]


def _paths(first: Checkpoint, rules: Rules) -> dict[str, tuple[Any, ...]]:
    """Where everything was in the nested dicts, as far as that is below the prefix."""
    found = dict[str, tuple[Any, ...]]()
    for name, called in _called(first.paths, rules):
        path = first.paths[name]
        if name.startswith(rules.prefix):
            depth = next((at for at in range(len(path)) if ".".join(map(str, (*path[:at], ""))) == rules.prefix), 0)
            found[called] = path[depth:]
        elif name not in first:
            found[called] = path
    return found


# --- the tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """Boxes of a tensor, each inside a row of what a rank holds, where it is the box `local`."""

    held: Sequence[Entry]  # by every rank
    rank: Ints
    row: Ints
    local: Boxes
    boxes: Boxes

    @staticmethod
    def of(held: Sequence[Entry], rank: int, local: Boxes, boxes: Boxes) -> Shards:
        """Boxes that a rank has at `local`; these may lie in several rows of it, or in none where they are empty."""
        box, row = join(local, held[rank].boxes)
        found, shift = local.take(box).overlap(held[rank].boxes.take(row)), (boxes.lo - local.lo)[box]
        return Shards(held, np.full(len(row), rank), row, found, Boxes(found.lo + shift, found.hi + shift))

    @staticmethod
    def concat(parts: Sequence[Shards]) -> Shards:
        """All of them."""
        rank, row = (np.concatenate(columns) for columns in zip(*((p.rank, p.row) for p in parts), strict=True))
        local, boxes = Boxes.concat([p.local for p in parts]), Boxes.concat([p.boxes for p in parts])
        return Shards(parts[0].held, rank, row, local, boxes)

    def locate(self, rows: Ints) -> Located:
        """Where some of them are in the files, of which every rank has one."""
        ranks = np.unique(self.rank[rows]).tolist() or [0]
        numbers = [np.flatnonzero(self.rank[rows] == rank) for rank in ranks]
        found = [self._of_rank(rank, rows[number]) for rank, number in zip(ranks, numbers, strict=True)]
        places = Places.concat(found).take(np.argsort(np.concatenate(numbers)))
        return Located(places.offset, places.strides // self.held[0].dtype.itemsize)

    def _of_rank(self, rank: int, rows: Ints) -> Places:
        found = self.held[rank].places(self.row[rows]).inside(np.arange(len(rows)), self.local.take(rows))
        return Places(self.boxes.take(rows), self.rank[rows], found.offset, found.strides)


@dataclass(frozen=True)
class Held:
    """What every rank has under a name, and what the rules say of it for every axis of the mesh."""

    name: str
    entries: Sequence[Entry]
    shown: Sequence[str]  # the files
    mesh: Mesh
    words: Sequence[Word]
    where: str  # in the rules

    @cached_property
    def dims(self) -> list[int | None]:
        """The dim that is split over each axis; None where the axis has replicas."""
        found = list[int | None]()
        for word in self.words:
            if isinstance(word, Partial):
                raise LayoutError(f"the terms of a partial tensor ({word}) cannot be read from files")
            found.append(None if isinstance(word, Replicate) else checked_dim(word.dim, self.entries[0].shape))
        return found

    def axes(self, dim: int | None) -> list[int]:
        """Those that split a dim, or have replicas."""
        return [axis for axis, split in enumerate(self.dims) if split == dim]

    def unlike(self, one: int, other: int, why: str) -> CheckpointError:
        """Two ranks whose tensors do not belong together."""
        first, second = (
            f"{self.entries[rank].dtype} of shape {self.entries[rank].shape} in {self.shown[rank]}"
            for rank in (one, other)
        )
        return CheckpointError(f"{self.name!r} is {first}, but {second}: {why}, by {self.where}")

    @cached_property
    def sizes(self) -> list[Ints]:
        """The sizes of the parts of every dim, in the order of the axes that split it; of all other ranks the same."""
        for rank, entry in enumerate(self.entries):
            if entry.dtype != self.entries[0].dtype or len(entry.shape) != len(self.entries[0].shape):
                raise self.unlike(0, rank, "dtype and number of dims should be the same")
        return [self._sizes(dim) for dim in range(len(self.entries[0].shape))]

    def _sizes(self, dim: int) -> Ints:
        axes = self.axes(dim)
        others = [axis for axis in range(len(self.words)) if axis not in axes]
        ranks = np.arange(len(self.entries)).reshape(self.mesh.shape).transpose(axes + others)
        ranks = ranks.reshape(prod(self.mesh.shape[axis] for axis in axes), -1)  # a row per part of the dim
        sizes = ints([entry.shape[dim] for entry in self.entries])[ranks]
        for part, at in np.argwhere(sizes != sizes[:, :1]).tolist():
            raise self.unlike(int(ranks[part, 0]), int(ranks[part, at]), f"dim {dim} should have the same size")
        return sizes[:, 0]

    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(int(sizes.sum()) for sizes in self.sizes)

    def first(self) -> Ints:
        """The ranks that count: of replicas the first. An array with the axes that split a dim."""
        every = np.arange(len(self.entries)).reshape(self.mesh.shape)
        return every[tuple(0 if dim is None else slice(None) for dim in self.dims)]

    def check_replicas(self) -> None:
        """Refuse files that differ where the rules say that they do not: the first cells of two tell."""
        every = np.arange(len(self.entries)).reshape(self.mesh.shape)
        last = every[tuple(-1 if dim is None else slice(None) for dim in self.dims)]
        for one, other in zip(self.first().reshape(-1).tolist(), last.reshape(-1).tolist(), strict=True):
            if one != other and _some(self.entries[one]) != _some(self.entries[other]):
                raise CheckpointError(
                    f"{self.name!r} is not the same in {self.shown[one]} and in {self.shown[other]}, though "
                    f"{self.where} says that they are replicas: is it split over an axis?"
                )


def _some(entry: Entry) -> bytes:
    """The first cells along every dim."""
    hi, room = list[int](), SAMPLE
    for size in reversed(entry.shape):
        hi.insert(0, min(size, max(room, 1)))
        room //= max(hi[0], 1)
    found = entry.read(Box((0,) * len(hi), tuple(hi)))
    return found.view(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""


def _entry(held: Held, files: Files, paths: Sequence[str]) -> Entry:
    """One tensor over the files of all ranks."""
    try:
        simple = all(isinstance(word, Shard | Replicate) for word in held.words)
        shape, shards = held.shape(), _one_after_the_other(held) if simple else _by_layout(held)
    except LayoutError as error:
        raise LayoutError(f"{held.where}: {held.name!r} in {held.shown[0]}: {error}") from None

    checked = list[bool]()

    def locate(rows: Ints) -> Located:
        if not checked:
            held.check_replicas()
            checked.append(True)
        return shards.locate(rows)

    return Entry(held.name, shape, held.entries[0].dtype, Alike(shards.boxes), shards.rank, locate, paths, files)


def _one_after_the_other(held: Held) -> Shards:
    """Parts as they follow along every dim, whatever their sizes."""
    ranks = held.first().reshape(-1)
    at, start = np.unravel_index(ranks, held.mesh.shape), np.zeros((len(ranks), len(held.sizes)), dtype=np.int64)
    for dim, sizes in enumerate(held.sizes):
        part = np.zeros_like(ranks)
        for axis in held.axes(dim):  # the first one cuts into the large parts
            part = part * held.mesh.shape[axis] + at[axis]
        start[:, dim] = (np.cumsum(sizes) - sizes)[part]
    every = [held.entries[rank].boxes for rank in ranks.tolist()]
    which, row = spread(ints([boxes.count for boxes in every]))
    local = Boxes.concat(every)
    return Shards(held.entries, ranks[which], row, local, Boxes(local.lo + start[which], local.hi + start[which]))


def _by_layout(held: Held) -> Shards:
    """Strided and fused ones, of which sizes do not say enough: they are cut by the rule of their layout."""
    shape, axes = held.shape(), [axis for axis, dim in enumerate(held.dims) if dim is not None]
    mesh = Mesh.of([held.mesh.shape[axis] for axis in axes], ranks=held.first())
    layout, found = layout_on(shape, mesh, [held.words[axis] for axis in axes]), list[Shards]()
    for rank in layout.owners():
        local, pieces = layout.local_shape(rank), layout.pieces(rank)
        if local != held.entries[rank].shape:
            has = f"{held.name!r} has shape {held.entries[rank].shape} in {held.shown[rank]}"
            raise CheckpointError(f"{has}, but should have {local}: of rank {rank} of {layout}, by {held.where}")
        whole = Boxes.of([piece.box for piece in pieces], len(shape))
        lo = ints([np.unravel_index(piece.offset, local) for piece in pieces]).reshape(-1, len(shape))
        found.append(Shards.of(held.entries, rank, Boxes(lo, lo + whole.hi - whole.lo), whole))
    return Shards.concat(found)
