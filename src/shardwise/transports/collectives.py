"""Small collectives made of messages between two owners, for transports without collectives of their own.

The tag keeps them apart from other messages, so they may run between other calls of the same owners.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from shardwise.exchange.transport import PeerBuffer, PostedMessages, ReduceOp

T = TypeVar("T")


class Messages(Protocol):
    """What can send messages: an end of a transport."""

    me: int
    owners: tuple[int, ...]
    rows: dict[int, int]  # the number of each owner in `owners`

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """Post the receives, then the sends as the iterator yields them. Both sides know all sizes beforehand."""
        ...


def all_to_all(over: Messages, rows: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
    """Send row i to `owners[i]`; the function that is returned waits for the rows of all owners."""
    mine, result = over.rows[over.me], torch.empty_like(rows)
    result[mine] = rows[mine]
    others = [(row, owner) for row, owner in enumerate(over.owners) if row != mine]
    receives = [(owner, result[row]) for row, owner in others]
    posted = over.post_messages(receives, [(owner, rows[row]) for row, owner in others], tag)

    def wait() -> torch.Tensor:
        wait_for(posted)
        return result

    return wait


def all_reduce(over: Messages, numbers: torch.Tensor, op: ReduceOp, tag: int) -> torch.Tensor:
    """By doubling: after step k an owner has the result of 2**k owners. Those past a power of two join in first."""
    me, count = over.rows[over.me], len(over.owners)
    most = 1 << (count.bit_length() - 1)
    if me >= most:
        _exchange_numbers(over, me - most, tag, send=numbers)
        return _exchange_numbers(over, me - most, tag, like=numbers)
    if me + most < count:
        numbers = _combine(numbers, _exchange_numbers(over, me + most, tag, like=numbers), op)
    for step in (1 << k for k in range(most.bit_length() - 1)):
        numbers = _combine(numbers, _exchange_numbers(over, me ^ step, tag, send=numbers, like=numbers), op)
    if me + most < count:
        _exchange_numbers(over, me + most, tag, send=numbers)
    return numbers


def all_gather(over: Messages, value: T, tag: int, device: torch.device) -> list[T]:
    """Everybody's values, pickled. Equal values are one object: they must not be changed.

    After step k an owner has the values of the next 2**k owners, so large groups need few messages too.
    """
    me, count = over.rows[over.me], len(over.owners)
    pickles = [pickle.dumps(value)]  # of this owner and the next ones, in a circle
    while len(pickles) < count:
        step = len(pickles)
        target, source = over.owners[me - step], over.owners[(me + step) % count]
        pickles += _pass_on(over, pickles[: count - step], target, source, tag, device)
    values = {text: pickle.loads(text) for text in set(pickles)}
    return [values[pickles[(row - me) % count]] for row in range(count)]


def wait_for(posted: PostedMessages) -> None:
    """Wait until all messages have arrived and are sent."""
    for _ in posted.arrivals():
        pass


def _exchange_numbers(
    over: Messages, row: int, tag: int, *, send: torch.Tensor | None = None, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Send numbers to an owner, and receive as many as `like` has."""
    peer, result = over.owners[row], torch.empty(0) if like is None else torch.empty_like(like)
    receives = [] if like is None else [(peer, result.view(torch.uint8))]
    sends = [] if send is None else [(peer, send.view(torch.uint8))]
    wait_for(over.post_messages(receives, sends, tag))
    return result


def _combine(a: torch.Tensor, b: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    return torch.maximum(a, b) if op == "max" else a + b


def _pass_on(
    over: Messages, pickles: list[bytes], target: int, source: int, tag: int, device: torch.device
) -> list[bytes]:
    """Send pickles to one owner and receive those of another: the size first, since only the sender knows it."""
    once = {text: text for text in pickles}  # pickle writes an object once, so equal values travel once
    mine = torch.frombuffer(bytearray(pickle.dumps([once[text] for text in pickles])), dtype=torch.uint8).to(device)
    size = torch.tensor([len(mine)], device=device)
    size_there = torch.empty_like(size)
    wait_for(over.post_messages([(source, size_there)], [(target, size)], tag))
    received = mine.new_empty(int(size_there))
    wait_for(over.post_messages([(source, received)], [(target, mine)], tag))
    result: list[bytes] = pickle.loads(received.cpu().numpy().tobytes())
    return result
