"""Writes DeepSpeed's universal checkpoints, which it loads on any number of ranks, in any stage of ZeRO.

All files are in a folder of their own. `latest_universal`, which names it, comes last: without it there is no
checkpoint. There are no checksums: DeepSpeed takes every file beside a weight for a state of the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.formats.torch_save import Records, TensorRecord, archive_of
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_keys, check_overlaps
from shardwise.checkpoint.segments import Data, write_segments
from shardwise.errors import CheckpointError
from shardwise.job.names import missing
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, unflatten_state_dict
from shardwise.storage.folders import OutputFolder

LATEST = "latest_universal"
MODEL, MODEL_OF_RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
STATE = re.compile(r"optimizer\.state\.(.+)\.(\w+)")
VERSION = "0.19.8"  # of DeepSpeed, where the source names none: the one that judged this
COUNTERS = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 0, "skipped_steps": 0, "lr_scheduler": None}
NEEDS = (
    "a universal checkpoint of DeepSpeed needs tensors model.NAME and optimizer.state.NAME.KEY, and values "
    "optimizer.param_groups with the names of the parameters of each group"
)


@dataclass(frozen=True)
class Plan:
    """What goes into which file. Tied tensors have the part of the one that they are tied to."""

    contents: Contents
    groups: Sequence[Mapping[str, object]]  # the settings of each group of the optimizer
    trained: Sequence[Sequence[str]]  # the names of its parameters

    @staticmethod
    def of(contents: Contents) -> Plan:
        """Refused where there are no groups with names."""
        paths = {name: contents.path_of(name) for name in contents.values}
        mine = {name: path for name, path in paths.items() if path[:2] == ("optimizer", "param_groups")}
        nested = unflatten_state_dict({name: contents.values[name] for name in mine}, mine)
        groups = nested["optimizer"]["param_groups"] if mine else []
        names = [group.get("params") for group in groups]
        if not groups or not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in names):
            raise CheckpointError(f"{NEEDS}; here are {f'the parameters {brief(names)}' if groups else 'no groups'}")
        return Plan(contents, [{**group, "params": [at]} for at, group in enumerate(groups)], names)

    @property
    def names(self) -> dict[str, None]:
        """Of all parameters of the optimizer."""
        return {name: None for names in self.trained for name in names}

    def same(self, name: str) -> str:
        """The name under which a tensor has parts."""
        return self.contents.tied.get(name, name)

    def shared(self) -> dict[str, str]:
        """The names that share a weight with one of the optimizer."""
        owners = {self.same(f"model.{name}"): name for name in self.names}
        found = {name: owners.get(self.same(f"model.{name}")) for name in self._kept()}
        return {name: owner for name, owner in found.items() if owner is not None}

    def _kept(self) -> list[str]:
        """What is below model. and does not belong to the optimizer: buffers, frozen parameters, shared names."""
        below = [name.removeprefix("model.") for name in self.contents.tensors if name.startswith("model.")]
        return [name for name in below if name not in self.names]

    def beside(self) -> dict[str, OBJ_PATH]:
        """The tensors of the model states, and the path of each."""
        tensors, shared = self.contents.tensors, self.shared()
        kept = {f"model.{n}": n for n in self._kept() if n not in shared and f"module.{n}" not in tensors}
        computed = {name: name.removeprefix("module.") for name in tensors if name.startswith("module.")}
        trees = ("model.", "module.", "optimizer.state.")
        others = {name: self.contents.path_of(name) for name in tensors if not name.startswith(trees)}
        return {name: ("module", key) for name, key in {**kept, **computed}.items()} | others

    def states(self) -> dict[tuple[str, str], str]:
        """The name of each tensor of the optimizer, by the file that it goes to: a parameter and a key."""
        found = {(name, "fp32"): f"model.{name}" for name in self.names}
        for name in self.contents.tensors:
            if name.startswith("optimizer."):
                match = STATE.fullmatch(name)
                if match is None or match[1] not in self.names or match[2] == "fp32":
                    raise CheckpointError(
                        f"{name!r} is of no parameter in optimizer.param_groups: leave it out. {NEEDS}"
                    )
                found[match[1], match[2]] = name
        return found

    def steps(self) -> dict[str, object]:
        """The steps that are numbers, not tensors."""
        matches = ((STATE.fullmatch(name), value) for name, value in self.contents.values.items())
        return {match[1]: value for match, value in matches if match and match[2] == "step" and match[1] in self.names}

    def check(self) -> None:
        """Refuse what DeepSpeed would not find, or take for something else."""
        tensors = self.contents.tensors
        if absent := [f"model.{name}" for name in self.names if f"model.{name}" not in tensors]:
            raise CheckpointError(missing("optimizer.param_groups names parameters without a tensor:", absent, tensors))
        for name in self.names:
            if tensors[f"model.{name}"][0] != torch.float32:
                raise CheckpointError(
                    f"'model.{name}' is {tensors[f'model.{name}'][0]}: cast it to float32, as DeepSpeed"
                )
            if "/" in name or name.startswith("."):
                raise CheckpointError(f"{name!r} cannot be the name of a folder: rename it with rename=")
        shared = self.shared()
        for name in (name for name in self._kept() if name not in shared):
            if f"module.{name}" in tensors and self.same(f"module.{name}") != self.same(f"model.{name}"):
                raise CheckpointError(f"'model.{name}' and 'module.{name}' differ, but there is one place for both")
        self.states()


class FileRecords:
    """The tensors of a file, each of them once."""

    def __init__(self, plan: Plan, parts: Mapping[str, TensorPart]) -> None:
        self._plan, self._parts = plan, parts
        self._keys, self.records = dict[str, str](), Records()

    def of(self, name: str) -> TensorRecord:
        """What takes the place of a tensor in the pickle of the file."""
        part = self._parts[self._plan.same(name)]
        key = self._keys.setdefault(part.name, str(len(self._keys)))
        self.records[key] = Data(part.bytes, part.write)
        return TensorRecord(key, part.dtype, part.shape)


class UniversalWriter(Writer):
    """Writes a folder of files for each weight, and one file with all that is not of the optimizer."""

    index_name = LATEST

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse what DeepSpeed would not find, or take for something else."""
        check_overlaps(contents)
        check_keys(contents)
        Plan.of(contents).check()

    def check(self, contents: Contents) -> None:
        """Refuse a folder with a checkpoint, or a part of one: files of two would be mixed."""
        super().check(contents)
        if self.folder.exists(LATEST) or self.folder.exists(_folder(contents)):
            raise CheckpointError(
                f"{self.folder.path} has a universal checkpoint already, or a part of one ({_folder(contents)}): give "
                f"another path, or remove it"
            )

    def file(self, owner: int) -> str:
        """The file that makes the others a checkpoint."""
        return LATEST

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> None:
        """Write all but the index."""
        plan, by_name = Plan.of(contents), {part.name: part for part in parts}
        for (name, key), tensor in plan.states().items():
            records = FileRecords(plan, by_name)
            stored = records.of(tensor)
            value = stored if key == "step" else {"param": stored, "cat_dim": 0}
            self._save(_folder(contents), f"zero/{name}/{key}.pt", value, records)
        for name, step in plan.steps().items():
            self._save(_folder(contents), f"zero/{name}/step.pt", step, FileRecords(plan, by_name))
        records = FileRecords(plan, by_name)
        self._save(_folder(contents), "zero/optimizer_state.pt", _settings(plan, records), records)
        for file, tensors in (MODEL_OF_RANK, ()), (MODEL, plan.beside()):
            records = FileRecords(plan, by_name)
            self._save(
                _folder(contents), file, _model_states(plan, {name: records.of(name) for name in tensors}), records
            )

    def _save(self, folder: str, file: str, value: object, records: FileRecords) -> None:
        """A file as torch.save writes it, without checksums."""
        inside, _, name = f"{folder}/{file}".rpartition("/")
        out = OutputFolder(self.folder.path_of(inside), durable=self.folder.durable, run=self.folder.run, sums=False)
        with out.write(name) as opened:
            write_segments(opened, archive_of(value, records.records))

    def finish(self, results: Mapping[int, None], contents: Contents) -> list[str]:
        """Write the index."""
        with self.folder.write(LATEST, sums=False) as file:
            file.write(self.index(results, contents))
        return []

    def index(self, results: Mapping[int, None], contents: Contents) -> bytes:
        """The name of the folder."""
        return _folder(contents).encode()


def _folder(contents: Contents) -> str:
    """Where all files are."""
    steps = contents.values.get("global_steps")
    return f"global_step{steps if type(steps) is int else 0}_universal"


def _settings(plan: Plan, records: FileRecords) -> dict[str, object]:
    """Of the optimizer. ZeRO-3 looks for the step of all weights here."""
    paths = {name: plan.contents.path_of(name) for name in plan.contents.values}
    flat = {
        name: path[1:]
        for name, path in paths.items()
        if path[:1] == ("optimizer",) and path[1] not in ("param_groups", "state")
    }
    rest = unflatten_state_dict({name: plan.contents.values[name] for name in flat}, flat)
    step: object = next((records.of(name) for (_, key), name in plan.states().items() if key == "step"), None)
    step = next(iter(plan.steps().values()), 0) if step is None else step
    inner = {"state": {at: {"step": step} for at in range(len(plan.groups))}, "param_groups": plan.groups}
    version = plan.contents.values.get("ds_version", VERSION)
    return {"ds_version": version, **rest, "param_groups": plan.groups, "optimizer_state_dict": inner}


def _model_states(plan: Plan, tensors: Mapping[str, TensorRecord]) -> dict[str, object]:
    """Counters and other values, and the tensors that do not belong to the optimizer."""
    values = {
        name: value for name, value in plan.contents.values.items() if plan.contents.path_of(name)[0] != "optimizer"
    }
    paths = {name: plan.contents.path_of(name) for name in values}
    beside = {name: path for name, path in plan.beside().items() if name in tensors}
    nested = unflatten_state_dict({**values, **tensors}, paths | beside)
    shapes = [
        {name: torch.Size(plan.contents.tensors[f"model.{name}"][1].shape) for name in one} for one in plan.trained
    ]
    return {
        "module": {},
        "buffer_names": [],
        **COUNTERS,
        **nested,
        "param_shapes": shapes,
        "shared_params": plan.shared(),
    }
