"""Deltas: whatever changed arrives, nothing else is touched, in few bytes; damaged bytes are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ExchangeError
from shardwise.exchange.deltas import (
    BLOCK,
    GAPS,
    HEADER,
    WORDS,
    Form,
    _escapes,
    _packed_gaps,
    choose,
    decode,
    encode,
    most_bytes,
)

SLACK = HEADER + 16  # values, and where they lie, end at multiples of 8 bytes


@st.composite
def masks(draw, most=5000):
    """Changed cells: random or in clusters, from none to all, of odd lengths too."""
    size = draw(st.one_of(st.integers(0, 40), st.integers(0, most)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fraction = draw(st.sampled_from([0, 0.0005, 0.01, 0.05, 0.13, 0.55, 0.9, 1]))
    if draw(st.booleans()):
        return random.random(size) < fraction
    edges = np.sort(random.integers(0, size + 1, 2 * draw(st.integers(0, 5))))
    mask = np.zeros(size, np.bool_)
    for start, stop in edges.reshape(-1, 2):
        mask[start:stop] = True
    return mask


def cells(size, itemsize, seed):
    return np.random.default_rng(seed).integers(0, 256, size * itemsize).astype(np.uint8).view(WORDS[itemsize])


def bits(words):
    return words.view(np.uint8)


def encoded(mask, words):
    room = np.full(most_bytes(len(mask), words.itemsize) + 9, 77, np.uint8)
    length = encode(mask, lambda: words, words.itemsize, room)
    assert (room[length:][-9:] == 77).all()
    return room[:length]


@given(masks(), st.sampled_from(sorted(WORDS)), st.integers(0, 99))
def test_changed_cells_arrive_and_the_others_stay(mask, itemsize, seed):
    ours, theirs = cells(len(mask), itemsize, seed), cells(len(mask), itemsize, seed + 1)
    written = np.ones_like(mask) if choose(mask, itemsize).form is Form.DENSE else mask
    expected = np.where(written, ours, theirs)
    message = encoded(mask, ours)
    assert decode(np.concatenate([message, bits(ours)]), theirs) == len(message)
    np.testing.assert_array_equal(bits(theirs), bits(expected))


@given(masks(), st.sampled_from(sorted(WORDS)))
def test_no_block_is_larger_than_its_values_and_a_bit_for_every_cell(mask, itemsize):
    message, count = encoded(mask, cells(len(mask), itemsize, 0)), int(mask.sum())
    assert len(message) <= most_bytes(len(mask), itemsize)
    assert len(message) <= count * itemsize + -(-len(mask) // 8) + SLACK


@pytest.mark.parametrize("fraction", [0.01, 0.02, 0.05])
def test_random_changes_of_bfloat16_take_little_more_than_3_bytes_each(fraction):
    mask = np.random.default_rng(3).random(BLOCK) < fraction
    assert len(encoded(mask, cells(BLOCK, 2, 0))) <= 3.2 * mask.sum()


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        (Form.NONE, np.zeros(99, np.bool_)),
        (Form.DENSE, np.ones(99, np.bool_)),
        (Form.BITS, np.arange(4000) % 3 == 0),
        (Form.BYTE_GAPS, np.arange(40000) % 50 == 0),
        (Form.SHORT_GAPS, np.arange(40000) % 1700 == 3),
        (Form.RUNS, np.arange(40000) % 9000 < 100),
    ],
)
def test_every_form_is_chosen_where_it_is_the_smallest(form, mask):
    assert choose(mask, 2).form is form


@given(
    st.lists(st.integers(0, 900), max_size=30), st.sampled_from([Form.BYTE_GAPS, Form.SHORT_GAPS]), st.integers(1, 80)
)
def test_gaps_that_are_too_long_for_their_number_are_told_in_several(gaps, form, scale):
    """Also at the first cell, at the last one, and one after the other."""
    dtype, longer = GAPS[form], np.array(gaps, np.int64) * scale
    most = np.iinfo(dtype).max
    expected = [number for gap in longer.tolist() for number in [most] * (gap // most) + [gap % most]]
    assert _packed_gaps(longer, len(expected), dtype).tolist() == expected
    assert _escapes(longer, dtype) == len(expected) - len(gaps)


def test_where_few_cells_changed_their_mask_is_read_once():
    """The number of runs is that of gaps: without a second look at the mask."""
    mask = np.arange(BLOCK) % 100 == 7
    expected = choose(mask, 2)

    class Once(np.ndarray):
        def __getitem__(self, key):
            assert not isinstance(key, slice), "neighbours in the mask are compared"
            return super().__getitem__(key)

    assert choose(mask.view(Once), 2).form is expected.form is Form.BYTE_GAPS


@given(masks(600), st.sampled_from([1, 2, 8]), st.data())
@settings(max_examples=300)
def test_damaged_bytes_never_write_outside(mask, itemsize, data):
    message = encoded(mask, cells(len(mask), itemsize, 0)).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, min(len(message), 80) - 1))] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.sampled_from([len(message), len(message) // 16 * 8]))]
    around = cells(len(mask) + 20, itemsize, 1)
    before = around.copy()
    try:
        decode(message, around[10 : 10 + len(mask)])
    except ExchangeError:
        np.testing.assert_array_equal(bits(around), bits(before))
    np.testing.assert_array_equal(around[:10], before[:10])
    np.testing.assert_array_equal(around[10 + len(mask) :], before[10 + len(mask) :])


def header(form, count, size):
    return np.array([form, count, size, 0], np.uint32).view(np.uint8)


@pytest.mark.parametrize(
    "message",
    [
        np.zeros(15, np.uint8),
        header(6, 1, 0),
        header(Form.NONE, 1, 0),
        header(Form.DENSE, 7, 0),
        header(Form.DENSE, 2**31, 2**31),
        np.concatenate([header(Form.BITS, 1, 1), np.array([5] + [0] * 7 + [3] + [0] * 7, np.uint8)]),
        np.concatenate([header(Form.BYTE_GAPS, 1, 1), np.array([5] + [0] * 7 + [255] + [0] * 7, np.uint8)]),
        np.concatenate([header(Form.BYTE_GAPS, 1, 1), np.array([5] + [0] * 7 + [8] + [0] * 7, np.uint8)]),
        np.concatenate([header(Form.SHORT_GAPS, 1, 3), np.zeros(16, np.uint8)]),
        np.concatenate([header(Form.RUNS, 2, 8), np.array([0] * 8 + [7, 0, 0, 0, 2, 0, 0, 0], np.uint8)]),
        np.concatenate([header(Form.RUNS, 2, 8), np.array([0] * 8 + [255, 255, 255, 255, 2, 0, 0, 0], np.uint8)]),
    ],
)
def test_bytes_that_are_not_a_delta_of_8_cells_are_refused(message):
    with pytest.raises(ExchangeError, match="damaged"):
        decode(message, np.zeros(8, np.uint8))
