"""Exchanges one after the other and under way together: what leaves early, what is left behind."""

from queue import Queue

import numpy as np
import pytest
import torch
from exchanges import arrays, tensors
from oracle import assert_same_buffers, buffers, numbered
from threads import (
    PATIENCE,
    carried,
    counted,
    outcomes,
    rooms,
    spaced,
    terms,
    together,
    transports_of,
    untouched,
)

from shardwise import ExchangeError, plan
from shardwise.exchange import Exchange, Move
from shardwise.exchange.exchange import inline_bytes
from shardwise.testing import scatter
from shardwise.transports.in_memory import InMemoryTransport, in_memory_transports


def test_exchanges_under_way_together_do_not_meet():
    made = plan("8x6/S0@3", "8x6/S1@3", itemsize=8)
    wholes = [numbered(made.source.shape) * sign for sign in (1, -1, 7)]
    before = [tensors(scatter(whole, made.source), torch.int64) for whole in wholes]
    after = [{owner: rooms(made, owner, torch.int64) for owner in range(3)} for _ in wholes]

    def work(transport):
        started = [
            Exchange(
                transport,
                terms(number=n),
                [Move.of(made, transport.me, here[transport.me], there[transport.me], torch.int64)],
            ).start()
            for n, (here, there) in enumerate(zip(before, after, strict=True))
        ]
        return [exchange.finish() for exchange in started]

    assert together(transports_of(made), work) == [[None] * 3] * 3
    for found, whole in zip(after, wholes, strict=True):
        assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_large_exchanges_under_way_together_do_not_meet():
    made = plan("512x300/S0@2", "512x300/S1@2", itemsize=8)

    def work(transport):
        rooms = [torch.zeros(512, 150, dtype=torch.int64) for _ in range(2)]
        moves = [Move.of(made, transport.me, [torch.full((256, 300), n)], [rooms[n]], torch.int64) for n in range(2)]
        started = [Exchange(transport, terms(n=n), [move]).start() for n, move in enumerate(moves)]
        return [exchange.finish() for exchange in started], [room.unique().tolist() for room in rooms]

    assert together(transports_of(made), work) == [([None] * 2, [[0], [1]])] * 2


@pytest.mark.parametrize(("source", "target", "most"), [("1/P@4", "1/R@4", None), ("4x3/S0@2", "4x3/R@2", 24)])
def test_one_cell_of_a_tensor_with_gaps_is_sent_too(source, target, most):
    made = plan(source, target, itemsize=8, max_bytes=most)
    whole = numbered(made.source.shape)
    found = carried(made, tensors(scatter(whole, made.source), torch.int64, spaced), dtype=torch.int64, form=spaced)
    assert_same_buffers(arrays(found, np.int64), buffers(made.target, whole))


def test_a_fresh_exchange_that_breaks_tells_the_transport_why():
    made = plan("8x6/R@1", "8x6/S0@1")
    (transport,), reasons = transports_of(made), []
    transport.fail = reasons.append
    move = Move.of(made, 0, [torch.ones(8, 6)], [torch.zeros(8, 6, requires_grad=True)], torch.float32)
    with pytest.raises(RuntimeError) as error:
        Exchange(transport, terms(), [move]).start().finish()
    assert reasons == [f"RuntimeError: {error.value}"]


def test_an_exchange_that_breaks_tells_the_transport_why():
    made = plan("8x6/R@1", "8x6/S0@1")
    (transport,), reasons = transports_of(made), []
    transport.fail = reasons.append
    target = torch.zeros(8, 6, requires_grad=True)  # which cannot be written to
    move = Move.of(made, 0, [torch.ones(8, 6)], [target], torch.float32)
    with pytest.raises(RuntimeError) as error:
        Exchange(transport, terms(), [move], fresh=False).start().finish()
    assert reasons == [f"RuntimeError: {error.value}"]


class TaggedWire(InMemoryTransport):
    """A transport on which messages only meet those of the same tag, so that they may leave before all have agreed."""

    def __init__(self, like, posts):
        super().__init__(like.me, like.owners, like._queues, PATIENCE)
        self.tagged, self.posts, self.abandoned = True, posts, []

    def post_messages(self, receives, sends, tag):
        for peer, message in sends:
            self.posts.setdefault((self.me, peer, tag), Queue()).put(message.clone())
        return TaggedMessages(self, receives, tag)

    def abandon(self, posted):
        self.abandoned.append(posted)


class TaggedMessages:
    def __init__(self, transport, receives, tag):
        self.transport, self.receives, self.tag = transport, receives, tag

    def arrivals(self):
        for at, (peer, room) in enumerate(self.receives):
            room.copy_(
                self.transport.posts.setdefault((peer, self.transport.me, self.tag), Queue()).get(timeout=PATIENCE)
            )
            yield at


def ahead(transports, made, *, alone=True, fresh=True, differ=()):
    """For every rank how many messages it had sent when it had started, what came of it, and its target."""
    calls = {transport.me: counted(transport)[0] for transport in transports}

    def work(transport):
        source = torch.from_numpy(scatter(numbered(made.source.shape), made.source)[transport.me][0])
        (target,) = rooms(made, transport.me, torch.int64)
        move = Move.of(made, transport.me, [source], [target], torch.int64)
        exchange = Exchange(transport, terms(extra=transport.me in differ), [move], fresh=fresh).start(alone=alone)
        early = len(calls[transport.me])
        try:
            return early, exchange.finish(), target
        except ExchangeError as error:
            return early, str(error), target

    return together(transports, work)


@pytest.fixture
def tagged():
    made, posts = plan("512x64/S0@2", "512x64/S1@2", itemsize=8), {}
    return made, [TaggedWire(transport, posts) for transport in transports_of(made)]


@pytest.mark.parametrize("fresh", [True, False])
def test_messages_leave_at_once_where_all_have_agreed_before(tagged, fresh):
    made, transports = tagged
    whole = numbered((512, 64))
    for options, early in ({}, 0), ({}, 1), ({"alone": False}, 0), ({}, 1):
        found = ahead(transports, made, fresh=fresh, **options)
        assert [sent for sent, *_ in found] == [early] * 2
        assert [told for _, told, _ in found] == [None] * 2
        assert_same_buffers({o: [t.numpy()] for o, (*_, t) in enumerate(found)}, buffers(made.target, whole))
    assert [transport.abandoned for transport in transports] == [[], []]


def test_messages_do_not_leave_at_once_on_a_transport_on_which_they_could_meet_others(tagged):
    made, transports = tagged
    for transport in transports:
        transport.tagged = False
    for _ in range(2):
        assert [early for early, *_ in ahead(transports, made)] == [0, 0]


def test_what_left_in_vain_is_abandoned_and_what_others_can_see_is_not_touched(tagged):
    made, transports = tagged
    ahead(transports, made)
    found = ahead(transports, made, fresh=False, differ=[1])
    assert [early for early, *_ in found] == [1, 0]
    (told,) = {told for _, told, _ in found}
    assert "disagree on the extra" in told
    assert [len(transport.abandoned) for transport in transports] == [1, 0]
    assert all(untouched(target) and (target == rooms(made, 0, torch.int64)[0]).all() for *_, target in found)
    found = ahead(transports, made)  # the next one does not meet what was left behind
    assert_same_buffers({o: [t.numpy()] for o, (*_, t) in enumerate(found)}, buffers(made.target, numbered((512, 64))))


def test_inline_messages_keep_every_dtype_aligned():
    for owners in (1, 2, 7, 8, 64, 255, 256):
        assert inline_bytes(owners) >= 64
        assert inline_bytes(owners) % 64 == 0


def test_every_rank_hears_of_an_owner_that_waits_in_vain():
    transports = in_memory_transports(2, timeout=0.01)
    (error,) = outcomes(transports[:1], lambda transport: Exchange(transport, terms()).start().finish())
    assert isinstance(error, ExchangeError)
    assert str(error) == "owner 0 waited 0.01 s for owner 1"
