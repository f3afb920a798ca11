"""Which tensors and values of a checkpoint are meant: patterns of names to take, and of names to leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardwise.checkpoint.entry import Checkpoint
from shardwise.errors import CheckpointError
from shardwise.job.names import matched

Select = Sequence[str] | str | None


class Selection(NamedTuple):
    """The names that a pattern of `select` matches (None: all of them), without those that one of `exclude` matches."""

    select: Select = None
    exclude: Select = None

    @property
    def everything(self) -> bool:
        """True if nothing is left out."""
        return self.select is None and not self.exclude

    def of(self, opened: Checkpoint) -> Callable[[str], bool]:
        """A function that is True for the selected names of a checkpoint."""
        names = {*opened, *opened.objects} if not self.everything else set[str]()
        taken, left = _any_of(_patterns(self.select), names), _any_of(_patterns(self.exclude), names)
        return lambda name: (self.select is None or taken(name)) and not left(name)

    def but_for(self, opened: Checkpoint, other: Checkpoint) -> Selection:
        """The same for a checkpoint, without patterns that leave out only names of the other one."""
        mine, theirs = [*opened, *opened.objects], [*other, *other.objects]
        left = [pattern for pattern in _patterns(self.exclude) if used(pattern, mine) or not used(pattern, theirs)]
        return Selection(self.select, left)

    def check(self, opened: Checkpoint, names: Sequence[str]) -> None:
        """Refuse patterns that match none of these names."""
        check_used(opened, "select=", _patterns(self.select), names)
        check_used(opened, "exclude=", _patterns(self.exclude), names)


def _any_of(patterns: Sequence[str], names: set[str]) -> Callable[[str], bool]:
    return lambda name: any(matched(pattern, name, names) is not None for pattern in patterns)


def _patterns(select: Select) -> list[str]:
    return [select] if isinstance(select, str) else list(select or [])


def used(pattern: str, names: Iterable[str]) -> bool:
    """Does a pattern match any name?"""
    return any(matched(pattern, name) is not None for name in names)


def check_used(opened: Checkpoint, option: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Refuse patterns of an option that match no name."""
    there = list(names)
    for pattern in patterns:
        if not used(pattern, there):
            some = ", ".join(map(repr, there[:4])) + (" ..." if len(there) > 4 else "")
            raise CheckpointError(f"{opened.path}: {option} has {pattern!r}, which matches no name: there are {some}")


EVERYTHING = Selection()
