"""Nested names in `.metadata`, so that torch's reader rebuilds the same dicts and lists, and ours the same keys.

torch's reader makes a list wherever a path goes on with anything but a str, and turns the keys of dicts into str
when it looks up where a value belongs. So what would come out changed is written in another way:

- A dict with int keys that holds tensors also has its skeleton, the dict without the tensors, as an item of its own.
  torch's reader starts from it, and fills in the tensors. Int keys stand in paths as floats: they find the same key of
  the skeleton, and our reader tells them from places in lists.
- A dict with int keys, a tuple, or a list that torch does not enter is one value where it holds no tensors. The paths
  of the leaves in it are written, too: torch ignores them, and our reader finds the leaves by them.
- What is neither is refused: other values beside tensors under int keys, and tensors inside tuples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from shardwise.checkpoint.formats.writers import Contents
from shardwise.errors import CheckpointError
from shardwise.state.traverse import OBJ_PATH, Key, Place, dotted, set_element

ELSEWHERE = (
    "Remedy: str keys (torch's get_optimizer_state_dict gives them), or another format: the default one of save, "
    "'sharded' or 'torch.save' of convert"
)
Paths = Mapping[str, OBJ_PATH]


class Nesting(NamedTuple):
    """What a checkpoint has, as torch's reader has to see it."""

    values: Mapping[str, Any]
    paths: Mapping[str, tuple[Any, ...]]
    skeletons: Mapping[str, Any]


def nesting(contents: Contents) -> Nesting:
    """By the rules above; refuses what torch's reader would change."""
    tensors, values = ({name: contents.path_of(name) for name in part} for part in (contents.tensors, contents.values))
    _check(tensors, values)
    groups = _groups(tensors.values(), values.values())
    _check_names({**tensors, **values}, map(dotted, groups))
    written = {name: _written(path) for name, path in {**tensors, **values}.items()}
    skeletons = _skeletons(tensors)
    return Nesting(
        _grouped(contents.values, values, groups),
        {**written, **{dotted(root): root for root in groups}, **{name: root for name, (root, _) in skeletons.items()}},
        {name: skeleton for name, (_, skeleton) in skeletons.items()},
    )


def _outermost(path: OBJ_PATH) -> OBJ_PATH | None:
    """The outermost container on a path that torch would not rebuild: a dict with int keys, or a tuple."""
    return next((path[:at] for at, key in enumerate(path) if type(key) in (Key, Place)), None)


def _groups(tensors: Iterable[OBJ_PATH], values: Iterable[OBJ_PATH]) -> set[OBJ_PATH]:
    """The containers that are stored as one value: such as torch would change, and lists that it does not enter."""
    changed = {root for path in values if (root := _outermost(path))}
    stored = {_within(path, changed) or path for path in values}
    if all(int not in map(type, path) for path in stored):
        return {path for path in changed if _within(path, changed) is None}
    entered = {inside for path in tensors for inside, _ in _lists(path)}
    entered |= {inside for path in stored for inside, end in _lists(path) if end < len(path)}
    found = changed | {inside for path in stored for inside, _ in _lists(path) if inside not in entered}
    return {path for path in found if _within(path, found) is None}


def _within(path: OBJ_PATH, groups: Collection[OBJ_PATH]) -> OBJ_PATH | None:
    """The outermost of some containers that a path leads into."""
    return next((path[:end] for end in range(1, len(path)) if path[:end] in groups), None)


def _lists(path: OBJ_PATH) -> Iterable[tuple[OBJ_PATH, int]]:
    """The lists on a path, and where each run of lists in lists ends: torch enters them for what stands there."""
    end = len(path)
    for at in range(len(path) - 1, 0, -1):
        if type(path[at]) is int:
            yield path[:at], end
        else:
            end = at


def _check(tensors: Paths, values: Paths) -> None:
    odd = {name: path for name, path in {**tensors, **values}.items() if not {*map(type, path)} <= {str, int}}
    inner = {name: root for name, path in odd.items() if name in values and (root := _outermost(path)) is not None}
    held = {path[:end] for path in tensors.values() for end in range(len(path))} if inner else ()
    for name, path in odd.items():
        if type(path[0]) is not str:
            _refuse(name, "has an int as a key of the outermost dict")
        if any(type(key) is Key and int(float(key)) != int(key) for key in path):
            _refuse(name, "has a key of more than 53 bits")
        if name in tensors and any(type(key) is Place for key in path):
            _refuse(name, "is a tensor inside of a tuple")
        if name in inner and inner[name] in held:
            _refuse(name, f"is no tensor, and lies beside tensors in {dotted(inner[name])!r}, which has int keys")


def _refuse(name: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{name!r} {why}: torch.distributed.checkpoint would read it back as something else. {ELSEWHERE}"
    )


def _check_names(paths: Paths, groups: Iterable[str]) -> None:
    """Refuse names that torch cannot tell from each other: it joins keys by dots."""
    for name, path in paths.items():
        if name != dotted(path):
            _refuse(dotted(path), "is the name of two things ('a.b' and 'b' in 'a', or 1 and '1')")
    for name in groups:
        if name in paths:
            _refuse(name, "is the name of two things")


def _grouped(values: Mapping[str, Any], paths: Paths, groups: set[OBJ_PATH]) -> dict[str, Any]:
    """The values that are stored: some of them have others in them."""
    found = dict[str, Any]()
    for name, value in values.items():
        path = paths[name]
        root = _within(path, groups)
        if root is None:
            found[name] = value
        else:
            set_element(found, (dotted(root), *path[len(root) :]), value)
    return found


def _skeletons(tensors: Paths) -> dict[str, tuple[OBJ_PATH, Any]]:
    """Dicts with int keys that have tensors, without them: by a name of their own, the path and the dict."""
    roots, trees = {root for path in tensors.values() if (root := _outermost(path))}, dict[str, Any]()
    for path in tensors.values() if roots else ():
        for root in (path[:end] for end in range(1, len(path)) if path[:end] in roots):
            set_element(trees, (dotted(root), *path[len(root) :]), None)
    return {_unused(f"{dotted(root)}{{}}", tensors): (root, trees[dotted(root)]) for root in roots}


def _unused(name: str, names: Paths) -> str:
    return name if name not in names else _unused(f"{name}{{}}", names)


def _written(path: OBJ_PATH) -> tuple[Any, ...]:
    return path if {*map(type, path)} <= {str, int} else tuple(map(_step, path))


def _step(key: Any) -> Any:
    """A key of a path, as it is written."""
    return float(key) if type(key) is Key else (int(key),) if type(key) is Place else key


def step_of(key: Any) -> Any:
    """A key of a path again; None for what is no such key."""
    if type(key) is float and key.is_integer():
        return Key(int(key))
    if type(key) is tuple and len(key) == 1 and type(key[0]) is int:
        return Place(key[0])
    return key if type(key) in (str, int) else None
