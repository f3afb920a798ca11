"""Staging: room for messages, kept between exchanges."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.exchange import Staging

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 100), max_size=6)
aligns = st.sampled_from([1, 2, 4, 8, 16])


def start(room):
    """Where a room begins in its buffer."""
    return room.storage_offset()


@given(sizes, aligns)
@settings(max_examples=40)
def test_every_message_gets_its_bytes_from_a_multiple_of_the_alignment_on(asked, align):
    rooms = Staging().take(asked, CPU, align=align)
    assert [room.numel() for room in rooms] == asked
    assert {room.dtype for room in rooms} <= {torch.uint8}
    assert [start(room) % align for room in rooms] == [0] * len(asked)


@given(sizes, aligns)
@settings(max_examples=40)
def test_rooms_taken_together_do_not_overlap(asked, align):
    rooms = Staging().take(asked, CPU, align=align)
    for number, room in enumerate(rooms):
        room.fill_(number)
    assert [room.tolist() for room in rooms] == [[number] * size for number, size in enumerate(asked)]


@given(st.lists(sizes, min_size=1, max_size=4), aligns)
@settings(max_examples=40)
def test_as_much_is_kept_as_the_largest_exchange_needed(exchanges, align):
    staging = Staging()
    for asked in exchanges:
        staging.take(asked, CPU, align=align)
    assert staging.bytes == max(sum(-(-size // align) * align for size in asked) for asked in exchanges)


def test_memory_that_is_large_enough_is_used_again():
    staging = Staging()
    (large,) = staging.take([64], CPU, align=8)
    first, second = staging.take([10, 20], CPU, align=8)
    assert first.data_ptr() == large.data_ptr()
    assert second.data_ptr() == large.data_ptr() + 16
    assert staging.bytes == 64


def test_every_dtype_can_start_at_its_own_size():
    rooms = Staging().take([3, 16, 5, 8], CPU, align=8)
    assert rooms[1].view(torch.complex64).shape == (2,)
    assert rooms[3].view(torch.float64).shape == (1,)


def test_nothing_is_kept_before_it_is_needed_and_after_it_is_released():
    staging = Staging()
    assert staging.bytes == 0
    assert staging.take([], CPU, align=4) == []
    assert staging.bytes == 0
    staging.take([40], CPU, align=4)
    assert staging.bytes == 40
    staging.release()
    assert staging.bytes == 0


def test_devices_have_buffers_of_their_own():
    staging = Staging()
    staging.take([40], CPU, align=4)
    (room,) = staging.take([24], torch.device("meta"), align=4)
    assert room.device.type == "meta"
    assert staging.bytes == 64
