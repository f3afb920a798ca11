"""What a mesh axis does to a tensor: split a dim in one of several ways, replicate, or hold terms of a reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry import Ints, Spans, ints, totals
from shardwise.layout.checks import checked_sizes, counted, not_too_many
from shardwise.notation import EXPERTS, LONGEST, OPERATIONS, PLACEMENT, SPLIT
from shardwise.quoting import brief


class Dim(NamedTuple):
    """A dim of a tensor as the mesh axes so far have split it: into `parts`, some of which may be empty."""

    number: int
    shape: tuple[int, ...]
    spans: Spans
    parts: int

    @property
    def size(self) -> int:
        """How many cells."""
        return self.shape[self.number]


@dataclass(frozen=True, slots=True)
class Shard:
    """Split dim `dim` over a mesh axis by torch.chunk's rule."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"

    def split(self, dim: Dim, count: int) -> Spans:
        """Every part cut into `count`."""
        return dim.spans.chunk(count)


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Split dim `dim` into `split_factor` chunks and each of these over a mesh axis (DTensor's `_StridedShard`)."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"S{self.dim}:{self.split_factor}"

    def split(self, dim: Dim, count: int) -> Spans:
        """Every part cut into chunks, and these into `count`."""
        size = max(dim.size, 1)
        factor = counted(self.split_factor, "the split factor of a strided shard")
        not_too_many(factor, "chunks (the split factor of a strided shard)")
        not_too_many(min(factor * count * len(dim.spans.start), size), "intervals of a strided shard")
        return dim.spans.strided(min(factor, size), count)  # beyond the size every cell is a chunk of its own


@dataclass(frozen=True, slots=True)
class Fused:
    """Dim `dim` is several tensors one after the other (q|k|v, gate|up): every segment is split over a mesh axis.

    Without `heads` by torch.chunk's rule. With `heads`, one number per segment, by whole heads: if a segment has fewer
    heads than the axis has ranks, each of its heads is replicated on consecutive ranks.

    >>> from shardwise.layout import Layout, Mesh
    >>> qkv = Layout.on_mesh((96, 64), Mesh(dp=2, tp=4), {"tp": Fused(0, (64, 16, 16), heads=(8, 2, 2))})
    >>> [str(piece.box) for piece in qkv.pieces(1)]  # two q heads, and the first k and v head, as rank 0 has too
    ['[16:32, 0:64]', '[64:72, 0:64]', '[80:88, 0:64]']
    """

    dim: int
    segments: Sequence[int]
    heads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", _numbers(self.segments, "the segments of a fused dim"))
        if not self.segments:
            raise LayoutError("a fused dim needs at least one segment, such as Fused(0, [64, 16, 16])")
        if self.heads is not None:
            object.__setattr__(self, "heads", _numbers(self.heads, "the heads of a fused dim"))

    def __str__(self) -> str:
        heads = "" if self.heads is None else f":{','.join(map(str, self.heads))}"
        return f"fused{self.dim}={','.join(map(str, self.segments))}{heads}"

    def split(self, dim: Dim, count: int) -> Spans:
        """Every segment cut into `count`, by heads if they are known."""
        check_whole(dim, str(self))
        lengths = checked_sizes(self.segments, dim.shape, dim.number, "segments")
        segments = Spans.pieces(ints(lengths), np.arange(len(lengths)))
        if self.heads is None:
            return segments.chunk(count).fused(count)
        if len(self.heads) != len(lengths):
            raise LayoutError(
                f"{self} has {len(lengths)} segments and {len(self.heads)} numbers of heads: give one each"
            )
        not_too_many(len(lengths) * count, "intervals of a fused dim")
        for length, heads in zip(lengths, self.heads, strict=True):
            check_heads(heads, length, count, f"a segment of {self}")
        return segments.shared(ints([min(heads, count) for heads in self.heads]), count).fused(count)


@dataclass(frozen=True, slots=True)
class Heads:
    """Dim `dim` is `count` heads of equal size: split over a mesh axis by whole heads.

    With fewer heads than ranks (tp larger than the number of kv heads), each head is replicated on consecutive ranks.

    >>> from shardwise.layout import Layout, Mesh
    >>> kv = Layout.on_mesh((16, 64), Mesh(tp=4), [Heads(0, 2)])
    >>> [str(kv.pieces(rank)[0].box) for rank in range(4)]
    ['[0:8, 0:64]', '[0:8, 0:64]', '[8:16, 0:64]', '[8:16, 0:64]']
    """

    dim: int
    count: int

    def __str__(self) -> str:
        return f"heads{self.dim}={self.count}"

    def split(self, dim: Dim, count: int) -> Spans:
        """The heads of every part cut into `count`."""
        if dim.parts == 1:
            check_heads(self.count, dim.size, count, str(self))
            return dim.spans.shared(ints([min(self.count, count)]), count)
        heads = self._heads_of_parts(dim)
        if dim.size:
            check_heads(int(heads[0]), int(heads[0]), count, f"every part of {self}")
        return dim.spans.shared(heads, count)

    def _heads_of_parts(self, dim: Dim) -> Ints:
        """How many heads each part has, where another placement has split the dim before: refused if it cut heads."""
        check_heads(self.count, dim.size, 1, str(self))
        start, stop, part = dim.spans
        size = max(dim.size // self.count, 1)
        heads = totals(stop - start, part, dim.parts) // size
        if (start % size).any() or (stop % size).any() or (heads != heads[0]).any():
            raise LayoutError(
                f"{self} after another split of dim {dim.number} into {dim.parts}: a head of {size} cells is cut, or "
                f"parts have different numbers of heads. Put the mesh axis of {self} before the others that split it"
            )
        return heads


@dataclass(frozen=True, slots=True)
class Experts:
    """Dim `dim` is experts of equal size: expert e is on rank `ranks[e]` of a mesh axis, or on several ranks.

    A rank has its experts in rising order. (A list of owners without a mesh: `Layout.experts`.)

    >>> from shardwise.layout import Layout, Mesh
    >>> hot = Layout.on_mesh((4, 64), Mesh(ep=3), [Experts(0, [0, (1, 2), 2, 0])])  # expert 1 on two ranks
    >>> [[piece.box.lo[0] for piece in hot.pieces(rank)] for rank in range(3)]
    [[0, 3], [1], [1, 2]]
    """

    dim: int
    ranks: Sequence[int | Sequence[int]]

    def __post_init__(self) -> None:
        rows = _several(self.ranks)
        if not rows:
            raise LayoutError(f"experts need a rank, or a list of ranks, for each expert, not {brief(self.ranks)}")
        object.__setattr__(self, "ranks", tuple(_ranks_of(row, expert) for expert, row in enumerate(rows)))

    def __str__(self) -> str:
        return f"experts{self.dim}={','.join('+'.join(map(str, ranks)) for ranks in self.rows)}"

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every expert, rising."""
        return cast(tuple[tuple[int, ...], ...], self.ranks)

    def split(self, dim: Dim, count: int) -> Spans:
        """Every expert on its ranks."""
        check_whole(dim, brief(str(self)))
        rows = self.rows
        if dim.size % len(rows):
            raise LayoutError(f"dim {dim.number} of shape {dim.shape} is not {len(rows)} experts of equal size")
        last = max(row[-1] for row in rows)
        if last >= count:
            raise LayoutError(f"an expert on rank {last} of a mesh axis of {count} ranks: they are 0..{count - 1}")
        size, expert = dim.size // len(rows), np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return Spans(expert * size, (expert + 1) * size, ints([rank for row in rows for rank in row]))


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Split dim `dim` into two chunks for every rank of a mesh axis: rank i has chunk i and the i-th from the end.

    So every rank has the same amount of work in causal attention over a sequence (ring attention).

    >>> from shardwise.layout import Layout
    >>> [str(piece.box) for piece in Layout.on_mesh((16,), (4,), [Zigzag(0)]).pieces(1)]
    ['[2:4]', '[12:14]']
    """

    dim: int

    def __str__(self) -> str:
        return f"zigzag{self.dim}"

    def split(self, dim: Dim, count: int) -> Spans:
        """Every part cut into pairs of chunks."""
        return dim.spans.zigzag(count)


@dataclass(frozen=True, slots=True)
class Cyclic:
    """Give blocks of `block` cells of dim `dim` to the ranks of a mesh axis in turn.

    >>> from shardwise.layout import Layout
    >>> [piece.box.lo[0] for piece in Layout.on_mesh((10,), (2,), [Cyclic(0, 2)]).pieces(0)]
    [0, 4, 8]
    """

    dim: int
    block: int

    def __str__(self) -> str:
        return f"cyclic{self.dim}={self.block}"

    def split(self, dim: Dim, count: int) -> Spans:
        """The blocks of every part in turn."""
        block = min(counted(self.block, "the block size"), max(dim.size, 1))
        not_too_many(dim.size // block, "blocks")
        return dim.spans.cyclic(block, count)


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every owner of a mesh axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every owner of a mesh axis holds a term; `reduce_op` over the terms gives the value."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in OPERATIONS:
            near = get_close_matches(str(self.reduce_op), OPERATIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LayoutError(f"no reduction {self.reduce_op!r}: use one of {', '.join(OPERATIONS)}{hint}")

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P{self.reduce_op}"


Split = Shard | StridedShard | Fused | Heads | Experts | Zigzag | Cyclic
Placement = Split | Replicate | Partial
MAY_REPLICATE = (Fused, Heads, Experts)  # splits that may give cells to several ranks


def placement(given: object) -> Placement:
    """A placement from its word ("S0", "S0:2", "R", "P", "Pmax"; also "S(0)", "P(max)"), from ours, or from torch's.

    >>> placement("Pmax"), placement("S(1)"), placement("heads0=8")
    (Partial(reduce_op='max'), Shard(dim=1), Heads(dim=0, count=8))
    """
    if isinstance(given, Placement):
        return given
    if isinstance(given, str):
        return _read(given)
    torchs: Any = given
    match type(given).__name__:  # torch's, exactly: a kind that we do not know must not pass for one that we do
        case "Shard":
            return Shard(int(torchs.dim))
        case "_StridedShard":
            return StridedShard(int(torchs.dim), int(torchs.split_factor))
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(torchs.reduce_op))
    raise LayoutError(
        f"{brief(given)} is not a placement: use 'S0', 'R', 'P', or Shard(0), Replicate(), Partial('sum')"
    )


def _read(word: str) -> Placement:
    if experts := EXPERTS.fullmatch(word.strip()):
        return Experts(int(experts["dim"]), [_listed(ranks, "+") for ranks in experts["ranks"].split(",")])
    if split := SPLIT.fullmatch(word.strip()):
        return _split(split["kind"], int(split["dim"]), _listed(split["numbers"]), _listed(split["heads"]))
    plain = word.strip().removeprefix("_").replace(", ", ":").replace("(", "").replace(")", "")
    match = PLACEMENT.fullmatch(plain)  # DTensor writes S(0), P(max) and _S(0, 2)
    if not match and plain[:1] == "P" and len(plain) <= LONGEST:
        return Partial(plain[1:])  # which knows the reductions
    if not match:
        raise _not_a_placement(word)
    if match["dim"] is None:
        return Replicate() if plain == "R" else Partial(match["op"] or "sum")
    return StridedShard(int(match["dim"]), int(match["factor"])) if match["factor"] else Shard(int(match["dim"]))


def _split(kind: str, dim: int, numbers: tuple[int, ...], heads: tuple[int, ...]) -> Split:
    """The split of a word: its numbers follow the `=`, and those of heads a colon."""
    match kind, numbers, heads:
        case "fused", (_, *_), _:
            return Fused(dim, numbers, heads or None)
        case "heads", (count,), ():
            return Heads(dim, count)
        case "zigzag", (), ():
            return Zigzag(dim)
        case "cyclic", (block,), ():
            return Cyclic(dim, block)
    raise _not_a_placement(f"{kind}{dim}")


def _not_a_placement(word: str) -> LayoutError:
    return LayoutError(
        f"{brief(word)} is not a placement: use S0 (shard dim 0), S0:2 (strided), R, P or Pmax, "
        f"fused0=64,16,16 (segments), fused0=64,16,16:8,2,2 (and their heads), heads0=8, zigzag0, cyclic0=8, "
        f"or experts0=0,1,1+2 (the ranks of each expert)"
    )


def _listed(text: str | None, between: str = ",") -> tuple[int, ...]:
    return tuple(map(int, text.split(between))) if text else ()


def _several(given: object) -> list[object] | None:
    """The items of a sequence; None for a single value."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None


def _ranks_of(given: object, expert: int) -> tuple[int, ...]:
    """The ranks of an expert, rising."""
    several = _several(given)
    ranks = _numbers([given] if several is None else several, f"the ranks of expert {expert}")
    if not ranks or len(set(ranks)) < len(ranks):
        raise LayoutError(f"expert {expert} needs one rank, or several different ones, not {brief(given)}")
    return tuple(sorted(ranks))


def _numbers(given: object, what: str) -> tuple[int, ...]:
    """A tuple of whole numbers from any sequence, so that placements can be hashed and compared."""
    try:
        return tuple(counted(number, f"each of {what}", least=0) for number in cast(Iterable[object], given))
    except TypeError:
        raise LayoutError(f"{what} must be a sequence of whole numbers, not {brief(given)}") from None


def check_whole(dim: Dim, what: str) -> None:
    """Refuse a split by sizes of the whole dim where another placement has split it before."""
    if dim.parts > 1:
        raise LayoutError(
            f"{what} after another split of dim {dim.number}: its numbers are for the whole dim, not for parts. "
            f"Put the mesh axis of {what} before the others that split dim {dim.number}"
        )


def check_heads(heads: object, size: int, ranks: int, what: str) -> None:
    """Refuse heads that do not fill a size equally, or that cannot be dealt out to ranks equally."""
    number = counted(heads, f"the number of heads of {what}")
    if size % number:
        raise LayoutError(f"{what}: {size} cells are not {number} heads of equal size; is the number of heads right?")
    if ranks % number and number % ranks:
        raise LayoutError(
            f"{what}: {number} heads over {ranks} ranks: one must divide the other, so that every rank has whole heads "
            f"and as many. Use a mesh axis that divides {number} or is a multiple of it"
        )
