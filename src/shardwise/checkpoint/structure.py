"""How the names of a checkpoint lie in each other: dicts, lists and tuples, by the paths of its leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.foreign import Foreign, is_foreign_class
from shardwise.checkpoint.formats.writers import Contents
from shardwise.checkpoint.standins import Record, Sealed
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, Key, Place, dotted, spelled

Paths = Mapping[str, OBJ_PATH]
STEPS = {Key: "dict, int", Place: "tuple", int: "list", str: "dict, str"}  # into what they lead


def check_inside(contents: Contents) -> None:
    """Refuse what would lie inside of another leaf, or in its place."""
    names = dict[OBJ_PATH, str]()
    for name in (*contents.tensors, *contents.values):
        other = names.setdefault(contents.path_of(name), name)
        if other != name:
            raise CheckpointError(f"{name!r} would lie in the place of {other!r}: select= leaves one of them out")
    for path, name in names.items():
        around = next((names[path[:end]] for end in range(1, len(path)) if path[:end] in names), None)
        if around is not None:
            raise CheckpointError(f"{name!r} would lie inside of {around!r}: rename= gives it another name")


def check_steps(contents: Contents) -> None:
    """Refuse keys of other types than str and int: no index keeps their types."""
    for name in (*contents.tensors, *contents.values):
        for key in contents.path_of(name):
            if type(key) not in STEPS:
                raise CheckpointError(
                    f"{name!r} has the key {brief(key)} ({type(key).__name__}): keys must be str or int. "
                    f"Remedy: give it another key, or convert to format='torch.save'"
                )


def check_keys(contents: Contents) -> None:
    """Refuse keys that are objects of unknown classes: a conversion does not look into them."""
    for name in (*contents.tensors, *contents.values):
        for key in contents.path_of(name):
            if isinstance(key, Foreign | Sealed | Record) or is_foreign_class(key):
                raise CheckpointError(f"{name!r} has the key {brief(key)}, which is not written: select= leaves it out")


def check_dotted(contents: Contents) -> None:
    """Refuse tensors of one name with dots, for formats that hold no more than that name."""
    for name in contents.tensors:
        called = dotted(contents.path_of(name))
        if called != name and called in contents.tensors:
            raise CheckpointError(
                f"{name!r} and another leaf are both called {called!r}: rename= gives it another name, or choose "
                f"another format"
            )


def names_there(paths: Paths, there: Checkpoint) -> dict[str, str]:
    """The names that a checkpoint has for leaves of these paths, where the one with dots is that of several leaves.

    {"a.b": x, "a": {"b": y}} has two leaves called a.b. One of them has its path spelled out, by the order of the dict:
    so names are no use there, and the paths tell. Most state dicts have none of these.
    """
    shared = _shared(paths) | _shared(there.paths)
    if not shared:
        return {}
    known = {_typed((name,)): name for name in shared if name not in there.paths}
    known |= {_typed(path): name for name, path in there.paths.items() if dotted(path) in shared}
    return {name: known.get(_typed(path), spelled(path)) for name, path in paths.items() if dotted(path) in shared}


def _shared(paths: Paths) -> set[str]:
    """The names with dots that several leaves have."""
    return {dotted(path) for name, path in paths.items() if ":" in name and dotted(path) != name}


def _typed(path: OBJ_PATH) -> tuple[Any, ...]:
    return tuple((type(key), key) for key in path)


def differing_step(a: OBJ_PATH | None, b: OBJ_PATH | None) -> str | None:
    """What differs between two paths of one name: the type of a key, or of a container. None: not known.

    >>> differing_step(("state", Key(0)), ("state", 0)), differing_step(("a", "b"), ("a", "b"))
    ('lies at state[0] (dict, int) and at state[0] (list)', None)
    """
    if a is None or b is None or (a == b and list(map(type, a)) == list(map(type, b))):
        return None
    return f"lies at {_shown(a)} and at {_shown(b)}"


def _shown(path: OBJ_PATH) -> str:
    into = "; ".join(STEPS.get(type(key), type(key).__name__) for key in path[1:])
    return f"{path[0]}{''.join(f'[{brief(key)}]' for key in path[1:])}" + (f" ({into})" if into else "")
