"""quantise and dequantise: whole tensors, plain or sharded."""

from __future__ import annotations

import torch

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.geometry import Box
from shardwise.quantised.arithmetic import (
    MOST,
    Scaling,
    check_finite,
    dequantise_box,
    encode_box,
    largest_magnitudes,
)
from shardwise.quantised.formats import EXPONENTS, Format, format_of
from shardwise.quantised.layouts import wrong_shape

VALUES = (torch.float32, torch.bfloat16, torch.float16)


def whole_box(shape: tuple[int, ...]) -> Box:
    """All cells of a tensor."""
    return Box((0,) * len(shape), shape)


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, format: Format | str, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values of codes and scales.

    >>> codes, scales = quantise(torch.tensor([[1.0, -2.0], [4.0, 0.0]]), "fp8-block")
    >>> dequantise(codes, scales, "fp8-block", dtype=torch.float32)
    tensor([[ 1., -2.],
            [ 4.,  0.]])
    """
    found = format_of(format)
    check_value_dtype(dtype)
    check_tensors(codes, scales, found)
    shape = found.value_shape(tuple(codes.shape))
    values = torch.empty(shape, dtype=dtype, device=codes.device)
    dequantise_box(values, codes, scales, found, whole_box(shape), shape)
    return values


def quantise(
    values: torch.Tensor, format: Format | str, *, scales: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of values. `scales`: the dtype of the scales, by default the usual one of the format.

    >>> codes, scales = quantise(torch.tensor([[448.0, -7.0]]), "fp8-row")
    >>> codes.to(torch.float32), scales
    (tensor([[448.,  -7.]]), tensor([[1.]]))
    """
    found = format_of(format)
    check_can_quantise(found)
    dtype, shape = scales_dtype(found, scales), tuple(values.shape)
    largest = largest_magnitudes(values, found, whole_box(shape), shape)
    check_finite(largest, "the tensor")
    scaling = Scaling.of(largest, found, dtype)
    codes = torch.empty(shape, dtype=found.codes, device=values.device)
    encode_box(codes, values, scaling.forward, found, whole_box(shape), shape)
    return codes, scaling.stored


def scales_dtype(format: Format, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of new scales: float32, or exponents as bytes, if none is given."""
    if dtype is None:
        return torch.uint8 if format.scales == EXPONENTS else torch.float32
    if dtype not in format.scales:
        raise RefusedTypeError(f"scales of {format.name} cannot be {dtype}")
    return dtype


def check_value_dtype(dtype: object) -> None:
    """Refuse values that are not floating point numbers of 16 or 32 bits."""
    if dtype not in VALUES:
        raise RefusedTypeError(f"values can be float32, bfloat16 or float16, not {dtype!r}")


def check_can_quantise(format: Format) -> None:
    """Refuse formats that are only read."""
    if format.codes not in MOST:
        raise RefusedValueError(f"{format.name} can be dequantised, but values cannot be quantised to it here")


def check_tensors(codes: torch.Tensor, scales: torch.Tensor, format: Format) -> None:
    """Refuse codes and scales that are not of this format."""
    if codes.dtype != format.codes or scales.dtype not in format.scales:
        raise RefusedTypeError(f"codes of {codes.dtype} with scales of {scales.dtype} are not {format.name}")
    shapes = tuple(codes.shape), tuple(scales.shape)
    if not format.fits(*shapes):
        raise RefusedValueError(wrong_shape("the tensor", *shapes, format))
