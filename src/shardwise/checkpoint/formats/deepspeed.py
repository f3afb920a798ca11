"""Checkpoints of DeepSpeed's ZeRO: a folder for each step, with a file of every rank. `latest` names the newest folder.

What they have becomes these names:

    model.NAME                the weights that the optimizer updates, mostly float32; frozen parameters and buffers
    module.NAME               the weights that the model computes with, such as bfloat16: ZeRO-1 and 2 have both
    optimizer.state.NAME.KEY  exp_avg, exp_avg_sq, step and so on
    optimizer.param_groups    the settings of each group, with the names of its parameters

Other values keep their names: global_steps, lr_scheduler, what the user added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import add

import torch

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.deepspeed_files import (
    ONE_SAVE,
    RankFile,
    damage_is_an_error,
    fragment_of,
    read_step,
    shapes_of,
)
from shardwise.checkpoint.formats.deepspeed_groups import FlatGroup, Shape, check_order
from shardwise.checkpoint.formats.deepspeed_names import ModelStates, Names, with_names
from shardwise.checkpoint.formats.flat_runs import Buffer, Run
from shardwise.checkpoint.formats.rank_files import first_cells
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, cut, ints
from shardwise.job.names import some
from shardwise.storage.paths import inside

LATEST = ("latest", "latest_universal")
PARTITIONED = {"base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups"}
PLACES = {
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "param_slice_mappings",
    "zero_stage",
    "ds_version",
}
Placed = Iterator[tuple[str, Shape, list[Run]]]


def step_folder(files: Files) -> str | None:
    """The folder of the newest step, by `latest`; None where there is no such file."""
    tags = {name: folder_of(files, name) for name in LATEST if files.has(name)}
    if len(set(tags.values())) > 1:
        both = " and ".join(f"{tag!r} (by {name})" for name, tag in tags.items())
        raise CheckpointError(f"{files.root} has two checkpoints of DeepSpeed, {both}: give the folder of one of them")
    return next(iter(tags.values()), None)


def folder_of(files: Files, name: str) -> str:
    """The folder that `latest` or its like names."""
    where = files.label(name)
    tag = inside(files.read(name).decode(errors="replace").strip(), where)
    there = sorted({one.rpartition("/")[0] for one in files.names(recursive=True) if "/" in one})
    if not any(folder == tag or folder.startswith(f"{tag}/") for folder in there):
        has = f"the folders {some(there)}" if there else "no folders"
        raise CheckpointError(f"{where} names the folder {tag!r}, but here are {has}: give the folder of a step")
    return tag


def open_step(files: Files, names: Sequence[str]) -> Checkpoint:
    """The checkpoint of a step, from the files of all ranks."""
    with damage_is_an_error(files):
        step = Step(files, *read_step(files, names))
        step.fill()
    return step.names.checkpoint("deepspeed")


class Step:
    """The files of a step, and the names that their contents get."""

    def __init__(self, files: Files, models: Sequence[RankFile], parts: Sequence[RankFile]) -> None:
        self.parts, self.model, self.first, self.stage = parts, models[0], parts[0], parts[0].stage
        self.names = Names(files, [file.archive.location.file for file in (*models, *parts)])
        self.masters = dict[str, tuple[Shape, list[Run], Buffer]]()
        self.states = ModelStates(models, zero3=self.stage == 3)

    def fill(self) -> None:
        """Name everything."""
        self._add_masters()
        self.states.add_to(self.names)
        self._check_weights()
        self._add_states()
        self._add_values()

    @cached_property
    def groups(self) -> list[FlatGroup]:
        """The parameters of each group, by the model states of the first rank."""
        shapes, given = shapes_of(self.model), self.first.partition.get("param_alignment_paddings")
        padding = given if isinstance(given, list) else [[0] * len(group) for group in shapes]
        fits = list(map(len, padding)) == list(map(len, shapes))
        if not fits or not all(type(one) is int and one >= 0 for sizes in padding for one in sizes):
            raise CheckpointError(f"{self.first.where} has paddings of other groups than {self.model.where} lists")
        return [
            FlatGroup(names, sizes, self.stage, len(self.parts), self.model.where)
            for names, sizes in zip(shapes, padding, strict=True)
        ]

    def _placed(self, number: int, what: str, tensors: Iterable[object]) -> tuple[list[Buffer], Placed]:
        """The partitions of a group on all ranks, and where its parameters are in them."""
        buffers = list[Buffer]()
        for file, tensor in zip(self.parts, tensors, strict=True):
            if not isinstance(tensor, TensorStub):
                first = next(iter(self.groups[number].shapes), None)
                raise CheckpointError(f"{file.where} has no tensor {what}, which a part of {first!r} should be in")
            buffers.append(Buffer(file.number, file.archive, tensor, what))
        return buffers, self.groups[number].runs(buffers)

    def _add_masters(self) -> None:
        """The weights that the optimizer updates, also under names that share them."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        found = self.masters
        for number in range(len(self.groups)):
            tensors = (self._of_group(file, key, number) for file in self.parts)
            buffers, placed = self._placed(number, f"{key}[{number}]", tensors)
            found |= {name: (shape, runs, buffers[0]) for name, shape, runs in placed}
            if listed := self._listed(number):
                check_order(self.groups[number], buffers, listed)
        for name, owner in self.states.owners(found).items():
            self.names.add_runs(("model", name), *found[owner], ("master", owner))

    def _of_group(self, file: RankFile, key: str, number: int) -> object:
        tensors = file.partition.get(key)
        if not isinstance(tensors, list) or len(tensors) != len(self.groups):
            count = f"{len(tensors)} groups" if isinstance(tensors, list) else "none"
            raise CheckpointError(
                f"{file.where} should have {key} of {len(self.groups)} groups, which {self.model.where} lists, but has "
                f"{count}"
            )
        return tensors[number]

    def _listed(self, number: int) -> list[Mapping[str, tuple[int, int]]]:
        """Where each rank says that the parameters of a group are; nothing where ranks do not say it, or wrongly.

        With round_robin_gradients DeepSpeed lists places in the order of the model, but its data has another one.
        """
        config = self.first.root.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
        if isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
            return []
        listed = list[Mapping[str, tuple[int, int]]]()
        for file in self.parts:
            groups = file.partition.get("param_slice_mappings")
            if not isinstance(groups, list) or number >= len(groups) or not isinstance(groups[number], Mapping):
                return []
            listed.append({name: fragment_of(one, name, file.where) for name, one in groups[number].items()})
        return listed

    def _check_weights(self) -> None:
        """Refuse model states of another save: the first cells of weights must be what the optimizer has, cast.

        Of the first parameter of each rank and the last one of each group; of all where only this shows their order.
        """
        if self.stage == 3:
            return
        for name, cells, buffer in self._first_of_ranks():
            self._check_weight(name, cells, buffer.where)
        for number, group in enumerate(self.groups):
            names = [*group.shapes]
            for name in names[1:][-1:] if self._listed(number) else names:
                self._check_weight(name, first_cells(group.shapes[name]), f"{self.first.where} and its like")

    def _first_of_ranks(self) -> Iterator[tuple[str, Box, Buffer]]:
        """The first cells that each rank has of each group."""
        first = dict[int, tuple[str, Shape, Run]]()
        for name, (shape, runs, _) in self.masters.items():
            for run in runs:
                first.setdefault(id(run.buffer), (name, shape, run))
        for name, shape, run in first.values():
            whole = Boxes.of([Box.whole(shape)], len(shape))
            box = cut(whole, ints([run.start]), ints([run.stop]))[1].box(0)
            yield name, Box(box.lo, tuple(map(add, box.lo, first_cells(box.shape).hi))), run.buffer

    def _check_weight(self, name: str, cells: Box, where: object) -> None:
        master, weight = self.names.entries[f"model.{name}"], self.names.entries.get(f"module.{name}")
        if weight is None or weight.shape != master.shape:
            raise CheckpointError(f"{self.model.where} has no weight {name!r} of shape {master.shape}")
        if not torch.allclose(master.read(cells).to(weight.dtype), weight.read(cells), rtol=0, atol=0, equal_nan=True):
            raise CheckpointError(
                f"{self.model.where} has other values of {name!r} than the optimizer in {where}: they are of "
                f"different saves, or in another order. {ONE_SAVE}"
            )

    def _add_states(self) -> None:
        """What the optimizer has of each parameter besides the weights."""
        states = [file.states() for file in self.parts]
        for number, group in enumerate(self.groups):
            for key, tensor in states[0].get(number, {}).items():
                if isinstance(tensor, TensorStub) and tensor.shape:
                    buffers, placed = self._placed(
                        number, f"state[{number}][{key!r}]", (one.get(number, {}).get(key) for one in states)
                    )
                    for name, shape, runs in placed:
                        self.names.add_runs(("optimizer", "state", name, key), shape, runs, buffers[0])
                elif isinstance(tensor, TensorStub):
                    for name in group.shapes:
                        self.names.add_tensor(("optimizer", "state", name, key), tensor, self.first, tied=False)

    def _add_values(self) -> None:
        """Values of the optimizer other than tensors, with the names of its parameters."""
        more = {key: one for key, one in self.first.partition.items() if key not in PARTITIONED | PLACES}
        states = self.first.states()
        numbers = {
            name: {key: one for key, one in states.get(number, {}).items() if not isinstance(one, TensorStub)}
            for number, group in enumerate(self.groups)
            for name in group.shapes
        }
        more |= {"state": numbers} if any(numbers.values()) else {}
        more["param_groups"] = with_names(self.first.param_groups(), [[*group.shapes] for group in self.groups])
        self.names.add_values({"optimizer": more}, self.first)
