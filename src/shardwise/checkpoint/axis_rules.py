"""What a rule can say of one mesh axis beside a placement: it becomes one when shape, config and mesh are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from math import gcd
from typing import Literal

from shardwise.checkpoint.expressions import Expression
from shardwise.errors import LayoutError
from shardwise.layout import Experts, Fused, Heads, Mesh, Placement, Shard
from shardwise.layout.checks import checked_dim

Shape = tuple[int, ...]
MOST_INDICES = 2**16  # of a dim whose owners are computed one by one
REMEDY = "Give it by Rules.of(config, mesh) or with_config(...), or put it beside the weights"
INDEX = "expert"  # the index along a dim, in expressions


@dataclass(frozen=True)
class Known:
    """The numbers that expressions may name: those of config.json, sizes of mesh axes, and numbers in a name."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    config: bool = False  # there is a config.json

    def with_numbers(self, more: Mapping[str, int]) -> Known:
        """With more of them, which hide others of the same names."""
        return Known({**self.numbers, **more}, self.config)

    def has(self, expression: Expression) -> bool:
        """True if a value is to be expected: only without a config.json may numbers be unknown."""
        return self.config or expression.names <= self.numbers.keys()

    def value(self, expression: Expression) -> int:
        """The value of an expression."""
        missing = sorted(expression.names - self.numbers.keys())
        if missing:
            why = self._unknown(missing[0]) if self.config else f"no config.json was given. {REMEDY}"
            what = "" if expression.text == missing[0] else f" for {expression.text!r}"
            raise LayoutError(f"the number {missing[0]!r} is needed{what}: {why}")
        return expression.value(self.numbers)

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, list(self.numbers), 1)
        return "it is not in config.json" + (f"; did you mean {near[0]!r}?" if near else "")

    def count(self, expression: Expression, what: str) -> int:
        """The value of an expression that counts something."""
        value = self.value(expression)
        if value < 1:
            raise LayoutError(f"{what} must be above 0, not {self.explained(expression)}")
        return value

    def explained(self, expression: Expression) -> str:
        """An expression with its value, for messages."""
        return expression.explained(self.numbers)


@dataclass(frozen=True)
class WholeHeads:
    """Split `dim` over an axis so that no head is cut. `repeat`: replicate heads where there are more ranks."""

    dim: int
    count: Expression
    repeat: bool = False

    def check(self, ranks: int, known: Known) -> None:
        """Refuse a number of ranks that would cut heads."""
        if known.has(self.count):
            check_heads(known.count(self.count, "heads"), ranks, self.repeat, known.explained(self.count))

    def placement(self, shape: Shape, ranks: int, known: Known) -> Placement:
        """Of a tensor of that shape."""
        dim = checked_dim(self.dim, shape)
        if known.has(self.count) and shape[dim] % known.count(self.count, "heads"):
            raise LayoutError(
                f"{shape[dim]} cells of dim {dim} are not {known.explained(self.count)} heads of equal size"
                + (": is config.json that of these weights?" if known.config else "")
            )
        return self.for_any_shape(ranks, known)

    def length(self, stored: int, ranks: int, known: Known) -> int:
        """The size of the dim, if all ranks together have stored so many cells of it."""
        count = known.count(self.count, "heads") if known.has(self.count) else ranks
        return stored * count // max(count, ranks)

    def for_any_shape(self, ranks: int, known: Known) -> Placement:
        """Where the number of heads is not known, nothing is checked."""
        self.check(ranks, known)
        replicated = known.has(self.count) and known.value(self.count) % ranks
        return Heads(self.dim, known.value(self.count)) if replicated else Shard(self.dim)


@dataclass(frozen=True)
class Segments:
    """Several tensors stacked along `dim`, each split over an axis.

    `parts` are their sizes, the ratio of these, or their numbers of heads. All heads have the same size; of the
    segments that have fewer heads than there are ranks, heads are replicated.
    """

    dim: int
    parts: tuple[Expression, ...]
    kind: Literal["segments", "ratio", "heads"] = "segments"

    def check(self, ranks: int, known: Known) -> None:
        """Refuse a number of ranks that would cut heads. There must be enough in the largest segment."""
        if self.kind == "heads" and all(map(known.has, self.parts)):
            counts = self.values(known)
            for part, count in zip(self.parts, counts, strict=True):
                check_heads(count, ranks, count < max(counts), known.explained(part))

    def placement(self, shape: Shape, ranks: int, known: Known) -> Placement:
        """Of a tensor of that shape."""
        dim = checked_dim(self.dim, shape)
        self.check(ranks, known)
        sizes = self.sizes(shape[dim], known)
        return Fused(dim, sizes, heads=self.values(known) if self.kind == "heads" else None)

    def length(self, stored: int, ranks: int, known: Known) -> int:
        """The size of the dim, if all ranks together have stored so many cells of it."""
        if self.kind != "heads":
            return stored
        counts = self.values(known)
        return stored * sum(counts) // sum(max(count, ranks) for count in counts)

    def values(self, known: Known) -> tuple[int, ...]:
        """The parts as numbers."""
        return tuple(known.count(part, f"the {self.kind} of fused") for part in self.parts)

    def sizes(self, length: int, known: Known) -> tuple[int, ...]:
        """The segments of a dim that is so long.

        >>> Segments(0, (Expression("32"), Expression("8"), Expression("8")), "ratio").sizes(6144, Known())
        (4096, 1024, 1024)
        """
        parts = self.values(known)
        if self.kind == "segments":
            return parts  # the layout refuses those that do not fill the dim
        reduced = [part // gcd(*parts) for part in parts] if self.kind == "ratio" else list(parts)
        if length % sum(reduced):
            how = "in the ratio" if self.kind == "ratio" else f"into {sum(parts)} heads of equal size:"
            raise LayoutError(f"{length} cells of dim {self.dim} cannot be cut {how} {list(parts)}")
        return tuple(part * length // sum(reduced) for part in reduced)


@dataclass(frozen=True)
class Owners:
    """The position along an axis that has a tensor (`dim` is None), or each index of a dim, as an expression."""

    position: Expression
    dim: int | None = None

    def placement(self, shape: Shape, ranks: int, known: Known) -> Placement:
        """Of a tensor whose indices along `dim` lie at different positions."""
        assert self.dim is not None
        dim = checked_dim(self.dim, shape)
        if shape[dim] > MOST_INDICES:
            raise LayoutError(f"owners of {shape[dim]} indices of dim {dim} are too many: at most {MOST_INDICES}")
        every = (known.with_numbers({INDEX: index}) for index in range(shape[dim]))
        return Experts(dim, tuple(self.on(ranks, one) for one in every))

    def length(self, stored: int, ranks: int, known: Known) -> int:
        """The size of the dim: each index lies at one position."""
        return stored

    def on(self, ranks: int, known: Known) -> int:
        """The position on an axis of so many ranks."""
        position = known.value(self.position)
        if not 0 <= position < ranks:
            given = ", ".join(f"{name} = {known.numbers[name]}" for name in sorted(self.position.names))
            raise LayoutError(
                f'owners = "{self.position}" is {position} for {given}, but the axis has positions 0 to {ranks - 1}'
            )
        return position

    def submesh(self, mesh: Mesh, axis: str, known: Known) -> Mesh:
        """The part of a mesh that has the tensor: one position of the axis.

        >>> Owners(Expression("expert % ep")).submesh(Mesh(ep=4, tp=2), "ep", Known({"expert": 7, "ep": 4}))
        Mesh(ep=1, tp=2, ranks=[[6, 7]])
        """
        return _at_position(mesh, axis, self.on(mesh.shape[mesh.names.index(axis)], known))


@lru_cache(maxsize=4096)
def _at_position(mesh: Mesh, axis: str, position: int) -> Mesh:
    """The ranks at one position of an axis."""
    sizes = [1 if name == axis else size for name, size in zip(mesh.names, mesh.shape, strict=True)]
    return Mesh.of(sizes, mesh.names, ranks=mesh.ranks.take([position], axis=mesh.names.index(axis)))


AxisRule = WholeHeads | Segments | Owners
Word = Placement | AxisRule


def check_experts(count: int, mesh: Mesh, axis: str, named: str) -> None:
    """Refuse an axis of which some ranks would have no expert."""
    ranks = mesh.shape[mesh.names.index(axis)]
    if ranks > count:
        raise LayoutError(f"{ranks} ranks along {axis!r} for {count} experts ({named}): use {axis}={count} or less")


def check_heads(count: int, ranks: int, repeat: bool, named: str) -> None:
    """Refuse ranks among which heads cannot be dealt out whole, each to one rank or to equally many."""
    if count % ranks and (ranks % count or not repeat):
        fits = f"a number of ranks that divides {count}" + f" or is a multiple of it (not {ranks})" * repeat
        what = "heads" if "head" in named else "blocks"  # of features, whose scales or pairs stay together
        raise LayoutError(f"{ranks} ranks cut {count} {what} ({named}): use {fits}")
