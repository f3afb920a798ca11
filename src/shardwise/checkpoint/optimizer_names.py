"""The states of an optimizer by the names of parameters, where a checkpoint has the numbers that torch gives them.

An optimizer numbers its parameters in the order of its groups. The names in that order come from the user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.checkpoint.entry import Checkpoint
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, dotted
from shardwise.storage.paths import readable

LIKE_WEIGHTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # states of the shape of the weight
Parameters = Sequence[str] | str | Path  # names, or a text file with a name in each line


def with_names(opened: Checkpoint, parameters: Parameters) -> Checkpoint:
    """The same checkpoint with `state.weight.exp_avg` in the place of `state.0.exp_avg`."""
    names = _names(parameters)
    root = _root(opened)
    _check(opened, names, _numbers(opened, root))
    _check_states(opened, root, len(names))
    paths = {name: _named(path, root, names) for name, path in opened.paths.items()}
    new = {name: dotted(path) for name, path in paths.items()}
    _check_shapes(opened, paths, root)
    entries = {(one := new.get(name, name)): replace(entry, name=one) for name, entry in opened.items()}
    known = {name: (name,) for name in (*opened, *opened.objects)} | paths
    objects = {new.get(name, name): _value(known[name], root, value, names) for name, value in opened.objects.items()}
    return opened.replaced(entries, paths={new[name]: path for name, path in paths.items()}, objects=objects)


def _names(parameters: Parameters) -> list[str]:
    if not isinstance(parameters, str | Path):
        return list(parameters)
    with readable(parameters):
        data = Path(parameters).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{parameters}: parameters= needs a text file with a name in each line: {error}"
        ) from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _root(opened: Checkpoint) -> OBJ_PATH:
    """What stands before `param_groups` in the paths of the one optimizer."""
    roots = {path[:-3]: None for path in opened.paths.values() if len(path) > 2 and path[-3] == "param_groups"}
    if len(roots) != 1:
        raise CheckpointError(
            f"{opened.path} has the states of {len(roots)} optimizers, but parameters= names those of one. "
            f"Remedy: select= takes one of them into a checkpoint of its own"
        )
    return next(iter(roots))


def _numbers(opened: Checkpoint, root: OBJ_PATH) -> list[object]:
    """The numbers of its parameters, in the order of its groups."""
    groups = {path: opened.objects[name] for name, path in opened.paths.items() if _is_list(path, root)}
    return [number for _, numbers in sorted(groups.items(), key=lambda item: int(item[0][-2])) for number in numbers]


def _is_list(path: OBJ_PATH, root: OBJ_PATH) -> bool:
    return path[:-2] == (*root, "param_groups") and path[-1] == "params"


def _check(opened: Checkpoint, names: Sequence[str], numbers: Sequence[object]) -> None:
    if numbers != list(range(len(numbers))):
        raise CheckpointError(
            f"{opened.path}: the parameters of its groups are {brief(numbers)}, not 0, 1, 2 and so on"
        )
    if len(set(names)) < len(names) or len(names) != len(numbers):
        raise CheckpointError(
            f"{opened.path} has an optimizer of {len(numbers)} parameters, but parameters= has {len(set(names))} "
            f"different names in {len(names)}: give the name of each, in the order of the groups"
        )


def _check_states(opened: Checkpoint, root: OBJ_PATH, count: int) -> None:
    """Refuse the state of a number that is in no group."""
    at = len(root)
    numbers = {path[at + 1] for path in opened.paths.values() if path[: at + 1] == (*root, "state") and path[at + 1 :]}
    for number in numbers:
        if isinstance(number, int) and not 0 <= number < count:
            raise CheckpointError(f"{opened.path} has the state of parameter {number}, but its groups have {count}")


def _check_shapes(opened: Checkpoint, paths: Mapping[str, OBJ_PATH], root: OBJ_PATH) -> None:
    """Refuse names in another order, as far as the shapes of weights in the same checkpoint tell."""
    states = {name: path for name, path in paths.items() if path[: len(root) + 1] == (*root, "state")}
    weights = defaultdict[str, set[tuple[int, ...]]](set)
    wanted = {str(path[-2]) for path in states.values() if path[-1] in LIKE_WEIGHTS}
    for name in opened.keys() - states.keys() if wanted else ():
        parts = name.split(".")
        for end in wanted.intersection(".".join(parts[at:]) for at in range(len(parts))):
            weights[end].add(opened[name].shape)
    for name, path in states.items():
        shapes = weights.get(str(path[-2]), set())
        if path[-1] in LIKE_WEIGHTS and name in opened and shapes and opened[name].shape not in shapes:
            raise CheckpointError(
                f"{opened.path}: {name!r} has shape {opened[name].shape}, but {path[-2]!r} of parameters= has "
                f"{min(shapes)}: give the names in the order of the groups"
            )


def _named(path: OBJ_PATH, root: OBJ_PATH, names: Sequence[str]) -> OBJ_PATH:
    at = len(root)
    if path[: at + 1] != (*root, "state") or len(path) < at + 2 or not isinstance(path[at + 1], int):
        return path
    return (*path[: at + 1], names[int(path[at + 1])], *path[at + 2 :])


def _value(path: OBJ_PATH, root: OBJ_PATH, value: object, names: Sequence[str]) -> object:
    return [names[number] for number in value] if _is_list(path, root) and isinstance(value, list) else value
