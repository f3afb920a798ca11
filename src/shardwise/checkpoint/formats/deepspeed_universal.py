"""DeepSpeed's universal checkpoints: a file for each weight and each state of the optimizer, for any number of ranks.

    latest_universal                         names the folder with all others
    FOLDER/zero/NAME/fp32.pt                 a weight that the optimizer updates; exp_avg.pt and so on beside it
    FOLDER/zero/optimizer_state.pt           the settings of the optimizer
    FOLDER/mp_rank_00_model_states.pt        buffers, frozen parameters and other values

Names are those of the checkpoints of ZeRO (`deepspeed.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.deepspeed_files import (
    ONE_SAVE,
    RankFile,
    damage_is_an_error,
    mapping,
    read_file,
    read_models,
    shapes_of,
)
from shardwise.checkpoint.formats.deepspeed_groups import Shape
from shardwise.checkpoint.formats.deepspeed_names import ModelStates, Names, with_names
from shardwise.checkpoint.formats.flat_runs import Buffer, Run
from shardwise.checkpoint.formats.torch_save import read_archive
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError
from shardwise.job.names import missing

SETTINGS = "zero/optimizer_state.pt"
STORED = re.compile(r"zero/(?P<name>.+)/(?P<key>[^/]+)\.pt")
MASTER, STEP = "fp32", "step"
NOT_VALUES = {"optimizer_state_dict", "param_groups", "fp32_flat_groups", "partition_count", "zero_stage"}
NOT_VALUES |= {"group_paddings", "param_alignment_paddings", "ds_version"}


def is_universal(files: Files) -> bool:
    """True for the folder of a universal checkpoint."""
    return files.has(SETTINGS)


def open_universal(files: Files) -> Checkpoint:
    """The tensors in the files of all weights, and what the model states have."""
    names = files.names(recursive=True)
    with damage_is_an_error(files):
        universal = Universal(files, read_models(files, [name for name in names if "/" not in name]), names)
        universal.fill()
    return universal.names.checkpoint("deepspeed-universal")


class Universal:
    """The files of a universal checkpoint, and the names that their contents get."""

    def __init__(self, files: Files, models: Sequence[RankFile], names: Sequence[str]) -> None:
        self.files, self.model = files, models[0]
        self.stored = [match for name in names if (match := STORED.fullmatch(name))]
        paths = [file.archive.location.file for file in models]
        self.settings = read_file(files, len(paths), SETTINGS)
        self.first = len(paths) + 1  # the number of the first file of a weight
        self.names = Names(files, [*paths, SETTINGS, *(match.string for match in self.stored)])
        self.groups = shapes_of(self.model)
        self.shapes = {name: shape for group in self.groups for name, shape in group.items()}
        self.states = ModelStates(models, zero3="zero_pp_rank" in paths[0])

    def fill(self) -> None:
        """Name everything."""
        self._check_all_there()
        for number, match in enumerate(self.stored):
            if match["name"] in self.shapes:  # others are what the model states have as well
                self._add(match["name"], match["key"], self.first + number, match.string)
        self._add_steps()
        self.states.add_to(self.names)
        self._add_values()

    def _check_all_there(self) -> None:
        """Refuse weights without a file, and states that only some weights have."""
        keys = {(match["name"], match["key"]) for match in self.stored}
        for key in {MASTER, *(key for name, key in keys if name in self.shapes)}:
            if absent := [name for name in self.shapes if (name, key) not in keys]:
                what = f"{self.files.root} has no zero/NAME/{key}.pt for"
                raise CheckpointError(f"{missing(what, absent, {name for name, _ in keys})}. {ONE_SAVE}")

    def _add(self, name: str, key: str, number: int, path: str) -> None:
        archive = read_archive(self.files, path)
        root = archive.root()
        value = root.get("param") if isinstance(root, Mapping) else root
        where = ("optimizer", "state", name, key) if key != MASTER else ("model", name)
        if key == STEP and not isinstance(value, TensorStub):
            self.names.values[self.names.take(*where)] = archive, value
        elif not isinstance(value, TensorStub):
            raise CheckpointError(f"{self.files.label(path)} has no tensor, which should be {key} of {name!r}")
        elif key == STEP:
            self.names.add_tensor(where, value, RankFile(number, archive, {}), tied=False)
        else:
            buffer = Buffer(number, archive, value, key)
            self._add_whole(where, self.shapes[name], buffer)

    def _add_whole(self, where: tuple[str, ...], shape: Shape, buffer: Buffer) -> None:
        """A tensor of a file; those from ZeRO-3 are flat."""
        stored, count = buffer.tensor, prod(shape)
        if stored.shape not in (shape, (count,)) or (count > 1 and stored.strides[-1:] != (1,)):
            raise CheckpointError(
                f"{buffer.where} has shape {stored.shape}, but by {self.model.where} {where[-1]!r} has {shape}"
            )
        shared = (buffer.file, "master") if where[0] == "model" else None
        runs = [Run(0, count, buffer, 0)] if count else []
        self.names.add_runs(where, shape, runs, buffer, shared)
        for name, owner in self.states.ties.items() if where[0] == "model" else ():
            if owner == where[1]:
                self.names.add_runs(("model", name), shape, runs, buffer, shared)

    def _add_steps(self) -> None:
        """Of checkpoints from ZeRO-3: the settings have one step for all weights."""
        inner = mapping(self.settings.root, "optimizer_state_dict", self.settings.where, optional=True)
        states = mapping(inner, "state", self.settings.where, optional=True).values()
        step = next((state.get(STEP) for state in states if isinstance(state, Mapping)), None)
        for name in self.shapes:
            if isinstance(step, TensorStub) and f"optimizer.state.{name}.{STEP}" not in self.names.nested:
                self.names.add_tensor(("optimizer", "state", name, STEP), step, self.settings, tied=False)

    def _add_values(self) -> None:
        """The settings of the optimizer, with the names of its parameters."""
        root = self.settings.root
        given = root.get("param_groups")
        settings = [group for group in given if isinstance(group, Mapping)] if isinstance(given, list) else []
        rest = {key: value for key, value in root.items() if key not in NOT_VALUES}
        rest["param_groups"] = with_names(settings, [[*group] for group in self.groups])
        self.names.add_values({"optimizer": rest}, self.settings)
