"""Exchanges through the in-memory transport: every plan brings the values that numpy says, for any strides."""

import numpy as np
import pytest
import torch
from copying import FULL, hosted, limited
from exchanges import BITS, DTYPES, WHOLE, arrays, bits, inlines, tensors, within
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, numbered
from threads import (
    FORMS,
    PATIENCE,
    carried,
    counted,
    forms,
    plain,
    rooms,
    spaced,
    terms,
    together,
    transports_of,
    turned,
    untouched,
)

from shardwise import Layout, parse, plan
from shardwise.exchange import Exchange, Move
from shardwise.testing import gather, scatter, simulate, strategies
from shardwise.transports.in_memory import in_memory_transports

# --- every pair of layouts --------------------------------------------------------------------------------------------


@given(limited(), forms, forms, inlines)
@settings(max_examples=20)
def test_every_plan_brings_the_values_that_numpy_brings(made, source, target, inline):
    """With rounds and hosts, from terms and to terms."""
    assume(made.source.op != "avg")  # which integers do not have
    whole = numbered(made.source.shape).astype(BITS[made.itemsize])
    shards = scatter(whole, made.source)
    with within(inline):
        found = carried(made, tensors(shards, WHOLE[made.itemsize], source), dtype=WHOLE[made.itemsize], form=target)
    found = arrays(found, whole.dtype)
    assert_same_buffers(found, simulate(made, shards))
    np.testing.assert_array_equal(gather(found, made.target), whole, strict=True)


@given(strategies.pairs(FULL), forms, forms)
@settings(max_examples=30)
def test_every_pair_of_layouts_is_carried_out_whatever_lies_how_in_memory(pair, source, target):
    made, whole = plan(*pair, itemsize=8), numbered(pair[0].shape)
    found = carried(made, tensors(scatter(whole, made.source), torch.int64, source), dtype=torch.int64, form=target)
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


@given(strategies.pairs(FULL), forms, forms)
@settings(max_examples=12)
def test_sources_and_the_memory_around_the_targets_stay_as_they_are(pair, source, target):
    made, whole = plan(*pair, itemsize=2), numbered(pair[0].shape).astype(np.int16)
    before = tensors(scatter(whole, made.source), torch.int16, source)
    after = carried(made, before, dtype=torch.int16, form=target)
    assert_same_buffers(arrays(before, np.int16), scatter(whole, made.source))
    assert all(untouched(tensor) for some in [*before.values(), *after.values()] for tensor in some)


@given(hosted(FULL), inlines)
@settings(max_examples=12)
def test_there_and_back_is_the_identity(hosted_pair, inline):
    source, target, hosts = hosted_pair
    there, back = plan(source, target, itemsize=4, hosts=hosts), plan(target, source, itemsize=4, hosts=hosts)
    shards = scatter(numbered(source.shape).astype(np.int32), source)
    with within(inline):
        found = carried(there, tensors(shards, torch.int32), dtype=torch.int32)
        found = carried(back, found, dtype=torch.int32)
    assert_same_buffers(arrays(found, np.int32), shards)


# --- several tensors --------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Several tensors, each with a plan, a dtype and its memory on both sides."""
    found = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=5)):
        source, target = draw(strategies.pairs(FULL))
        rounds = {"max_bytes": 64 * dtype.itemsize} if draw(st.booleans()) else {}
        found.append((plan(source, target, itemsize=dtype.itemsize, **rounds), dtype, draw(forms), draw(forms)))
    return found


def moved(some, transports):
    """The buffers of every tensor after one exchange of them all."""
    shards = [scatter(bits(made.source.shape, dtype, n), made.source) for n, (made, dtype, *_) in enumerate(some)]
    before = [tensors(held, dtype, form) for held, (_, dtype, form, _) in zip(shards, some, strict=True)]
    after = [{o: rooms(made, o, dtype, form) for o in made.target.owners()} for made, dtype, _, form in some]

    def work(transport):
        moves = [
            Move.of(made, transport.me, here.get(transport.me, []), there.get(transport.me, []), dtype)
            for (made, dtype, *_), here, there in zip(some, before, after, strict=True)
        ]
        exchange = Exchange(transport, terms(), moves).start()
        assert exchange.finish() is None
        return exchange

    exchanges = together(transports, work)
    for (made, dtype, *_), found, held in zip(some, after, shards, strict=True):
        assert_same_buffers(arrays(found, BITS[dtype.itemsize]), simulate(made, held))
    return exchanges


@given(jobs(), inlines)
@settings(max_examples=12)
def test_tensors_of_many_dtypes_move_in_one_exchange(some, inline):
    transports = transports_of(*(made for made, *_ in some))
    with within(inline):
        exchanges = moved(some, transports)  # which compares all buffers
    assert [len(exchange.moves) for exchange in exchanges] == [len(some)] * len(transports)


def test_tensors_of_every_dtype_share_their_messages():
    made = {size: plan("48x40/S0@3", "48x40/S1@4", itemsize=size) for size in BITS}
    some = [(made[dtype.itemsize], dtype, plain, plain) for dtype in DTYPES]
    for transport, exchange in zip(range(4), moved(some, transports_of(made[1])), strict=True):
        (round_,) = exchange.schedule.rounds
        messages = [*round_.sends, *round_.small_sends]
        assert len(messages) == len(made[1].for_owner(transport).sends)
        assert {len(message.parts) for message in messages} <= {len(DTYPES)}


@given(jobs(), inlines)
@settings(max_examples=10)
def test_the_bytes_on_the_transport_are_those_of_the_plans(some, inline):
    transports = transports_of(*(made for made, *_ in some))
    sent = {transport.me: counted(transport)[0] for transport in transports}
    with within(inline):
        exchanges = moved(some, transports)
    for transport, exchange in zip(transports, exchanges, strict=True):
        small = sum(message.bytes for round_ in exchange.schedule.rounds for message in round_.small_sends)
        found = small + sum(one.bytes for one in sent[transport.me])
        assert found == sum(made.sent.get(transport.me, 0) for made, *_ in some)
        assert exchange.inline >= max((p.bytes for p in exchange.schedule.rounds[0].small_sends), default=0)
    total = sum(one.bytes for sends in sent.values() for one in sends)
    total += sum(message.bytes for exchange in exchanges for message in exchange.schedule.rounds[0].small_sends)
    assert total == sum(made.bytes_moved for made, *_ in some)


# --- tensors of every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 2**14], ids=["messages", "inline"])
@pytest.mark.parametrize("target", ["6x5/S1@3", "6x5/R@2:8,9", "6x5/flat=0-7,7-30@2", "6x5/P@2"])
def test_an_expanded_source_gives_the_same_cell_many_times(target, most):
    made = plan("6x5/S0@2", target, itemsize=8)
    row = torch.arange(1, 6)
    sources = {owner: [row.expand(3, 5)] for owner in range(2)}
    assert sources[0][0].stride() == (0, 1)
    with within(most):
        found = carried(made, sources)
    whole = np.broadcast_to(row.numpy(), (6, 5))
    assert_same_buffers(arrays(found, np.int64), simulate(made, scatter(whole, made.source)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (1, 1, 1)], ids=str)
def test_tensors_of_no_dims_or_no_cells_move(shape, dtype, form):
    made = plan(Layout.replicated(shape, [5, 0]), Layout.replicated(shape, [4, 0, 2]), itemsize=dtype.itemsize)
    shards = scatter(bits(shape, dtype), made.source)
    found = carried(made, tensors(shards, dtype, form), dtype=dtype, form=form)
    assert_same_buffers(arrays(found, BITS[dtype.itemsize]), buffers(made.target, bits(shape, dtype)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "other", ["12x5/S0@3", "12x5/S1@2:7,1", "12x5/cyclic0=2@2", "12x5/flat=0-1,1-31,31-60@3:2,0,1"]
)
def test_flat_ranges_move_both_ways(other, form):
    flat, whole = parse("12x5/flat=0-7,7-33,33-33,33-60@4:4,1,2,0"), numbered((12, 5))
    for made in plan(flat, other, itemsize=8), plan(other, flat, itemsize=8):
        found = carried(made, tensors(scatter(whole, made.source), torch.int64, form), form=form)
        assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_owners_with_several_buffers_move():
    whole = numbered((12, 4))
    made = plan(Layout.chunk((12, 4), 0, [0, 1, 0, 1]), Layout.chunk((12, 4), 1, [1, 5, 1]), itemsize=8)
    found = carried(made, tensors(scatter(whole, made.source), torch.int64, spaced), form=turned)
    assert [len(found[owner]) for owner in (1, 5)] == [2, 1]
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_owners_may_have_any_numbers_and_transports_may_have_more_of_them():
    made = plan("12x4/S0@3:900,7,41", "12x4/S1@2:41,10000", itemsize=8)
    transports = in_memory_transports(
        [10000, 3, 41, 7, 900, 5], timeout=PATIENCE
    )  # 3 and 5 only agree; rows are not in order
    whole = numbered((12, 4))
    found = carried(made, tensors(scatter(whole, made.source), torch.int64), transports=transports)
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_the_dtype_of_the_messages_may_be_that_of_either_side():
    made = {size: plan("64x48/S0@2", "64x48/S1@2:1,2", itemsize=size) for size in (4, 8)}
    exact = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 48)))
    for source, message, target in (
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float64),
        (torch.float64, torch.float64, torch.float32),
    ):
        whole = exact.to(source)
        held = dict(enumerate([part.clone()] for part in whole.chunk(2)))
        for most in (0, 2**14):
            with within(most):
                found = carried(made[message.itemsize], held, dtype=message, becomes=target)
            for owner, part in zip((1, 2), whole.to(target).chunk(2, dim=1), strict=True):
                torch.testing.assert_close(found[owner][0], part, rtol=0, atol=0)
