"""Megatron's `torch_dist` folders: tensors as torch.distributed.checkpoint has them, other values in `common.pt`.

Megatron stacks the layers of a model along a dim of their own, or names each; either way names are global, and shards
of all parallel ranks are boxes of one tensor. Values that differ from rank to rank have names like `key/shard_0_4`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import dcp, torch_save
from shardwise.checkpoint.formats.dcp_writing import DcpWriter, Item, metadata_of
from shardwise.checkpoint.formats.safetensors import parse_json
from shardwise.checkpoint.formats.torch_save import archive_of
from shardwise.checkpoint.formats.writers import Contents, TensorPart, check_keys, check_overlaps
from shardwise.checkpoint.segments import write_segments
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.state.traverse import unflatten_state_dict

COMMON, CONFIG, BACKEND = "common.pt", "metadata.json", "torch_dist"
WRITTEN = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
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
    _check_apart(files, [*tensors], [*common])
    opened = Checkpoint(
        files,
        "megatron-dist",
        {**tensors, **common},
        paths=common.paths,
        objects=lambda: _all_values(files, common.objects, tensors.objects),
    )
    opened.sums = tensors.sums
    return opened


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
        return self.index_of(metadata_of(results, _sharded(contents), with_paths=False))

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
    return contents._replace(values={name: value for name, value in contents.values.items() if SHARD in name}, paths={})
