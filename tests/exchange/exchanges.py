"""What the tests of exchanges share: bits of every dtype, everybody's tensors, and the limit of small messages."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from threads import (
    arrays_of,
    plain,
    tensors_of,
)

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
]
BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
inlines = st.sampled_from([0, 64, 2**14])  # the largest message that travels with the agreement


def bits(shape, dtype, seed=0):
    """Random bits in whole numbers that are as long as the dtype: not a number, infinities and all."""
    random = np.random.default_rng(seed)
    if dtype == torch.bool:
        return random.integers(0, 2, shape).astype(np.int8)
    raw = random.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8)
    return raw.view(BITS[dtype.itemsize]).reshape(shape)


def tensors(shards, dtype, form=plain):
    """Everybody's arrays as tensors."""
    return {owner: tensors_of(arrays, dtype, form) for owner, arrays in shards.items()}


def arrays(found, dtype):
    """And back."""
    return {owner: arrays_of(some, dtype) for owner, some in found.items()}


@contextmanager
def within(most):
    """Messages of up to that many bytes travel with the agreement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.exchange.exchange.INLINE", most)
        yield
