"""Tensors on devices that the transport cannot reach: they are packed, and never read or written by their addresses."""

import far
import numpy as np
import pytest
import torch
from threads import terms, together, transports_of

from shardwise import plan
from shardwise.exchange import Exchange, Move, ViewCache
from shardwise.exchange.peer_reads import read_from_peer
from shardwise.testing import on_ranks

MADE = plan("512x64/S0@2", "512x64/R@2", itemsize=8)
FIRST = (0, 0)


def exchange(*, source="cpu", target="cpu"):
    """That of owner 0, over a transport that reaches memory of the CPU only; and what it is given to send."""
    transport, sends = transports_of(MADE)[0], []
    transport.message_device = lambda _: torch.device("cpu")
    transport.post_round = lambda _, given, *__, **___: sends.extend(given)
    here, there = (
        torch.empty(shape, dtype=torch.int64, device=d) for shape, d in (((256, 64), source), ((512, 64), target))
    )
    return Exchange(transport, terms(), [Move.of(MADE, 0, [here], [there], torch.int64)]), sends


@pytest.mark.parametrize(("device", "offered"), [("cpu", 1), ("meta", 0)])
def test_only_tensors_where_messages_lie_are_offered_to_be_read(device, offered):
    made, sends = exchange(source=device)
    made._post(made.schedule.rounds[0], hidden=False)
    assert [len(one.tensors) for one in sends] == [offered]


class Peer:
    """Tensors of owner 1 that can be read; and to where they were."""

    key, mapped, strides = b"where they are", False, [(64, 1)]

    def read(self, here, tensor, offset, sizes):
        self.here, self.bytes = here, int(sizes.sum())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_read_goes_straight_into_memory_and_else_by_way_of_a_message(device):
    made, peer, views = exchange(target=device)[0], Peer(), ViewCache()
    (message,) = made.schedule.rounds[0].receives
    read_from_peer(FIRST, message, peer, made.moves, 0, views)
    assert peer.bytes == 256 * 64 * 8
    straight = made.targets[0][0].data_ptr() + peer.bytes  # the second half of the rows
    np.testing.assert_array_equal(peer.here, [straight if device == "cpu" else views.spare(peer.bytes).data_ptr()])


def reduced_far(made, *, target="far", dtype=torch.int64):
    """Results of owners whose terms are on the device; the transport reaches CPU memory only. In its own process."""
    _lib, values = far.set_up(), {}

    def work(transport):
        transport.message_device = lambda _: torch.device("cpu")
        shape = made.target.local_shapes(transport.me)[0]
        room = torch.empty(shape, dtype=dtype)
        source = [far.Far(torch.full(made.source.shape, transport.me + 1, dtype=dtype))]
        move = Move.of(made, transport.me, source, [far.Far(room) if target == "far" else room], dtype)
        Exchange(transport, terms(), [move], device=torch.device("far")).start().finish()
        values[transport.me] = sorted(set(room.tolist()))

    together(transports_of(made), work)
    return values


@pytest.mark.parametrize("target", ["far", "cpu"])
@pytest.mark.parametrize("form", ["4/P@3 4/R@3", "6/P@3 6/S0@3", "18000/P@3 18000/R@3", "18000/P@3 18000/S0@3"])
def test_terms_on_a_device_are_reduced_on_the_device_of_the_target(form, target):
    """Also of 32 bytes, which come with the agreement; and where messages lie in CPU memory."""
    made = plan(*form.split(), itemsize=8)
    (found,) = on_ranks(1, lambda _: reduced_far(made, target=target))
    assert found == {0: [6], 1: [6], 2: [6]}


def test_short_floats_on_a_device_are_reduced_there_too():
    made = plan("4/Pavg@2", "4/R@2", itemsize=2)
    (found,) = on_ranks(1, lambda _: reduced_far(made, dtype=torch.bfloat16))
    assert found == {0: [1.5], 1: [1.5]}


def deltas_far(made):
    """What owners have after a dense exchange and a delta between tensors on the device, in its own process."""
    _lib, values = far.set_up(), {}

    def work(transport):
        transport.message_device = lambda _: torch.device("cpu")
        room = torch.zeros(made.target.local_shapes(transport.me)[0], dtype=torch.int64)
        memory = torch.arange(transport.me, 512 * 32 + transport.me).view(256, 64)
        changed = torch.zeros(256, 64, dtype=torch.bool)
        for step in range(2):
            move = Move.of(made, transport.me, [far.Far(memory)], [far.Far(room)], torch.int64)
            move = move._replace(changed=[far.Far(changed)]) if step else move
            delta = "always" if step else False
            exchange = Exchange(transport, terms(), [move], device=torch.device("far"), fresh=False, delta=delta)
            exchange.start().finish()
            assert exchange.traffic.sent < 0.1 * made.bytes_moved
            changed[::7, ::9] = True
            memory[changed] = -5
        values[transport.me] = room

    together(transports_of(made), work)
    return values


def test_deltas_between_tensors_on_a_device():
    (found,) = on_ranks(1, lambda _: deltas_far(plan("512x64/S0@2", "512x64/S1@2", itemsize=8)))
    whole = torch.cat([torch.arange(at, 512 * 32 + at).view(256, 64) for at in (0, 1)])
    whole.view(2, 256, 64)[:, ::7, ::9] = -5
    for owner, columns in enumerate(whole.chunk(2, dim=1)):
        np.testing.assert_array_equal(found[owner], columns)
