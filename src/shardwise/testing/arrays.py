"""Sharded numpy arrays in one process: scatter, gather, and plans carried out message by message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import PlanError
from shardwise.geometry import Box, ints
from shardwise.layout import Layout, Piece
from shardwise.planning import Copy, Part, Plan

Array = npt.NDArray[Any]
Shards = dict[int, list[Array]]  # the buffers of every owner

COMBINE: Mapping[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def scatter(array: npt.ArrayLike, layout: Layout, *, seed: int = 0) -> Shards:
    """The buffers that every owner has when `array` lies in this layout. Terms of a partial one are drawn at random.

    >>> scatter(np.arange(6), Layout.chunk((6,), 0, owners=2))
    {0: [array([0, 1, 2])], 1: [array([3, 4, 5])]}
    """
    whole = np.asarray(array)
    if whole.shape != layout.shape:
        raise PlanError(f"the array has shape {whole.shape}, but the layout {layout!r} has {layout.shape}")
    terms = _terms(whole, layout, np.random.default_rng(seed))
    shards = empty(layout, whole.dtype)
    for owner, buffers in shards.items():
        for piece in layout.pieces(owner):
            view(buffers, piece)[...] = terms[term_of(layout, owner)][index(piece.box)]
    return shards


def gather(shards: Mapping[int, Sequence[Array]], layout: Layout) -> Array:
    """The array that lies in these buffers: the inverse of `scatter`. Replicas must agree."""
    dtype = _dtype(shards, layout)
    terms = np.zeros((layout.terms, *layout.shape), dtype=dtype)
    written = np.zeros((layout.terms, *layout.shape), dtype=np.bool_)
    for owner in layout.owners():
        for piece in layout.pieces(owner):
            at = (term_of(layout, owner), *index(piece.box))
            values = view(shards[owner], piece)
            if not np.array_equal(terms[at][written[at]], values[written[at]], equal_nan=values.dtype.kind in "fc"):
                raise PlanError(f"owner {owner} holds other values in {piece.box} than another owner of these cells")
            terms[at], written[at] = values, True
    return _combined(list(terms), layout.op)


def simulate(plan: Plan, shards: Mapping[int, Sequence[Array]]) -> Shards:
    """The target's buffers after the plan ran on the source's: packed, sent and unpacked by each owner's own part.

    >>> rows, columns = Layout.chunk((4, 4), 0, owners=2), Layout.chunk((4, 4), 1, owners=2)
    >>> from shardwise.planning import plan
    >>> after = simulate(plan(rows, columns), scatter(np.arange(16).reshape(4, 4), rows))
    >>> after[1][0].tolist()
    [[2, 3], [6, 7], [10, 11], [14, 15]]
    """
    dtype = _dtype(shards, plan.source)
    for leg in plan.legs:
        averaged = leg.makes_sums and leg.source.op == "avg"
        shards = _simulate(leg, shards, np.result_type(dtype, np.int64) if averaged else dtype)
    return {owner: list(buffers) for owner, buffers in shards.items()}


def _simulate(leg: Plan, shards: Mapping[int, Sequence[Array]], dtype: np.dtype[Any]) -> Shards:
    """One leg of a plan, whose results have this dtype."""
    parts = {owner: leg.part(owner) for owner in leg.owners}
    result = empty(leg.target, dtype)
    for owner, buffers in result.items():
        for buffer in buffers:
            buffer[...] = parts[owner].fill or 0
    todo = {owner: _by_stage(part) for owner, part in parts.items()}
    for stage in sorted({stage for stages in todo.values() for stage in stages}):
        now = {owner: stages.get(stage, []) for owner, stages in todo.items()}
        transport = _packed(leg, now, shards, result, stage)
        for owner, copies in now.items():
            _unpack(leg, owner, copies, result.get(owner, []), stage, transport)
        if any(len(message) for message in transport.values()):
            raise PlanError(f"step {stage[0]}, round {stage[1]}: cells were sent that no owner expected")
    return result


def _packed(
    plan: Plan,
    now: Mapping[int, list[Copy]],
    shards: Mapping[int, Sequence[Array]],
    messages: Shards,
    stage: tuple[int, int],
) -> dict[tuple[int, int], Array]:
    """One message per sender and receiver, packed in the sender's order."""
    layout, buffers = (plan.source, shards) if stage[0] == 0 else (plan.target, messages)
    transport = defaultdict[tuple[int, int], list[Array]](list)
    for owner, copies in now.items():
        for copy in copies:
            if copy.source == owner:
                cells = read(buffers[owner], layout, owner, copy.box)
                transport[copy.source, copy.target].append(cells.reshape(-1))
    return {pair: np.concatenate(cells) for pair, cells in transport.items()}


def _unpack(
    plan: Plan,
    owner: int,
    copies: list[Copy],
    buffers: Sequence[Array],
    stage: tuple[int, int],
    transport: dict[tuple[int, int], Array],
) -> None:
    """Messages taken apart in the receiver's order; terms are then reduced in theirs."""
    arrived = list[tuple[Copy, Array]]()
    for copy in copies:
        if copy.target == owner:
            message = transport[copy.source, copy.target]
            arrived.append((copy, message[: copy.box.volume].reshape(copy.box.shape)))
            transport[copy.source, copy.target] = message[copy.box.volume :]
    if plan.reducing and stage[0] == 0:
        arrived.sort(key=lambda item: (item[0].box.lo, item[0].box.hi, item[0].term))
        for (_, _), terms in groupby(arrived, key=lambda item: (item[0].box.lo, item[0].box.hi)):
            several = list(terms)
            if [copy.term for copy, _ in several] != _terms_of(plan, owner):
                raise PlanError(f"owner {owner} gets terms {[c.term for c, _ in several]} of {several[0][0].box}")
            op = "sum" if plan.makes_sums and plan.source.op == "avg" else plan.source.op
            sizes = plan.sums.sizes if plan.sums and plan.takes_sums else None
            value = _combined([cells for _, cells in several], op, sizes)
            write(buffers, plan.target, owner, several[0][0].box, value)
    else:
        for copy, cells in arrived:
            write(buffers, plan.target, owner, copy.box, cells)


def _terms_of(leg: Plan, owner: int) -> list[int]:
    """The terms that an owner reduces: all, or those of its own term of the target."""
    edges = leg.sums.edges if leg.sums and leg.sums.made else (0, leg.source.terms)
    term = term_of(leg.target, owner) if len(edges) > 2 else 0
    return list(range(edges[term], edges[term + 1]))


def _by_stage(part: Part) -> dict[tuple[int, int], list[Copy]]:
    """The copies of each round of each step."""
    stages = defaultdict[tuple[int, int], list[Copy]](list)
    for copy in part.copies:
        stages[copy.step, copy.round].append(copy)
    return stages


def _dtype(shards: Mapping[int, Sequence[Array]], layout: Layout) -> np.dtype[Any]:
    """The dtype of all buffers, which must be those of the layout."""
    for owner in layout.owners():
        shapes = [b.shape for b in shards[owner]] if owner in shards else None
        if shapes != list(layout.local_shapes(owner)):
            raise PlanError(f"owner {owner} of {layout!r} has buffers {layout.local_shapes(owner)}, not {shapes}")
    return np.result_type(*{b.dtype for buffers in shards.values() for b in buffers})


def empty(layout: Layout, dtype: npt.DTypeLike) -> Shards:
    """Buffers of the right shapes for every owner."""
    return {owner: [np.zeros(shape, dtype) for shape in layout.local_shapes(owner)] for owner in layout.owners()}


def view(buffers: Sequence[Array], piece: Piece) -> Array:
    """The cells of a piece inside its owner's buffers."""
    flat = buffers[piece.buffer].reshape(-1)
    strides = [stride * flat.itemsize for stride in piece.strides]
    return np.lib.stride_tricks.as_strided(flat[piece.offset :], piece.box.shape, strides)


def read(buffers: Sequence[Array], layout: Layout, owner: int, box: Box) -> Array:
    """The cells of a box from an owner's buffers, whatever pieces they lie in."""
    result = np.zeros(box.shape, buffers[0].dtype)
    for inside, cells in _parts(buffers, layout, owner, box):
        result[index(inside.within(box))] = cells
    return result


def write(buffers: Sequence[Array], layout: Layout, owner: int, box: Box, cells: Array) -> None:
    """The cells of a box into an owner's buffers."""
    for inside, place in _parts(buffers, layout, owner, box):
        place[...] = cells[index(inside.within(box))]


def _parts(buffers: Sequence[Array], layout: Layout, owner: int, box: Box) -> Iterator[tuple[Box, Array]]:
    for piece in layout.pieces(owner):
        inside = piece.box & box
        if inside is not None:
            yield inside, view(buffers, piece)[index(inside.within(piece.box))]


def index(box: Box) -> tuple[slice | EllipsisType, ...]:
    """The box as an index that gives a view, also of a 0-d array."""
    return (*box.slices, ...)


def term_of(layout: Layout, owner: int) -> int:
    """Which term of a partial layout an owner holds."""
    return int(layout.form.holders.term_of(ints([owner]))[0])


def _combined(terms: Sequence[Array], op: str | None, sizes: Sequence[int] | None = None) -> Array:
    """The reduction of terms, each of which is the sum of so many others."""
    if op is None:
        return terms[0]
    sizes = sizes or [1] * len(terms)
    if op != "avg":
        return _in_a_tree(COMBINE[op], terms, sizes)
    wide = np.result_type(terms[0], np.int64)  # a sum of narrow numbers may not fit
    value, count = _in_a_tree(np.add, [term.astype(wide) for term in terms], sizes), sum(sizes)
    whole = wide == np.int64
    if whole and (value % count).any():
        raise PlanError(f"an average of {terms[0].dtype} terms is not an integer: use a float dtype")
    return (value // count if whole else value / count).astype(terms[0].dtype)


def _in_a_tree(combine: Callable[[Array, Array], Array], terms: Sequence[Array], sizes: Sequence[int]) -> Array:
    """The first 2**k of n terms, the others, and then both: 2**k is the largest power of two below n."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((sum(sizes) - 1).bit_length() - 1)
    first = int(np.searchsorted(np.cumsum(sizes), half)) + 1
    return combine(_in_a_tree(combine, terms[:first], sizes[:first]), _in_a_tree(combine, terms[first:], sizes[first:]))


def _terms(value: Array, layout: Layout, random: np.random.Generator) -> list[Array]:
    """Terms whose reduction is the value, exactly where it is made of whole numbers."""
    others = layout.terms - 1
    if not others:
        return [value]
    noise = [random.integers(0, 2, value.shape).astype(value.dtype) for _ in range(others)]
    match layout.op:
        case "sum":
            return [value - reduce(np.add, noise), *noise]  # unsigned numbers wrap round, and back
        case "avg":
            room = (value > _least(value)) & (value < -1 - _least(value)) if value.dtype.kind == "i" else True
            change = np.where(room, noise[0], 0).astype(value.dtype) * (value.dtype.kind not in "ub")
            return [value - change, value + change, *[value] * (others - 1)]
        case "product":
            units = [np.where(n == 0, 1, -1).astype(value.dtype) for n in noise]
            return [value * reduce(np.multiply, units), *units]
        case "bxor":
            return [value ^ reduce(np.bitwise_xor, noise), *noise]
        case "max":
            away = np.where(value > _least(value), value - noise[0], value)
        case "min":
            away = np.where(value + noise[0] > value, value + noise[0], value)
        case "band":
            away = value | noise[0]
        case _:
            away = value & ~noise[0]
    whose = random.integers(0, layout.terms, value.shape)
    return [np.where(whose == term, value, away).astype(value.dtype) for term in range(layout.terms)]


def _least(value: Array) -> int | float:
    return int(np.iinfo(value.dtype).min) if value.dtype.kind in "iu" else -np.inf
