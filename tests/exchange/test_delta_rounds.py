"""Exchanges whose messages go as deltas: to the bit as dense ones, for any layouts, strides and casts, in few bytes."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from copying import FULL, limited
from exchanges import BITS, WHOLE, arrays, bits, tensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, numbered
from threads import forms, outcomes, rooms, terms, together, transports_of, untouched

from shardwise import ExchangeError, Layout, plan
from shardwise.exchange import Exchange, Move, delta_blocks
from shardwise.testing import scatter, simulate, strategies


@contextmanager
def cut_into(block, segment):
    """Blocks of so many cells and segments of so many bytes, and no message too small for a delta."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_blocks, "BLOCK", block)
        patch.setattr(delta_blocks, "SEGMENT", segment)
        patch.setattr("shardwise.exchange.exchange.SMALLEST", 1)
        patch.setattr("shardwise.exchange.exchange.INLINE", 0)
        delta_blocks.segments_of.cache_clear()
        yield
    delta_blocks.segments_of.cache_clear()


def sent(transports):
    """The bytes of all messages that each transport sends from now on, by owner."""
    found = {transport.me: 0 for transport in transports}

    def counting(transport):
        post = transport.post_messages

        def posted(receives, sends, tag):
            sends = list(sends)
            found[transport.me] += sum(message.numel() for _, message in sends)
            return post(receives, sends, tag)

        transport.post_messages = posted

    for transport in transports:
        counting(transport)
    return found


def carry(made, transports, sources, targets, dtype, changed=None):
    """One exchange of one tensor, as deltas where it is known what changed; the traffic of every owner."""

    def work(transport):
        me = transport.me
        move = Move.of(made, me, sources.get(me, []), targets.get(me, []), dtype)
        if changed is not None:
            move = move._replace(changed=changed.get(me, []))
        delta = "always" if changed is not None else False
        exchange = Exchange(transport, terms(delta=delta), [move], fresh=False, delta=delta)
        assert exchange.start().finish() is None
        return exchange.traffic

    return together(transports, work)


@given(
    strategies.pairs(FULL),
    forms,
    forms,
    forms,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(3, 7), (64, 128), (2**18, 2**21)]),
    st.sampled_from([0, 0.05, 0.5, 0.7, 1]),
)
@settings(max_examples=60)
def test_every_pair_of_layouts_gets_what_changed(pair, source, target, mask, itemsize, sizes, fraction):
    made, dtype, random = plan(*pair, itemsize=itemsize), WHOLE[itemsize], np.random.default_rng(0)
    if made.reducing:
        return
    whole = bits(pair[0].shape, dtype, 1)
    changed = random.random(whole.shape) < fraction
    after = np.where(changed, bits(pair[0].shape, dtype, 2), whole).astype(whole.dtype)
    before, now = (tensors(scatter(one, made.source), dtype, source) for one in (whole, after))
    masks = tensors(scatter(changed.astype(np.int8), made.source), torch.uint8, mask)
    targets = {o: rooms(made, o, dtype, target) for o in made.target.owners()}
    with cut_into(*sizes):
        transports = transports_of(made)
        carry(made, transports, before, targets, dtype)
        carry(made, transports, now, targets, dtype, masks)
    assert_same_buffers(arrays(targets, BITS[itemsize]), buffers(made.target, after))
    assert all(untouched(tensor) for some in targets.values() for tensor in some)


@given(limited(), forms, forms, st.sampled_from([(3, 7), (64, 128)]))
@settings(max_examples=40)
def test_rounds_relays_and_terms_bring_what_a_dense_exchange_brings(made, source, target, sizes):
    """Terms that are reduced go whole, as do relayed messages and targets that are filled anew."""
    assume(made.source.op != "avg")  # which integers do not have
    dtype = WHOLE[made.itemsize]
    whole = numbered(made.source.shape).astype(BITS[made.itemsize])
    versions = [scatter(one, made.source) for one in (whole, np.where(whole % 7 == 3, whole + 1, whole))]
    before, now = (tensors(shards, dtype, source) for shards in versions)
    masks = {
        owner: [torch.from_numpy(np.asarray(a != b)) for a, b in zip(some, versions[1][owner], strict=True)]
        for owner, some in versions[0].items()
    }
    targets = {o: rooms(made, o, dtype, target) for o in made.target.owners()}
    with cut_into(*sizes):
        transports = transports_of(made)
        carry(made, transports, before, targets, dtype)
        carry(made, transports, now, targets, dtype, masks)
    assert_same_buffers(arrays(targets, BITS[made.itemsize]), simulate(made, versions[1]))


CASTS = [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float64),
    (torch.complex128, torch.complex128, torch.complex128),
]


@pytest.mark.parametrize(("dtype", "travels", "becomes"), CASTS)
@pytest.mark.parametrize("columns", [2, 3])
def test_casts_bring_the_bits_of_a_dense_exchange_whatever_values_they_are_of(dtype, travels, becomes, columns):
    shape = (6, 8)
    made = plan(Layout.chunk(shape, 0, range(2)), Layout.chunk(shape, 1, range(columns)), itemsize=travels.itemsize)
    raw = np.random.default_rng(5).integers(0, 256, (2, *shape, dtype.itemsize)).astype(np.uint8)  # NaNs and all
    whole = torch.from_numpy(raw).view(dtype)[..., 0]
    changed = torch.arange(48).reshape(shape) % 5 == 0
    after = torch.where(changed, whole[1], whole[0])
    before, now, masks = (
        {o: [rows.clone()] for o, rows in enumerate(one.chunk(2))} for one in (whole[0], after, changed)
    )
    found, expected = ({o: rooms(made, o, becomes) for o in range(columns)} for _ in range(2))
    with cut_into(5, 20):
        transports = transports_of(made)
        carry(made, transports, before, found, travels)
        carry(made, transports, now, found, travels, masks)
        carry(made, transports, now, expected, travels)
    bits_of = BITS.get(becomes.itemsize, np.int64)
    for owner in range(columns):
        (ours,), (theirs,) = (
            arrays({0: [t.view(torch.uint8) for t in some[owner]]}, np.uint8)[0] for some in (found, expected)
        )
        np.testing.assert_array_equal(ours.view(bits_of), theirs.view(bits_of))


def large(owners=4, rows=512, columns=4096):
    shape = (rows, columns)
    made = plan(Layout.chunk(shape, 0, range(owners)), Layout.chunk(shape, 1, range(owners)), itemsize=2)
    return made, np.random.default_rng(1).integers(-9, 9, shape).astype(np.int16)


@pytest.mark.parametrize(("fraction", "most"), [(0, 0.001), (0.02, 0.0321), (0.05, 0.08), (0.5, 0.57), (1, 1.0001)])
def test_few_bytes_are_sent_where_little_changed_and_no_more_than_dense_otherwise(fraction, most):
    made, whole = large()
    changed = np.random.default_rng(2).random(whole.shape) < fraction
    before, now = (tensors(scatter(one, made.source), torch.int16) for one in (whole, whole ^ changed))
    masks = tensors(scatter(changed, made.source), torch.bool)
    targets = {o: rooms(made, o, torch.int16) for o in range(4)}
    transports = transports_of(made)
    carry(made, transports, before, targets, torch.int16)
    found = sent(transports)
    traffic = carry(made, transports, now, targets, torch.int16, masks)
    assert_same_buffers(arrays(targets, np.int16), buffers(made.target, whole ^ changed))
    agreement = 3 * (128 + 64 + 2**14)  # headers, notes, and room for small messages
    for owner, one in enumerate(traffic):
        assert found[owner] - agreement <= most * made.bytes_moved / 4
        assert one.dense == made.bytes_moved / 4
        assert one.sent <= found[owner]


def test_all_that_a_rank_knows_nothing_of_is_sent():
    made, whole = large(2)
    before, now = (tensors(scatter(one, made.source), torch.int16) for one in (whole, whole + 1))
    targets = {o: rooms(made, o, torch.int16) for o in range(2)}
    transports = transports_of(made)
    carry(made, transports, before, targets, torch.int16)

    def work(transport):
        move = Move.of(made, transport.me, now[transport.me], targets[transport.me], torch.int16)
        return Exchange(transport, terms(), [move], fresh=False, delta="always").start().finish()

    together(transports, work)
    assert_same_buffers(arrays(targets, np.int16), buffers(made.target, whole + 1))


@pytest.mark.parametrize("bad", [0, 2**40, -1])
def test_a_peer_that_announces_nonsense_is_refused(bad, monkeypatch):
    made, whole = large(2)
    sources = tensors(scatter(whole, made.source), torch.int16)
    masks = tensors(scatter(np.zeros_like(whole, np.bool_), made.source), torch.bool)
    targets = {o: rooms(made, o, torch.int16) for o in range(2)}
    transports = transports_of(made)
    monkeypatch.setattr(transports[1], "_timeout", 1.0)
    monkeypatch.setattr(transports[0], "_timeout", 1.0)
    post = transports[0].post_messages

    def lying(receives, sends, tag):
        def lies():
            for peer, message in sends:
                told = message.view(torch.int64) if message.numel() == 8 else torch.tensor([0])
                yield peer, torch.tensor([bad]).view(torch.uint8) if int(told[0]) > 2 else message

        return post(receives, lies(), tag)

    transports[0].post_messages = lying

    def work(transport):
        me = transport.me
        move = Move.of(made, me, sources[me], targets[me], torch.int16)._replace(changed=masks[me])
        return Exchange(transport, terms(), [move], fresh=False, delta="always").start().finish()

    found = outcomes(transports, work)
    assert isinstance(found[1], ExchangeError)
    assert f"announced {bad} bytes" in str(found[1])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40), st.data())
def test_parts_of_a_window_between_two_cells_of_a_message_are_found(outer, size, data):
    """Against the numbers of its elements."""
    from shardwise.exchange.messages import Pair
    from shardwise.geometry import Window, row_major

    shape = tuple(data.draw(st.integers(1, n)) for n in outer)
    strides = row_major(tuple(outer))
    window = Window(0, shape, strides, data.draw(st.integers(0, 9)))
    here = Window(0, shape, tuple(reversed(row_major(tuple(reversed(shape))))), 3)
    start = data.draw(st.integers(0, 60))
    parts = list(delta_blocks._between(Pair(here, window), start, start + size))
    numbers = [np.concatenate([[], *(getattr(part, end).elements() for part in parts)]) for end in ("there", "here")]
    inside = (window.elements() >= start) & (window.elements() < start + size)
    order = np.argsort(numbers[0])
    np.testing.assert_array_equal(numbers[0][order], np.sort(window.elements()[inside]))
    np.testing.assert_array_equal(np.sort(numbers[1]), np.sort(here.elements()[inside]))
    assert len(parts) <= 2 * len(shape)
