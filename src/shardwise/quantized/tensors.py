"""quantize and dequantize: whole tensors, plain or sharded."""

from __future__ import annotations

import torch

from shardwise.containers.container import container_of
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.exchange import view_of
from shardwise.geometry import Box
from shardwise.layout import places_of
from shardwise.quantized.arithmetic import (
    LARGEST_CODE,
    Scaling,
    check_finite,
    dequantize_box,
    encode_box,
    largest_magnitudes,
)
from shardwise.quantized.formats import EXPONENTS, VALUES, Format, format_of
from shardwise.quantized.layouts import scales_layout, wrong_shape
from shardwise.tensor.resharding import reshard
from shardwise.transports.members import owner_here


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, format: Format | str, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values of codes and scales, plain or sharded.

    Sharded codes give a ShardedTensor in their layout. The scales may have any sharding. All ranks of the group call.

    >>> codes, scales = quantize(torch.tensor([[1.0, -2.0], [4.0, 0.0]]), "fp8-block")
    >>> dequantize(codes, scales, "fp8-block", dtype=torch.float32)
    tensor([[ 1., -2.],
            [ 4.,  0.]])
    """
    found = format_of(format)
    check_value_dtype(dtype)
    check_tensors(codes, scales, found)
    if is_sharded(codes) or is_sharded(scales):
        return _dequantize_sharded(codes, scales, found, dtype)
    shape = found.value_shape(tuple(codes.shape))
    values = torch.empty(shape, dtype=dtype, device=codes.device)
    dequantize_box(values, codes, scales, found, Box.whole(shape), shape)
    return values


def _dequantize_sharded(codes: torch.Tensor, scales: torch.Tensor, format: Format, dtype: torch.dtype) -> torch.Tensor:
    """Every rank gets the scales of its codes, and computes its part."""
    if not (is_sharded(codes) and is_sharded(scales)) or format.pairs:
        raise RefusedTypeError("codes and scales must both be sharded, with a code in a byte: use load, or a Resharder")
    container, shape = container_of(codes), tuple(codes.shape)
    layout = container.layout
    grid = reshard(scales, scales_layout(layout, format, tuple(scales.shape)), group=container.group)
    me, local = owner_here(container.group), container.disassemble(codes)
    values = [torch.empty(part.shape, dtype=dtype, device=part.device) for part in local]
    pieces = grid.layout.pieces(me) if grid is not None and me in grid.layout else ()
    known = {piece.box: grid.shards[piece.buffer] for piece in pieces if grid is not None}
    here, there = (places_of(layout, me, [part.stride() for part in parts]) for parts in (local, values))
    for at, (source, target) in enumerate(zip(here.windows(), there.windows(), strict=True)):
        box = here.boxes.box(at)
        factor = known[format.scales_box(box, shape, tuple(scales.shape))]
        dequantize_box(view_of(target, values), view_of(source, local), factor, format, box, shape)
    return ShardedTensor(values, layout, container.group)


def quantize(
    values: torch.Tensor, format: Format | str, *, scales: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of values. `scales`: the dtype of the scales, by default the usual one of the format.

    >>> codes, scales = quantize(torch.tensor([[448.0, -7.0]]), "fp8-row")
    >>> codes.to(torch.float32), scales
    (tensor([[448.,  -7.]]), tensor([[1.]]))
    """
    found = format_of(format)
    dtype, shape = scales_dtype(found, scales), tuple(values.shape)
    if values.dtype not in (*VALUES, torch.float64):
        raise RefusedTypeError(f"only floating-point values can be quantized, not {values.dtype}")
    largest = largest_magnitudes(values, found, Box.whole(shape), shape)
    check_finite(largest, "the tensor")
    scaling = Scaling.of(largest, found, dtype)
    codes = torch.empty(shape, dtype=found.codes, device=values.device)
    encode_box(codes, values, scaling.forward, found, Box.whole(shape), shape)
    return codes, scaling.stored.reshape(found.grid(shape))  # also where there are no values


def scales_dtype(format: Format, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of new scales: float32, or exponents as bytes, if none is given."""
    found = dtype or (torch.uint8 if format.scales == EXPONENTS else torch.float32)
    check_can_quantize(format, found)
    return found


def check_value_dtype(dtype: object) -> None:
    """Refuse values that are not floating point numbers of 16 or 32 bits."""
    if dtype not in VALUES:
        raise RefusedTypeError(f"values can be float32, bfloat16 or float16, not {dtype!r}")


def check_can_quantize(format: Format, scales: torch.dtype) -> None:
    """Refuse formats that are only read, and scales that would be rounded: codes are of the exact ones."""
    if format.codes not in LARGEST_CODE:
        raise RefusedValueError(f"{format.name} can be dequantized, but values cannot be quantized to it here")
    if scales not in format.scales or scales not in (torch.float32, *EXPONENTS):
        wanted = [str(one) for one in (torch.float32, *EXPONENTS) if one in format.scales]
        raise RefusedTypeError(
            f"values are quantized to {format.name} with scales of {' or '.join(wanted)}, not {scales}"
        )


def check_tensors(codes: torch.Tensor, scales: torch.Tensor, format: Format) -> None:
    """Refuse codes and scales that are not of this format."""
    if codes.dtype != format.codes or scales.dtype not in format.scales:
        raise RefusedTypeError(f"codes of {codes.dtype} with scales of {scales.dtype} are not {format.name}")
    shapes = tuple(codes.shape), tuple(scales.shape)
    if not format.fits(*shapes):
        raise RefusedValueError(wrong_shape("the tensor", *shapes, format))
