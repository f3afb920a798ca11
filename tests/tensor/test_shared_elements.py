"""Tensors that share elements are always found; parts of one tensor that share none are never taken for such."""

from itertools import combinations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.containers.memory import shared

LINE = torch.zeros(8)


@st.composite
def parts(draw):
    """Slices of one tensor: in every dim with the same step, from anywhere to anywhere."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    whole = torch.zeros(shape, dtype=draw(st.sampled_from([torch.int8, torch.float32])))
    ends = st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape))
    taken = draw(st.lists(ends, max_size=4))
    return [
        whole[tuple(slice(*sorted(end), step) for end, step in zip(some, steps, strict=True))].permute(order)
        for some in taken
    ]


@st.composite
def views(draw):
    """Of the same memory with any strides, also such that overlap themselves, and with any of two dtypes."""
    memory, found = torch.zeros(128, dtype=torch.int8), []
    strides = st.lists(st.integers(0, 3), min_size=0, max_size=3)
    common = draw(strides)
    for _ in range(draw(st.integers(2, 4))):
        some = memory.view(draw(st.sampled_from([torch.int8, torch.int16])))
        stride = draw(st.just(common) | strides)
        shape = [draw(st.integers(1, 5)) for _ in stride]
        found.append(some.as_strided(shape, stride, draw(st.integers(0, 6))))
    return found


def addresses(tensor):
    """Of all bytes of its elements."""
    starts = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = starts[..., None] + stride * torch.arange(size)
    width = tensor.element_size()
    return {tensor.data_ptr() + at * width + byte for at in starts.flatten().tolist() for byte in range(width)}


def in_common(tensors, written):
    """Pairs with an address in common, of which one at least is written."""
    numbers = [pair for pair in combinations(range(len(tensors)), 2) if pair[0] < written]
    return sorted((a, b) for a, b in numbers if addresses(tensors[a]) & addresses(tensors[b]))


@given(parts(), st.integers(1, 4))
def test_of_parts_of_one_tensor_exactly_those_with_common_elements_are_found(tensors, written):
    found = list(shared(tensors[:written], tensors[written:]))
    assert sorted(found) == in_common(tensors, written)


@given(views(), st.integers(1, 4))
@example([LINE.unfold(0, 5, 2)[:1], LINE.view(4, 2)[2:]], 1)  # a window is longer than its stride
def test_views_with_common_elements_are_always_found(tensors, written):
    found = list(shared(tensors[:written], tensors[written:]))
    assert set(in_common(tensors, written)) <= set(found)
