"""Rules that join several tensors to one, split one into several, or permute dims."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from shardwise.job.names import filled, matched
from shardwise.job.subtensor import Subtensor

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Concat:
    """One tensor that has several others one after the other along a dim: q, k, v in qkv; gate, up in gate_up.

    Stars in the names stand for the same on both sides. The rule works in both directions. `sizes` of the parts are
    needed only where neither side has them: to split a whole into unequal parts, in a conversion or under an
    intermediate name.

    >>> Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], dim=0).dim
    0
    """

    whole: str
    parts: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apart(self, whole: Shape) -> list[Shape]:
        """The shapes of the parts, where only the whole is known."""
        dim = checked_dim(self.dim, whole)
        equal, rest = divmod(whole[dim], len(self.parts))
        if self.sizes is None and rest:
            raise ValueError(f"{whole[dim]} along dim {dim} is not {len(self.parts)} equal parts: give their sizes=")
        sizes = self.sizes if self.sizes is not None else [equal] * len(self.parts)
        if len(sizes) != len(self.parts) or sum(sizes) != whole[dim]:
            raise ValueError(f"sizes {list(sizes)} are not {len(self.parts)} parts of the {whole[dim]} along dim {dim}")
        return [(*whole[:dim], size, *whole[dim + 1 :]) for size in sizes]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        dim = checked_dim(self.dim, parts[0])
        return (*parts[0][:dim], sum(part[checked_dim(self.dim, part)] for part in parts), *parts[0][dim + 1 :])

    def named(self, part: str, names: Collection[str]) -> tuple[str, list[str]] | None:
        """The names of the whole and of all parts, of which this is the first; None where it is not."""
        stars = matched(self.parts[0], part, names)
        several = [] if stars is None else [filled(one, stars) for one in self.parts]
        return (filled(self.whole, stars), several) if stars is not None and all(n in names for n in several) else None

    def located(self, part: str, names: Collection[str]) -> Iterator[tuple[str, ...]]:
        """What the stars stand for, if this is the name of a part."""
        for pattern in self.parts:
            stars = matched(pattern, part, names)
            if stars is not None:
                yield stars

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[Subtensor]:
        """Where the parts are in the whole."""
        dim, start, found = checked_dim(self.dim, whole), 0, list[Subtensor]()
        for part in parts:
            if len(part) != len(whole):
                raise ValueError(f"a part has {len(part)} dims, but {self.whole!r} has {len(whole)}")
            found.append(Subtensor.whole(whole).narrow(dim, start, part[dim]))
            start += part[dim]
        if start != whole[dim]:
            raise ValueError(f"its parts have {start} along dim {dim}, but {self.whole!r} has {whole[dim]}")
        return found

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """The names of the parts."""
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
        dim = checked_dim(self.dim, whole)
        return [(*whole[:dim], *whole[dim + 1 :])] * whole[dim]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        dim = checked_dim(self.dim, (*parts[0], len(parts)))
        return (*parts[0][:dim], len(parts), *parts[0][dim:])

    def named(self, part: str, names: Collection[str]) -> tuple[str, list[str]] | None:
        """The names of the whole and of all parts, of which this is the first; None where it is not."""
        stars = matched(self.part.replace("{}", "0"), part, names)
        if stars is None:
            return None
        return filled(self.whole, stars), list(takewhile(names.__contains__, self.numbered(stars)))

    def located(self, part: str, names: Collection[str]) -> Iterator[tuple[str, ...]]:
        """What the stars stand for, if this is the name of a part."""
        for number in dict.fromkeys(NUMBER.findall(part)):
            stars = matched(self.part.replace("{}", number), part, names)
            if stars is not None:
                yield stars

    def numbered(self, stars: Sequence[str]) -> Iterator[str]:
        """The names of part 0, part 1 and so on, endlessly."""
        every = filled(self.part, stars)
        return (every.replace("{}", str(at)) for at in count())

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[Subtensor]:
        """Where the parts are in the whole."""
        return [Subtensor.whole(whole).select(checked_dim(self.dim, whole), at) for at in range(len(parts))]

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """The names of the parts."""
        every = filled(self.part, stars)
        return [every.replace("{}", str(at)) for at in range(whole[checked_dim(self.dim, whole)])]


@dataclass(frozen=True)
class Transposed:
    """A tensor whose dims are stored in another order on the other side; by default reversed.

    `order` has, for every dim of the source, which dim of the target it is: source == target.permute(order).
    """

    name: str
    order: Sequence[int] | None = None

    def permutation(self, ndim: int) -> tuple[int, ...]:
        """The order of `ndim` dims; refused if it is not a permutation of them."""
        if self.order is None:
            return tuple(reversed(range(ndim)))
        order = tuple(checked_dim(dim, (0,) * ndim) for dim in self.order)
        if sorted(order) != list(range(ndim)):
            raise ValueError(f"{self.order} is not a permutation of the {ndim} dims of the target")
        return order


Joining = Concat | Stack
Remap = Concat | Stack | Transposed


def checked_dim(dim: object, shape: Shape) -> int:
    """The dim, counted from the first one."""
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise ValueError(f"there is no dim {dim!r} in a shape of {len(shape)} dims")
    return dim % len(shape)


def checked_rules(remap: object) -> list[Remap]:
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
