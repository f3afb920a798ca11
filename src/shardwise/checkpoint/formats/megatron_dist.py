"""Megatron's `torch_dist` folders: tensors as torch.distributed.checkpoint has them, other values in `common.pt`.

Megatron stacks the layers of a model along a dim of their own, or names each; either way names are global, and shards
of all parallel ranks are boxes of one tensor. Values that differ from rank to rank have names like `key/shard_0_4`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import dcp, torch_save
from shardwise.checkpoint.formats.safetensors import parse_json
from shardwise.errors import CheckpointError

COMMON, CONFIG, BACKEND = "common.pt", "metadata.json", "torch_dist"


def is_megatron_dist(files: Files, index: dcp.Index) -> bool:
    """True where Megatron wrote `.metadata`. Only where torch's planner wrote no paths are other files looked for."""
    if index.has_paths or not (files.has(CONFIG) or files.has(COMMON)):
        return False
    return not files.has(CONFIG) or backend_of(files) == BACKEND


def backend_of(files: Files) -> object:
    """How the tensors are stored, by `metadata.json`."""
    return parse_json(files.read(CONFIG), files.label(CONFIG)).get("sharded_backend")


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
