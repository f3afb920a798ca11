"""Detects the format of a checkpoint, and opens it."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.file_patterns import numbered_alike
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    megatron_dist,
    megatron_ranks,
    rank_files,
    safetensors,
    safetensors_shards,
    several,
    sharded,
    torch_save,
)
from shardwise.checkpoint.formats.deepspeed_files import is_step
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.rules import RulesSource
from shardwise.checkpoint.sightings import SHOWN, kind_of, seen
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.storage.folders import token_of
from shardwise.storage.locks import LOCK, PARTIAL
from shardwise.storage.paths import PathLike
from shardwise.storage.sums import data_name

NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
LATEST = "latest_checkpointed_iteration.txt"  # of Megatron
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # of peft
MODELS = ("pytorch_model.bin",)
KNOWN = (
    "safetensors (a file, several with an index, or sharded by shardwise), torch.distributed.checkpoint (.metadata), "
    "Megatron (torch_dist, mp_rank_XX), torch.save (.pt, .pth, .bin), DeepSpeed (latest, *_optim_states.pt, zero/), "
    "or a directory of per-rank torch.save files with rules= (in convert source_rules=)"
)


def open(path: PathLike, *, rules: RulesSource | None = None) -> Checkpoint:
    """Open the checkpoint at a path or URL: a mapping from names to entries. No tensors are read yet.

    `rules` (a rules file, or what `read_rules` returns) say how the per-rank files of a directory fit together.
    """
    return open_files(*files_at(path), rules)


def open_files(files: Files, name: str | None = None, rules: RulesSource | None = None) -> Checkpoint:
    """Open a checkpoint in files; `name`: if it is a single one."""
    with _without_garbage_collection():
        checkpoint = _open(files, name, rules)
    checkpoint.files.mark_opened()
    return checkpoint


def _open(files: Files, name: str | None, rules: RulesSource | None) -> Checkpoint:
    if rules is not None:
        return rank_files.open_rank_files(files, rules)
    if name is None:
        return _open_directory(files)
    checkpoint = _open_file(files, name)
    checkpoint.path = str(files.label(name))
    return checkpoint


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The collector would visit a million small objects again and again while they are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open_directory(files: Files) -> Checkpoint:
    for index in (sharded.INDEX, dcp.METADATA, safetensors.INDEX):  # first, as listing a large directory is slow
        if files.has(index):
            _check_one_index(files, index)
            return _open_file(files, index)
    there = [name for name in files.names() if name == data_name(name)]  # without checksums
    here = [name for name in there if name != LOCK and not PARTIAL.fullmatch(name)]
    for attempt in (_open_weights, _open_folder_of_framework, _open_torch_saves):
        opened = attempt(files, here)
        if opened is not None:
            return opened
    if len(here) < len(there):
        raise CheckpointError(
            f"{files.root} is unfinished: a save or a conversion to it was interrupted, or is still running"
        )
    raise _unrecognized(files, here)


def _open_weights(files: Files, names: list[str]) -> Checkpoint | None:
    """Files with an index, or safetensors files without one."""
    indexes = [name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
    tensors = [name for name in names if name.endswith(".safetensors")]
    _check_one_model(files, names, indexes or tensors)
    if len(indexes) == 1:
        return _open_file(files, indexes[0])
    if tensors and len(indexes) == 0:
        _check_whole(files, tensors)
        return _open_safetensors(files, tensors)
    return None


def _open_folder_of_framework(files: Files, names: list[str]) -> Checkpoint | None:
    """What Megatron, DeepSpeed or accelerate write, by the names of files and folders."""
    if LATEST in names:
        return _open_latest(files)
    megatron_dist.refuse_without_index(files, names)
    if deepspeed_universal.is_universal(files):
        return deepspeed_universal.open_universal(files)
    if is_step(names):
        return deepspeed.open_step(files, names)
    folders = files.folders()
    return _open_accelerate(files, folders) if several.is_of_accelerate(folders) else None


def _open_torch_saves(files: Files, names: list[str]) -> Checkpoint | None:
    """One file of torch.save, or those of all ranks."""
    saved = _torch_saves(files, names)
    if len(saved) == 1:
        return torch_save.open_files(files, saved)
    step = deepspeed.step_folder(files)
    if step is not None:
        return _open(*files_at(files.path(step)), None)
    groups = [group for group in numbered_alike(saved) if len(group) > 1 and torch_save.has_shards(files, group[0])]
    if groups:
        parts = {group[0]: torch_save.open_files(files, group, ranks=True) for group in groups}
        return several.joined(files, "torch.save", parts)
    return megatron_ranks.open_megatron_ranks(files) if megatron_ranks.holds_rank_files(files) else None


def _torch_saves(files: Files, names: list[str]) -> list[str]:
    return [name for name in names if torch_save.looks_like_one(files, name)]


def _check_one_model(files: Files, names: list[str], models: list[str]) -> None:
    """Refuse a model and an adapter in one folder: some of their tensors may have the same names."""
    adapters = [name for name in names if name in ADAPTERS]
    others = [name for name in (*models, *(name for name in names if name in MODELS)) if name not in ADAPTERS]
    if adapters and others:
        raise _several(files, [others[0], adapters[0]])


def _check_one_index(files: Files, index: str) -> None:
    """Refuse another checkpoint beside it: nobody knows which one was saved last."""
    others = {sharded.INDEX: (dcp.METADATA,), safetensors.INDEX: (ADAPTERS[0], safetensors.SINGLE)}.get(index, ())
    there = [name for name in others if files.has(name)]
    if there == [safetensors.SINGLE] and safetensors.SINGLE in safetensors.read_index(files, index).files.values():
        return
    if there:
        raise _several(files, [index, *there])


def _several(files: Files, names: list[str]) -> CheckpointError:
    merge = "; convert with merge= adds an adapter to its model" if any(name in ADAPTERS for name in names) else ""
    return CheckpointError(
        f"{files.root} has {len(names)} checkpoints: {', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}. "
        f"Give the path of one of them, such as {files.path(names[0])}{merge}"
    )


def _unrecognized(files: Files, names: list[str]) -> CheckpointError:
    """Names the checkpoints in a folder that is none, or what was looked for and what was seen."""
    saved, folders = _torch_saves(files, names), files.folders()
    indexes = (sharded.INDEX, dcp.METADATA, safetensors.INDEX, safetensors.SINGLE)
    below = [folder for folder in folders if any(files.has(f"{folder}/{index}") for index in indexes)]
    if below or len(saved) > 1:
        return _several(files, [*saved, *below])
    return CheckpointError(
        f"{files.root} is not a recognized checkpoint: it has {seen(files, names, folders)}. Expected {KNOWN}"
    )


def _open_dcp(files: Files) -> Checkpoint:
    """With what Megatron or Lightning write beside it: all that is not of a model or an optimizer."""
    index, beside = dcp.read_index(files), several.LIGHTNING
    if megatron_dist.is_megatron_dist(files, index):
        return megatron_dist.open_megatron_dist(files, index)
    checkpoint = dcp.open_dcp(files, index)
    if not files.has(beside) or not torch_save.looks_like_one(files, beside):
        return checkpoint
    parts = {dcp.METADATA: checkpoint, beside: torch_save.open_files(files, [beside])}
    return several.joined(files, "lightning", parts)


def _open_accelerate(files: Files, folders: list[str]) -> Checkpoint:
    """The model and the optimizer, each in a folder of its own."""
    parts = {folder: open(files.path(folder)) for folder in folders if several.ACCELERATE.fullmatch(folder)}
    return several.joined(files, f"accelerate ({', '.join(parts)})", parts)


def _open_safetensors(files: Files, names: list[str]) -> Checkpoint:
    """Files of whole tensors, or of boxes of tensors."""
    headers = safetensors.read_headers(files, names)
    shards = safetensors_shards.are_shards(headers)
    return (safetensors_shards.open_shards if shards else safetensors.open_headers)(files, headers)


def _open_latest(files: Files) -> Checkpoint:
    """The newest iteration of a training with Megatron."""
    latest = files.read(LATEST).decode("utf-8", "replace").strip()
    if latest != "release" and not re.fullmatch("[0-9]{1,18}", latest):
        raise CheckpointError(f"{files.label(LATEST)} has {brief(latest)}, but a number or 'release' is expected")
    folder = latest if latest == "release" else f"iter_{int(latest):07d}"
    try:
        there = files_at(files.path(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{files.label(LATEST)} says {latest}, but there is no {folder} beside it") from error
    return _open(*there, None)


def _check_whole(files: Files, names: list[str]) -> None:
    """Refuse a part of a checkpoint, which an interrupted save or conversion left."""
    unfinished = [name for name in names if token_of(name)]
    if unfinished:
        raise CheckpointError(
            f"{files.root} has {unfinished[0]}, but no {sharded.INDEX}: the save was interrupted, or is still running"
        )
    whole = [name for name in names if not safetensors_shards.SHARD_NAME.fullmatch(name)]  # of several ranks
    numbered = [match for name in whole if (match := NUMBERED.fullmatch(name))]
    counts = Counter((match[1], match[3]) for match in numbered)
    for match in numbered:
        if int(match[3]) != counts[match[1], match[3]]:
            raise CheckpointError(f"{files.root} has {match[0]}, but not all {int(match[3])} files, and no index")


def _open_file(files: Files, name: str) -> Checkpoint:
    if name == LATEST:
        return _open_latest(files)
    if name in deepspeed.LATEST:
        return _open(*files_at(files.path(deepspeed.folder_of(files, name))), None)
    if name == sharded.INDEX:
        return sharded.open_sharded(files)
    if name == dcp.METADATA:
        return _open_dcp(files)
    if name.endswith(".safetensors.index.json"):
        return safetensors.open_indexed(files, name)
    if name.endswith(".bin.index.json"):
        return torch_save.open_indexed(files, name)
    if torch_save.looks_like_one(files, name):
        return torch_save.open_files(files, [name])
    if name.endswith(".safetensors") or safetensors.looks_like_one(files, name):
        return _open_safetensors(files, [name])
    raise CheckpointError(
        f"{files.label(name)} is not a recognized checkpoint: it is {kind_of(files, name)}. Expected {KNOWN}"
    )
