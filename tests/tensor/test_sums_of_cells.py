"""Sums of values: any boxes, however they lie, come to the same, by whichever product of bytes."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.job import sums
from shardwise.job.sums import COLUMNS, LANES, LINE, SPAN, box_sums, number
from shardwise.testing import on_ranks
from shardwise.testing.device import use_device

DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128]
SHAPES = [(), (1,), (5,), (700,), (3000,), (3, 700), (40, 33), (3, 2, 130), (300, 3, 3), (2, 3, 257, 2)]


def drawn(shape, dtype, seed=0):
    """Random bits; of bool, random values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator).view(dtype).reshape(shape)


def mixed(seed, place):
    """The weights of 64 bits, in Python's own integers."""
    x = ((place + 1) * -7046029254386353131 + seed) % 2**64
    for shift, factor in (30, -4658895280553007687), (27, -7723592293110705685):
        x = (x ^ (x >> shift)) * factor % 2**64
    return (x ^ (x >> 31)) | 1


def by_definition(values, key=""):
    """Byte by byte, in Python's own integers."""
    *outer, inner = values.shape or (1,)
    while outer and inner * values.element_size() < LINE:
        inner *= outer.pop()
    lines = values.contiguous().reshape(-1).view(torch.int8).reshape(-1, inner * values.element_size()).tolist()
    words = b"".join(mixed(number(f"table{key}"), at).to_bytes(8, "little") for at in range(SPAN * COLUMNS // 8))
    table = np.where((small := np.frombuffer(words, np.int8) >> 1) == 0, 64, small).reshape(SPAN, COLUMNS).astype(int)
    totals, spans = [0] * LANES, -(-len(lines[0]) // SPAN)
    for (number_of, line), span in product(enumerate(lines), range(spans)):
        part = np.array(line[span * SPAN : (span + 1) * SPAN])
        found = (part @ table[: len(part)]).tolist()
        for lane in range(LANES):
            columns = [mixed(number(f"columns {lane}{key}"), column) for column in range(COLUMNS)]
            of_span = sum(a * b for a, b in zip(found, columns, strict=True))
            totals[lane] += of_span * mixed(number(f"spans {lane}{key}"), number_of * spans + span)
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_what_the_definition_says(shape):
    for dtype in DTYPES:
        values = drawn(shape, dtype)
        for key in ("", "another"):
            assert box_sums(values, [0] * len(shape), shape, key=key).tolist() == by_definition(values, key), dtype


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_boxes_come_to_the_sum_of_the_whole(data):
    shape, dtype = data.draw(st.sampled_from(SHAPES[1:])), data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(len(shape))))
    values = drawn([shape[axis] for axis in order], dtype).permute(*np.argsort(order))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    total = torch.zeros(LANES, dtype=torch.int64)
    for box in product(*(list(pairwise(edges)) for edges in cuts)):
        cells = values[tuple(slice(*ends) for ends in box)]
        total += box_sums(cells, [low for low, _ in box], shape)
    assert total.tolist() == box_sums(values.contiguous(), [0] * len(shape), shape).tolist()


@pytest.mark.parametrize("shape", [(5,), (3, 700), (70, 1024), (300, 3, 3), (3, 2, 5000)])
def test_blocks_of_any_size_come_to_the_same(shape, monkeypatch):
    values = drawn(shape, torch.float32)
    expected = box_sums(values, [0] * len(shape), shape)
    monkeypatch.setattr(sums, "BLOCK", 1000)
    monkeypatch.setattr(sums, "COPIED_BLOCK", 600)
    assert torch.equal(box_sums(values, [0] * len(shape), shape), expected)
    strided = values.repeat_interleave(2, dim=-1)[..., ::2]
    assert torch.equal(box_sums(strided, [0] * len(shape), shape), expected)


def test_tensors_that_autograd_follows_are_summed():
    values = torch.ones(40, 2100, requires_grad=True)
    expected = box_sums(torch.ones(40, 2000), [0, 0], (40, 2000))
    for cells in (values[:, 100:], torch.ones(2000, 40, requires_grad=True).T, torch.ones(40, 4000)[:, ::2]):
        found = box_sums(cells, [0, 0], (40, 2000))
        assert (found.requires_grad, found.tolist()) == (False, expected.tolist())


def test_products_in_floats_do_not_round(monkeypatch):
    """On CPUs without fast products of bytes: the largest sums that there are, and under autocast."""
    monkeypatch.setattr(sums, "exact_byte_products", lambda: False)
    rows = torch.tensor([[-128], [127], [-1]], dtype=torch.int8).repeat(1, SPAN)
    rows[:, 0] += 1
    for weight in (-64, 64, 63):
        weights = torch.full((SPAN, COLUMNS), weight, dtype=torch.int8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = sums._product(rows, weights).to(torch.int64)
        np.testing.assert_array_equal(found, rows.to(torch.int64) @ weights.to(torch.int64))
    values = drawn((40, 3000), torch.bfloat16)
    assert box_sums(values, [0, 0], values.shape).tolist() == by_definition(values)


def test_products_of_bytes_are_exact_at_the_extremes():
    rows = torch.tensor([[-128, 127], [127, 127], [-128, -128]], dtype=torch.int8).repeat(9, SPAN // 2)
    for weights in ([-64, 64], [64, 64], [-64, -64]):
        table = torch.tensor(weights, dtype=torch.int8).repeat(SPAN // 2)[:, None].repeat(1, COLUMNS)
        found = sums._product(rows, table).to(torch.int64)
        np.testing.assert_array_equal(found, rows.to(torch.int64) @ table.to(torch.int64))


def test_a_device_comes_to_the_same_sums():
    def run(_rank):
        device, found = use_device(), []
        for shape in SHAPES:
            values = drawn(shape, torch.bfloat16)
            there = box_sums(values.to(device), [0] * len(shape), shape).cpu()
            found.append(there.tolist() == box_sums(values, [0] * len(shape), shape).tolist())
        return found

    assert on_ranks(1, run) == [[True] * len(SHAPES)]
