"""Memory that every rank of a group has alike, of which each keeps only its part, until it is needed again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import torch

from shardwise.activation.account import Account
from shardwise.activation.announcement import Announcement
from shardwise.dtensor import after_backward, backward_task, dressed_as
from shardwise.exchange.wire import Message, Swap
from shardwise.wires import GroupWire

ALIGN = 64  # bytes: where parts begin
AHEAD = 2  # restored before they are asked for
Key = tuple[Any, ...]


class Home:
    """All that is kept in parts over one wire, numbered in the order in which it was saved: the same on every rank."""

    def __init__(self, wire: GroupWire) -> None:
        self.wire = wire
        self.next = 0
        self.lock = RLock()  # backward may run in threads of its own
        self._kept = WeakValueDictionary[int, Kept]()
        self._known = WeakValueDictionary[Key, Kept]()
        self._order = list[int]()  # the numbers, ascending; those of what is gone may be among them
        self._ahead = set[int]()  # under way, or there, before anybody asked
        self._used = dict[int, Kept]()  # whole, for as long as the backward pass may ask again
        self._task = -1
        self._pending = list[tuple[Swap, Any]]()  # messages that nobody waits for any more

    @staticmethod
    def of(wire: GroupWire) -> Home:
        """That of a wire."""
        if "activations" not in wire.memory:
            wire.memory["activations"] = Home(wire)
        home: Home = wire.memory["activations"]
        return home

    def known(self, key: Key) -> Kept | None:
        """What was kept before by that key, if it still is."""
        return self._known.get(key)

    def keep(self, key: Key, whole: torch.Tensor, held: Any, label: str, account: Account) -> Kept:
        """Keep this rank's part of these bytes. `held` lives as long as the key must mean the same."""
        kept = Kept(self, self.next, whole, held, label, account)
        self.next += 1
        self._kept[kept.number] = self._known[key] = kept
        self._order.append(kept.number)
        return kept

    def forget_from(self, number: int) -> None:
        """What was kept by a forward pass that failed: other ranks may not have come so far."""
        self.next = number
        del self._order[bisect_left(self._order, number) :]
        for late in [late for late in self._kept if late >= number]:
            self._kept.pop(late, None)

    def spans(self, total: int) -> Iterator[tuple[int, slice]]:
        """Every owner, and which of so many bytes are its part."""
        count = len(self.wire.owners)
        cuts = [total * row // count // ALIGN * ALIGN for row in range(count)] + [total]
        for row, owner in enumerate(self.wire.owners):
            yield owner, slice(cuts[row], cuts[row + 1])

    def tag(self, *what: object) -> int:
        """Of messages that only meet those of the same things."""
        return crc32(f"{self.wire.name} activations {what}".encode()) >> 1

    def before(self, number: int) -> Iterator[Kept]:
        """What was kept before, latest first: backward most likely needs that next."""
        for at in range(bisect_left(self._order, number) - 1, -1, -1):
            kept = self._kept.get(self._order[at])
            if kept is None:
                del self._order[at]
            else:
                yield kept

    def restore_ahead(self, number: int) -> None:
        """Start on what comes before, so that it is there when it is asked for."""
        for kept in self.before(number):
            if len(self._ahead) >= AHEAD:
                return
            if not kept.under_way:
                kept.post()
                self._ahead.add(kept.number)

    def asked_for(self, kept: Kept) -> None:
        """Remember what has to be given back when the backward pass ends."""
        self._ahead.discard(kept.number)
        task = backward_task()
        if task is None:
            kept.release()
            return
        self._used[kept.number] = kept
        if task != self._task:
            self._task = task
            after_backward(self.release)

    def release(self) -> None:
        """The backward pass is over."""
        with self.lock:
            for kept in self._used.values():
                kept.release()
            self._used.clear()
            self._task = -1

    def gone(self, kept: Kept) -> None:
        """It is needed no more, all its uses have been served."""
        self._used.pop(kept.number, None)

    def leave(self, swap: Swap, memory: Any) -> None:
        """Messages still write into this memory."""
        self._pending = [(swap, memory) for swap, memory in self._pending if not swap.done()]
        if not swap.done():
            self._pending.append((swap, memory))


class Kept:
    """This rank's part of some bytes that all ranks had alike."""

    def __init__(self, home: Home, number: int, whole: torch.Tensor, held: Any, label: str, account: Account) -> None:
        self.home, self.number, self.label, self.account, self._held = home, number, label, account, held
        self.bytes, self.device = whole.numel(), whole.device
        mine = dict(home.spans(self.bytes))[home.wire.me]
        self.part = whole[mine].clone()
        self.announcement: Announcement | None = None
        self.uses = 0  # by how many saved tensors
        self._left = 0  # of those, in this backward pass
        self._times = 0  # restored
        self._posted: tuple[Swap, torch.Tensor] | None = None
        self._whole: torch.Tensor | None = None
        account.kept(self.bytes, self.part.numel())

    @property
    def under_way(self) -> bool:
        """True where it is or will be whole."""
        return self._posted is not None or self._whole is not None

    def post(self) -> None:
        """Send this rank's part to all others, and get theirs, without waiting."""
        if self.announcement is not None:
            self.announcement.check()
        wire = self.home.wire
        place = wire.serves(self.device)
        part, room = self.part.to(place), torch.empty(self.bytes, dtype=torch.uint8, device=place)
        receives, sends = list[Message](), list[Message]()
        for owner, span in self.home.spans(self.bytes):
            if owner == wire.me:
                room[span] = part
            elif span.start < span.stop:
                receives.append((owner, room[span]))
            if owner != wire.me and part.numel():
                sends.append((owner, part))
        tag = self.home.tag("part", self.number, self.bytes, self._times)
        self._posted = wire.swap(receives, sends, tag), room
        self._times += 1
        self.account.gathered(self.bytes - part.numel())

    def whole(self) -> torch.Tensor:
        """The bytes, restored. Every rank of the group asks for the same in its backward pass, in whatever order."""
        with self.home.lock:
            if self._whole is None:
                if self._posted is None:
                    self.post()
                assert self._posted is not None, "just posted"
                swap, room = self._posted
                for _ in swap.arrivals():
                    pass
                self._posted, self._whole, self._left = None, room.to(self.device), self.uses
            found = self._whole
            self.home.asked_for(self)
            self._left -= 1
            if not self._left:
                self.release()
                self.home.gone(self)
            self.home.restore_ahead(self.number)
            return found

    def release(self) -> None:
        """Give the whole back; the part stays."""
        self._whole = None

    def __del__(self) -> None:
        if self._posted is not None:
            self.home.leave(*self._posted)


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved: which part of the bytes that are kept it is."""

    kept: Kept
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    spec: Any  # of a DTensor

    def restored(self) -> torch.Tensor:
        """The same again."""
        storage = self.kept.whole().untyped_storage()
        local = torch.empty(0, dtype=self.dtype, device=self.kept.device)
        local.set_(storage, 0, self.size, self.stride)
        return local if self.spec is None else dressed_as(self.spec, local)
