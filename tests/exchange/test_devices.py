"""Tensors on devices that the wire cannot reach: they are packed, and never read or written by their addresses."""

import numpy as np
import pytest
import torch
from threads import terms, wires_of

from shardwise import plan
from shardwise.exchange import Exchange, Move, Views
from shardwise.exchange.fetch import fetch

MADE = plan("512x64/S0@2", "512x64/R@2", itemsize=8)
TURN = (0, 0)


def exchange(*, source="cpu", target="cpu"):
    """That of owner 0, over a wire that reaches memory of the CPU only; and what it is given to send."""
    wire, sends = wires_of(MADE)[0], []
    wire.serves = lambda _: torch.device("cpu")
    wire.turn = lambda _, given, *__, **___: sends.extend(given)
    here, there = (
        torch.empty(shape, dtype=torch.int64, device=d) for shape, d in (((256, 64), source), ((512, 64), target))
    )
    return Exchange(wire, terms(), [Move.of(MADE, 0, [here], [there], torch.int64)]), sends


@pytest.mark.parametrize(("device", "offered"), [("cpu", 1), ("meta", 0)])
def test_only_tensors_where_messages_lie_are_offered_to_be_read(device, offered):
    made, sends = exchange(source=device)
    made._post(made.schedule.turns[0], hidden=False)
    assert [len(one.tensors) for one in sends] == [offered]


class Peer:
    """Tensors of owner 1 that can be read; and to where they were."""

    key, attached, strides = b"where they are", True, [(64, 1)]

    def read(self, here, tensor, offset, sizes):
        self.here, self.bytes = here, int(sizes.sum())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_read_goes_straight_into_memory_and_else_by_way_of_a_message(device):
    made, peer, views = exchange(target=device)[0], Peer(), Views()
    (parcel,) = made.schedule.turns[0].receives
    fetch(TURN, parcel, peer, made.moves, 0, views)
    assert peer.bytes == 256 * 64 * 8
    straight = made.targets[0][0].data_ptr() + peer.bytes  # the second half of the rows
    np.testing.assert_array_equal(peer.here, [straight if device == "cpu" else views.spare(peer.bytes).data_ptr()])
