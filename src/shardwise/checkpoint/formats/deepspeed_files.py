"""The files that ranks of DeepSpeed's ZeRO write at a step: which there must be, and what they say besides tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import NamedTuple

from shardwise.checkpoint.files import FileLabel, Files
from shardwise.checkpoint.formats.archives import Archive, tensor_reader
from shardwise.checkpoint.formats.deepspeed_groups import Shape
from shardwise.checkpoint.formats.torch_save import read_archive
from shardwise.checkpoint.opaque import UnknownObject
from shardwise.checkpoint.unpickle_stubs import TensorStub, sizes
from shardwise.errors import CheckpointError
from shardwise.job.names import some
from shardwise.quoting import brief

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]+)_mp_rank_(?P<model>[0-9]+)_?optim_states\.pt")
MODEL_OF_RANK = re.compile(r"zero_pp_rank_(?P<rank>[0-9]+)_mp_rank_(?P<model>[0-9]+)_model_states\.pt")  # of ZeRO-3
MODEL = re.compile(r"(?P<rank>)mp_rank_(?P<model>[0-9]+)(?:_[0-9]+)?_model_states\.pt")
OTHERS = re.compile(r"(?:layer|expert|expp_rank)_.*_states\.pt")
ONE_SAVE = "Remedy: remove what other saves left here, and copy what is missing of this one"
UNIVERSAL = "Remedy: convert it with DeepSpeed's ds_to_universal.py, and give the folder that this makes"
PLAIN = (bool, int, float, str)


class RankFile(NamedTuple):
    """A file of a rank: its number among all files, and what it has, with stubs for tensors."""

    number: int
    archive: Archive
    root: Mapping[str, object]

    @property
    def where(self) -> FileLabel:
        """In messages."""
        return self.archive.where._replace(bytes=None)

    @property
    def partition(self) -> Mapping[str, object]:
        """The part of the optimizer that this rank has."""
        return mapping(self.root, "optimizer_state_dict", self.where)

    @property
    def stage(self) -> int:
        """Of ZeRO. The optimizer for bfloat16 without ZeRO does not say it, and has partitions as stage 1."""
        return _number(self.partition.get("zero_stage", 1), f"{self.where}: zero_stage")

    @property
    def world(self) -> int:
        """How many ranks there are."""
        given = self.partition.get("partition_count")
        counts = given if isinstance(given, list) and given else [given]
        if any(count != counts[0] for count in counts):
            raise CheckpointError(f"{self.where} has groups on {brief(counts)} ranks (experts), which are not read")
        return _number(counts[0], f"{self.where}: partition_count")

    @property
    def inner(self) -> Mapping[str, object]:
        """The state dict of the optimizer of torch that ZeRO works with."""
        name = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        state = self.partition.get(name)
        return (
            {"state": dict(enumerate(state))} if isinstance(state, list) else mapping(self.partition, name, self.where)
        )

    def states(self) -> dict[object, Mapping[str, object]]:
        """The state of each flat group, by the number of the group."""
        states = mapping(self.inner, "state", self.where)
        if not all(isinstance(one, Mapping) for one in states.values()):
            raise CheckpointError(f"{self.where} has the states {brief(states)}, not a dict for each group")
        return {key: mapping(states, key, self.where) for key in states}

    def param_groups(self) -> list[Mapping[str, object]]:
        """The settings of the groups of the optimizer."""
        groups = self.inner.get("param_groups")
        return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []


def _number(value: object, what: str) -> int:
    """A positive whole number; members of an Enum are made of one."""
    plain = value.args[0] if isinstance(value, UnknownObject) and len(value.args) == 1 else value
    if type(plain) is not int or not 0 < plain < 2**20:
        raise CheckpointError(f"{what} is {brief(value)}, not a small whole number")
    return plain


def mapping(root: Mapping[str, object], key: str, where: object, *, optional: bool = False) -> Mapping[str, object]:
    """A dict in a dict of a file; an empty one in the place of None, or of one that may be absent."""
    value = root.get(key, None if key in root or optional else ...)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} has no dict {key!r}: it is not a file of DeepSpeed's ZeRO that is known here")
    return value


def shape_of(value: object, name: str, where: object) -> Shape:
    """A shape that a file lists."""
    try:
        return sizes(tuple(value) if isinstance(value, list | tuple) else value)
    except UnpicklingError:
        raise CheckpointError(f"{where}: the shape of {name!r} is {brief(value)}, not a tuple of sizes") from None


def shapes_of(file: RankFile) -> list[dict[str, Shape]]:
    """The names and shapes of the parameters of each group, in the order of the flat tensors."""
    groups = file.root.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{file.where} has no list param_shapes: the parameters in flat tensors have no names")
    return [{str(name): shape_of(shape, name, file.where) for name, shape in group.items()} for group in groups]


def fragment_of(value: object, name: str, where: object) -> tuple[int, int]:
    """Where a rank says that its part of a parameter is: the first element and their number."""
    state = value.state if isinstance(value, UnknownObject) else None
    start, count = (state.get("start"), state.get("numel")) if isinstance(state, Mapping) else (None, None)
    if type(start) is not int or type(count) is not int:
        raise CheckpointError(f"{where}: the place of {name!r} is {brief(value)}, not a fragment_address")
    return start, count


@contextmanager
def damage_is_an_error(files: Files) -> Iterator[None]:
    """Files of strangers can have anything in the place of what DeepSpeed writes."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{files.root}: not a checkpoint of DeepSpeed as it is known here: {type(error).__name__}: {error}"
        ) from error


# --- which files there must be ----------------------------------------------------------------------------------------


def is_step(names: Sequence[str]) -> bool:
    """True for the files of a step: some rank's part of the optimizer, or model states of ZeRO-3."""
    return any(OPTIMIZER.fullmatch(name) or MODEL_OF_RANK.fullmatch(name) for name in names)


def read_step(files: Files, names: Sequence[str]) -> tuple[list[RankFile], list[RankFile]]:
    """The model states (in ZeRO-3 of all ranks) and the parts of the optimizer; refused if not those of one save."""
    _check_kinds(files, names)
    parts = _by_rank(files, names, OPTIMIZER)
    if not parts:
        raise CheckpointError(
            f"{files.root} has model states of DeepSpeed's ZeRO-3, which have no weights, but no optim_states files, "
            f"which have them. {ONE_SAVE}"
        )
    first = read_file(files, 0, parts[min(parts)])
    zero3 = first.stage == 3
    models = _by_rank(files, names, MODEL_OF_RANK if zero3 else MODEL)
    paths = _in_order(files, models, first.world if zero3 else 1, "model states", first)
    count = len(paths)
    paths += _in_order(files, parts, first.world, "parts of the optimizer", first)
    read = [read_file(files, number, path) for number, path in enumerate(paths)]
    _check_one_save(files, read[:count], read[count:])
    return read[:count], read[count:]


def read_models(files: Files, names: Sequence[str]) -> list[RankFile]:
    """The model states beside a universal checkpoint: of one rank, or of all ranks of ZeRO-3."""
    _check_kinds(files, names)
    whole, ranked = _by_rank(files, names, MODEL), _by_rank(files, names, MODEL_OF_RANK)
    found = whole or ranked
    if 0 not in found:
        raise CheckpointError(
            f"{files.root} has no model states of rank 0, such as mp_rank_00_model_states.pt. {ONE_SAVE}"
        )
    first = read_file(files, 0, found[0])
    ranks = first.root.get("dp_world_size") if not whole else 1
    absent = [rank for rank in range(ranks if type(ranks) is int else 1) if rank not in found]
    if absent and first.root.get("frozen_param_fragments"):
        raise CheckpointError(f"{files.root} lacks the model states of rank {absent[0]} of {ranks}. {ONE_SAVE}")
    others = [read_file(files, at, found[at]) for at in range(1, len(found)) if not absent]
    return [first, *others]


def _check_kinds(files: Files, names: Sequence[str]) -> None:
    """Refuse checkpoints that are split in other ways as well."""
    for name in names:
        match = OPTIMIZER.fullmatch(name) or MODEL_OF_RANK.fullmatch(name) or MODEL.fullmatch(name)
        if OTHERS.fullmatch(name) or (match is not None and int(match["model"]) > 0):
            raise CheckpointError(
                f"{files.label(name)} is of a model that is split by tensor, pipeline or expert parallelism, which the "
                f"files of DeepSpeed do not describe. {UNIVERSAL}"
            )


def _by_rank(files: Files, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """The file of each rank."""
    found = dict[int, str]()
    for name in names:
        if match := pattern.fullmatch(name):
            other = found.setdefault(int(match["rank"] or 0), name)
            if other != name:
                raise CheckpointError(f"{files.label(other)} and {name} are of the same rank. {ONE_SAVE}")
    return found


def _in_order(files: Files, found: Mapping[int, str], world: int, what: str, first: RankFile) -> list[str]:
    """The files of all ranks, and of no others."""
    absent = [rank for rank in range(world) if rank not in found]
    if absent:
        ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}{' ...' if len(absent) > 8 else ''}"
        raise CheckpointError(
            f"{files.root} lacks the {what} of {ranks}: {first.where} is of {world} rank{'s' * (world > 1)}. {ONE_SAVE}"
        )
    if beyond := [name for rank, name in found.items() if rank >= world]:
        raise CheckpointError(
            f"{files.root} has files of two numbers of ranks: {first.where} is of {world}, but there is also "
            f"{some(sorted(beyond))}. {ONE_SAVE}"
        )
    return [found[rank] for rank in range(world)]


def read_file(files: Files, number: int, name: str) -> RankFile:
    """A file, without the tensors. `number`: its place among all files."""
    archive = read_archive(files, name)
    root = archive.root()
    if not isinstance(root, Mapping):
        raise CheckpointError(f"{archive.where} has {brief(root)}, not a dict as the files of DeepSpeed have")
    return RankFile(number, archive, root)


def _check_one_save(files: Files, models: Sequence[RankFile], parts: Sequence[RankFile]) -> None:
    """Refuse files of different saves: the settings of the optimizer and the steps are equal on all ranks of one."""
    settings = [_settings(files, part) for part in parts]
    for part, values in zip(parts, settings, strict=True):
        for what, value in values.items():
            if settings[0].get(what) != value:
                raise _two_saves(parts[0], part, what, settings[0].get(what), value)
    for model in models:
        for what in ("global_steps", "dp_world_size"):
            if model.root.get(what) != models[0].root.get(what):
                raise _two_saves(models[0], model, what, models[0].root.get(what), model.root.get(what))
    ranks = models[0].root.get("dp_world_size", parts[0].world)
    if ranks != parts[0].world:
        raise _two_saves(parts[0], models[0], "the number of ranks", parts[0].world, ranks)


def _two_saves(one: RankFile, other: RankFile, what: str, first: object, second: object) -> CheckpointError:
    return CheckpointError(
        f"{one.where} and {other.where} are of different saves: {what} is {brief(first)} in one, and "
        f"{brief(second)} in the other. {ONE_SAVE}"
    )


def _settings(files: Files, part: RankFile) -> dict[str, object]:
    """What is equal on all ranks: the stage, the number of ranks, steps, the learning rate and so on."""
    read = tensor_reader(files, part.archive, "step")
    found: dict[str, object] = {"the stage of ZeRO": part.stage, "the number of ranks": part.world}
    for number, state in part.states().items():
        step = state.get("step")
        value = read(step).item() if isinstance(step, TensorStub) and not step.shape else step
        found |= {f"the step of group {number}": value} if isinstance(value, PLAIN) else {}
    for number, group in enumerate(part.param_groups()):
        found |= {f"{key} of group {number}": value for key, value in group.items() if isinstance(value, PLAIN)}
    return found
