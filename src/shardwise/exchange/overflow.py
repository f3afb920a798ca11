"""Values that a cast would lose: those beyond the range of the new dtype, which become inf, NaN or another number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple, get_args

import torch

from shardwise.errors import RefusedValueError
from shardwise.exchange.reduce import Look, blocks

Overflow = Literal["refuse", "allow"]
# The two have the same exponents: only the last 0.2 % of the range is lost, and no cast is as frequent as this one.
NOT_WATCHED = (torch.float32, torch.bfloat16)
QUICK = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)


class Range(NamedTuple):
    """The finite values of a dtype lie between these two; `inf` tells whether it has infinities, too."""

    least: float
    most: float
    inf: bool


@dataclass(frozen=True, order=True)
class Loss:
    """How many values of a tensor are lost, and the largest of them, without its sign."""

    count: int = 0
    largest: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.count + other.count, max(self.largest, other.largest))


@dataclass(frozen=True)
class Lost:
    """What a cast would lose of a tensor."""

    name: str
    dtype: torch.dtype
    becomes: torch.dtype
    loss: Loss

    def __str__(self) -> str:
        values = "1 value" if self.loss.count == 1 else f"{self.loss.count} values"
        return (
            f"{values} of {self.name} {'is' if self.loss.count == 1 else 'are'} beyond the range of {self.becomes}, "
            f"which ends at {_range(self.becomes).most:g}: the largest in magnitude is {self.loss.largest:g} "
            f"({self.dtype})"
        )

    @property
    def became(self) -> str:
        """What the cast makes of the values."""
        return "inf" if _range(self.becomes).inf else "NaN or another number"


class Losses:
    """What casts lose of many tensors, counted as they are read."""

    def __init__(self) -> None:
        self._losses = dict[str, Lost]()

    def look(self, name: str, tensors: Iterable[torch.Tensor], becomes: torch.dtype) -> None:
        """Count what these values of a tensor lose by a cast."""
        for tensor in tensors:
            lost = loss(tensor, becomes)
            if lost.count:
                self.add(Lost(name, tensor.dtype, becomes, lost))

    def looking(self, name: str, dtype: torch.dtype, becomes: torch.dtype) -> Look | None:
        """What looks at the values of a tensor; None where there is nothing to look for."""
        return partial(self.look, name, becomes=becomes) if may_overflow(dtype, becomes) else None

    def add(self, lost: Lost) -> None:
        """More values of a tensor."""
        before = self._losses.get(lost.name)
        self._losses[lost.name] = lost if before is None else replace(lost, loss=before.loss + lost.loss)

    def keep_worst(self, lost: Lost) -> None:
        """Values of a tensor that may have been counted already."""
        before = self._losses.get(lost.name, lost)
        self._losses[lost.name] = max(before, lost, key=lambda one: one.loss)

    def clear(self) -> None:
        """Start again."""
        self._losses.clear()

    def __getitem__(self, name: str) -> Loss:
        """Of a tensor."""
        return self._losses[name].loss if name in self._losses else Loss()

    def per_tensor(self) -> list[Lost]:
        """Every tensor that loses any."""
        return list(self._losses.values())


def check_overflow(overflow: object) -> None:
    """Refuse another word."""
    if overflow not in get_args(Overflow):
        raise RefusedValueError(f"overflow= must be 'refuse' or 'allow', not {overflow!r}")


def refusal(lost: Iterable[Lost], written: str) -> str:
    """Why a cast is refused: the worst tensor, the others, and what was written."""
    worst, *others = sorted(lost, key=lambda one: (-one.loss.count, one.name))
    more = f" (and {len(others)} more tensor{'s' * (len(others) > 1)}, such as {others[0].name})" if others else ""
    return f"{worst}{more}. {written}; overflow='allow' casts anyway"


def refuse_loss(lost: Iterable[Lost], written: str = "Nothing was written") -> None:
    """Refuse a cast that would lose any value."""
    losses = list(lost)
    if losses:
        raise RefusedValueError(refusal(losses, written))


@lru_cache(maxsize=1024)
def may_overflow(dtype: torch.dtype, becomes: torch.dtype) -> bool:
    """True where a value may be beyond the range of the new dtype. Other casts cost nothing."""
    if dtype == becomes or (dtype, becomes) == NOT_WATCHED or becomes == torch.bool:  # which only tells what is not 0
        return False
    ours, theirs = _range(dtype), _range(becomes)
    beyond = ours.least < theirs.least or ours.most > theirs.most or (ours.inf and not theirs.inf)
    return beyond or (_has_fractions(dtype) and not _has_fractions(becomes))


def loss(tensor: torch.Tensor, becomes: torch.dtype) -> Loss:
    """What a cast loses of the values of a tensor.

    >>> loss(torch.tensor([1.0, -7e4, 1e5, float("inf")]), torch.float16)
    Loss(count=2, largest=100000.0)
    """
    if not tensor.numel() or not may_overflow(tensor.dtype, becomes) or _within(tensor, _range(becomes)):
        return Loss()
    total = Loss()
    for at in blocks(tensor.shape):
        total += _loss(tensor[at], becomes)
    return total


def _within(tensor: torch.Tensor, limits: Range) -> bool:
    """True where all values are finite and in the range: one pass over the memory, and all that most tensors need."""
    if tensor.dtype not in QUICK:
        return False
    low, high = torch.aminmax(tensor)
    return bool(limits.least <= low.item() and high.item() <= limits.most)


def _loss(values: torch.Tensor, becomes: torch.dtype) -> Loss:
    if values.is_complex():
        return _loss(torch.view_as_real(values), becomes.to_real())
    large = values.double()
    lost = large[_is_lost(values, large, becomes.to_real())].abs()
    return Loss(lost.numel(), float(lost.nan_to_num(0, torch.inf).max())) if lost.numel() else Loss()


def _is_lost(values: torch.Tensor, large: torch.Tensor, becomes: torch.dtype) -> torch.Tensor:
    least, most, inf = _range(becomes)
    if not _has_fractions(values.dtype) and not _has_fractions(becomes):  # exact, also where float64 is not
        cast = values.to(becomes)
        return (cast.to(values.dtype) != values) | ((cast.double() < 0) != (large < 0))
    if inf:
        return large.isfinite() & ~values.to(becomes).to(torch.float32 if becomes.itemsize < 8 else becomes).isfinite()
    if _has_fractions(becomes):
        return (large < least) | (large > most)
    whole = large.trunc()
    return ~((whole >= least) & (whole < most + 1))  # also NaN


@lru_cache(maxsize=256)
def _range(dtype: torch.dtype) -> Range:
    if dtype == torch.bool:
        return Range(0, 1, inf=False)
    if not _has_fractions(dtype):
        return Range(float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max), inf=False)
    limits = torch.finfo(dtype)
    top = torch.tensor([torch.inf], dtype=torch.float32, device="cpu").to(dtype.to_real())
    return Range(limits.min, limits.max, inf=bool(top.double().isinf()))


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
