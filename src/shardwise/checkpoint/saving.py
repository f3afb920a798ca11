"""save: every rank writes its own part; the index is written last."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache, partial
from secrets import token_hex
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.atomic_files import OutputFolder, write_tensor
from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.comparing import differing_replicas, sample_sums
from shardwise.checkpoint.files import PathLike
from shardwise.checkpoint.formats import dcp_writing, sharded
from shardwise.checkpoint.formats.writers import Contents, Saver, TensorPart, WriteClaim, claim_folder, names_token
from shardwise.checkpoint.values import encode, refuse_modules
from shardwise.checkpoint.writer_assignment import assign_writers
from shardwise.containers.description import Descriptions, describe_all, is_tensor, memory_of
from shardwise.exchange import view_of
from shardwise.geometry import Box, Boxes, Strides, Window
from shardwise.job.plan import TensorInfo
from shardwise.job.side import check_side, combine_descriptions, refuse_several_jobs
from shardwise.job.ties import Ties, tied, ties_of
from shardwise.layout import Layout, places_of
from shardwise.quoting import printable
from shardwise.state.traverse import FLATTEN_MAPPING, StateDict, flatten_state_dict, is_step

T = TypeVar("T")
REMOVING = 8  # files of an earlier checkpoint that are removed at a time
WRITERS: dict[str, type[Saver]] = {"safetensors": sharded.ShardedWriter, "dcp": dcp_writing.DcpWriter}


def save(
    state_dict: StateDict,
    path: PathLike,
    *,
    format: str = "safetensors",
    group: dist.ProcessGroup | None = None,
    durable: bool = True,
) -> None:
    """Write a state dict to a directory. Every rank of the group calls; without a group, this process alone.

    `format`: "safetensors", a file for every rank and our index, or "dcp", which torch.distributed.checkpoint loads.
    Replicas are written once, in equal shares; so are tied tensors, which share all of their memory. An earlier
    checkpoint at the path is removed once the new one is complete. Concurrent saves and conversions to one path are
    refused. Values other than tensors are taken from the first rank; so are plain tensors that differ between ranks,
    with a warning. `durable`: wait until the data is on disk.
    """
    callers = Callers("save", group)
    flat, paths, tensors, ties, differing = _described(callers, state_dict, format, path)
    layouts = _layouts(tensors, differing)
    layouts |= {name: layouts[one] for name, one in ties.items()}
    others = {name: value for name, value in flat.items() if name not in tensors and not is_tensor(value)}
    contents = Contents(layouts, others, paths, ties)
    opened = list[Saver]()

    def write() -> tuple[Saver, object]:
        writer = _writer(format, OutputFolder(path, durable=durable, run=token), callers, token, contents)
        opened.append(writer)  # which `undo` has to know even if it fails
        own = {name: tensor for name, tensor in tensors.items() if name not in ties}
        parts = [p for name, tensor in own.items() for p in _parts(name, tensor, layouts[name][1], flat, callers.me)]
        return writer, writer.write(callers.me, parts, contents)

    def undo() -> None:
        for writer in opened:
            writer.undo(callers.me)
        claim.unfinished = False

    with ExitStack() as stack:
        fits = partial(WRITERS[format].fits, contents)
        token, claim = _claim(callers, OutputFolder(path, durable=durable, run=token_hex(8)), fits, stack)
        try:
            writer, files = callers.tell(write)
        except BaseException as error:
            # an error that all ranks know ends the save; otherwise others may continue, and their index names our files
            if callers.alone or (isinstance(error, Exception) and not callers.broken):
                undo()
            raise
        try:
            old = callers.from_first(lambda: writer.finish(files, contents) if callers.first else [])
        except Exception:
            # what the index names must stay; who wrote it says so for all, as others may see the directory as it was
            if not callers.broken and not callers.from_first(
                lambda: callers.first and names_token(writer.folder, writer.main, token)
            ):
                undo()
            raise
        if callers.first and old:  # the rank with the lock, so that files it leaves if it dies are on record
            with ThreadPoolExecutor(REMOVING) as pool:
                list(pool.map(writer.folder.remove, old))
    if differing and callers.first:
        warnings.warn(printable(_unlike(differing)), stacklevel=2)


def _claim(
    callers: Callers, folder: OutputFolder, fits: Callable[[], None], stack: ExitStack
) -> tuple[str, WriteClaim]:
    """The token of this save, and the right to write there, which the first rank has for all until the stack ends.

    What the format cannot hold is refused before anything is written.
    """

    def claim() -> tuple[WriteClaim, str]:
        fits()
        mine = stack.enter_context(claim_folder(folder, folder.run)) if callers.first else WriteClaim()
        return mine, folder.run

    mine, tokens = callers.tell(claim)
    return next(iter(tokens.values())), mine


def _described(
    callers: Callers, state_dict: StateDict, format: str, path: PathLike
) -> tuple[dict[str, object], FLATTEN_MAPPING, dict[str, TensorInfo], dict[str, str], list[str]]:
    """This rank's flat state dict and paths; the infos of all tensors, tied names, names that differ between ranks."""

    def say() -> tuple[tuple[dict[str, object], FLATTEN_MAPPING, dict[str, int]], tuple[Descriptions, list[str], Ties]]:
        _check(format)
        flat, paths = flatten_state_dict(state_dict)
        refuse_modules(flat)
        for name, steps in paths.items():
            if not all(map(is_step, steps)):
                raise TypeError(f"{name!r} has a key that is neither a string nor an integer in its path {steps}")
        others = {name: value for name, value in flat.items() if value is not None and not is_tensor(value)}
        for name, value in others.items():
            encode(value, name)  # refused before anything is written
        mine = flat, paths, {} if callers.alone else sample_sums(flat)
        return mine, (describe_all(flat, callers.transport), list(others), ties_of(flat, callers.transport))

    (flat, paths, marked), by_rank = callers.tell(say, {"format": format, "path": str(path)})
    with callers.refusals():
        tensors = _all_tensors(callers, by_rank)
    ties = tied({rank: ties for rank, (*_, ties) in by_rank.items()})
    return flat, paths, tensors, ties, differing_replicas(tensors, marked, callers.highest)


def _all_tensors(
    callers: Callers, by_rank: Mapping[int, tuple[Descriptions, list[str], Ties]]
) -> dict[str, TensorInfo]:
    """The tensors of all ranks, which must have the same other values."""
    (first, (_, names, _)), *others = by_rank.items()
    for rank, (_, other, _) in others:
        if other != names:
            strange = sorted(set(names) ^ set(other)) or names
            raise ValueError(f"ranks {first} and {rank} have different values that are not tensors: {strange[:5]}")
    descriptions = {rank: one for rank, (one, *_) in by_rank.items()}
    refuse_several_jobs(descriptions, callers.transport)
    tensors = combine_descriptions(descriptions, "state dict")
    callers.check(tensors)
    _check_whole(tensors)
    return tensors


def _check_whole(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors with cells that no rank holds: each rank may only know its own chunks."""
    for layout in {tensor.layout for tensor in tensors.values()}:
        try:
            layout.validate()
        except ValueError as error:
            name = next(name for name, tensor in tensors.items() if tensor.layout == layout)
            raise ValueError(f"{name!r} of the state dict: {error}") from error


def _layouts(tensors: Mapping[str, TensorInfo], differing: Sequence[str]) -> dict[str, tuple[torch.dtype, Layout]]:
    """The dtype of every tensor and its writers. The first rank writes tensors that differ between ranks."""
    sources = {name: tensor.layout for name, tensor in tensors.items()}
    sources |= {name: Layout.replicated(tensors[name].shape, sources[name].owners()[:1]) for name in differing}
    return {
        name: (tensor.dtype, assign_writers(name, sources[name], tensor.dtype.itemsize, turn))
        for turn, (name, tensor) in enumerate(tensors.items())
    }


def _unlike(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4])) + (" ..." if len(names) > 4 else "")
    return (
        f"save: {shown} differ{'s' * (len(names) == 1)} between ranks, though plain tensors are the same on all: "
        f"those of the first rank that has them are saved. What every rank has of its own needs a name of its own"
    )


def _check(format: str) -> None:
    if format not in WRITERS:
        raise ValueError(f"format= must be one of {', '.join(map(repr, WRITERS))}, not {format!r}")


def _writer(format: str, folder: OutputFolder, callers: Callers, token: str, contents: Contents) -> Saver:
    writer = WRITERS[format](folder, callers.owners, token)
    if callers.first:
        writer.check(contents)
    return writer


def _parts(name: str, tensor: TensorInfo, layout: Layout, flat: Mapping[str, object], me: int) -> Sequence[TensorPart]:
    """The boxes of a tensor that this rank writes: views of its memory."""
    memory = memory_of(flat.get(name))
    check_side("state dict", {name: memory}, {name: tensor}, me)
    if me not in layout or not memory:
        return []
    places = _places(tensor.layout, layout, me, tuple(t.stride() for t in memory))
    return [TensorPart(name, box, tensor.dtype, partial(write_tensor, view_of(cut, memory))) for box, cut in places]


@lru_cache(maxsize=4096)
def _places(held: Layout, layout: Layout, me: int, strides: tuple[Strides, ...]) -> list[tuple[Box, Window]]:
    """The boxes to write, and where they are. Cached: many tensors share a layout."""
    boxes = Boxes.of([piece.box for piece in layout.pieces(me)], layout.ndim)
    _, places = places_of(held, me, strides).once(boxes)
    return [(places.boxes.box(at), cut) for at, cut in enumerate(places.windows())]
