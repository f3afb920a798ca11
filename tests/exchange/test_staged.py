"""What an exchange stages, and what it sends from and receives into place."""

import numpy as np
import pytest
import torch
from copying import limited
from exchanges import BITS, DTYPES, WHOLE, arrays, bits, tensors, within
from hypothesis import assume, given, settings
from oracle import assert_same_buffers, buffers, numbered
from threads import (
    carried,
    counted,
    plain,
    shifted,
    transports_of,
    turned,
)

from shardwise import parse, plan
from shardwise.exchange.exchange import inline_bytes
from shardwise.testing import scatter, simulate


@given(limited())
@settings(max_examples=8)
def test_no_more_is_staged_than_the_plan_says(made):
    assume(made.source.op != "avg")  # which integers do not have
    transports = transports_of(made)
    shards = scatter(numbered(made.source.shape).astype(BITS[made.itemsize]), made.source)
    with within(0):
        carried(made, tensors(shards, WHOLE[made.itemsize]), dtype=WHOLE[made.itemsize], transports=transports)
    assert max(transport.staging.bytes for transport in transports) <= made.peak_bytes <= made.max_bytes


LARGE = [
    "512x300/S0@3",
    "512x300/S1@4:1,2,3,4",
    "512x300/R@2:0,7",
    "512x300/flat=0-50000,50000-153600@2:5,1",
    "512x300/P@2",
]


@pytest.mark.parametrize("source", LARGE)
@pytest.mark.parametrize("target", LARGE)
def test_large_messages_bring_what_small_ones_bring(source, target):
    made, whole = plan(source, target, itemsize=8), numbered((512, 300))
    shards = scatter(whole, made.source)
    here, there = (plain, turned) if source < target else (turned, plain)
    found = carried(made, tensors(shards, torch.int64, here), form=there)
    assert_same_buffers(arrays(found, np.int64), simulate(made, shards))


@pytest.mark.parametrize(("rows", "own"), [(12, [1, 1]), (5, [1, 0])])
def test_only_messages_beyond_the_limit_are_sent_on_their_own(rows, own):
    made = plan(f"512x300/split0={512 - rows},{rows}@2", "512x300/R@2", itemsize=8)
    assert [made.sent[owner] > inline_bytes(2) for owner in range(2)] == [n == 1 for n in own]
    transports = transports_of(made)
    sent = [counted(transport)[0] for transport in transports]
    found = carried(made, tensors(scatter(numbered((512, 300)), made.source), torch.int64), transports=transports)
    assert [len(messages) for messages in sent] == own
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, numbered((512, 300))))


def test_messages_that_lie_in_one_piece_are_sent_from_and_received_into_place():
    made = plan("512x64/S0@2", "512x64/R@1:2", itemsize=8)
    transports = transports_of(made)
    calls = {transport.me: counted(transport) for transport in transports}
    before = tensors(scatter(numbered((512, 64)), made.source), torch.int64)
    after = carried(made, before, transports=transports)
    np.testing.assert_array_equal(after[2][0].numpy(), numbered((512, 64)))
    assert [transport.staging.bytes for transport in transports] == [0, 0, 0]
    for owner in (0, 1):
        (send,) = calls[owner][0]
        assert (send.peer, send.outof.data_ptr()) == (2, before[owner][0].data_ptr())
    start, half = after[2][0].data_ptr(), 512 * 64 * 8 // 2
    assert {one.peer: one.into.data_ptr() - start for one in calls[2][1]} == {0: 0, 1: half}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_from_and_into_place(dtype):
    made = plan("512x128/S0@2", "512x128/R@1:2", itemsize=dtype.itemsize)
    transports = transports_of(made)
    shards = scatter(bits((512, 128), dtype), made.source)
    found = carried(made, tensors(shards, dtype, shifted), dtype=dtype, form=shifted, transports=transports)
    assert [transport.staging.bytes for transport in transports] == [0, 0, 0]
    assert_same_buffers(arrays(found, BITS[dtype.itemsize]), simulate(made, shards))


def test_only_the_side_that_is_scattered_is_staged():
    size = 512 * 64 * 8
    whole, columns = parse("512x64/R@1:2"), parse("512x64/S1@2")
    for made, form, staged in (
        (plan(columns, whole, itemsize=8), plain, [0, 0, size]),  # sent as they lie, to be spread over the rows
        (plan(whole, columns, itemsize=8), plain, [0, 0, size]),
        (plan(whole, columns, itemsize=8), turned, [size // 2, size // 2, size]),
    ):
        transports = transports_of(made)
        before = tensors(scatter(numbered((512, 64)), made.source), torch.int64)
        found = carried(made, before, form=form, transports=transports)
        assert_same_buffers(arrays(found, np.int64), buffers(made.target, numbered((512, 64))))
        assert [transport.staging.bytes for transport in transports] == staged


def test_staging_is_kept_for_the_next_exchange():
    made = plan("512x64/S0@2", "512x64/S1@2", itemsize=8)
    transports = transports_of(made)
    shards = scatter(numbered((512, 64)), made.source)
    kept = set()
    for _ in range(3):
        assert_same_buffers(
            arrays(carried(made, tensors(shards, torch.int64), transports=transports), np.int64), simulate(made, shards)
        )
        kept.add(
            tuple(transport.staging.take([1], torch.device("cpu"), align=1)[0].data_ptr() for transport in transports)
        )
    assert len(kept) == 1
    assert [transport.staging.bytes for transport in transports] == [
        made.sent[owner] for owner in range(2)
    ]  # what comes needs none
