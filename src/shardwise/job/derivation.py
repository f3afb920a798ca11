"""Find what a name stands for on a side that has its cells only under other names: joined, split or rearranged.

Rules compose in any order and depth. An intermediate name, which neither side has, is made like any other: its cells
are views of views of the tensors that the side has.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from math import prod
from typing import NamedTuple

from shardwise.job.names import filled, matched
from shardwise.job.remap_rules import Joining, Padded, Rearranging, Remap, SameCells, Shape, Shapes, Stack
from shardwise.job.subtensor import Subtensor, simplify

Path = frozenset[Hashable]  # names that are being made, and rules that are being used, to make them


class Fragment(NamedTuple):
    """Cells of a tensor that the side has, and which cells of a name they are. Padding has no source: it is zeros."""

    source: str | None
    source_view: Subtensor
    view: Subtensor


@dataclass(frozen=True)
class Derived:
    """What a name stands for: its shape, where its cells come from, and the numbers of the rules that say so.

    `left_out`: how many cells come from nowhere, and keep their values. `dropped`: padding of sources.
    """

    shape: Shape
    fragments: tuple[Fragment, ...]
    rules: frozenset[int] = frozenset()
    left_out: int = 0
    dropped: tuple[Fragment, ...] = ()

    @staticmethod
    def plain(name: str, shape: Shape) -> Derived:
        """A tensor that the side has."""
        whole = Subtensor.whole(shape)
        return Derived(shape, (Fragment(name, whole, whole),))

    def seen(self, cells: SameCells) -> list[Fragment]:
        """Some of its cells (`here`), in the coordinates of a tensor where they are `there`."""
        empty = [one._replace(view=cells.there.nothing()) for one in self.fragments if 0 in one.view.shape]
        if cells.here is Subtensor.whole(self.shape) and cells.there.is_box and not empty:  # as usual, and quick
            return [one._replace(view=cells.there.part(one.view)) for one in self.fragments]
        return empty + [  # the names of what is empty count all the same
            Fragment(source, *simplify(source_view.part(ours), cells.there.part(theirs)))
            for source, source_view, view in self.fragments
            for ours, theirs in view.common(cells.here)
        ]

    def rearranged(self, shape: Shape, cells: Sequence[SameCells], number: int) -> Derived:
        """Its cells in a tensor of another shape, by a rule."""
        fragments = [fragment for one in cells for fragment in self.seen(one)]
        if not fragments:  # there are no cells: all that counts is the dtype of the source
            fragments = [self.fragments[0]._replace(view=Subtensor.whole(shape))]
        return Derived(shape, tuple(fragments), self.rules | {number}, dropped=self.dropped)

    def padded(self, rule: Padded, shape: Shape, number: int) -> Derived:
        """Longer or shorter by a rule. What is new is zeros, or whatever was there; what is cut off is dropped."""
        done = self.rearranged(shape, rule.views(self.shape, shape), number)
        new, old = rule.padding(self.shape, shape), rule.padding(shape, self.shape)
        if new is not None and rule.fill == "keep":
            return replace(done, left_out=prod(new.shape))
        zeros = [] if new is None else [Fragment(None, Subtensor.whole(new.shape), new)]
        dropped = [] if old is None else self.seen(SameCells(old, old))
        return replace(done, fragments=(*done.fragments, *zeros), dropped=(*done.dropped, *dropped))


class Derivation:
    """All that rules can make of the tensors of one side. `targets`: the other side, which may know sizes of parts.

    Without `targets`, this is the target side itself: what its tensors would be under intermediate names.
    """

    def __init__(self, shapes: Shapes, rules: Sequence[Remap], targets: Derivation | None = None) -> None:
        self._shapes, self._targets = shapes, targets
        self._joining = {at: rule for at, rule in enumerate(rules) if not isinstance(rule, Rearranging)}
        self._rearranging = {at: rule for at, rule in enumerate(rules) if isinstance(rule, Rearranging)}
        self._names: Collection[str] = shapes if targets is None else {*shapes, *targets._shapes}
        self._found, self._cuts = dict[str, Derived](), dict[tuple[int, str], dict[str, Derived]]()
        self._circles = list[str]()  # names that were looked for while they were being made

    def find(self, name: str, wanted: Shape | None = None, path: Path = frozenset()) -> Derived | None:
        """What the name stands for; None where nothing says so. `wanted`: its shape, where it is known."""
        if name not in self._found:
            steps = self._steps(name)
            shapes = _shapes_of(name, steps, wanted)
            if name in path:
                self._circles.append(name)
                return None
            made = self._made(name, shapes[0], path)
            if made is None:
                return None
            if shapes[0] not in (None, made.shape):
                by = ", ".join(str(step.rule) for step in steps)
                where = f"is what becomes {wanted} (by {by})" if steps else "in the target"
                raise ValueError(f"{name!r} has shape {made.shape} in the source, but {shapes[0]} {where}")
            done = self._rearranged(name, made, steps, shapes[1:], final=not path)
            if done is None:
                return None
            self._found[name] = done
        return self._found[name]

    def _steps(self, name: str) -> list[Rearrangement]:
        """The rules that rearrange the cells of a name, in their order: at most one of each kind."""
        steps = list[Rearrangement]()
        for at, rule in self._rearranging.items() if self._rearranging else ():
            if matched(rule.name, name, self._names) is not None:
                _check_one(name, [*(step.rule for step in steps if type(step.rule) is type(rule)), rule])
                steps.append(Rearrangement(at, rule))
        return steps

    def _rearranged(
        self, name: str, made: Derived, steps: Sequence[Rearrangement], shapes: Sequence[Shape | None], *, final: bool
    ) -> Derived | None:
        """The tensor after all steps; on the target side before them. None where nothing says what it was."""
        if self._targets is None:
            for step in reversed(steps):
                before = step.before(name, made.shape)
                if before is None:
                    return None
                made = step.undone(name, made, before)
            return made
        for step, shape in zip(steps, shapes, strict=True):
            made = step.apply(name, made, shape, final=final and step is steps[-1])
        return made

    def _made(self, name: str, wanted: Shape | None, path: Path) -> Derived | None:
        """The tensor of a name before rules rearrange its cells: as the side has it, joined, or cut."""
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
            fragment
            for made, cells in zip(parts.values(), views, strict=True)
            for fragment in made.seen(SameCells(cells.there, cells.here))
        ]
        rules = frozenset({at}).union(*(part.rules for part in parts.values()))
        dropped = tuple(fragment for part in parts.values() for fragment in part.dropped)
        return Derived(whole, tuple(fragments), rules, dropped=dropped)

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
        shaped = zip(names, shapes or (), views, strict=False)
        return {name: made.rearranged(shape, [cells], at) for name, shape, cells in shaped}

    def _part_shapes(self, rule: Joining, whole: str, names: Sequence[str], shape: Shape) -> list[Shape] | None:
        """The shapes of the parts of a whole, from the rule or the target. Sizes are never guessed: one part is all."""
        if isinstance(rule, Stack) or rule.sizes is not None or len(names) == 1:
            return rule.apart(shape)
        if self._targets is None:
            return None
        known = {name: self._targets.find(name) for name in names}
        unknown = [name for name, made in known.items() if made is None]
        if unknown:
            raise ValueError(f"the size of {unknown[0]!r}, a part of {whole!r}, is not known: give sizes=")
        return [made.shape for made in known.values() if made is not None]


class Rearrangement(NamedTuple):
    """A rule that rearranges the cells of a tensor, and its number."""

    number: int
    rule: Rearranging

    def before(self, name: str, shape: Shape | None) -> Shape | None:
        """The shape that becomes this one; None where it is not known."""
        with self._blamed(name):
            return None if shape is None else self.rule.before(shape)

    def apply(self, name: str, made: Derived, shape: Shape | None, *, final: bool) -> Derived:
        """The tensor after it. `shape`: of the result, where it is known. `final`: it is a tensor of the target."""
        self._check_once(name, made)
        with self._blamed(name):
            after = self.rule.after(made.shape) if shape is None else shape
            if not isinstance(self.rule, Padded):
                return made.rearranged(after, self.rule.views(made.shape, after), self.number)
            if self.rule.fill == "keep" and not final:
                raise ValueError('fill="keep" is only possible for a tensor of the target itself, after all rules')
            return made.padded(self.rule, after, self.number)

    def undone(self, name: str, made: Derived, before: Shape) -> Derived:
        """The tensor that becomes this one."""
        self._check_once(name, made)
        with self._blamed(name):
            cells = [SameCells(there, here) for here, there in self.rule.views(before, made.shape)]
            return made.rearranged(before, cells, self.number)

    def _check_once(self, name: str, made: Derived) -> None:
        if self.number in made.rules:
            raise ValueError(f"{self.rule} fits {name!r} and what that is made of: give a name that fits one of them")

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        with blamed(self.rule):
            try:
                yield
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None


def _shapes_of(name: str, steps: Sequence[Rearrangement], wanted: Shape | None) -> list[Shape | None]:
    """The shapes before the first step, after it, and so on, as far as the shape after all of them says."""
    shapes = [wanted]
    for step in reversed(steps):
        shapes.insert(0, step.before(name, shapes[0]))
    return shapes


def _check_one(name: str, rules: Sequence[Remap]) -> None:
    if len(rules) > 1:
        raise ValueError(f"{name!r} would come both from {rules[0]} and from {rules[1]}")


def _views(rule: Joining, whole: str, shape: Shape, parts: Shapes) -> list[SameCells]:
    """Where the parts are in a whole; refused if their shapes do not fit."""
    try:
        views = rule.views(shape, list(parts.values()))
    except ValueError as error:
        raise ValueError(f"{whole!r}: {error}") from None
    for (name, part), cells in zip(parts.items(), views, strict=True):
        expected = cells.there.region.shape
        if expected != part:
            raise ValueError(f"{name!r} has shape {part}, but its part of {whole!r} has {expected}")
    return views


@contextmanager
def blamed(rule: Remap) -> Iterator[None]:
    """Name the rule in errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error} (by {rule})") from error
