"""Casts on the way: which are possible, and what travels."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.exchange.reduce import check as check_reduction
from shardwise.layout import Layout
from shardwise.planning import plan


def travels_as(source: Layout, target: Layout, dtype: torch.dtype, becomes: torch.dtype) -> torch.dtype:
    """The dtype of messages: cast before they travel where that is shorter, unless they are terms to be reduced."""
    check_dtype(becomes)
    check_cast(dtype, becomes)
    if plan(source, target).reducing:
        check_reduction(source.op or "", dtype)
        return dtype
    return becomes if becomes.itemsize < dtype.itemsize else dtype


def check_dtype(dtype: object) -> None:
    """Refuse what is none."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise RefusedTypeError(f"dtype= must be a torch.dtype, not {dtype!r}")


@lru_cache(maxsize=1024)
def check_cast(dtype: torch.dtype, becomes: torch.dtype) -> None:
    """Refuse casts that lose more than digits."""
    if dtype == becomes:
        return
    if dtype.is_complex and not becomes.is_complex:
        raise RefusedValueError(f"{dtype} cannot be cast to {becomes}: the imaginary part would be lost")
    try:
        torch.zeros(1, dtype=becomes, device="cpu").copy_(torch.zeros(1, dtype=dtype, device="cpu"))
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise RefusedValueError(f"{dtype} cannot be cast to {becomes}: {said}") from None
