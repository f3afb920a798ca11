"""Which tensor becomes which: by name, and in parts where several become one or one becomes several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import NamedTuple

from shardwise.job.derivation import Derivation, Derived, Fragment, blamed
from shardwise.job.names import Rename, filled, matched, missing, renamed
from shardwise.job.remap_rules import (
    Concat,
    Interleaved,
    Joining,
    NamedParts,
    Padded,
    Rearranging,
    Remap,
    Rotary,
    Shape,
    Shapes,
    Stack,
    Transposed,
    checked_rules,
)
from shardwise.job.subtensor import Subtensor, uncovered

__all__ = [
    "Concat",
    "Interleaved",
    "Link",
    "Padded",
    "Remap",
    "Rotary",
    "Shapes",
    "Stack",
    "Transposed",
    "check_kept",
    "links",
    "partly_filled",
    "shapes_after",
]


class NoSourceError(ValueError):
    """Targets that no source has cells for."""


class Link(NamedTuple):
    """Cells of a source tensor that become cells of a target tensor. `zeros`: the source is no tensor of the source."""

    source: str
    target: str
    source_view: Subtensor
    target_view: Subtensor
    zeros: bool = False


def links(
    sources: Shapes,
    targets: Shapes,
    *,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    strict: bool = True,
    whole: bool = True,
    empty: bool = False,
) -> list[Link]:
    """All of them, in the order of the targets. Raises where a name is missing, extra, or of another shape.

    Sources without a target are left out where it is not `strict`, targets without a source where it is not `whole`.
    Links without cells are left out, unless `empty`. Rules of `remap` compose: what one makes, another can take.
    """
    rules = checked_rules(remap)
    given = _given(sources, rename)
    shapes = {name: sources[source] for name, source in given.items()}
    derivation = Derivation(shapes, rules, Derivation(targets, rules))
    planned, dropped, used = list[Link]() if rules else _plain(shapes, targets), list[Link](), set[int]()
    for name, shape in targets.items() if rules else ():
        made = derivation.find(name, shape)
        if made is not None:
            _check_whole(name, shape, made)
            planned += [_link(name, fragment) for fragment in made.fragments]
            dropped += [_link(name, fragment) for fragment in made.dropped]
            used |= made.rules
    _check(planned, shapes, targets, [rule for at, rule in enumerate(rules) if at not in used], strict, whole)
    if strict and rules:
        _check_cells([link for link in (*planned, *dropped) if not link.zeros], shapes)
    planned = planned if empty else [link for link in planned if 0 not in link.target_view.shape]
    return [link._replace(source=given[link.source]) if rename and not link.zeros else link for link in planned]


def partly_filled(links: Iterable[Link], targets: Shapes) -> list[str]:
    """Targets of which some cells have a link, and others keep their values."""
    cells = Counter[str]()
    for link in links:
        cells[link.target] += prod(link.target_view.shape)
    return [name for name, shape in targets.items() if 0 < cells[name] < prod(shape)]


def check_kept(links: Iterable[Link], targets: Shapes, new: Collection[str]) -> None:
    """Refuse to leave cells as they are in new memory, which has no values yet."""
    kept = next((name for name in partly_filled(links, targets) if name in new), None)
    if kept is not None:
        raise ValueError(f'{kept!r} gets new memory, which has no padding to keep: leave fill="keep" out')


def _plain(sources: Shapes, targets: Shapes) -> list[Link]:
    """What there is without rules: every target is the source of the same name."""
    planned = list[Link]()
    for name, shape in targets.items():
        if name in sources:
            if sources[name] != shape:
                raise ValueError(f"{name!r} has shape {sources[name]} in the source, but {shape} in the target")
            view = Subtensor.whole(shape)
            planned.append(Link(name, name, view, view))
    return planned


def _link(target: str, fragment: Fragment) -> Link:
    source, source_view, view = fragment
    if source is not None:
        return Link(source, target, source_view, view)
    shape = "x".join(map(str, view.shape))
    return Link(f"zeros of {shape} for {target}", target, Subtensor.whole(view.shape), view, zeros=True)


def _given(sources: Shapes, rename: Rename) -> dict[str, str]:
    """Which source has a name, once they are renamed."""
    if rename is None:
        return {name: name for name in sources}
    given = dict[str, str]()
    for source in sources:
        for name in renamed(source, rename, sources):
            if name in given:
                raise ValueError(f"{given[name]!r} and {source!r} would both be {name!r}: give them different names")
            given[name] = source
    return given


def shapes_after(sources: Shapes, *, rename: Rename = None, remap: Iterable[Remap] = ()) -> dict[str, Shape]:
    """The names and shapes that a conversion comes to where no target says so.

    >>> shapes_after({"q": (8, 6), "k": (2, 6)}, remap=[Concat("qk", ["q", "k"])])
    {'qk': (10, 6)}
    """
    shapes = {name: shape for source, shape in sources.items() for name in renamed(source, rename, sources)}
    rules = checked_rules(remap)
    made_by, before = dict.fromkeys(shapes, frozenset[int]()), None
    steps = [(number, rule) for number, rule in enumerate(rules) if isinstance(rule, Rearranging)]
    joins = [(number, rule) for number, rule in enumerate(rules) if not isinstance(rule, Rearranging)]
    kept = next((rule for _, rule in steps if isinstance(rule, Padded) and rule.fill == "keep"), None)
    if kept is not None:
        raise ValueError(f'{kept}: a new tensor has no padding to keep: leave fill="keep" out')
    while shapes != before:  # cells are rearranged as soon as there is a name, before another rule takes it
        before = shapes
        for number, rule in [*steps, *(one for join in joins for one in (join, *steps))]:
            with blamed(rule):
                shapes = _after(number, rule, shapes, made_by)
    for number, rule in joins:
        left = [name for name in shapes if number not in made_by[name]]
        if isinstance(rule, NamedParts):
            with blamed(rule):
                _check_parts(rule, left, made_by)
    return shapes


def _after(number: int, rule: Remap, shapes: Shapes, made_by: dict[str, frozenset[int]]) -> dict[str, Shape]:
    """The names and shapes after one rule. It takes nothing that it has made: `made_by` are the rules behind names."""
    free = {name: shape for name, shape in shapes.items() if number not in made_by[name]}
    becomes = _rearranged(rule, free, made_by) if isinstance(rule, Rearranging) else _regrouped(rule, free, made_by)
    found, gone = dict[str, Shape](), {old for olds, _ in becomes for old in olds}
    made = {olds[0]: (olds, news) for olds, news in becomes}
    twice = [new for _, news in becomes for new in news if new in shapes and new not in gone]
    if twice:
        raise ValueError(f"{twice[0]!r} is there already: it cannot be made as well")
    for name, shape in shapes.items():
        olds, news = made.get(name, ((), {}))
        found |= news if name in gone else {name: shape}
        behind = frozenset({number}).union(*(made_by[old] for old in olds))
        made_by |= dict.fromkeys(news, behind)
    return found


Becomes = list[tuple[Sequence[str], dict[str, Shape]]]  # which names become which, with their shapes


def _rearranged(rule: Rearranging, shapes: Shapes, names: Collection[str]) -> Becomes:
    fitting = [name for name in shapes if matched(rule.name, name, names) is not None]
    return [([name], {name: rule.after(shapes[name])}) for name in fitting]


def _regrouped(rule: Joining, shapes: Shapes, names: Collection[str]) -> Becomes:
    """Parts become wholes; wholes that are not parts themselves become parts."""
    groups = [group for group in (rule.named(name, shapes) for name in shapes) if group is not None]
    joined: Becomes = [(parts, {whole: rule.joined([shapes[p] for p in parts])}) for whole, parts in groups]
    done = {name for parts, wholes in joined for name in (*parts, *wholes)}
    others = {name: stars for name in shapes if (stars := matched(rule.whole, name, names)) is not None}
    return joined + [
        ([name], dict(zip(rule.names(stars, shapes[name]), rule.apart(shapes[name]), strict=True)))
        for name, stars in others.items()
        if name not in done
    ]


def _check_parts(rule: NamedParts, left: Collection[str], names: Collection[str]) -> None:
    """Refuse some of the parts without the others."""
    for name in left:
        for part in rule.parts:
            stars = matched(part, name, names)
            several = [] if stars is None else [filled(one, stars) for one in rule.parts]
            absent = [one for one in several if one not in left]
            if absent:
                raise ValueError(f"{name!r} is there, but {', '.join(map(repr, absent))} is not")


def _check_whole(name: str, shape: Shape, made: Derived) -> None:
    """All cells of a target come from somewhere, once."""
    if made.shape != shape:
        raise ValueError(f"{name!r} has shape {made.shape} in the source, but {shape} in the target")
    count = sum(prod(one.view.shape) for one in made.fragments) + made.left_out
    if count != prod(shape):
        raise ValueError(f"{count} of the {prod(shape)} cells of {name!r} come from the source")


def _check(
    planned: Sequence[Link], sources: Shapes, targets: Shapes, unused: Sequence[Remap], strict: bool, whole: bool
) -> None:
    """Every target comes from somewhere; every source goes somewhere."""
    used, reached = {link.source for link in planned}, {link.target for link in planned}
    left = [name for name in targets if whole and name not in reached]
    idle = f"; {', '.join(map(str, unused))} fit nothing" if unused else ""
    if left:
        raise NoSourceError(missing("the source has nothing for", left, sources) + idle)
    extra = [name for name in sources if name not in used]
    if extra and strict:
        raise ValueError(missing("the target has no", extra, targets) + idle + "; strict=False leaves them out")
    if unused and strict:
        raise ValueError(f"{unused[0]} fits nothing: leave it out, or look for a name that is written otherwise")


def _check_cells(planned: Sequence[Link], sources: Shapes) -> None:
    """Every cell of a source goes somewhere, also where the source is taken apart."""
    views = dict[str, set[Subtensor]]()
    for link in planned:
        views.setdefault(link.source, set()).add(link.source_view)
    for name, several in views.items():
        left = uncovered(several, sources[name])
        if left is not None:
            raise ValueError(f"the target has no place for cells {left} of {name!r}; strict=False leaves them out")
