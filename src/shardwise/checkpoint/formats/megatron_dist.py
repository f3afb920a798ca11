"""Megatron's `torch_dist` folders: tensors as torch.distributed.checkpoint has them, other values in `common.pt`.

Megatron stacks the layers of a model along a dim of their own, or names each; either way names are global, and shards
of all parallel ranks are boxes of one tensor. Values that differ from rank to rank have names like `key/shard_0_4`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from operator import mul
from pickle import UnpicklingError

from shardwise.checkpoint.entry import Checkpoint, Entry, HashableBoxes, Positions
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import dcp, torch_save
from shardwise.checkpoint.formats.dcp_writing import DcpWriter, Item
from shardwise.checkpoint.formats.safetensors import parse_json
from shardwise.checkpoint.formats.torch_save import archive_of
from shardwise.checkpoint.formats.writers import Contents, TensorPart, check_keys, check_overlaps
from shardwise.checkpoint.segments import write_segments
from shardwise.checkpoint.unpickle_stubs import sizes
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes, Ints, cut, ints, row_major
from shardwise.quoting import brief
from shardwise.state.traverse import unflatten_state_dict

COMMON, CONFIG, BACKEND = "common.pt", "metadata.json", "torch_dist"
WRITTEN = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ORIGINAL = "nd_reformulated_orig_global_shape"
SHARD = "/shard_"  # in the names of values that differ from rank to rank


def is_megatron_dist(files: Files, index: dcp.Index) -> bool:
    """True where Megatron wrote `.metadata`. Only where torch's planner wrote no paths are other files looked for."""
    if index.has_paths or not (files.has(CONFIG) or files.has(COMMON)):
        return False
    return not files.has(CONFIG) or backend_of(files) == BACKEND


def backend_of(files: Files) -> object:
    """How the tensors are stored, by `metadata.json`."""
    return parse_json(files.read(CONFIG), files.label(CONFIG)).get("sharded_backend")


def refuse_without_index(files: Files, names: Sequence[str]) -> None:
    """Refuse a folder of Megatron that has no `.metadata`: `common.pt` alone would be a checkpoint without tensors."""
    backend = backend_of(files) if CONFIG in names else None
    if backend is not None and backend != BACKEND:
        raise CheckpointError(
            f"{files.root} is a checkpoint of Megatron stored by {brief(backend)}, and only {BACKEND} is read. Remedy: "
            f"convert it in Megatron, with --ckpt-convert-format torch_dist"
        )
    if backend is not None or (COMMON in names and any(name.endswith(".distcp") for name in names)):
        raise CheckpointError(
            f"{files.label(dcp.METADATA)} is missing, which a checkpoint of Megatron needs: the save was interrupted"
        )


def open_megatron_dist(files: Files, index: dcp.Index) -> Checkpoint:
    """The tensors of `.metadata`, and the values of both."""
    for name in (CONFIG, COMMON):
        if not files.has(name):
            raise CheckpointError(
                f"{files.label(name)} is missing, although {index.where} is a checkpoint of Megatron, which writes "
                f"both: the save was interrupted, or the folder was copied in part"
            )
    tensors, common = dcp.open_dcp(files, index), torch_save.open_files(files, [COMMON])
    shaped = {name: _unflattened(entry, shape) for name, shape in _flat(index).items() if (entry := tensors.get(name))}
    _check_apart(files, [*tensors], [*common])
    opened = Checkpoint(
        files,
        "megatron-dist",
        {**tensors, **shaped, **common},
        paths=common.paths,
        objects=lambda: _all_values(files, common.objects, tensors.objects),
    )
    opened.sums = tensors.sums
    return opened


def _flat(index: dcp.Index) -> dict[str, tuple[int, ...]]:
    """The true shapes of tensors that are stored as flat ranges of shards: optimizer states of older versions."""
    data = index.metadata.get("mcore_data")
    several = data.items() if isinstance(data, dict) else ()
    shapes = {name: more.get(ORIGINAL) for name, more in several if type(name) is str and isinstance(more, dict)}
    try:
        return {name: sizes(shape) for name, shape in shapes.items() if shape is not None}
    except UnpicklingError as error:
        raise CheckpointError(f"{index.where}: the shapes in its mcore_data are invalid: {error}") from error


def _unflattened(entry: Entry, shape: tuple[int, ...]) -> Entry:
    """A tensor by its true shape. As stored, its last dim has the cells of a shard, and the others are the grid."""
    grid = entry.shape[:-1]
    local = tuple(size // max(count, 1) for size, count in zip(shape, grid, strict=False))
    lo, hi = entry.boxes
    fits = tuple(map(mul, local, grid)) == shape and prod(local) == entry.shape[-1]
    if len(grid) != len(shape) or not fits or (hi[:, :-1] - lo[:, :-1] != 1).any():
        raise CheckpointError(
            f"{entry.files.root}: {entry.name!r} is stored as {entry.shape}, which is not a grid of flat shards of its "
            f"shape {shape}"
        )
    first = lo[:, :-1] * ints(local)
    row, parts = cut(Boxes(first, first + ints(local)), lo[:, -1], hi[:, -1])
    before = ((parts.lo - first[row]) * ints(row_major(local))).sum(axis=1) - lo[row, -1]

    def locate(rows: Ints) -> Positions:
        at = entry.locate(row[rows])
        if at.strides is not None:
            raise CheckpointError(f"{entry.files.root}: the flat shards of {entry.name!r} have strides")
        return Positions(at.start + before[rows] * entry.dtype.itemsize)

    return Entry(
        entry.name, shape, entry.dtype, HashableBoxes(parts), entry.file[row], locate, entry.paths, entry.files
    )


def _all_values(files: Files, common: Mapping[str, object], sharded: Mapping[str, object]) -> dict[str, object]:
    _check_apart(files, [*common], [*sharded])
    return {**common, **sharded}


def _check_apart(files: Files, one: list[str], other: list[str]) -> None:
    """Refuse a name that two files have."""
    twice = sorted({*one} & {*other})
    if twice:
        raise CheckpointError(f"{twice[0]!r} is both in {files.label(COMMON)} and in {files.label(dcp.METADATA)}")


class MegatronDistWriter(DcpWriter):
    """Writes what Megatron's dist_checkpointing loads: the files of DCP, and `common.pt` and `metadata.json` beside."""

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse what torch.distributed.checkpoint or torch.save cannot hold."""
        DcpWriter.fits(_sharded(contents))
        check_overlaps(contents)
        check_keys(contents)

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> list[Item]:
        """Write the file of an owner."""
        return super().write(me, parts, _sharded(contents))

    def index(self, results: Mapping[int, list[Item]], contents: Contents) -> bytes:
        """`.metadata`, without paths: names are keys of one dict."""
        items = [item for several in results.values() for item in several]
        return self.index_of(items, _sharded(contents), with_paths=False)

    def finish(self, results: Mapping[int, list[Item]], contents: Contents) -> list[str]:
        """Write the common values, then the index."""
        common = {name: value for name, value in contents.values.items() if SHARD not in name}
        nested = unflatten_state_dict(common, {name: contents.path_of(name) for name in common})
        with self.folder.write(COMMON) as file:
            write_segments(file, archive_of(nested, {}))
        with self.folder.write(CONFIG) as file:
            file.write(json.dumps(WRITTEN).encode())
        return super().finish(results, contents)


def _sharded(contents: Contents) -> Contents:
    """What is not in `common.pt`."""
    return contents._replace(
        values={name: value for name, value in contents.values.items() if SHARD in name}, paths={}, made=None
    )
