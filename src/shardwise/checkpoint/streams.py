"""What the tensors of a checkpoint become: other names, put together or taken apart, some of them, other dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.streaming import Stream
from shardwise.errors import CheckpointError
from shardwise.state.links import Link, Remap, links, shapes_after
from shardwise.state.names import Rename, matched
from shardwise.state.view import View
from shardwise.tensor.casting import check_cast, check_dtype

Select = Sequence[str] | str | None
Cast = torch.dtype | Sequence[tuple[str, torch.dtype | None] | torch.dtype] | None


def stream_of(entry: Entry) -> Stream:
    """An entry as it is."""
    whole = View.whole(entry.shape)
    return Stream(entry.name, entry.shape, entry.dtype, ((Link(entry.name, entry.name, whole, whole), entry),))


def streams_of(
    opened: Checkpoint, *, rename: Rename = None, remap: Iterable[Remap] = (), select: Select = None, cast: Cast = None
) -> dict[str, Stream]:
    """The tensors by their new names. What fits nothing is refused: it was meant to."""
    remap, casts = list(remap), _casts(cast)
    shapes = {name: opened[name].shape for name in opened if chosen(name, select)}
    if not shapes and len(opened):
        _check_used(opened, "select=", _patterns(select), opened)
    targets = shapes_after(shapes, rename=rename, remap=remap)
    found = dict[str, list[tuple[Link, Entry]]]()
    for link in links(shapes, targets, rename=rename, remap=remap, empty=True):
        found.setdefault(link.target, []).append((link, opened[link.source]))
    named = list(rename.items() if isinstance(rename, Mapping) else [] if callable(rename) else rename or [])
    if select is not None:
        _check_used(opened, "select=", _patterns(select), [*opened, *opened.objects])
    _check_used(opened, "rename=", [pattern for pattern, _ in named], opened)
    _check_used(opened, "cast=", [pattern for pattern, _ in casts if pattern is not None], targets)
    return {name: _stream(name, shape, found[name], casts) for name, shape in targets.items()}


def chosen(name: str, select: Select) -> bool:
    """True for a name that is to be taken."""
    return select is None or any(matched(pattern, name) is not None for pattern in _patterns(select))


def _patterns(select: Select) -> list[str]:
    return [select] if isinstance(select, str) else list(select or [])


def _check_used(opened: Checkpoint, option: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    there = list(names)
    for pattern in patterns:
        if not any(matched(pattern, name) is not None for name in there):
            some = ", ".join(map(repr, there[:4])) + (" ..." if len(there) > 4 else "")
            raise CheckpointError(f"{opened.path}: {option} has {pattern!r}, which fits no name: there are {some}")


def _stream(
    name: str, shape: tuple[int, ...], sources: Sequence[tuple[Link, Entry]], casts: Sequence[tuple[str | None, Any]]
) -> Stream:
    stored = {entry.dtype for _, entry in sources}
    becomes = {_cast(name, dtype, casts) for dtype in stored}
    if len(becomes) > 1:
        raise CheckpointError(f"{name!r} is put together from {', '.join(map(str, stored))}: cast= makes them alike")
    found = Stream(name, shape, becomes.pop(), tuple(one for one in sources if prod(one[0].target_view.shape)))
    for dtype in stored:
        check_cast(dtype, found.dtype)
    found.check()
    return found


def _casts(cast: Any) -> list[tuple[str | None, torch.dtype | None]]:
    """Rules; the dtype that counts where none fits, for floating point numbers, has no pattern, and is the last."""
    listed = [] if cast is None else [cast] if isinstance(cast, torch.dtype) else cast
    if not isinstance(listed, list | tuple):
        raise TypeError(f"cast= must be a torch.dtype, or rules [(pattern, dtype), ...], not {cast!r}")
    rest: list[Any] = [(None, rule) for rule in listed if isinstance(rule, torch.dtype)]
    rules: list[Any] = [rule for rule in listed if not isinstance(rule, torch.dtype)]
    if len(rest) > 1 or not all(isinstance(rule, list | tuple) and len(rule) == 2 for rule in rules):
        raise TypeError(f"cast= must be rules [(pattern, dtype), ...] and at most one dtype for the rest, not {cast!r}")
    for _, becomes in rules:
        check_dtype(becomes)
    if any(not becomes.is_floating_point for _, becomes in rest):
        raise TypeError(f"cast= to {rest[0][1]} for all floating point numbers would cut them: give a pattern with it")
    return [*map(tuple, rules), *rest]


def _cast(name: str, dtype: torch.dtype, casts: Sequence[tuple[str | None, torch.dtype | None]]) -> torch.dtype:
    for pattern, becomes in casts:
        if dtype.is_floating_point if pattern is None else matched(pattern, name) is not None:
            return dtype if becomes is None else becomes
    return dtype
