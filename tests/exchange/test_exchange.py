"""Exchanges through the in-memory wire: every plan brings the values that numpy says, whatever lies how in memory."""

from contextlib import contextmanager
from functools import reduce as fold
from queue import Queue

import numpy as np
import pytest
import torch
from copying import FULL, hosted, limited
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, numbered
from threads import (
    FORMS,
    PATIENCE,
    arrays_of,
    carried,
    counted,
    forms,
    outcomes,
    plain,
    rooms,
    rowwise,
    shifted,
    spaced,
    tensors_of,
    terms,
    together,
    turned,
    untouched,
    wires_of,
)

from shardwise import ExchangeError, Layout, Mesh, parse, plan
from shardwise.exchange import Exchange, Move
from shardwise.exchange.run import inline_bytes
from shardwise.notation import OPERATIONS
from shardwise.testing import gather, scatter, simulate, strategies
from shardwise.wires.memory import MemoryWire, memory_wires

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
        patch.setattr("shardwise.exchange.run.INLINE", most)
        yield


# --- every pair of layouts -------------------------------------------------------------------------------------------


@given(limited(), rowwise, rowwise, inlines)
@settings(max_examples=20)
def test_every_plan_brings_the_values_that_numpy_brings(made, source, target, inline):
    """With rounds and hosts, from terms and to terms."""
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


# --- several tensors -------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Several tensors, each with a plan, a dtype and its memory on both sides."""
    found = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=5)):
        source, target = draw(strategies.pairs(FULL))
        rounds = {"max_bytes": 64 * dtype.itemsize} if draw(st.booleans()) else {}
        found.append((plan(source, target, itemsize=dtype.itemsize, **rounds), dtype, draw(rowwise), draw(rowwise)))
    return found


def moved(some, wires):
    """The buffers of every tensor after one exchange of them all."""
    shards = [scatter(bits(made.source.shape, dtype, n), made.source) for n, (made, dtype, *_) in enumerate(some)]
    before = [tensors(held, dtype, form) for held, (_, dtype, form, _) in zip(shards, some, strict=True)]
    after = [{o: rooms(made, o, dtype, form) for o in made.target.owners()} for made, dtype, _, form in some]

    def work(wire):
        moves = [
            Move.of(made, wire.me, here.get(wire.me, []), there.get(wire.me, []), dtype)
            for (made, dtype, *_), here, there in zip(some, before, after, strict=True)
        ]
        exchange = Exchange(wire, terms(), moves).start()
        assert exchange.finish() is None
        return exchange

    exchanges = together(wires, work)
    for (made, dtype, *_), found, held in zip(some, after, shards, strict=True):
        assert_same_buffers(arrays(found, BITS[dtype.itemsize]), simulate(made, held))
    return exchanges


@given(jobs(), inlines)
@settings(max_examples=12)
def test_tensors_of_many_dtypes_move_in_one_exchange(some, inline):
    with within(inline):
        moved(some, wires_of(*(made for made, *_ in some)))


def test_tensors_of_every_dtype_share_their_messages():
    made = {size: plan("48x40/S0@3", "48x40/S1@4", itemsize=size) for size in BITS}
    some = [(made[dtype.itemsize], dtype, plain, plain) for dtype in DTYPES]
    for wire, exchange in zip(range(4), moved(some, wires_of(made[1])), strict=True):
        (turn,) = exchange.schedule.turns
        parcels = [*turn.sends, *turn.small_sends]
        assert len(parcels) == len(made[1].for_owner(wire).sends)
        assert {len(parcel.parts) for parcel in parcels} <= {len(DTYPES)}


@given(jobs(), inlines)
@settings(max_examples=10)
def test_the_bytes_on_the_wire_are_those_of_the_plans(some, inline):
    wires = wires_of(*(made for made, *_ in some))
    sent = {wire.me: counted(wire)[0] for wire in wires}
    with within(inline):
        exchanges = moved(some, wires)
    for wire, exchange in zip(wires, exchanges, strict=True):
        small = sum(parcel.bytes for turn in exchange.schedule.turns for parcel in turn.small_sends)
        found = small + sum(message.numel() for _, message in sent[wire.me])
        assert found == sum(made.sent.get(wire.me, 0) for made, *_ in some)
        assert exchange.inline >= max((p.bytes for p in exchange.schedule.turns[0].small_sends), default=0)
    total = sum(message.numel() for messages in sent.values() for _, message in messages)
    total += sum(parcel.bytes for exchange in exchanges for parcel in exchange.schedule.turns[0].small_sends)
    assert total == sum(made.bytes_moved for made, *_ in some)


# --- memory ----------------------------------------------------------------------------------------------------------


@given(limited())
@settings(max_examples=8)
def test_no_more_is_staged_than_the_plan_says(made):
    wires = wires_of(made)
    shards = scatter(numbered(made.source.shape).astype(BITS[made.itemsize]), made.source)
    with within(0):
        carried(made, tensors(shards, WHOLE[made.itemsize]), dtype=WHOLE[made.itemsize], wires=wires)
    assert max(wire.staging.bytes for wire in wires) <= made.peak_bytes <= made.max_bytes


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
    wires = wires_of(made)
    sent = [counted(wire)[0] for wire in wires]
    found = carried(made, tensors(scatter(numbered((512, 300)), made.source), torch.int64), wires=wires)
    assert [len(messages) for messages in sent] == own
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, numbered((512, 300))))


def test_messages_that_lie_in_one_piece_are_sent_from_and_received_into_place():
    made = plan("512x64/S0@2", "512x64/R@1:2", itemsize=8)
    wires = wires_of(made)
    calls = {wire.me: counted(wire) for wire in wires}
    before = tensors(scatter(numbered((512, 64)), made.source), torch.int64)
    after = carried(made, before, wires=wires)
    np.testing.assert_array_equal(after[2][0].numpy(), numbered((512, 64)))
    assert [wire.staging.bytes for wire in wires] == [0, 0, 0]
    for owner in (0, 1):
        ((peer, message),) = calls[owner][0]
        assert (peer, message.data_ptr()) == (2, before[owner][0].data_ptr())
    start, half = after[2][0].data_ptr(), 512 * 64 * 8 // 2
    assert {peer: room.data_ptr() - start for peer, room in calls[2][1]} == {0: 0, 1: half}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_from_and_into_place(dtype):
    made = plan("512x128/S0@2", "512x128/R@1:2", itemsize=dtype.itemsize)
    wires = wires_of(made)
    shards = scatter(bits((512, 128), dtype), made.source)
    found = carried(made, tensors(shards, dtype, shifted), dtype=dtype, form=shifted, wires=wires)
    assert [wire.staging.bytes for wire in wires] == [0, 0, 0]
    assert_same_buffers(arrays(found, BITS[dtype.itemsize]), simulate(made, shards))


def test_only_the_side_that_is_scattered_is_staged():
    size = 512 * 64 * 8
    whole, columns = parse("512x64/R@1:2"), parse("512x64/S1@2")
    for made, form, staged in (
        (plan(columns, whole, itemsize=8), plain, [0, 0, size]),  # sent as they lie, to be spread over the rows
        (plan(whole, columns, itemsize=8), plain, [0, 0, size]),
        (plan(whole, columns, itemsize=8), turned, [size // 2, size // 2, size]),
    ):
        wires = wires_of(made)
        before = tensors(scatter(numbered((512, 64)), made.source), torch.int64)
        found = carried(made, before, form=form, wires=wires)
        assert_same_buffers(arrays(found, np.int64), buffers(made.target, numbered((512, 64))))
        assert [wire.staging.bytes for wire in wires] == staged


def test_staging_is_kept_for_the_next_exchange():
    made = plan("512x64/S0@2", "512x64/S1@2", itemsize=8)
    wires = wires_of(made)
    shards = scatter(numbered((512, 64)), made.source)
    kept = set()
    for _ in range(3):
        assert_same_buffers(
            arrays(carried(made, tensors(shards, torch.int64), wires=wires), np.int64), simulate(made, shards)
        )
        kept.add(tuple(wire.staging.take([1], torch.device("cpu"), align=1)[0].data_ptr() for wire in wires))
    assert len(kept) == 1
    assert [wire.staging.bytes for wire in wires] == [made.sent[owner] for owner in range(2)]  # what comes needs none


# --- tensors of every kind -------------------------------------------------------------------------------------------


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


def test_owners_may_have_any_numbers_and_wires_may_have_more_of_them():
    made = plan("12x4/S0@3:900,7,41", "12x4/S1@2:41,10000", itemsize=8)
    wires = memory_wires([10000, 3, 41, 7, 900, 5], timeout=PATIENCE)  # 3 and 5 only agree; rows are not in order
    whole = numbered((12, 4))
    found = carried(made, tensors(scatter(whole, made.source), torch.int64), wires=wires)
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


# --- terms -----------------------------------------------------------------------------------------------------------

SHAPE = (6, 5)
TARGETS = [
    "6x5/R@4",
    "6x5/S0@4",
    "6x5/S1@3:9,2,0",
    "6x5/R@1:9",
    "6x5/boxes=0:6,0:2+0:3,2:5+3:6,2:5@3:3,1,1",
    "6x5/flat=0-7,7-30@2:30,2",
    "6x5/cyclic0=1@2",
]
ROUNDS, HOSTS = {"max_bytes": 256}, {"hosts": 2}
WAYS = [*((op, {}) for op in OPERATIONS), ("sum", ROUNDS), ("max", ROUNDS), ("sum", HOSTS), ("product", HOSTS)]
APPLY = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def contributions(dtype, count=4, shape=SHAPE):
    """Terms of very different size, so that every change of order shows."""
    random = np.random.default_rng(count)
    if not dtype.is_floating_point and not dtype.is_complex:
        return list(torch.from_numpy(random.integers(-99, 99, (count, *shape))).to(dtype))
    return list(
        torch.from_numpy(random.standard_normal((count, *shape)) * 10.0 ** random.integers(-3, 4, (count, *shape))).to(
            dtype
        )
    )


def in_order(values, op, wide=None):
    """The reduction of the terms, one after the other, rounded at the end."""
    dtype = values[0].dtype
    value = fold(APPLY[op], [value.to(wide or dtype) for value in values])
    return (value / len(values) if op == "avg" else value).to(dtype)


def assert_value(found, layout, value):
    """Every owner has its cells of the value, bit by bit."""
    whole = arrays_of([value], BITS[value.element_size()])[0]
    assert_same_buffers(arrays(found, whole.dtype), buffers(layout, whole))


@pytest.mark.parametrize(("op", "options"), WAYS, ids=str)
def test_every_reduction_gives_the_same_bits_in_every_layout(op, options):
    values = contributions(torch.int32 if op in ("band", "bor", "bxor") else torch.float32)
    owners = [2, 0, 3, 1]  # the owner of each term
    source = Layout.on_mesh(SHAPE, Mesh.of((4,), ranks=owners), [f"P{op}"])
    held = {owner: [value] for owner, value in zip(owners, values, strict=True)}
    for target, most, form in zip(TARGETS, [0, 64, 2**14] * 3, FORMS * 2, strict=False):
        made = plan(source, target, itemsize=4, **options)
        with within(most):
            found = carried(made, held, form=form)
        assert_value(found, made.target, in_order(values, op))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_of_bfloat16_are_added_in_float32_and_rounded_once(op, target):
    values = [value.bfloat16() for value in contributions(torch.float32, 7)]
    once, always = in_order(values, op, torch.float32), in_order(values, op)
    assert not torch.equal(once, always)
    made = plan(f"6x5/P{op}@7", target, itemsize=2)
    assert_value(carried(made, {owner: [value] for owner, value in enumerate(values)}), made.target, once)


def test_float8_and_complex_sums_are_in_order_too():
    for dtype, wide in (torch.float8_e4m3fn, torch.float32), (torch.complex64, None):
        values = [value.to(dtype) for value in contributions(torch.float32)]
        for target in TARGETS:
            made = plan("6x5/P@4", target, itemsize=dtype.itemsize)
            found = carried(made, {owner: [value] for owner, value in enumerate(values)})
            assert_value(found, made.target, in_order(values, "sum", wide))


@pytest.mark.parametrize("target", ["131072/R@4", "131072/S0@4", "131072/R@3:0,8,9"])
def test_results_that_are_shared_have_the_same_bits(target):
    values = contributions(torch.float32, shape=(131072,))
    made = plan("131072/P@4", target, itemsize=4)
    found = carried(made, {owner: [value] for owner, value in enumerate(values)})
    assert_value(found, made.target, in_order(values, "sum"))


@given(strategies.pairs(["partial"]), rowwise, inlines)
@settings(max_examples=15)
def test_from_terms_to_terms_the_value_is_kept(pair, form, inline):
    made, whole = plan(*pair, itemsize=8), numbered(pair[0].shape)
    with within(inline):
        found = carried(
            made, tensors(scatter(whole, made.source, seed=3), torch.int64, form), dtype=torch.int64, form=form
        )
    np.testing.assert_array_equal(gather(arrays(found, np.int64), made.target), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "neutral"), [("sum", 0), ("product", 1), ("max", None)])
def test_a_whole_value_becomes_terms_of_every_dtype(op, neutral, dtype):
    whole = contributions(torch.float32)[0].to(dtype)
    made = plan("6x5/R@1", f"6x5/P{op}@3", itemsize=dtype.itemsize)
    found = carried(made, {0: [whole]}, form=spaced)
    others = whole if neutral is None else torch.full(SHAPE, neutral).to(dtype)
    for owner, wanted in enumerate([whole, others, others]):
        ours, theirs = (arrays_of([t], BITS[dtype.itemsize])[0] for t in (found[owner][0], wanted))
        np.testing.assert_array_equal(ours, theirs)
    assert all(untouched(some[0]) for some in found.values())


def test_a_reduction_into_a_longer_dtype_is_not_rounded():
    values = [value.bfloat16() for value in contributions(torch.float32)]
    made = plan("6x5/P@4", "6x5/R@1:9", itemsize=2)
    found = carried(made, {o: [value] for o, value in enumerate(values)}, dtype=torch.bfloat16, becomes=torch.float32)
    torch.testing.assert_close(found[9][0], fold(torch.add, [v.float() for v in values]), rtol=0, atol=0)


# --- one after the other ---------------------------------------------------------------------------------------------


def test_exchanges_under_way_together_do_not_meet():
    made = plan("8x6/S0@3", "8x6/S1@3", itemsize=8)
    wholes = [numbered(made.source.shape) * sign for sign in (1, -1, 7)]
    before = [tensors(scatter(whole, made.source), torch.int64) for whole in wholes]
    after = [{owner: rooms(made, owner, torch.int64) for owner in range(3)} for _ in wholes]

    def work(wire):
        started = [
            Exchange(
                wire, terms(number=n), [Move.of(made, wire.me, here[wire.me], there[wire.me], torch.int64)]
            ).start()
            for n, (here, there) in enumerate(zip(before, after, strict=True))
        ]
        return [exchange.finish() for exchange in started]

    assert together(wires_of(made), work) == [[None] * 3] * 3
    for found, whole in zip(after, wholes, strict=True):
        assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_an_exchange_that_breaks_tells_the_wire_why():
    made = plan("8x6/R@1", "8x6/S0@1")
    (wire,), reasons = wires_of(made), []
    wire.fail = reasons.append
    target = torch.zeros(8, 6, requires_grad=True)  # which cannot be written to
    move = Move.of(made, 0, [torch.ones(8, 6)], [target], torch.float32)
    with pytest.raises(RuntimeError) as error:
        Exchange(wire, terms(), [move], fresh=False).start().finish()
    assert reasons == [f"RuntimeError: {error.value}"]


class TaggedWire(MemoryWire):
    """A wire on which messages only meet those of the same tag, so that they may leave before all have agreed."""

    def __init__(self, like, posts):
        super().__init__(like.me, like.owners, like._queues, PATIENCE)
        self.tagged, self.posts, self.abandoned = True, posts, []

    def swap(self, receives, sends, tag):
        for peer, message in sends:
            self.posts.setdefault((self.me, peer, tag), Queue()).put(message.clone())
        return TaggedSwap(self, receives, tag)

    def abandon(self, posted):
        self.abandoned.append(posted)


class TaggedSwap:
    def __init__(self, wire, receives, tag):
        self.wire, self.receives, self.tag = wire, receives, tag

    def arrivals(self):
        for at, (peer, room) in enumerate(self.receives):
            room.copy_(self.wire.posts.setdefault((peer, self.wire.me, self.tag), Queue()).get(timeout=PATIENCE))
            yield at


def ahead(wires, made, *, alone=True, fresh=True, differ=()):
    """For every rank how many messages it had sent when it had started, what came of it, and its target."""
    calls = {wire.me: counted(wire)[0] for wire in wires}

    def work(wire):
        source = torch.from_numpy(scatter(numbered(made.source.shape), made.source)[wire.me][0])
        (target,) = rooms(made, wire.me, torch.int64)
        move = Move.of(made, wire.me, [source], [target], torch.int64)
        exchange = Exchange(wire, terms(extra=wire.me in differ), [move], fresh=fresh).start(alone=alone)
        early = len(calls[wire.me])
        try:
            return early, exchange.finish(), target
        except ExchangeError as error:
            return early, str(error), target

    return together(wires, work)


@pytest.fixture
def tagged():
    made, posts = plan("512x64/S0@2", "512x64/S1@2", itemsize=8), {}
    return made, [TaggedWire(wire, posts) for wire in wires_of(made)]


@pytest.mark.parametrize("fresh", [True, False])
def test_messages_leave_at_once_where_all_have_agreed_before(tagged, fresh):
    made, wires = tagged
    whole = numbered((512, 64))
    for options, early in ({}, 0), ({}, 1), ({"alone": False}, 0), ({}, 1):
        found = ahead(wires, made, fresh=fresh, **options)
        assert [sent for sent, *_ in found] == [early] * 2
        assert [told for _, told, _ in found] == [None] * 2
        assert_same_buffers({o: [t.numpy()] for o, (*_, t) in enumerate(found)}, buffers(made.target, whole))
    assert [wire.abandoned for wire in wires] == [[], []]


def test_messages_do_not_leave_at_once_on_a_wire_on_which_they_could_meet_others(tagged):
    made, wires = tagged
    for wire in wires:
        wire.tagged = False
    for _ in range(2):
        assert [early for early, *_ in ahead(wires, made)] == [0, 0]


def test_what_left_in_vain_is_abandoned_and_what_others_can_see_is_not_touched(tagged):
    made, wires = tagged
    ahead(wires, made)
    found = ahead(wires, made, fresh=False, differ=[1])
    assert [early for early, *_ in found] == [1, 0]
    (told,) = {told for _, told, _ in found}
    assert "disagree on the extra" in told
    assert [len(wire.abandoned) for wire in wires] == [1, 0]
    assert all(untouched(target) and (target == rooms(made, 0, torch.int64)[0]).all() for *_, target in found)
    found = ahead(wires, made)  # the next one does not meet what was left behind
    assert_same_buffers({o: [t.numpy()] for o, (*_, t) in enumerate(found)}, buffers(made.target, numbered((512, 64))))


def test_inline_messages_keep_every_dtype_aligned():
    for owners in (1, 2, 7, 8, 64, 255, 256):
        assert inline_bytes(owners) >= 64
        assert inline_bytes(owners) % 64 == 0
    assert inline_bytes(257) == 0


def test_every_rank_hears_of_an_owner_that_waits_in_vain():
    wires = memory_wires(2, timeout=0.01)
    (error,) = outcomes(wires[:1], lambda wire: Exchange(wire, terms()).start().finish())
    assert isinstance(error, ExchangeError)
    assert str(error) == "owner 0 waited 0.01 s for owner 1"
