"""Select, rename, join, split and cast the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.streaming import Stream
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.job.casts import Cast, CastRequest, Casts, Change, check_change, check_changes
from shardwise.job.names import Rename, matched
from shardwise.job.remap import Link, Remap, links, shapes_after
from shardwise.job.subtensor import Subtensor

Select = Sequence[str] | str | None


def stream_of(entry: Entry) -> Stream:
    """An entry as it is."""
    whole = Subtensor.whole(entry.shape)
    return Stream(entry.name, entry.shape, entry.dtype, ((Link(entry.name, entry.name, whole, whole), entry),))


def streams_of(
    opened: Checkpoint, *, rename: Rename = None, remap: Iterable[Remap] = (), select: Select = None, cast: Cast = None
) -> dict[str, Stream]:
    """The tensors by their new names. Patterns that match nothing are refused."""
    remap, casts = list(remap), Casts.of(cast)
    shapes = {name: opened[name].shape for name in filter(chosen(opened, select), opened)}
    if not shapes and len(opened):
        _check_used(opened, "select=", _patterns(select), opened)
    targets = shapes_after(shapes, rename=rename, remap=remap)
    casts = casts.among(targets)
    sources = dict[str, list[tuple[Link, Entry]]]()
    for link in links(shapes, targets, rename=rename, remap=remap, empty=True):
        sources.setdefault(link.target, []).append((link, opened[link.source]))
    named = list(rename.items() if isinstance(rename, Mapping) else [] if callable(rename) else rename or [])
    if select is not None:
        _check_used(opened, "select=", _patterns(select), [*opened, *opened.objects])
    _check_used(opened, "rename=", [pattern for pattern, _ in named], opened)
    _check_used(opened, "cast=", casts.unused(targets), targets)
    streams = {name: _stream(name, shape, sources[name], casts) for name, shape in targets.items()}
    _check_casts(
        opened,
        [Change(e.name, name, e.dtype, streams[name].dtype) for name in targets for _, e in sources[name]],
        casts,
    )
    for stream in streams.values():
        stream.check()
    return streams


def chosen(opened: Checkpoint, select: Select) -> Callable[[str], bool]:
    """A function that is True for the selected names of a checkpoint."""
    if select is None:
        return lambda name: True
    patterns, names = _patterns(select), {*opened, *opened.objects}
    return lambda name: any(matched(pattern, name, names) is not None for pattern in patterns)


def _patterns(select: Select) -> list[str]:
    return [select] if isinstance(select, str) else list(select or [])


def _check_used(opened: Checkpoint, option: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    there = list(names)
    for pattern in patterns:
        if not any(matched(pattern, name) is not None for name in there):
            some = ", ".join(map(repr, there[:4])) + (" ..." if len(there) > 4 else "")
            raise CheckpointError(f"{opened.path}: {option} has {pattern!r}, which matches no name: there are {some}")


def _stream(name: str, shape: tuple[int, ...], sources: Sequence[tuple[Link, Entry]], casts: Casts) -> Stream:
    stored = {entry.dtype: None for _, entry in sources}
    requests = {dtype: casts.request(name, dtype) or CastRequest(dtype, named=False) for dtype in stored}
    becomes = {one.dtype for one in requests.values()}
    if len(becomes) > 1:
        raise CheckpointError(f"{name!r} is put together from {', '.join(map(str, stored))}: cast= makes them alike")
    return Stream(name, shape, becomes.pop(), tuple(one for one in sources if prod(one[0].target_view.shape)))


def _check_casts(opened: Checkpoint, changes: Iterable[Change], casts: Casts) -> None:
    def check(change: Change) -> None:
        request = casts.request(change.target, change.dtype)
        check_change(change, opened, named=request is not None and request.named)

    try:
        check_changes(changes, check)
    except ValueError as error:
        raise RefusedCastError(f"{opened.path}: {error}") from error
