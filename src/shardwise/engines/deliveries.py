"""Names that only the loader itself can load: which it needs together, and that it leaves the others alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.containers.dispatch import OpOverload, TorchDispatchMode, written_tensors
from shardwise.containers.memory import shared, storage_of
from shardwise.engines.memory import FromCheckpoint, Memory, Untraceable, Write, memory_shape, window_of
from shardwise.engines.recorder import NeedsValuesError, Recorder
from shardwise.errors import EngineError, LayoutError
from shardwise.geometry import strided_boxes

Alone = Callable[[Iterable[str]], Recorder]


def in_any_layer(name: str) -> str:
    """The same for all layers and experts, which loaders treat alike.

    >>> in_any_layer("layers.12.experts.3.up")
    'layers.*.experts.*.up'
    """
    return re.sub(r"\d+", "*", name)


def merged(several: Iterable[Untraceable]) -> list[Untraceable]:
    """The same with names that occur together as one.

    >>> [one.names for one in merged([Untraceable(("a", "b"), ""), Untraceable(("b", "d"), "")])]
    [('a', 'b', 'd')]
    """
    groups = dict[str, dict[str, str]]()  # of a name: all names of its group, with their reasons
    for found in several:
        group = {name: reason for one in found.names for name, reason in groups.get(one, {one: found.reason}).items()}
        groups |= dict.fromkeys(group, group)
    different = {id(group): group for group in groups.values()}.values()
    return [Untraceable(tuple(group), next(iter(group.values()))) for group in different]


def together(
    recorder: Recorder, untraceable: Sequence[Untraceable], names: Iterable[str], alone: Alone
) -> list[Untraceable]:
    """The names that must go through the loader as well, because it does something else without them.

    A loader may clear a parameter first, or wait until all parts of one are there. So it is recorded again with the
    names of one group `alone`. One group stands for those of other layers.
    """
    known, answers, more = list(names), dict[frozenset[str], bool](), list[Untraceable]()
    for group in merged(untraceable):
        if not set(group.names) <= set(known):  # it looks at values, which are missing here: guarded when it is called
            continue
        key = frozenset(map(in_any_layer, group.names))
        if key not in answers:
            answers[key] = _same_alone(recorder, group.names, alone)
        if not answers[key]:
            beside = _beside(recorder, group.names)
            whole = beside if _same_alone(recorder, beside, alone) else known
            more.append(Untraceable(tuple(whole), f"the loader needs it together with {group.names[0]!r}"))
    return more


def _beside(recorder: Recorder, names: Iterable[str]) -> list[str]:
    """All names that go to the same parameters."""
    memories = [memory for memory in recorder.engine_memories() if not set(names).isdisjoint(memory.history)]
    return list(dict.fromkeys(name for memory in memories for name in memory.history))


def _same_alone(recorder: Recorder, names: Sequence[str], alone: Alone) -> bool:
    """True if the loader does the same with these names when it gets no others."""
    try:
        again = alone(names)
    except (EngineError, NeedsValuesError):
        return False
    own = set(names)
    for memory in recorder.engine_memories():
        now = again.memories.get(storage_of(memory.tensor))
        writes = [] if now is None else now.writes()
        if _missing(memory, writes, own) or _foreign(memory, writes, own):
            return False
    return True


def _missing(memory: Memory, now: Sequence[Write], own: set[str]) -> bool:
    """True if cells that these names fill together with the others are not filled now."""
    for write in memory.writes():
        if isinstance(write.origin, Untraceable) and not own.isdisjoint(write.origin.names):
            left = [write.box]
            for other in now:
                left = [rest for part in left for rest in part.minus(other.box)]
            if left:
                return True
    return False


def _foreign(memory: Memory, now: Sequence[Write], own: set[str]) -> bool:
    """True if cells of other names are written now."""
    others = [
        one.box for one in memory.writes() if isinstance(one.origin, FromCheckpoint) and one.origin.name not in own
    ]
    return any(write.box & box is not None for write in now for box in others)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to cells that hold other names of the checkpoint than those that the loader was given."""

    def __init__(self, names: Sequence[str], others: Mapping[str, Sequence[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._others = names, dict[int, list[tuple[str, torch.Tensor]]]()
        for name, shards in others.items():
            for shard in shards:
                self._others.setdefault(storage_of(shard), []).append((name, shard))

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Called by torch for every operation of the loader."""
        for target in written_tensors(func, args, kwargs or {}):
            for name, shard in self._others.get(storage_of(target), ()):
                if any(shared([target], [shard])) and _have_cells_in_common(target, shard):
                    given = ", ".join(map(repr, self._names[:5]))
                    raise EngineError(
                        f"the engine's loader, given {given} alone, writes to cells of {name!r}: it needs both. "
                        f"Load this engine by its own means, or record a loader that keeps them apart"
                    )
        return func(*args, **(kwargs or {}))


def _have_cells_in_common(target: torch.Tensor, shard: torch.Tensor) -> bool:
    """Exactly; also true where that would take too many boxes to tell. Both are views of one storage."""
    if target.dtype != shard.dtype:
        return True
    shape = memory_shape(shard if shard._base is None else shard._base)
    try:
        written, kept = (strided_boxes(window_of(one), shape) for one in (target, shard))
    except LayoutError:
        return True
    return any(one.box & other.box is not None for one in written for other in kept)
