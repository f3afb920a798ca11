"""Rules that join several tensors to one, split one into several, or rearrange the cells of one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from typing import Any, Literal, NamedTuple, get_args

from shardwise.job.names import filled, matched
from shardwise.job.subtensor import Subtensor

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
NUMBER = re.compile(r"\d+")


class SameCells(NamedTuple):
    """The same cells in two tensors."""

    here: Subtensor
    there: Subtensor


# --- several tensors and one -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedParts:
    """A whole and its parts, each of which has a name of its own. Stars stand for the same in all names."""

    whole: str
    parts: Sequence[str]

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

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """The names of the parts."""
        return [filled(part, stars) for part in self.parts]


@dataclass(frozen=True)
class Concat(NamedParts):
    """One tensor that is the concatenation of others along a dim: q, k, v in qkv; gate, up in gate_up.

    Stars in the names stand for the same on both sides. The rule works in both directions. `sizes` of the parts are
    needed only where neither side has them: to split a whole into unequal parts, in a conversion or under an
    intermediate name.

    >>> Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], dim=0).dim
    0
    """

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
        return [_resized(whole, dim, size) for size in sizes]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        return _joined(self.dim, parts)

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[SameCells]:
        """Where the parts are in the whole."""
        dim = checked_dim(self.dim, whole)
        _check_lengths(self, whole, dim, parts)
        sizes = [part[dim] for part in parts]
        return [
            SameCells(Subtensor.whole(whole).narrow(dim, start, size), Subtensor.whole(_resized(whole, dim, size)))
            for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        ]


@dataclass(frozen=True)
class Interleaved(NamedParts):
    """One tensor in which several others alternate along a dim: q, k, v of every head; gate and up of every row.

    A group has `sizes[0]` cells of the first part, then `sizes[1]` of the second one, and so on; then the next group
    follows. With heads of 64: [64, 64, 64] for GPT-NeoX and BLOOM; [8 * 64, 64, 64] where 8 heads of q share one of k
    and v, as in Falcon; [1, 1] for gate and up that alternate row by row. The rule works in both directions.

    >>> Interleaved("*.gate_up", ["*.gate", "*.up"], sizes=[1, 1]).apart((8, 4))
    [(4, 4), (4, 4)]
    """

    sizes: Sequence[int]
    dim: int = 0

    def apart(self, whole: Shape) -> list[Shape]:
        """The shapes of the parts, where only the whole is known."""
        dim = checked_dim(self.dim, whole)
        return [_resized(whole, dim, self._groups(whole, dim) * size) for size in self.sizes]

    def joined(self, parts: Sequence[Shape]) -> Shape:
        """The shape of the whole, where only the parts are known."""
        return _joined(self.dim, parts)

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[SameCells]:
        """Where the parts are in the whole."""
        dim = checked_dim(self.dim, whole)
        _check_lengths(self, whole, dim, parts)
        groups, starts = self._groups(whole, dim), accumulate(self.sizes, initial=0)
        alternating = Subtensor.whole(whole).unflatten(dim, [groups, sum(self.sizes)])
        return [
            SameCells(
                alternating.narrow(dim + 1, start, size),
                Subtensor.whole(_resized(whole, dim, groups * size)).unflatten(dim, [groups, size]),
            )
            for start, size in zip(starts, self.sizes, strict=False)
        ]

    def _groups(self, whole: Shape, dim: int) -> int:
        groups, rest = divmod(whole[dim], sum(self.sizes))
        if rest:
            raise ValueError(f"{whole[dim]} along dim {dim} is not a multiple of a group: {sum(self.sizes)}, all sizes")
        return groups


@dataclass(frozen=True)
class Stack:
    """One tensor that is the stack of others along a new dim: experts. `{}` in `part` is their number.

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

    def views(self, whole: Shape, parts: Sequence[Shape]) -> list[SameCells]:
        """Where the parts are in the whole."""
        dim, every = checked_dim(self.dim, whole), Subtensor.whole(whole)
        part = Subtensor.whole((*whole[:dim], *whole[dim + 1 :]))
        return [SameCells(every.select(dim, at), part) for at in range(len(parts))]

    def names(self, stars: Sequence[str], whole: Shape) -> list[str]:
        """The names of the parts."""
        every = filled(self.part, stars)
        return [every.replace("{}", str(at)) for at in range(whole[checked_dim(self.dim, whole)])]


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _joined(dim: int, parts: Sequence[Shape]) -> Shape:
    first = checked_dim(dim, parts[0])
    return _resized(parts[0], first, sum(part[checked_dim(dim, part)] for part in parts))


def _check_lengths(rule: NamedParts, whole: Shape, dim: int, parts: Sequence[Shape]) -> None:
    for part in parts:
        if len(part) != len(whole):
            raise ValueError(f"a part has {len(part)} dims, but {rule.whole!r} has {len(whole)}")
    total = sum(part[dim] for part in parts)
    if total != whole[dim]:
        raise ValueError(f"its parts have {total} along dim {dim}, but {rule.whole!r} has {whole[dim]}")


# --- the cells of one tensor -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transposed:
    """A tensor whose dims are stored in another order on the other side; by default reversed.

    `order` has, for every dim of the source, which dim of the target it is: source == target.permute(order).
    """

    name: str
    order: Sequence[int] | None = None

    def before(self, after: Shape) -> Shape | None:
        """The shape that becomes this one."""
        return tuple(after[dim] for dim in self._permutation(len(after)))

    def after(self, before: Shape) -> Shape:
        """The shape that this one becomes."""
        order = self._permutation(len(before))
        return tuple(before[order.index(dim)] for dim in range(len(before)))

    def views(self, before: Shape, after: Shape) -> list[SameCells]:
        """The same cells before and after."""
        return [SameCells(Subtensor.whole(before), Subtensor.whole(after).permute(self._permutation(len(after))))]

    def _permutation(self, ndim: int) -> tuple[int, ...]:
        """The order of `ndim` dims; refused if it is not a permutation of them."""
        if self.order is None:
            return tuple(reversed(range(ndim)))
        order = tuple(checked_dim(dim, (0,) * ndim) for dim in self.order)
        if sorted(order) != list(range(ndim)):
            raise ValueError(f"{self.order} is not a permutation of the {ndim} dims of the target")
        return order


RotaryOrder = Literal["halves", "pairs"]
ROTARY_ORDERS: tuple[RotaryOrder, ...] = ("halves", "pairs")


@dataclass(frozen=True)
class Rotary:
    """A tensor whose rotary cells are stored in another order on the other side.

    Rotary embeddings turn two cells of a head together. They are stored as two halves of the head (`"halves"`, as in
    transformers) or side by side (`"pairs"`, as Meta publishes Llama, and in GPT-J). `to` is the order in the target;
    the source has the other one. Along `dim` the tensor has heads of `head_dim` cells. Where only some cells of a head
    are rotary, there are `rotary_dim` of them from cell `start` on.

    >>> Rotary("*.q_proj.weight", head_dim=64, to="halves").after((512, 256))
    (512, 256)
    """

    name: str
    head_dim: int
    to: RotaryOrder
    rotary_dim: int | None = None
    start: int = 0
    dim: int = 0

    def before(self, after: Shape) -> Shape | None:
        """The shape that becomes this one: the same."""
        self._heads(after)
        return after

    def after(self, before: Shape) -> Shape:
        """The shape that this one becomes: the same."""
        self._heads(before)
        return before

    def views(self, before: Shape, after: Shape) -> list[SameCells]:
        """The same cells before and after: rotary ones, and those on both sides of them in each head."""
        dim, rotary = checked_dim(self.dim, after), self._rotary
        heads = Subtensor.whole(after).unflatten(dim, [self._heads(after), self.head_dim])
        turned, stop = heads.narrow(dim + 1, self.start, rotary), self.start + rotary
        halves, pairs = (turned.unflatten(dim + 1, sizes) for sizes in ([2, rotary // 2], [rotary // 2, 2]))
        order = [*range(dim + 1), dim + 2, dim + 1, *range(dim + 3, len(after) + 2)]
        both = [pairs.permute(order), halves]
        rest = [heads.narrow(dim + 1, 0, self.start), heads.narrow(dim + 1, stop, self.head_dim - stop)]
        return [
            SameCells(*(both if self.to == "halves" else reversed(both))),
            *(SameCells(part, part) for part in rest if part.shape[dim + 1]),
        ]

    @property
    def _rotary(self) -> int:
        rotary = self.head_dim - self.start if self.rotary_dim is None else self.rotary_dim
        if rotary % 2 or self.start < 0 or rotary < 0 or self.start + rotary > self.head_dim:
            raise ValueError(f"{rotary} rotary cells from cell {self.start} on are not an even part of {self.head_dim}")
        return rotary

    def _heads(self, shape: Shape) -> int:
        dim = checked_dim(self.dim, shape)
        heads, rest = divmod(shape[dim], self.head_dim)
        if rest:
            raise ValueError(f"{shape[dim]} along dim {dim} is not a multiple of head_dim={self.head_dim}")
        return heads


Filling = Literal["zeros", "keep"]


@dataclass(frozen=True)
class Padded:
    """A tensor that is longer on one side: a vocabulary of 1003 rows, padded to 1024.

    The longer side has its padding at the end of `dim`. In a longer target the padding is filled with zeros, or left as
    it is with `fill="keep"`. From a longer source the padding is left out. In a conversion no target says how long the
    result is: give its `size`, or a `multiple` to round up to.

    >>> Padded("lm_head.weight", multiple=64).after((1003, 512))
    (1024, 512)
    """

    name: str
    size: int | None = None
    multiple: int | None = None
    dim: int = 0
    fill: Filling = "zeros"

    def before(self, after: Shape) -> Shape | None:
        """Unknown: the source says how long it is."""
        checked_dim(self.dim, after)
        return None

    def after(self, before: Shape) -> Shape:
        """The shape that this one becomes."""
        dim = checked_dim(self.dim, before)
        if (self.size is None) == (self.multiple is None):
            raise ValueError("no target says how long it is to be: give either size= or multiple=")
        size = self.size if self.multiple is None else -(-before[dim] // self.multiple) * self.multiple
        return _resized(before, dim, size or 0)

    def views(self, before: Shape, after: Shape) -> list[SameCells]:
        """The same cells before and after."""
        dim = checked_dim(self.dim, after)
        if _resized(before, dim, 0) != _resized(after, dim, 0):
            raise ValueError(f"{before} and {after} differ in other dims than dim {dim}")
        self._check_size(before, after, dim)
        both = min(before[dim], after[dim])
        return [SameCells(*(Subtensor.whole(shape).narrow(dim, 0, both) for shape in (before, after)))]

    def _check_size(self, before: Shape, after: Shape, dim: int) -> None:
        if self.size is not None and self.size not in (before[dim], after[dim]):
            raise ValueError(f"neither {before} nor {after} has size={self.size} along dim {dim}")
        if self.multiple is not None and max(before[dim], after[dim]) % self.multiple:
            longer = max(before[dim], after[dim])
            raise ValueError(f"{longer} along dim {dim} is not a multiple of multiple={self.multiple}")

    def padding(self, before: Shape, after: Shape) -> Subtensor | None:
        """The cells of the target that come from nowhere."""
        dim = checked_dim(self.dim, after)
        missing = after[dim] - before[dim]
        return Subtensor.whole(after).narrow(dim, before[dim], missing) if missing > 0 and 0 not in after else None


Joining = Concat | Interleaved | Stack
Rearranging = Transposed | Rotary | Padded
Remap = Joining | Rearranging
RULES = ", ".join(kind.__name__ for kind in (*get_args(Joining), *get_args(Rearranging)))


def checked_dim(dim: object, shape: Shape) -> int:
    """The dim, counted from the first one."""
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise ValueError(f"there is no dim {dim!r} in a shape of {len(shape)} dims")
    return dim % len(shape)


def list_rules(remap: object) -> list[Any]:
    """What is given as `remap=`: rules in any iterable, or a single one. Not checked yet."""
    return list(remap) if isinstance(remap, Iterable) and not isinstance(remap, str) else [remap]


def checked_rules(remap: object) -> list[Remap]:
    """The rules; anything else is refused."""
    rules = list[Remap]()
    for rule in list_rules(remap):
        if not isinstance(rule, Remap):
            raise TypeError(f"remap= must be a list of {RULES}, but has {rule!r}")
        _check_names(rule)
        _check_numbers(rule)
        rules.append(rule)
    return rules


def _check_names(rule: Remap) -> None:
    if isinstance(rule, NamedParts) and (not isinstance(rule.parts, list | tuple) or not rule.parts):
        raise ValueError(f"{rule}: `parts` must be a list of different names")
    several = rule.parts if isinstance(rule, NamedParts) else ()
    names = [rule.name] if isinstance(rule, Rearranging) else [rule.whole, *several]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{rule}: names must be strings")
    if isinstance(rule, Stack) and "{}" not in rule.part:
        raise ValueError(f"{rule}: `part` needs {{}} where the number of a part is")
    if len(set(several)) < len(several):
        raise ValueError(f"{rule}: `parts` must be a list of different names")


def _check_numbers(rule: Remap) -> None:
    """Refuse sizes that mean nothing, before anything is looked for."""
    if isinstance(rule, Interleaved) and not (_are_counts(rule.sizes) and len(rule.sizes) == len(rule.parts)):
        raise ValueError(f"{rule}: `sizes` must be a list with a whole number above 0 for each part")
    if isinstance(rule, Rotary) and (rule.to not in ROTARY_ORDERS or not _are_counts([rule.head_dim])):
        raise ValueError(f'{rule}: `head_dim` must be a whole number above 0, and `to` "halves" or "pairs"')
    if isinstance(rule, Padded):
        given = [number for number in (rule.size, rule.multiple) if number is not None]
        if rule.fill not in get_args(Filling) or not _are_counts(given):
            raise ValueError(f'{rule}: `fill` must be "zeros" or "keep"; `size`, `multiple` whole numbers above 0')


def _are_counts(values: Sequence[object]) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int and value > 0 for value in values)
