"""Terms to values: reduced element by element in the order of the terms, so that every layout gets the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

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
BLOCK = 2**16  # elements that are worked on at a time: they stay in the cache, and need little memory


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
    one = torch.zeros(1, dtype=dtype)
    try:
        reduce(one, [one, one], op)
    except RuntimeError as error:
        raise ExchangeError(f"terms of dtype {dtype} cannot be reduced by {op!r}: {error}") from None


def reduce(target: Tensor, terms: Sequence[Tensor], op: str, look: Look | None = None) -> None:
    """Write the reduction of the terms, of which there are two or more, of the shape of the target.

    It is computed on the device of the target. Terms may lie elsewhere: messages that travel with the agreement, and
    all messages of transports that cannot reach the device, are in CPU memory. `look` sees values that are cast, before
    they are.
    """
    dtype, combine = terms[0].dtype, COMBINE[op]
    wide = accumulator(dtype)
    there = target.dtype == wide == dtype
    for at in blocks(target.shape):
        first, *rest = (term[at].to(target.device, wide) for term in terms)
        value = combine(first, rest[0], out=target[at] if there else torch.empty_like(first))
        for term in rest[1:]:
            combine(value, term, out=value)
        if op == "avg":
            value.div_(len(terms))
        if not there:
            rounded = value.to(dtype)  # as the value is, whatever it is cast to
            if look is not None:
                look([rounded])
            target[at] = rounded


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What terms are reduced in: wide enough that short floats are rounded once."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int64 if dtype in UNSIGNED else dtype


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no arithmetic for them; int64 wraps to the same bits


def blocks(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Slices of the first dims that cover the shape in blocks of about BLOCK cells; none where it is one block."""
    cells, axis = 1, len(shape)
    while axis and cells * shape[axis - 1] <= BLOCK:
        axis -= 1
        cells *= shape[axis]
    if not axis:
        yield ()
        return
    yield from _along(shape, axis - 1, max(1, BLOCK // max(cells, 1)))


def _along(shape: Sequence[int], axis: int, length: int) -> Iterator[tuple[slice, ...]]:
    """Every index of the axes before `axis`, and pieces of that length along it."""
    for outer in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], length):
            yield (*(slice(i, i + 1) for i in outer), slice(start, start + length))
