"""The names of what DeepSpeed's checkpoints have, and what their model states have beside the optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.archives import Archive
from shardwise.checkpoint.formats.deepspeed_files import RankFile, mapping, shape_of
from shardwise.checkpoint.formats.deepspeed_groups import FlatGroup, Shape
from shardwise.checkpoint.formats.flat_runs import Buffer, Run, entry_of_runs
from shardwise.checkpoint.formats.torch_save import flatten, objects_of, tensor_entry
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError
from shardwise.state.traverse import OBJ_PATH

LAYOUT = {"module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}


class Names:
    """What a checkpoint has by name: tensors, and values of files."""

    def __init__(self, files: Files, paths: Sequence[str]) -> None:
        self.files, self.paths = files, paths
        self.entries, self.nested = dict[str, Entry](), dict[str, OBJ_PATH]()
        self.values = dict[str, tuple[Archive, object]]()

    def take(self, *path: str) -> str:
        """A name for a path that has none yet."""
        name = ".".join(path)
        return self._named(name, path)

    def _named(self, name: str, path: OBJ_PATH) -> str:
        if name in self.nested:
            raise CheckpointError(f"{self.files.root}: two values would be called {name!r}")
        self.nested[name] = path
        return name

    def add_runs(
        self, path: tuple[str, ...], shape: Shape, runs: Sequence[Run], like: Buffer, shared: Hashable = None
    ) -> None:
        """A tensor in flat buffers."""
        name = self.take(*path)
        self.entries[name] = entry_of_runs(name, shape, like, runs, self.paths, self.files, shared)

    def add_tensor(self, path: tuple[str, ...], tensor: TensorStub, file: RankFile, *, tied: bool = True) -> None:
        """A tensor in one file."""
        name = self.take(*path)
        self.entries[name] = entry = tensor_entry(name, tensor, file.archive, file.number, self.paths, self.files)
        entry.shared = entry.shared if tied else None

    def add_values(self, root: Mapping[str, object], file: RankFile) -> None:
        """Nested values, and tensors among them."""
        flat, nested = flatten(root, file.where)
        for name, value in flat.items():
            self._named(name, nested[name])
            if isinstance(value, TensorStub):
                self.entries[name] = tensor_entry(name, value, file.archive, file.number, self.paths, self.files)
            else:
                self.values[name] = file.archive, value

    def checkpoint(self, format: str) -> Checkpoint:
        """All of it."""
        return Checkpoint(
            self.files, format, self.entries, paths=self.nested, objects=lambda: objects_of(self.files, self.values)
        )


class ModelStates:
    """What the files with model states have. ZeRO-3 has one for every rank, without the cells of weights."""

    def __init__(self, models: Sequence[RankFile], *, zero3: bool) -> None:
        self.models, self.model, self.zero3 = models, models[0], zero3
        self.frozen = mapping(self.model.root, "frozen_param_shapes", self.model.where) if zero3 else {}
        self.ties = mapping(self.model.root, "shared_params", self.model.where)

    def add_to(self, names: Names) -> None:
        """Name what has no name yet: the weights of the optimizer have theirs."""
        self._add_module(names)
        self._add_frozen(names)
        root = self.model.root.items()
        rest = {key: one for key, one in root if key not in LAYOUT and (key, one) != ("optimizer", None)}
        names.add_values(rest, self.model)

    def owners(self, names: Mapping[str, object]) -> dict[str, str]:
        """The name under which each weight of the optimizer is stored, also of names that share one."""
        shared = {name: str(owner) for name, owner in self.ties.items() if owner in names}
        return {name: name for name in names} | shared

    def _add_module(self, names: Names) -> None:
        """Buffers and frozen parameters. With weights that have cells, it is also the model as it computes."""
        module = mapping(self.model.root, "module", self.model.where)
        tensors = {
            name: value for name, value in module.items() if isinstance(value, TensorStub) and isinstance(name, str)
        }
        computes = not self.zero3 and any(f"model.{name}" in names.nested for name in tensors)
        for name, tensor in tensors.items():
            if f"model.{name}" not in names.nested and name not in self.frozen:
                names.add_tensor(("model", name), tensor, self.model)
            if computes:
                names.add_tensor(("module", name), tensor, self.model)

    def _add_frozen(self, names: Names) -> None:
        """Frozen parameters of ZeRO-3: every rank has a part of each in its model states."""
        held = [mapping(file.root, "frozen_param_fragments", file.where, optional=True) for file in self.models]
        for name, listed in self.frozen.items() if held[0] else ():  # without, if they were saved so
            shape, buffers = shape_of(listed, name, self.model.where), list[Buffer]()
            for file, parts in zip(self.models, held, strict=True):
                tensor = parts.get(name)
                if not isinstance(tensor, TensorStub):
                    raise CheckpointError(f"{file.where} has no part of the frozen parameter {name!r}")
                buffers.append(Buffer(file.number, file.archive, tensor, f"the part of {name!r}"))
            group = FlatGroup({name: shape}, [0], 3, len(buffers), self.model.where)
            for _, _, runs in group.runs(buffers):
                names.add_runs(("model", name), shape, runs, buffers[0])


def with_names(settings: Sequence[Mapping[str, object]], groups: Sequence[Sequence[str]]) -> list[dict[str, object]]:
    """The settings of the groups of an optimizer, whose parameters are the flat groups with the numbers in `params`."""
    named = list[dict[str, object]]()
    for one in settings:
        numbers = one.get("params")
        known = [at for at in numbers if type(at) is int and at < len(groups)] if isinstance(numbers, list) else []
        named.append({**one, "params": [name for at in known for name in groups[at]]})
    return named
