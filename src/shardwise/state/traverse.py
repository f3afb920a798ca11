"""Nested state dicts: visit, look up and set values, flatten and unflatten. Inputs are never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch

PATH_ITEM = str | int
OBJ_PATH = tuple[PATH_ITEM, ...]
STATE_DICT_ITEM = object
STATE_DICT_TYPE = dict[str, Any]
StateDict = Mapping[Any, object]  # what is accepted: keys of any type, nested or flat
FLATTEN_MAPPING = dict[str, OBJ_PATH]
Keep = Callable[[Any], bool]
Visitor = Callable[[OBJ_PATH, Any], None]


class Key(int):
    """An integer key of a mapping. Plain integers in a path are list indices."""


class Place(int):
    """An index into a tuple."""


def _is_tensor(value: object) -> bool:
    containers = "local_shards", "shards", "__create_chunk_list__"
    return isinstance(value, torch.Tensor) or any(hasattr(value, name) for name in containers)


def traverse_state_dict(
    state_dict: StateDict,
    visitor: Visitor,
    keep_traversing: Keep | None = _is_tensor,
) -> None:
    """Call `visitor(path, value)` for every leaf.

    Mappings are entered. Lists and tuples are entered only if they contain, at any depth, a mapping or a value for
    which `keep_traversing` returns True. Empty containers are leaves. Keys keep their type; integer keys of mappings
    are `Key`s.

    >>> traverse_state_dict({"a": {1: [2, 3], "b": ()}, "c": [torch.zeros(1)]}, lambda path, _: print(path))
    ('a', 1)
    ('a', 'b')
    ('c', 0)
    """
    _check_mapping(state_dict)
    _visit((), state_dict, visitor, keep_traversing or (lambda _: False), [])


def _check_mapping(value: object) -> None:
    if not isinstance(value, Mapping):
        hint = ": give its state_dict()" if hasattr(value, "state_dict") else ""
        raise TypeError(f"a state dict is a mapping, not {type(value).__name__}{hint}")


def _visit(
    path: OBJ_PATH,
    value: object,
    visitor: Visitor,
    keep: Keep,
    inside: list[int],
) -> None:
    if id(value) in inside:
        raise ValueError(f"the state dict contains itself at {'.'.join(map(str, path))}")
    items = _items(value) if isinstance(value, Mapping) or _entered(value, keep, [], set()) else []
    if not items and path:
        visitor(path, value)
        return
    for key, item in items:
        _visit((*path, key), item, visitor, keep, [*inside, id(value)])


def _items(value: StateDict | Sequence[object]) -> list[tuple[PATH_ITEM, object]]:
    if isinstance(value, Mapping):
        return [(Key(key) if type(key) is int else key, item) for key, item in value.items()]
    place = Place if isinstance(value, tuple) else int
    return [(place(at), item) for at, item in enumerate(value)]


def _entered(value: object, keep: Keep, inside: list[int], dull: set[int]) -> TypeGuard[Sequence[object]]:
    """True for a list or tuple to enter, also one that contains itself. `dull`: ids of those not to enter."""
    if not isinstance(value, list | tuple) or isinstance(value, torch.Size) or id(value) in dull:
        return False
    if id(value) in inside:
        return True
    deeper = [*inside, id(value)]
    if any(isinstance(item, Mapping) or keep(item) or _entered(item, keep, deeper, dull) for item in value):
        return True
    dull.add(id(value))
    return False


def set_element(root_dict: dict[Any, Any], path: OBJ_PATH, value: object) -> None:
    """Set the value at a path. Missing containers are created, of the kinds that the path needs.

    >>> root = {}
    >>> set_element(root, ("a", 1, "b"), 5)
    >>> root
    {'a': [None, {'b': 5}]}
    """
    if not path:
        raise ValueError("the path is empty: give at least one key")
    _check_mapping(root_dict)
    _put(root_dict, path, value)


def _put(container: object, path: OBJ_PATH, value: object) -> object:
    """The container with the value: the same object, or a new one for a tuple."""
    key, rest = path[0], path[1:]
    if container is None:
        container = () if isinstance(key, Place) else [] if type(key) is int else {}
    if isinstance(container, Mapping):
        plain = int(key) if isinstance(key, Key) else key
        container[plain] = _put(container.get(plain), rest, value) if rest else value  # type: ignore[index]
        return container
    if not isinstance(key, int) or not isinstance(container, list | tuple):
        raise ValueError(f"{key!r} is not a key or index of {type(container).__name__}")
    items: list[object] = list(container) if isinstance(container, tuple) else container
    items.extend([None] * (key + 1 - len(items)))
    items[key] = _put(items[key], rest, value) if rest else value
    return tuple(items) if isinstance(container, tuple) else items


def get_element(root_dict: StateDict, path: OBJ_PATH, default_value: object = None) -> Any:
    """The value at a path, or the default.

    >>> get_element({"a": [1, {"b": 5}]}, ("a", 1, "b")), get_element({"a": [1]}, ("a", 1), "nothing")
    (5, 'nothing')
    """
    value: Any = root_dict
    for key in path:
        if isinstance(value, Mapping):
            if key not in value:
                return default_value
        elif not isinstance(value, list | tuple) or not isinstance(key, int) or not 0 <= key < len(value):
            return default_value
        value = value[key]
    return value


def is_step(key: object) -> bool:
    """True for a key of a path that a file can hold: a string or an integer."""
    return isinstance(key, str | int) and not isinstance(key, bool)


def flatten_state_dict(state_dict: StateDict) -> tuple[STATE_DICT_TYPE, FLATTEN_MAPPING]:
    """The leaves by dotted name, and the path of each, for `unflatten_state_dict`.

    >>> flat, paths = flatten_state_dict({"a": {1: "x"}, "b": ({}, torch.Size([2]))})
    >>> flat
    {'a.1': 'x', 'b.0': {}, 'b.1': torch.Size([2])}
    >>> unflatten_state_dict(flat, paths)
    {'a': {1: 'x'}, 'b': ({}, torch.Size([2]))}
    """
    leaves = list[tuple[OBJ_PATH, object]]()
    traverse_state_dict(state_dict, lambda path, value: leaves.append((path, value)))
    plain = {dotted(path) for path, _ in leaves}
    flat, paths = STATE_DICT_TYPE(), FLATTEN_MAPPING()
    for path, value in leaves:
        name = dotted(path)
        if name in flat:  # {1: a, "1": b}, {"a.b": x, "a": {"b": y}}
            name = spelled(path)
            while name in plain or name in flat:
                name += "'"
        flat[name], paths[name] = value, path
    return flat, paths


def dotted(path: OBJ_PATH) -> str:
    """The name of a leaf. Several leaves may share one.

    >>> dotted(("a", 1)), dotted(("a.1",))
    ('a.1', 'a.1')
    """
    return ".".join(map(str, path))


def spelled(path: OBJ_PATH) -> str:
    """A unique name, for a leaf whose dotted name another leaf has too.

    >>> spelled(("a", "b")), spelled(("a.b",))
    ("'a':str/'b':str", "'a.b':str")
    """
    return "/".join(f"{key!r}:{type(key).__name__}" for key in path)


def unflatten_state_dict(state_dict: Mapping[str, object], mapping: FLATTEN_MAPPING) -> STATE_DICT_TYPE:
    """The inverse of `flatten_state_dict`."""
    nested = STATE_DICT_TYPE()
    for name, value in state_dict.items():
        if name not in mapping:
            raise ValueError(f"{name!r} has no path: give the mapping that flatten_state_dict returned with it")
        set_element(nested, mapping[name], value)
    return nested
