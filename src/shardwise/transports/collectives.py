"""Small collectives made of messages: an all-to-all, and a tree of owners for numbers and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from shardwise.exchange.transport import PeerBuffer, PostedMessages, ReduceOp
from shardwise.transports import direct

if TYPE_CHECKING:
    from shardwise.transports.endpoint import Endpoint

T = TypeVar("T")


def all_to_all(over: Endpoint, rows: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
    """Send row i to `owners[i]`; the function that is returned waits for the rows of all owners."""
    result, posted = direct.all_to_all(over, rows, tag)

    def wait() -> torch.Tensor:
        wait_for(posted)
        return result

    return wait


def all_reduce(over: Endpoint, numbers: torch.Tensor, op: ReduceOp, tag: int) -> torch.Tensor:
    """Up a tree of owners, and down again; among few, in one round."""
    if (at_once := direct.all_reduce(over, numbers, op, tag)) is not None:
        return at_once
    parent, children = relatives(over)
    rooms = [torch.empty_like(numbers) for _ in children]
    _exchange_small(over, zip(children, rooms, strict=True), [], tag)
    for room in rooms:
        numbers = torch.maximum(numbers, room) if op == "max" else numbers + room
    if parent is not None:
        result = torch.empty_like(numbers)
        _exchange_small(over, [(parent, result)], [(parent, numbers)], tag)
        numbers = result
    _exchange_small(over, [], [(child, numbers) for child in children], tag)
    return numbers


def all_gather(over: Endpoint, value: T, tag: int, device: torch.device) -> list[T]:
    """Everybody's values, by the same tree. Equal values travel once and are one object: they must not be changed."""
    (parent, children), text = relatives(over), over.encode(value)
    if (at_once := direct.all_gather(over, text, tag, device)) is not None:
        decoded = {one: over.decode(one) for one in set(at_once)}
        return [decoded[one] for one in at_once]
    texts = {over.rows[over.me]: text}
    for joined in _receive(over, children, tag, device):
        texts |= _separated(joined)
    if parent is not None:
        _send(over, [parent], _joined(texts), tag, device)
        texts = _separated(*_receive(over, [parent], tag, device))
    _send(over, children, _joined(texts), tag, device)
    values = {text: over.decode(text) for text in set(texts.values())}
    return [values[texts[row]] for row in range(len(over.owners))]


BRANCHES = 4  # of the tree: up and down are as many steps as doubling has, with two messages per owner in all


def relatives(over: Endpoint) -> tuple[int | None, list[int]]:
    """The owner above this one in the tree, and those below it."""
    me, owners = over.rows[over.me], over.owners
    parent = owners[(me - 1) // BRANCHES] if me else None
    return parent, list(owners[BRANCHES * me + 1 : BRANCHES * (me + 1) + 1])


def wait_for(posted: PostedMessages) -> None:
    """Wait until all messages have arrived and are sent."""
    for _ in posted.arrivals():
        pass


def _exchange_small(over: Endpoint, receives: Iterable[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> None:
    """Numbers between owners. Messages are flat, whatever the shape of the numbers."""
    rooms, messages = (
        [(peer, numbers.view(-1).view(torch.uint8)) for peer, numbers in side] for side in (receives, sends)
    )
    if rooms or messages:
        wait_for(over.post_small(rooms, messages, tag))


FIRST = 2**10  # bytes of a text's first message, which says how long it is; a second one brings the rest


def _send(over: Endpoint, peers: Sequence[int], text: bytes, tag: int, device: torch.device) -> None:
    """Send a text to each of these owners."""
    if peers:
        told = torch.frombuffer(bytearray(np.int64(len(text)).tobytes() + text.ljust(FIRST - 8)), dtype=torch.uint8)
        parts = [part for part in (told[:FIRST].to(device), told[FIRST:].to(device)) if len(part)]
        wait_for(over.post_small([], [(peer, part) for peer in peers for part in parts], tag))


def _receive(over: Endpoint, peers: Sequence[int], tag: int, device: torch.device) -> list[bytes]:
    """The text of each of these owners."""
    first = [torch.empty(FIRST, dtype=torch.uint8, device=device) for _ in peers]
    _exchange_small(over, zip(peers, first, strict=True), [], tag)
    sizes = [8 + int(room[:8].cpu().view(torch.int64)) for room in first]
    rest = [room.new_empty(max(size - FIRST, 0)) for room, size in zip(first, sizes, strict=True)]
    _exchange_small(over, [(peer, room) for peer, room in zip(peers, rest, strict=True) if len(room)], [], tag)
    whole = [torch.cat(parts)[8:size].cpu() for *parts, size in zip(first, rest, sizes, strict=True)]
    return [text.numpy().tobytes() for text in whole]


def _joined(texts: Mapping[int, bytes]) -> bytes:
    """Strings of bytes by number as one: equal ones travel once."""
    once = list(dict.fromkeys(texts.values()))
    place = {text: at for at, text in enumerate(once)}
    numbers = [len(texts), len(once), *texts, *(place[text] for text in texts.values()), *map(len, once)]
    return np.array(numbers, np.int64).tobytes() + b"".join(once)


def _separated(data: bytes) -> dict[int, bytes]:
    """The inverse.

    >>> _separated(_joined({3: b"a", 1: b"", 7: b"a"}))
    {3: b'a', 1: b'', 7: b'a'}
    """
    count, different = np.frombuffer(data, np.int64, 2).tolist()
    numbers = np.frombuffer(data, np.int64, 2 + 2 * count + different)[2:]
    rows, places, lengths = np.split(numbers, [count, 2 * count])
    ends = [0, *np.cumsum(lengths).tolist()]
    body = data[8 * (2 + len(numbers)) :]
    once = [body[start:stop] for start, stop in pairwise(ends)]
    return {row: once[place] for row, place in zip(rows.tolist(), places.tolist(), strict=True)}
