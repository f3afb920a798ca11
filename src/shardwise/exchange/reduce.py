"""Terms to values: added up in a binary tree that depends on their number alone, so every layout gets the same bits.

Of n terms the first 2**k make one half and the others make the other half, where 2**k is the largest power of two below
n; and so on in each half. So the terms of a host can be added there, and their sum travels in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from shardwise.errors import ExchangeError

Tensor = torch.Tensor
Look = Callable[[Iterable[Tensor]], None]  # at values before they are cast

COMBINE: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BITWISE = ("band", "bor", "bxor")
BLOCK = 2**17  # elements that are worked on at a time: they stay in the cache, and need little memory
DEVICE_BLOCK = 2**24  # the same on an accelerator, where every block takes a launch


@lru_cache(maxsize=256)
def check(op: str, dtype: torch.dtype) -> None:
    """Refuse a reduction that this dtype does not have."""
    fractions = dtype.is_floating_point or dtype.is_complex
    unordered = dtype.is_complex or dtype == torch.uint64  # which torch cannot compare
    if op == "avg" and not fractions:
        raise ExchangeError(
            f"terms of dtype {dtype} cannot be reduced by 'avg': an average of integers need not be an integer. "
            f"Cast the terms to a float dtype first, or use 'sum'"
        )
    if (op in BITWISE and fractions) or (op in ("max", "min") and unordered):
        raise ExchangeError(f"terms of dtype {dtype} cannot be reduced by {op!r}: there is no such operation")
    one = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        reduce(one.clone(), [one, one], Rule(op), dtype)
    except RuntimeError as error:
        raise ExchangeError(f"terms of dtype {dtype} cannot be reduced by {op!r}: {error}") from None


class Rule(NamedTuple):
    """How terms become a value. `sizes`: of how many terms of the source each is the sum; None where it is one.

    A `partial` result is itself such a sum: it is not rounded, and not divided for an average.
    """

    op: str
    sizes: tuple[int, ...] | None = None
    partial: bool = False


def reduce(target: Tensor, terms: Sequence[Tensor], rule: Rule, dtype: torch.dtype, look: Look | None = None) -> None:
    """Write the reduction of the terms, each of the shape of the target. `dtype` is that of the source's terms.

    It is computed on the device of the target. Terms may lie elsewhere: messages that travel with the agreement, and
    all messages of transports that cannot reach the device, are in CPU memory. `look` sees values that are cast, before
    they are.
    """
    wide, sizes = accumulator(dtype), rule.sizes or (1,) * len(terms)
    there = target.dtype == wide and (rule.partial or wide == dtype)
    for at in blocks(target.shape, None if target.device.type == "cpu" else DEVICE_BLOCK):
        value = target[at] if there else torch.empty(target[at].shape, dtype=wide, device=target.device)
        _add_up((term[at].to(target.device, wide) for term in terms), sizes, COMBINE[rule.op], value)
        if rule.op == "avg" and not rule.partial:
            value.div_(sum(sizes))
        if there:
            continue
        rounded = value if rule.partial else value.to(dtype)  # as the value is, whatever it is cast to
        if look is not None and not rule.partial:
            look([rounded])
        target[at] = rounded


class Node(NamedTuple):
    """Some terms that were added up. Its memory may be written if it is our own."""

    size: int
    value: Tensor
    own: bool


def _add_up(terms: Iterable[Tensor], sizes: Sequence[int], combine: Callable[..., Tensor], result: Tensor) -> None:
    """Equal sizes are joined as they come, and what is left at the end from the last to the first: that is the tree."""
    nodes, spare, total = list[Node](), list[Tensor](), sum(sizes)

    def join() -> None:
        second, first = nodes.pop(), nodes.pop()
        size = first.size + second.size
        spare.extend(node.value for node in (first, second) if node.own)
        room = result if size == total else spare.pop() if spare else torch.empty_like(result)
        nodes.append(Node(size, combine(first.value, second.value, out=room), True))

    for size, term in zip(sizes, terms, strict=True):
        nodes.append(Node(size, term, False))
        while len(nodes) > 1 and nodes[-2].size == nodes[-1].size:
            join()
    while len(nodes) > 1:
        join()
    if len(sizes) == 1:
        result.copy_(nodes[0].value)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of some of the terms travel in: as wide as they are computed, and at least four bytes."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What terms are reduced in: wide enough that short floats are rounded once."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int64 if dtype in UNSIGNED else dtype


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no arithmetic for them; int64 wraps to the same bits


def blocks(shape: Sequence[int], most: int | None = None) -> Iterator[tuple[slice, ...]]:
    """Slices of the first dims that cover the shape in blocks of about so many cells; none where it is one block."""
    cells, axis, most = 1, len(shape), most or BLOCK
    while axis and cells * shape[axis - 1] <= most:
        axis -= 1
        cells *= shape[axis]
    if not axis:
        yield ()
        return
    yield from _along(shape, axis - 1, max(1, most // max(cells, 1)))


def _along(shape: Sequence[int], axis: int, length: int) -> Iterator[tuple[slice, ...]]:
    """Every index of the axes before `axis`, and pieces of that length along it."""
    for outer in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], length):
            yield (*(slice(i, i + 1) for i in outer), slice(start, start + length))
