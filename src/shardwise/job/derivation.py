"""Find what a name stands for on a side that has its cells only under other names: joined, split or transposed.

Rules compose in any order and depth. An intermediate name, which neither side has, is made like any other: its cells
are views of views of the tensors that the side has.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

from shardwise.job.names import filled, matched
from shardwise.job.remap_rules import Joining, Remap, Shape, Shapes, Stack, Transposed
from shardwise.job.subtensor import Subtensor

Path = frozenset[Hashable]  # names that are being made, and rules that are being used, to make them


class Fragment(NamedTuple):
    """Cells of a tensor that the side has, and which cells of a name they are."""

    source: str
    source_view: Subtensor
    view: Subtensor


@dataclass(frozen=True)
class Derived:
    """What a name stands for: its shape, where its cells come from, and the numbers of the rules that say so."""

    shape: Shape
    fragments: tuple[Fragment, ...]
    rules: frozenset[int] = frozenset()

    @staticmethod
    def plain(name: str, shape: Shape) -> Derived:
        """A tensor that the side has."""
        whole = Subtensor.whole(shape)
        return Derived(shape, (Fragment(name, whole, whole),))

    def within(self, view: Subtensor) -> list[Fragment]:
        """The same cells, in the coordinates of a tensor of which this is a part."""
        return [fragment._replace(view=view.part(fragment.view)) for fragment in self.fragments]

    def cut(self, view: Subtensor, number: int) -> Derived:
        """A part of it, by a rule."""
        cuts = ((fragment, view.common(fragment.view)) for fragment in self.fragments)
        fragments = [
            Fragment(fragment.source, fragment.source_view.part(both[1]), both[0]) for fragment, both in cuts if both
        ]
        if not fragments:  # there are no cells: all that counts is the dtype of the source
            fragments = [self.fragments[0]._replace(view=Subtensor.whole(view.shape))]
        return Derived(view.shape, tuple(fragments), self.rules | {number})

    def turned(self, order: Sequence[int], number: int) -> Derived:
        """Its dims in another order, by a rule: self == result.permute(order)."""
        shape = tuple(self.shape[order.index(dim)] for dim in range(len(order)))
        fragments = self.within(Subtensor.whole(shape).permute(order))
        return Derived(shape, tuple(fragments), self.rules | {number})


class Derivation:
    """All that rules can make of the tensors of one side. `targets`: the other side, which may know sizes of parts.

    Without `targets`, this is the target side itself: what its tensors would be under intermediate names.
    """

    def __init__(self, shapes: Shapes, rules: Sequence[Remap], targets: Derivation | None = None) -> None:
        self._shapes, self._targets = shapes, targets
        self._joining = {at: rule for at, rule in enumerate(rules) if not isinstance(rule, Transposed)}
        self._turning = {at: rule for at, rule in enumerate(rules) if isinstance(rule, Transposed)}
        self._names: Collection[str] = shapes if targets is None else {*shapes, *targets._shapes}
        self._found, self._cuts = dict[str, Derived](), dict[tuple[int, str], dict[str, Derived]]()
        self._circles = list[str]()  # names that were looked for while they were being made

    def find(self, name: str, wanted: Shape | None = None, path: Path = frozenset()) -> Derived | None:
        """What the name stands for; None where nothing says so. `wanted`: its shape, where it is known."""
        if name not in self._found:
            turn = self._turn(name)
            before = turn.before(name, wanted) if turn else wanted
            if name in path:
                self._circles.append(name)
                return None
            made = self._made(name, before, path)
            if made is None:
                return None
            if before not in (None, made.shape):
                where = "when the target is transposed" if turn else "in the target"
                raise ValueError(f"{name!r} has shape {made.shape} in the source, but {before} {where}")
            self._found[name] = turn.apply(name, made, back=self._targets is None) if turn else made
        return self._found[name]

    def _turn(self, name: str) -> Turn | None:
        """The rule that permutes the dims of a name, if there is one."""
        turns = [
            Turn(at, rule) for at, rule in self._turning.items() if matched(rule.name, name, self._names) is not None
        ]
        _check_one(name, [turn.rule for turn in turns])
        return turns[0] if turns else None

    def _made(self, name: str, wanted: Shape | None, path: Path) -> Derived | None:
        """The tensor of a name before its dims are permuted: as the side has it, joined, or cut."""
        if name in self._shapes:
            return Derived.plain(name, self._shapes[name])
        found = list[tuple[Remap, Derived]]()
        for at, rule in self._joining.items():
            made = self._joined(at, rule, name, wanted, path) or self._cut(at, rule, name, path)
            found += [(rule, made)] if made is not None else []
        _check_one(name, [rule for rule, _ in found])
        return found[0][1] if found else None

    def _joined(self, at: int, rule: Joining, name: str, wanted: Shape | None, path: Path) -> Derived | None:
        """A whole, joined from its parts."""
        stars = matched(rule.whole, name, self._names) if not {(at, "joined"), (at, name)} & path else None
        if stars is None:
            return None
        parts = self._parts(rule, name, stars, wanted, path | {name, (at, "joined"), (at, name)})
        if not parts:
            return None
        with blamed(rule):
            whole = wanted if wanted is not None else rule.joined([part.shape for part in parts.values()])
            views = _views(rule, name, whole, {part: made.shape for part, made in parts.items()})
        fragments = [
            fragment for made, view in zip(parts.values(), views, strict=True) for fragment in made.within(view)
        ]
        return Derived(whole, tuple(fragments), frozenset({at}).union(*(part.rules for part in parts.values())))

    def _parts(
        self, rule: Joining, name: str, stars: Sequence[str], wanted: Shape | None, path: Path
    ) -> dict[str, Derived] | None:
        """All parts of a whole; None where one is missing."""
        found = dict[str, Derived]()
        for part in self._part_names(rule, stars, wanted, path):
            made = self.find(part, path=path)
            if made is None:
                return None
            found[part] = made
        if isinstance(rule, Stack) and found and self._targets is not None:
            self._check_last(rule, name, stars, len(found), path)
        return found

    def _part_names(self, rule: Joining, stars: Sequence[str], wanted: Shape | None, path: Path) -> Iterable[str]:
        """The parts of a whole. A stack of unknown size has as many as are found; a circle of rules is not its end."""

        def goes_on(part: str) -> bool:
            before = len(self._circles)
            return self.find(part, path=path) is not None or not path.isdisjoint(self._circles[before:])

        if isinstance(rule, Stack) and wanted is None:
            return takewhile(goes_on, rule.numbered(stars))
        with blamed(rule):
            return rule.names(stars, wanted or ())

    def _check_last(self, rule: Stack, name: str, stars: Sequence[str], count: int, path: Path) -> None:
        """Refuse a stack of fewer tensors than there are."""
        more = next(islice(rule.numbered(stars), count, None))
        if self.find(more, path=path) is not None:
            raise ValueError(f"{name!r} is a stack of {count} tensors, but the source has {more!r} too (by {rule})")

    def _cut(self, at: int, rule: Joining, name: str, path: Path) -> Derived | None:
        """A part, cut from its whole."""
        for stars in rule.located(name, self._names) if (at, "cut") not in path else ():
            whole = filled(rule.whole, stars)
            made = self.find(whole, path=path | {name, (at, "cut"), (at, whole)}) if (at, whole) not in path else None
            if made is not None and (at, whole) not in self._cuts:
                self._cuts[at, whole] = self._all_cuts(at, rule, whole, stars, made)
            if made is not None and name in self._cuts[at, whole]:
                return self._cuts[at, whole][name]
        return None

    def _all_cuts(self, at: int, rule: Joining, whole: str, stars: Sequence[str], made: Derived) -> dict[str, Derived]:
        """All parts of a whole: at once, because there may be very many."""
        with blamed(rule):
            names = rule.names(stars, made.shape)
            twice = [name for name in names if name in self._shapes]
            if twice and self._targets is not None:
                raise ValueError(f"the source has {twice[0]!r}, and {whole!r} of which it is a part: leave one out")
            shapes = self._part_shapes(rule, whole, names, made.shape)
            views = _views(rule, whole, made.shape, dict(zip(names, shapes, strict=True))) if shapes else []
        return {name: made.cut(view, at) for name, view in zip(names, views, strict=False)}

    def _part_shapes(self, rule: Joining, whole: str, names: Sequence[str], shape: Shape) -> list[Shape] | None:
        """The shapes of the parts of a whole, from the rule or the target. Sizes are never guessed."""
        if isinstance(rule, Stack) or rule.sizes is not None:
            return rule.apart(shape)
        if self._targets is None:
            return None
        known = {name: self._targets.find(name) for name in names}
        unknown = [name for name, made in known.items() if made is None]
        if unknown:
            raise ValueError(f"the size of {unknown[0]!r}, a part of {whole!r}, is not known: give sizes=")
        return [made.shape for made in known.values() if made is not None]


class Turn(NamedTuple):
    """A rule that changes the order of a tensor's dims, and its number."""

    number: int
    rule: Transposed

    def before(self, name: str, shape: Shape | None) -> Shape | None:
        """The shape that becomes this one."""
        return None if shape is None else tuple(shape[dim] for dim in self._order(name, len(shape)))

    def apply(self, name: str, made: Derived, *, back: bool) -> Derived:
        """The tensor with its dims in the other order."""
        if self.number in made.rules:
            raise ValueError(f"{self.rule} fits {name!r} and what that is made of: give a name that fits one of them")
        order = self._order(name, len(made.shape))
        return made.turned([order.index(dim) for dim in range(len(order))] if back else order, self.number)

    def _order(self, name: str, ndim: int) -> tuple[int, ...]:
        with blamed(self.rule):
            try:
                return self.rule.permutation(ndim)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None


def _check_one(name: str, rules: Sequence[Remap]) -> None:
    if len(rules) > 1:
        raise ValueError(f"{name!r} would come both from {rules[0]} and from {rules[1]}")


def _views(rule: Joining, whole: str, shape: Shape, parts: Shapes) -> list[Subtensor]:
    """Where the parts are in a whole; refused if their shapes do not fit."""
    try:
        views = rule.views(shape, list(parts.values()))
    except ValueError as error:
        raise ValueError(f"{whole!r}: {error}") from None
    for (name, part), view in zip(parts.items(), views, strict=True):
        if view.shape != part:
            raise ValueError(f"{name!r} has shape {part}, but its part of {whole!r} has {view.shape}")
    return views


@contextmanager
def blamed(rule: Remap) -> Iterator[None]:
    """Name the rule in errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error} (by {rule})") from error
