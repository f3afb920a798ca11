"""Names that differ only in numbers, as one pattern: `layers.{0..49}.w`; names that differ only in a prefix."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")  # a whole part of a name, spelled as numbers are
Numbers = tuple[int, ...]
Slots = tuple[tuple[int, ...], ...]  # for each place of a number, those that appear there


def grouped(names: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Patterns, and the names that each stands for, in the order of the names. `names` says of each what it is.

    Names have one pattern if they are of one kind, and alike but for numbers.

    >>> grouped({"h.0.w": "a", "h.1.w": "a", "h.2.w": "b", "norm": "a"})
    [('h.{0..1}.w', ['h.0.w', 'h.1.w']), ('h.2.w', ['h.2.w']), ('norm', ['norm'])]
    """
    groups = defaultdict[tuple[str, Hashable], dict[Numbers, str]](dict)
    for name, kind in names.items():
        numbers = tuple(map(int, NUMBER.findall(name)))
        groups[NUMBER.sub("{}", name), kind][numbers] = name
    patterns = list[tuple[str, list[str]]]()
    for members in groups.values():
        for slots in products(members):
            chosen = [name for numbers, name in members.items() if _within(numbers, slots)]
            patterns.append((_pattern(chosen[0], slots), chosen))
    return patterns


def _within(numbers: Numbers, slots: Slots) -> bool:
    return all(number in slot for number, slot in zip(numbers, slots, strict=True))


def products(rows: Iterable[Numbers]) -> list[Slots]:
    """Rows of numbers as few products of sets: each row is in exactly one.

    >>> products([(0, 0), (0, 1), (1, 0), (1, 1), (2, 5)])
    [((0, 1), (0, 1)), ((2,), (5,))]
    """
    below = defaultdict[int, list[Numbers]](list)
    for row in rows:
        if not row:
            return [()]
        below[row[0]].append(row[1:])
    alike = defaultdict[frozenset[Numbers], list[int]](list)
    for first, rest in below.items():
        alike[frozenset(rest)].append(first)
    return [(tuple(sorted(firsts)), *slots) for rest, firsts in alike.items() for slots in products(sorted(rest))]


def _pattern(name: str, slots: Slots) -> str:
    parts = iter(slots)
    return NUMBER.sub(lambda _: _written(next(parts)), name)


def _written(numbers: Sequence[int]) -> str:
    """
    >>> _written([7]), _written([0, 1, 2, 5])
    ('7', '{0..2,5}')
    """
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def rename_between(one: Iterable[str], other: Iterable[str]) -> tuple[str, str] | None:
    """The rename that turns all names that only one side has into those of the other, if they differ in a prefix.

    >>> rename_between(["model.a.w", "model.b"], ["a.w", "b"]), rename_between(["a"], ["x.a"])
    (('model.*', '*'), ('*', 'x.*'))
    >>> rename_between(["a", "b"], ["x.a", "y.b"]), rename_between(["a"], ["a"])
    (None, None)
    """
    mine, theirs = set(one), set(other)
    left, right = sorted(mine - theirs), sorted(theirs - mine)
    if not left or len(left) != len(right):
        return None
    for before, after in (_prefixes(left[0], name) for name in right):
        if {after + name.removeprefix(before) for name in left if name.startswith(before)} == set(right):
            return f"{before}*", f"{after}*"
    return None


def _prefixes(one: str, other: str) -> tuple[str, str]:
    """What stands before the longest common end of two names, up to a whole part of them."""
    parts, others = one.split("."), other.split(".")
    same = 0
    while same < min(len(parts), len(others)) and parts[-1 - same] == others[-1 - same]:
        same += 1
    return tuple("".join(f"{part}." for part in name[: len(name) - same]) for name in (parts, others))  # type: ignore[return-value]
