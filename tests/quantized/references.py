"""Quantized tensors by the shortest arithmetic: whole tensors, every scale repeated for every cell of its block."""

import numpy as np
import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def repeated(scales, format, shape):
    """A scale for every cell."""
    scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    for dim, (size, block) in enumerate(zip(shape, format.blocks(shape), strict=True)):
        scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scales


def numbers(codes, format):
    if not format.pairs:
        return codes.to(torch.float32)
    table = torch.tensor(E2M1)
    both = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
    return both.reshape(*codes.shape[:-2], -1)


def factors(scales):
    return torch.pow(2.0, scales.to(torch.float32) - 127) if scales.dtype == torch.uint8 else scales.to(torch.float32)


def dequantized(codes, scales, format, dtype):
    shape = format.value_shape(tuple(codes.shape))
    values = numbers(codes, format) * repeated(factors(scales), format, shape)
    return (values * (1 / format.divisor) if format.divisor != 1 else values).to(dtype)


def largest(values, format):
    """By looking at every block."""
    shape = tuple(values.shape)
    found, blocks = torch.zeros(format.grid(shape)), format.blocks(shape)
    for at in np.ndindex(*found.shape):
        cells = values[tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, blocks, strict=True))]
        found[at] = cells.abs().max().to(torch.float32)
    return found


def quantized_fp8(values, format):
    """Codes and float32 scales, as transformers computes them."""
    most = largest(values, format)
    forward = torch.where(most > 0, 448.0 / most, 1.0)
    scaled = values.to(torch.float32) * repeated(forward, format, tuple(values.shape))
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), 1.0 / forward


def random_codes(shape, format, seed=0):
    """Any codes but nan."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    if format.codes == torch.float8_e4m3fn:
        codes = torch.where(codes % 128 == 127, 0, codes)
    return codes.view(format.codes)


def random_scales(shape, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 1:
        return torch.randint(100, 140, shape, generator=random, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape, generator=random) * 3 + 1e-3).to(dtype)


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def assert_same_bits(one, other):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(bits(one).numpy(), bits(other).numpy())
