"""Which tensor becomes which: by name, and in parts where several become one or one becomes several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from math import prod
from typing import NamedTuple

from shardwise.job.names import Rename, filled, matched, missing, renamed
from shardwise.job.subtensor import Subtensor

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class Link(NamedTuple):
    """Cells of a source tensor that become cells of a target tensor."""

    source: str
    target: str
    source_view: Subtensor
    target_view: Subtensor


@dataclass(frozen=True)
class Concat:
    """One tensor that has several others one after the other along a dim: q, k, v in qkv; gate, up in gate_up.

    Stars in the names stand for the same on both sides. It holds in both directions. `sizes` of the parts are needed
    only where there is no target that has them: to take a whole apart into unequal ones in a conversion.

    >>> Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], dim=0).dim
    0
    """

    whole: str
    parts: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apart(self, whole: Shape) -> list[Shape]:
        """The shapes of the parts, where only the whole is known."""
        dim = _dim(self.dim, whole)
        equal, rest = divmod(whole[dim], len(self.parts))
        if self.sizes is None and rest:
            raise ValueError(f"{whole[dim]} along dim {dim} is not {len(self.parts)} equal parts: give their sizes=")
        sizes = self.sizes if self.sizes is not None else [equal] * len(self.parts)
        if len(sizes) != len(self.parts) or sum(sizes) != whole[dim]:
            raise ValueError(f"sizes {list(sizes)} are not {len(self.parts)} parts of the {whole[dim]} along dim {dim}")
        return [(*whole[:dim], size, *whole[dim + 1 :]) for size in sizes]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        dim = _dim(self.dim, parts[0])
        return (*parts[0][:dim], sum(part[_dim(self.dim, part)] for part in parts), *parts[0][dim + 1 :])

    def named(self, part: str, names: Shapes) -> tuple[str, list[str]] | None:
        """The names of the whole and of all parts, of which this is the first; None where it is not."""
        stars = matched(self.parts[0], part, names)
        several = [] if stars is None else [filled(one, stars) for one in self.parts]
        return (filled(self.whole, stars), several) if stars is not None and all(n in names for n in several) else None

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[Subtensor]:
        """Where the parts are in the whole."""
        dim, start, views = _dim(self.dim, whole), 0, list[Subtensor]()
        for part in parts:
            if len(part) != len(whole):
                raise ValueError(f"a part has {len(part)} dims, but {self.whole!r} has {len(whole)}")
            views.append(Subtensor.whole(whole).narrow(dim, start, part[dim]))
            start += part[dim]
        if start != whole[dim]:
            raise ValueError(f"its parts have {start} along dim {dim}, but {self.whole!r} has {whole[dim]}")
        return views

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """Of the parts."""
        return [filled(part, stars) for part in self.parts]


@dataclass(frozen=True)
class Stack:
    """One tensor that has several others along a dim of its own: experts. `{}` in `part` is their number.

    >>> Stack("*.experts.up", "*.experts.{}.up").names(["layers.0"], (2, 8, 8))
    ['layers.0.experts.0.up', 'layers.0.experts.1.up']
    """

    whole: str
    part: str
    dim: int = 0

    def apart(self, whole: Shape) -> list[Shape]:
        """The shapes of the parts, where only the whole is known."""
        dim = _dim(self.dim, whole)
        return [(*whole[:dim], *whole[dim + 1 :])] * whole[dim]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        dim = self.dim % (len(parts[0]) + 1)
        return (*parts[0][:dim], len(parts), *parts[0][dim:])

    def named(self, part: str, names: Shapes) -> tuple[str, list[str]] | None:
        """The names of the whole and of all parts, of which this is the first; None where it is not."""
        stars = matched(self.part.replace("{}", "0"), part, names)
        if stars is None:
            return None
        every = filled(self.part, stars)
        several = list(takewhile(names.__contains__, (every.replace("{}", str(at)) for at in count())))
        return filled(self.whole, stars), several

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[Subtensor]:
        """Where the parts are in the whole."""
        return [Subtensor.whole(whole).select(_dim(self.dim, whole), at) for at in range(len(parts))]

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """Of the parts."""
        count = whole[_dim(self.dim, whole)]
        return [filled(self.part, stars).replace("{}", str(at)) for at in range(count)]


@dataclass(frozen=True)
class Transposed:
    """A tensor whose dims are stored in another order on the other side: reversed, unless `order` says.

    `order` has, for every dim of the source, which dim of the target it is: source == target.permute(order).
    """

    name: str
    order: Sequence[int] | None = None


Remap = Concat | Stack | Transposed


def _dim(dim: object, shape: Shape) -> int:
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise ValueError(f"there is no dim {dim!r} in a shape of {len(shape)} dims")
    return dim % len(shape)


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
    Links without cells are left out, unless `empty`.
    """
    rules = _checked(remap)
    given = _given(sources, rename)
    shapes = {name: sources[source] for name, source in given.items()}
    ruled, by = defaultdict[str, list[Link]](list), dict[str, Remap]()
    for rule in rules:
        for link in _by_rule(rule, shapes, targets):
            if by.setdefault(link.target, rule) is not rule:
                raise ValueError(f"{link.target!r} would come both from {by[link.target]} and from {rule}")
            ruled[link.target].append(link)
    _check_whole(ruled, targets)
    planned = list[Link]()
    for name, shape in targets.items():
        if name in ruled:
            planned += ruled[name]
        elif name in shapes:
            planned.append(_plain(name, shapes[name], shape))
    unused = [rule for rule in rules if rule not in by.values()]
    _check(planned, shapes, targets, unused, strict, whole)
    planned = [link for link in planned if empty or 0 not in link.target_view.shape]
    return [link._replace(source=given[link.source]) if rename else link for link in planned]


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


def _checked(remap: object) -> list[Remap]:
    """The rules; anything else is refused."""
    rules, given = list[Remap](), list(remap) if isinstance(remap, Iterable) and not isinstance(remap, str) else [remap]
    for rule in given:
        if not isinstance(rule, Remap):
            raise TypeError(f"remap= must be a list of Concat, Stack and Transposed, but has {rule!r}")
        several = rule.parts if isinstance(rule, Concat) and not isinstance(rule.parts, str) else ()
        names = [rule.name] if isinstance(rule, Transposed) else [rule.whole, *several]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"{rule}: names must be strings")
        if isinstance(rule, Stack) and "{}" not in rule.part:
            raise ValueError(f"{rule}: `part` needs {{}} where the number of a part is")
        if isinstance(rule, Concat) and (isinstance(rule.parts, str) or len(set(rule.parts)) < len(rule.parts)):
            raise ValueError(f"{rule}: `parts` must be a list of different names")
        rules.append(rule)
    return rules


def shapes_after(sources: Shapes, *, rename: Rename = None, remap: Iterable[Remap] = ()) -> dict[str, Shape]:
    """The names and shapes that a conversion comes to where no target says so.

    >>> shapes_after({"q": (8, 6), "k": (2, 6)}, remap=[Concat("qk", ["q", "k"])])
    {'qk': (10, 6)}
    """
    shapes = {name: shape for source, shape in sources.items() for name in renamed(source, rename, sources)}
    for rule in _checked(remap):
        try:
            shapes = _after(rule, shapes)
        except ValueError as error:
            raise ValueError(f"{error} (by {rule})") from error
    return shapes


def _after(rule: Remap, shapes: Shapes) -> dict[str, Shape]:
    remapped, gone = dict[str, Shape](), set[str]()
    if isinstance(rule, Concat):
        _check_parts(rule, shapes)
    for name, shape in shapes.items():
        if name in gone:
            continue
        if isinstance(rule, Transposed):
            fits = matched(rule.name, name, shapes) is not None
            remapped[name] = _turned(rule, shape) if fits else shape
        elif (together := rule.named(name, shapes)) is not None:
            remapped[together[0]] = rule.joined([shapes[part] for part in together[1]])
            gone |= set(together[1])
        elif (stars := matched(rule.whole, name, shapes)) is not None:
            remapped |= zip(rule.names(stars, shape), rule.apart(shape), strict=True)
        else:
            remapped[name] = shape
    return {name: shape for name, shape in remapped.items() if name not in gone or name not in shapes}


def _check_parts(rule: Concat, shapes: Shapes) -> None:
    """Refuse some of the parts without the others."""
    for name in shapes:
        for part in rule.parts:
            stars = matched(part, name, shapes)
            several = [] if stars is None else [filled(one, stars) for one in rule.parts]
            absent = [one for one in several if one not in shapes]
            if absent:
                raise ValueError(f"{name!r} is there, but {', '.join(map(repr, absent))} is not")


def _turned(rule: Transposed, source: Shape) -> Shape:
    order = tuple(reversed(range(len(source)))) if rule.order is None else tuple(_dim(d, source) for d in rule.order)
    if sorted(order) != list(range(len(source))):
        raise ValueError(f"{rule.order} is not an order of {len(source)} dims")
    return tuple(source[order.index(dim)] for dim in range(len(source)))


def _plain(name: str, source: Shape, target: Shape) -> Link:
    if source != target:
        raise ValueError(f"{name!r} has shape {source} in the source, but {target} in the target")
    view = Subtensor.whole(source)
    return Link(name, name, view, view)


def _by_rule(rule: Remap, sources: Shapes, targets: Shapes) -> list[Link]:
    try:
        return list(_remapped(rule, sources, targets))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error} (by {rule})") from error


def _remapped(rule: Remap, sources: Shapes, targets: Shapes) -> Iterable[Link]:
    if isinstance(rule, Transposed):
        for name in targets:
            if name in sources and matched(rule.name, name, targets) is not None:
                yield _transposed(name, rule, sources[name], targets[name])
        return
    for wholes, others, inward in ((targets, sources, True), (sources, targets, False)):
        for whole, shape in wholes.items():
            stars = matched(rule.whole, whole, wholes)
            if stars is None or whole in others:
                continue
            parts = rule.names(stars, shape)
            if all(part in others for part in parts):
                yield from _parts(rule, whole, shape, {part: others[part] for part in parts}, inward=inward)


def _parts(rule: Concat | Stack, whole: str, shape: Shape, parts: Shapes, *, inward: bool) -> Iterable[Link]:
    try:
        views = rule.views(shape, list(parts.values()))
    except ValueError as error:
        raise ValueError(f"{whole!r}: {error}") from None
    for (part, size), view in zip(parts.items(), views, strict=True):
        if view.shape != size:
            raise ValueError(f"{part!r} has shape {size}, but its part of {whole!r} has {view.shape}")
        plain = Subtensor.whole(size)
        yield Link(part, whole, plain, view) if inward else Link(whole, part, view, plain)


def _transposed(name: str, rule: Transposed, source: Shape, target: Shape) -> Link:
    order = tuple(reversed(range(len(target)))) if rule.order is None else tuple(_dim(d, target) for d in rule.order)
    if sorted(order) != list(range(len(target))):
        raise ValueError(f"{name!r}: {rule.order} is not an order of the {len(target)} dims of the target")
    view = Subtensor.whole(target).permute(order)
    if view.shape != source:
        raise ValueError(f"{name!r} has shape {source} in the source, but {view.shape} when the target is transposed")
    return Link(name, name, Subtensor.whole(source), view)


def _check_whole(ruled: Mapping[str, Sequence[Link]], targets: Shapes) -> None:
    """All cells of a target that has parts come from somewhere, once."""
    for name, several in ruled.items():
        count = sum(prod(link.target_view.shape) for link in several)
        if count != prod(targets[name]):
            raise ValueError(f"{count} of the {prod(targets[name])} cells of {name!r} come from the source")


def _check(
    planned: Sequence[Link], sources: Shapes, targets: Shapes, unused: Sequence[Remap], strict: bool, whole: bool
) -> None:
    """Every target comes from somewhere; every source goes somewhere."""
    used, reached = {link.source for link in planned}, {link.target for link in planned}
    left = [name for name in targets if whole and name not in reached]
    idle = f"; {', '.join(map(str, unused))} fit nothing" if unused else ""
    if left:
        raise ValueError(missing("the source has nothing for", left, sources) + idle)
    extra = [name for name in sources if name not in used]
    if extra and strict:
        raise ValueError(missing("the target has no", extra, targets) + idle + "; strict=False leaves them out")
    if unused and strict:
        raise ValueError(f"{unused[0]} fits nothing: leave it out, or look for a name that is written otherwise")
