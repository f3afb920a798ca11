"""Layout: where every cell of a tensor lives. Constructors for every kind; all lower to a grid or a listing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError
from shardwise.geometry import Box, Boxes, Ints, Spans, different, ints
from shardwise.layout.build import along, on_mesh, unless_counting
from shardwise.layout.checks import (
    MOST_CELLS,
    checked_boxes,
    checked_dim,
    checked_ranges,
    checked_shape,
    checked_sizes,
    owner_array,
    refuse_repeats,
)
from shardwise.layout.diagnosis import Diagnosis, diagnose
from shardwise.layout.form import Form, Piece
from shardwise.layout.listing import Listing
from shardwise.layout.mesh import Mesh
from shardwise.layout.placements import Cyclic, Experts, Fused, Heads, Placement, Replicate, Zigzag
from shardwise.notation import Numbers, Spelling, read


class Layout:
    """Where every cell of a tensor of `shape` lives: a frozen, hashable value. Layouts with the same meaning are equal.

    >>> rows = Layout.chunk((8, 6), 0, owners=4)
    >>> print(rows)
    8x6/S0@4
    >>> rows.pieces(1)
    (Piece(box=Box(lo=(2, 0), hi=(4, 6)), buffer=0, offset=0, strides=(6, 1)),)
    >>> rows.owners(Box((3, 0), (5, 1)))
    (1, 2)
    >>> rows == Layout.boxes((8, 6), [(o, (2 * o, 0), (2 * o + 2, 6)) for o in range(4)])
    True
    """

    shape: tuple[int, ...]
    ndim: int
    terms: int  # how many contributions make one cell: 1 unless the layout is partial
    op: str | None  # how the terms of a partial layout are reduced
    form: Form

    def __init__(
        self, shape: tuple[int, ...], form: Form, spell: Callable[[], Spelling], op: str | None = None
    ) -> None:
        """For the constructors below; use those. The spelling is made on first use: it can be long."""
        self.__dict__.update(shape=shape, ndim=len(shape), form=form, terms=form.terms, op=op, _spell=spell)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen: {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout is frozen: {name!r} cannot be deleted")

    # --- constructors ------------------------------------------------------------------------------------------------

    @staticmethod
    def chunk(shape: Sequence[int], dim: int, owners: int | Sequence[int]) -> Layout:
        """Split `dim` over the owners by torch.chunk's rule: ceil(size / n) each, the last ones smaller or empty.

        >>> [Layout.chunk((5, 2), 0, owners=4).local_shape(o) for o in range(4)]
        [(2, 2), (2, 2), (1, 2), (0, 2)]
        """
        shape = checked_shape(shape)
        dim, numbers = checked_dim(dim, shape), owner_array(owners)
        spans = Spans.whole(shape[dim]).chunk(len(numbers))
        return Layout(
            shape, along(shape, dim, spans, numbers), lambda: _spelled(shape, "mesh", None, (f"S{dim}",), numbers)
        )

    @staticmethod
    def split(
        shape: Sequence[int], dim: int, sizes: Sequence[int], owners: int | Sequence[int] | None = None
    ) -> Layout:
        """Split `dim` into chosen sizes, one per owner; zeros are allowed.

        >>> Layout.split((10, 6), 0, [3, 5, 2]).local_shape(1)
        (5, 6)
        """
        shape = checked_shape(shape)
        dim = checked_dim(dim, shape)
        lengths = checked_sizes(sizes, shape, dim, "sizes")
        numbers = owner_array(len(lengths) if owners is None else owners)
        if len(lengths) != len(numbers):
            raise LayoutError(f"{len(lengths)} sizes for {len(numbers)} owners: give one size per owner")
        spans = Spans.pieces(ints(lengths), np.arange(len(lengths)))
        return Layout(
            shape,
            along(shape, dim, spans, numbers),
            lambda: _spelled(shape, "split", dim, tuple((n,) for n in lengths), numbers),
        )

    @staticmethod
    def on_mesh(shape: Sequence[int], mesh: Mesh | Mapping[str, int] | Sequence[int], placements: object) -> Layout:
        """One placement per mesh axis, in DTensor's meaning: applied from left to right.

        Placements are strings ("S0", "S0:2" strided, "R", "P", "Pmax", "fused0=64,16,16", "heads0=8"), values such as
        Shard(0) or Heads(0, 8), or torch's own objects, in a sequence, or in a mapping axis name -> placement.

        >>> print(Layout.on_mesh((8, 6), Mesh(fsdp=4, tp=2), ["S0", "R"]))
        8x6/S0,R@fsdp=4,tp=2
        """
        shape = checked_shape(shape)
        if not isinstance(mesh, Mesh):
            mesh = Mesh.of(list(mesh.values()), list(mesh)) if isinstance(mesh, Mapping) else Mesh.of(mesh)
        form, op, words = on_mesh(shape, mesh, mesh.placements(placements))
        return Layout(shape, form, lambda: _spelled_mesh(shape, words, mesh), op)

    @staticmethod
    def boxes(
        shape: Sequence[int],
        pieces: Iterable[tuple[int, Sequence[int], Sequence[int]]] | tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
        *,
        overlap: Literal["replicas"] | None = None,
    ) -> Layout:
        """Arbitrary rectangles (owner, lo, hi); several of one owner are several buffers, in the given order.

        Different owners of the same box are replicas. `overlap="replicas"` says that cells in partly overlapping boxes
        are equal too, so that any holder may serve them. Three arrays (owners, lo, hi) are accepted as well.

        >>> Layout.boxes((4, 6), [(0, (0, 0), (4, 2)), (1, (0, 2), (4, 6))]).local_shape(1)
        (4, 4)
        """
        shape = checked_shape(shape)
        owners, boxes = checked_boxes(pieces, shape)
        if overlap not in (None, "replicas"):
            raise LayoutError(f"overlap must be None or 'replicas', not {overlap!r}")
        listing = Listing.of_boxes(shape, boxes, owners, overlapping=overlap is not None)
        kind = "boxes" if overlap is None else "overlapping"
        return Layout(shape, listing.as_grid() or listing, lambda: _spelled(shape, kind, None, _corners(boxes), owners))

    @staticmethod
    def replicated(shape: Sequence[int], owners: int | Sequence[int]) -> Layout:
        """All of the tensor on every owner.

        >>> print(Layout.replicated((), owners=[3, 5]))
        scalar/R@2:3,5
        """
        return _on_owners(shape, Replicate(), owners)

    @staticmethod
    def cyclic(shape: Sequence[int], dim: int, block: int, owners: int | Sequence[int]) -> Layout:
        """Blocks of `block` cells along `dim`, to each owner in turn.

        >>> [p.box.lo[0] for p in Layout.cyclic((10,), 0, block=2, owners=2).pieces(0)]
        [0, 4, 8]
        """
        return _on_owners(shape, Cyclic(dim, block), owners)

    @staticmethod
    def zigzag(shape: Sequence[int], dim: int, owners: int | Sequence[int]) -> Layout:
        """Two chunks of `dim` for each of n owners: owner i has chunk i and the i-th from the end (ring attention).

        >>> [str(p.box) for p in Layout.zigzag((16,), 0, owners=4).pieces(0)]
        ['[0:2]', '[14:16]']
        """
        return _on_owners(shape, Zigzag(dim), owners)

    @staticmethod
    def ulysses(
        shape: Sequence[int], sequence: int, heads: int, owners: int | Sequence[int], count: int | None = None
    ) -> tuple[Layout, Layout]:
        """The layouts of Ulysses attention: outside, dim `sequence` is split; inside, the heads of dim `heads`.

        `count`: how many heads the dim has, if a head is not one cell. A reshard between the two is the all-to-all.

        >>> outside, inside = Layout.ulysses((1024, 512), sequence=0, heads=1, owners=4, count=8)
        >>> print(outside, inside)
        1024x512/S0@4 1024x512/heads1=8@4
        """
        shape = checked_shape(shape)
        whole_heads = Heads(heads, shape[checked_dim(heads, shape)] if count is None else count)
        return Layout.chunk(shape, sequence, owners), _on_owners(shape, whole_heads, owners)

    @staticmethod
    def experts(shape: Sequence[int], dim: int, owners: Sequence[int | Sequence[int]]) -> Layout:
        """Experts stacked along `dim`: expert e is on owner `owners[e]`, or on each of several (replicas).

        An owner has one buffer with its experts in ascending order. To rebalance experts, reshard between two of these.

        >>> layout = Layout.experts((4, 64), 0, [0, (5, 7), 7, 0])
        >>> [piece.box.lo[0] for piece in layout.pieces(7)]
        [1, 2]
        """
        rows = Experts(dim, owners).rows
        numbers = different(owner_array([owner for row in rows for owner in row]))
        ranks = [numbers.searchsorted(row).tolist() for row in rows]
        return _on_owners(shape, Experts(dim, ranks), numbers.tolist())

    @staticmethod
    def flat(shape: Sequence[int], ranges: Iterable[tuple[int, int, int]]) -> Layout:
        """Ranges (owner, start, stop) of the flattened tensor, each a 1-d buffer (FSDP1, ZeRO, distributed optimizers).

        >>> [str(p.box) for p in Layout.flat((4, 6), [(0, 0, 9), (1, 9, 24)]).pieces(1)]
        ['[1:2, 3:6]', '[2:4, 0:6]']
        """
        shape = checked_shape(shape)
        owners, start, stop = checked_ranges(ranges, shape)
        items = tuple(zip(start.tolist(), stop.tolist(), strict=True))
        listing = Listing.of_ranges(shape, start, stop, owners)
        form = (listing.as_grid() or listing) if len(shape) == 1 else listing  # in one dim ranges are boxes
        return Layout(shape, form, lambda: _spelled(shape, "flat", None, items, owners))

    @staticmethod
    def fused(shape: Sequence[int], dim: int, segments: Sequence[int], owners: int | Sequence[int]) -> Layout:
        """Several tensors stacked along `dim` (q|k|v, gate|up): every segment is split over all owners.

        >>> [str(p.box) for p in Layout.fused((12,), 0, [8, 4], owners=2).pieces(1)]
        ['[4:8]', '[10:12]']
        """
        return _on_owners(shape, Fused(dim, segments), owners)

    # --- questions ---------------------------------------------------------------------------------------------------

    def pieces(self, owner: int) -> tuple[Piece, ...]:
        """What an owner holds, and where it lies in its buffers. Empty if all buffers of the owner are empty."""
        return self.form.pieces(self._checked_owner(owner))

    def owners(self, box: Box | None = None) -> tuple[int, ...]:
        """The owners that hold a cell of `box`, ascending; without a box all owners, even those that hold nothing."""
        if box is None:
            return tuple(self.form.owners.tolist())
        if not isinstance(box, Box):
            raise LayoutError(f"owners of a box are asked by Box(lo, hi), not {box!r}")
        box = box & Box((0,) * len(box.lo), (MOST_CELLS,) * len(box.lo)) or Box(box.lo, box.lo)
        if len(box.lo) != self.ndim:
            raise LayoutError(f"{box} has {len(box.lo)} dims, but the layout has shape {self.shape}")
        cells, block = self.form.cells
        lo, hi = cells.overlap(Boxes.of([box], self.ndim))
        rows = np.unique(block[(lo < hi).all(axis=1)])
        rows = (rows[:, None] * self.terms + np.arange(self.terms)).reshape(-1)
        return tuple(np.unique(self.form.holders.expand(rows)[1]).tolist())

    def __contains__(self, owner: object) -> bool:
        """True for an owner, also one that holds nothing."""
        if not isinstance(owner, int | np.integer) or not 0 <= owner < 2**63:
            return False
        owners = self.form.owners
        at = int(owners.searchsorted(owner))
        return at < len(owners) and bool(owners[at] == owner)

    def local_shapes(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of an owner's buffers."""
        return self.form.buffers(self._checked_owner(owner))

    def local_shape(self, owner: int) -> tuple[int, ...]:
        """The shape of an owner's only buffer."""
        shapes = self.local_shapes(owner)
        if len(shapes) != 1:
            raise LayoutError(f"owner {owner} has {len(shapes)} buffers of shapes {shapes}: ask for local_shapes")
        return shapes[0]

    def _checked_owner(self, owner: int) -> int:
        if owner not in self:
            owners = self.form.owners
            shown = ", ".join(map(str, owners[:8].tolist())) + (", ..." if len(owners) > 8 else "")
            raise LayoutError(f"no owner {owner!r} in {self!r}: it has {len(owners)} owners ({shown})")
        return int(owner)

    def whole(self) -> Layout:
        """The same layout where every term of a partial one is a replica of the value: so lie its gradients.

        >>> print(parse("8x6/P,S1@2x3").whole())
        8x6/R,S1@2x3
        """
        return self._whole

    @cached_property
    def _whole(self) -> Layout:
        if self.op is None:
            return self
        s = self.spelling  # only meshes have terms
        words = [Replicate() if str(word).startswith("P") else word for word in s.items]
        return Layout.on_mesh(self.shape, Mesh.of(s.mesh, s.names, ranks=s.owners), words)

    # --- validity ----------------------------------------------------------------------------------------------------

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Every gap and overlap. A grid has none by construction."""
        return diagnose(self.form) if isinstance(self.form, Listing) else Diagnosis()

    def validate(self) -> Layout:
        """Return the layout if its pieces cover every cell exactly once (replicas aside); otherwise raise an error.

        >>> Layout.boxes((8, 6), [(0, (0, 0), (4, 6)), (1, (3, 0), (7, 6))]).validate()
        Traceback (most recent call last):
        shardwise.errors.LayoutError: the pieces of 8x6/boxes=0:4,0:6+3:7,0:6@2 do not cover shape (8, 6) exactly:
          [7:8, 0:6] has no owner
          owners 0 and 1 both hold [3:4, 0:6]
        Remedy: give the cells without an owner to one; make overlapping boxes equal (replicas) or disjoint, or say
        overlap="replicas" (in the notation overlapping=) if overlapping cells hold equal values.
        """
        if isinstance(self.form, Listing) and self.diagnosis:  # grids cover all by construction
            raise LayoutError(
                f"the pieces of {self.brief()} do not cover shape {self.shape} exactly:\n{self.diagnosis}\n"
                f"Remedy: {self.diagnosis.remedy()}"
            )
        return self

    # --- values ------------------------------------------------------------------------------------------------------

    def shortest(self) -> Layout:
        """The same layout under a shorter name, where it is the chunks of some dims.

        >>> print(Layout.boxes((4, 6), [(1, (0, 0), (2, 6)), (0, (2, 0), (4, 6))]).shortest())
        4x6/S0@2:1,0
        """
        by_owner = [(owner, self.pieces(owner)) for owner in self.owners()]
        if self.op is not None or not all(len(pieces) == 1 for _, pieces in by_owner):
            return self
        corners = sorted((pieces[0].box.lo, owner) for owner, pieces in by_owner)
        counts = [len({lo[dim] for lo, _ in corners}) for dim in range(self.ndim)]
        cut = [dim for dim, count in enumerate(counts) if count > 1]
        if not cut or prod(counts) != len(by_owner):
            return self
        owners, words = [owner for _, owner in corners], [f"S{dim}" for dim in cut]
        if len(cut) == 1:
            chunks = Layout.chunk(self.shape, cut[0], owners)
        else:
            chunks = Layout.on_mesh(self.shape, Mesh.of([counts[dim] for dim in cut], ranks=owners), words)
        return chunks if chunks == self else self

    def relabel(self, owners: Mapping[int, int]) -> Layout:
        """The same layout with owners renumbered. Owners that are not named keep their number.

        >>> print(Layout.chunk((8, 6), 0, owners=2).relabel({0: 1, 1: 0}))
        8x6/S0@2:1,0
        """
        if not isinstance(owners, Mapping):
            raise LayoutError(f"relabel needs a mapping owner -> new owner, not {owners!r}")
        for owner in owners:
            self._checked_owner(owner)
        old = self.form.owners
        new = owner_array([owners.get(o, o) for o in old.tolist()])
        refuse_repeats(new, "a relabelled layout")
        order = range(prod(self.spelling.mesh)) if self.spelling.owners is None else self.spelling.owners
        spelling = replace(self.spelling, owners=unless_counting(ints([owners.get(o, o) for o in order])))
        return Layout(self.shape, self.form.relabel(old, new), lambda: spelling, self.op)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that are the same for equal layouts, on every machine."""
        head = f"shardwise layout 1 {self.shape} {self.op} ".encode()
        return blake2b(head + self.form.digest(), digest_size=16).hexdigest()

    @cached_property
    def _hash(self) -> int:
        return int(self.fingerprint[:15], 16)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self.shape == other.shape and self.fingerprint == other.fingerprint)

    @cached_property
    def spelling(self) -> Spelling:
        """How the layout was written down: not part of its meaning, so not compared."""
        return self._spell()  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Callable[[str], Layout], tuple[str]]:
        return parse, (str(self),)

    def __str__(self) -> str:
        return str(self.spelling)

    def brief(self, width: int = 100) -> str:
        """The notation, cut short where it is very long."""
        text = str(self)
        return text if len(text) <= width else f"{text[:width]}... ({len(self.form.owners)} owners)"

    def __repr__(self) -> str:
        return f"Layout('{self.brief()}')"

    def _repr_html_(self) -> str:
        """Who holds what, in notebooks."""
        from shardwise import report  # which looks at layouts

        return report.glance(self)


def parse(text: str) -> Layout:
    """The layout of a string: the inverse of str(layout). See `shardwise.notation` for the grammar.

    >>> parse("8x6/S0@4") == Layout.chunk((8, 6), 0, owners=4)
    True
    """
    if not isinstance(text, str):
        raise LayoutError(f"the notation of a layout is a string, not {text!r}")
    return from_spelling(read(text))


def from_spelling(s: Spelling) -> Layout:
    """The layout of a string that was read before."""
    owners = s.owners if s.owners is not None else range(prod(s.mesh))
    if s.kind == "mesh":
        return _parsed_mesh(s, owners)
    rows, dim = cast(tuple[tuple[int, ...], ...], s.items), s.dim or 0
    match s.kind:
        case "split":
            return Layout.split(s.shape, dim, [r[0] for r in rows], list(owners))
        case "flat":
            return Layout.flat(s.shape, [(o, r[0], r[1]) for o, r in zip(owners, rows, strict=True)])
    return Layout.boxes(
        s.shape,
        [(o, r[::2], r[1::2]) for o, r in zip(owners, rows, strict=True)],
        overlap="replicas" if s.kind == "overlapping" else None,
    )


def _parsed_mesh(s: Spelling, owners: Sequence[int]) -> Layout:
    word = str(s.items[0])
    if s.names is None and len(s.items) == 1 and word[1:].isdigit():  # may name an owner twice
        return Layout.chunk(s.shape, int(word[1:]), list(owners))
    return Layout.on_mesh(s.shape, Mesh.of(s.mesh, s.names, ranks=owners), s.items)


def _on_owners(shape: Sequence[int], placement: Placement, owners: int | Sequence[int]) -> Layout:
    """One placement over a plain list of owners."""
    numbers = owner_array(owners)
    return Layout.on_mesh(shape, Mesh.of((len(numbers),), ranks=numbers), [placement])


def _spelled(
    shape: tuple[int, ...], kind: str, dim: int | None, items: tuple[str, ...] | tuple[Numbers, ...], owners: Ints
) -> Spelling:
    return Spelling(shape, kind, dim, items, (len(owners),), None, unless_counting(owners))


def _spelled_mesh(shape: tuple[int, ...], words: tuple[str, ...], mesh: Mesh) -> Spelling:
    names = mesh.names if mesh.named else None
    return Spelling(shape, "mesh", None, words, mesh.shape, names, unless_counting(mesh.ranks.reshape(-1)))


def _corners(boxes: Boxes) -> tuple[tuple[int, ...], ...]:
    """lo and hi of every axis in turn, as the notation lists them."""
    return tuple(map(tuple, np.stack(boxes, axis=2).reshape(boxes.count, -1).tolist()))
