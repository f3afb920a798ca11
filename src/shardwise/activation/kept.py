"""Memory that every rank of a group has alike, of which each keeps only its part, until it is needed again."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from threading import Event, RLock, Thread
from typing import NamedTuple
from weakref import WeakValueDictionary
from zlib import crc32

import torch

from shardwise.activation.account import Account
from shardwise.activation.digest import difference
from shardwise.errors import ExchangeError
from shardwise.exchange.collectives import PeerBuffer, PostedMessages
from shardwise.torch_internals.autograd import after_backward, backward_task
from shardwise.transports import GroupTransport

ALIGN = 64  # bytes: where parts begin
PATIENCE = 3.0  # seconds until a rank that waits helps those that may wait for something else

Site = tuple[str, int]  # a module, and which of the tensors that it keeps


class Posted(NamedTuple):
    """Messages under way: first what the ranks say of the whole, then their parts of it."""

    mine: torch.Tensor
    heads: dict[int, torch.Tensor]
    said: PostedMessages
    room: torch.Tensor
    parts: PostedMessages


class Home:
    """All that is kept in parts over one transport, numbered in the order in which it was saved."""

    def __init__(self, transport: GroupTransport) -> None:
        self.transport = transport
        self.lock = RLock()  # backward may run in threads of its own
        self._numbers = count()
        self._kept = WeakValueDictionary[int, Kept]()
        self._times = Counter[Site]()  # how often each site was restored
        self._task: int | None = None  # the backward pass that is on
        self._whole = WeakValueDictionary[int, Kept]()  # restored in it
        self._last: Site | None = None  # what it asked for last
        self._follows = dict[Site, Site | None]()  # and what came after that, the last time
        self._wrong = set[tuple[Site, Site]]()  # where that was no good guess
        self._left = list[Posted]()  # messages that may still write into memory, for as long as the group lives

    @staticmethod
    def of(transport: GroupTransport) -> Home:
        """That of a transport."""
        return transport.resource(Home, lambda: Home(transport))

    def keep(self, whole: torch.Tensor, digest: int, site: Site, label: str, account: Account) -> Kept:
        """Keep this rank's part of these bytes. `site` is the same in every forward pass."""
        kept = Kept(self, next(self._numbers), whole, digest, site, label, account)
        self._kept[kept.number] = kept
        return kept

    def spans(self, total: int) -> Iterator[tuple[int, slice]]:
        """Every owner, and which of so many bytes are its part."""
        owners = self.transport.owners
        cuts = [total * row // len(owners) // ALIGN * ALIGN for row in range(len(owners))] + [total]
        for row, owner in enumerate(owners):
            yield owner, slice(cuts[row], cuts[row + 1])

    def tag(self, *what: object) -> int:
        """Of messages that only meet those of the same things."""
        return crc32(f"{self.transport.name} activations {what}".encode()) >> 1

    def place(self, site: Site) -> tuple[Site, int]:
        """Which restoring this is: the same on every rank, whatever else happens in between.

        Not by anything counted in forward: ranks may have failed there, tried again or given up.
        """
        self._times[site] += 1
        return site, self._times[site]

    # --- a backward pass ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Something is asked for: by this pass, or by another one after the last was broken off."""
        task = backward_task()
        if task is None or task != self._task:
            self.end()
            self._task = task
            if task is not None:
                after_backward(self.end)

    def end(self) -> None:
        """The pass is over: what outlives it, because it is retained, becomes a part again."""
        with self.lock:
            if self._last is not None:
                self._follows[self._last] = None
            self._task = self._last = None
            for kept in list(self._whole.values()):
                kept.shrink()
            self._whole.clear()

    def asked_for(self, kept: Kept) -> None:
        """Learn in which order things are asked for, and shrink what came before, if autograd has not dropped it."""
        if kept.number not in self._whole:
            if self._last is not None:
                self._follows[self._last] = kept.site
            self._last = kept.site
        for other in list(self._whole.values()):
            if other.served and other is not kept:
                other.shrink()
        self._whole[kept.number] = kept

    def _others(self, number: int) -> Iterator[Kept]:
        """What else this pass may ask for: first what was saved before, the latest first."""
        known = sorted(self._kept)
        at = bisect_left(known, number)
        for n in [*reversed(known[:at]), *known[at:]]:
            kept = self._kept.get(n)
            if kept is not None and n != number and n not in self._whole and not kept.under_way:
                yield kept

    def restore_ahead(self, kept: Kept) -> None:
        """Start on what came next in the last backward pass, so that it is there when it is asked for.

        Not on anything else: what another rank has dropped, or never asks for, would be waited for in vain.
        """
        site = self._follows.get(kept.site)
        if site is None or (kept.site, site) in self._wrong or self._task is None:
            return
        for other in self._others(kept.number):
            if other.number < kept.number and other.site == site:
                other.guess = kept.site, site
                other.post()
                return

    def help_others(self, number: int) -> None:
        """Start on something else: other ranks may wait for that, in another order, before they come to this.

        Only where it is clear what they would wait for: a site that is kept more than once has an order of its own.
        """
        sites = Counter(kept.site for kept in self._kept.values())
        for other in self._others(number):
            if sites[other.site] == 1:
                other.post()
                return

    def leave(self, posted: Posted, guess: tuple[Site, Site] | None) -> None:
        """Messages that nobody will wait for, because of a guess that was wrong."""
        self._left.append(posted)
        if guess is not None:
            self._wrong.add(guess)


class Kept:
    """This rank's part of some bytes that all ranks had alike."""

    def __init__(
        self, home: Home, number: int, whole: torch.Tensor, digest: int, site: Site, label: str, account: Account
    ) -> None:
        self.home, self.number, self.digest, self.account = home, number, digest, account
        self.site, self.label = site, label
        self.guess: tuple[Site, Site] | None = None  # why it was restored ahead
        self.bytes, self.device = whole.numel(), whole.device
        self._mine = dict(home.spans(self.bytes))[home.transport.me]
        self._part: torch.Tensor | None = whole[self._mine].clone()  # None while it is part of the whole
        self.uses = 0  # by how many saved tensors
        self._left = 0  # of those, in this backward pass
        self._posted: Posted | None = None
        self._whole: torch.Tensor | None = None
        account.kept(self.bytes, self._mine.stop - self._mine.start)

    @property
    def under_way(self) -> bool:
        """True where it is or will be whole."""
        return self._part is None

    @property
    def served(self) -> bool:
        """True once this backward pass has asked for it as often as it was saved."""
        return self._left <= 0

    def post(self) -> Posted:
        """Send this rank's part to all others, and get theirs, without waiting."""
        assert self._part is not None, "not under way"
        transport, place = self.home.transport, self.home.place(self.site)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=transport.message_device(self.device))
        part = room[self._mine].copy_(self._part)
        spans = {owner: span for owner, span in self.home.spans(self.bytes) if owner != transport.me}
        mine = torch.tensor([self.digest, self.bytes])
        heads = {owner: torch.empty_like(mine) for owner in spans}
        told = [(owner, head.view(torch.uint8)) for owner, head in heads.items()]
        said = transport.post_messages(
            told, [(owner, mine.view(torch.uint8)) for owner in spans], self.home.tag("said", place)
        )
        # parts of another size never meet: their tags differ, and what was said before tells why
        receives: list[PeerBuffer] = [(owner, room[span]) for owner, span in spans.items() if span.start < span.stop]
        sends: list[PeerBuffer] = [(owner, part) for owner in spans if part.numel()]
        parts = transport.post_messages(receives, sends, self.home.tag("part", place, self.bytes))
        self._posted, self._part = Posted(mine, heads, said, room, parts), None
        self.account.gathered(self.bytes - part.numel())
        return self._posted

    def whole(self) -> torch.Tensor:
        """The bytes, restored. Every rank of the group asks for the same in its backward pass, in whatever order."""
        with self.home.lock:
            self.home.begin()
            if self._whole is None:
                self._restore()
            found = self._whole
            assert found is not None, "restored"
            self._left -= 1
            self.home.asked_for(self)
            self.home.restore_ahead(self)
            if backward_task() is None:
                self.home.end()
            return found

    def _restore(self) -> None:
        posted = self._posted or self.post()
        for _ in _patiently(lambda: self._arrive(posted), at_once=not self.home.transport.tagged):
            self.home.help_others(self.number)
        self._whole, self._posted, self._left = posted.room.to(self.device), None, self.uses

    def _arrive(self, posted: Posted) -> None:
        _finish(posted.said)
        told = {owner: tuple(head.tolist()) for owner, head in posted.heads.items()}
        told[self.home.transport.me] = self.digest, self.bytes
        if len(set(told.values())) > 1:
            raise ExchangeError(f"input_reshard: {difference(self.label, told)}")
        _finish(posted.parts)

    def shrink(self) -> None:
        """Keep only the part again."""
        if self._whole is not None:
            self._part, self._whole = self._whole[self._mine].clone(), None

    def __del__(self) -> None:
        posted = getattr(self, "_posted", None)
        if posted is not None:
            self.home.leave(posted, self.guess)


def _finish(swap: PostedMessages) -> None:
    for _ in swap.arrivals():
        pass


def _patiently(work: Callable[[], None], *, at_once: bool) -> Iterator[None]:
    """Do it, and yield now and then while it takes long."""
    if at_once:
        work()
        return
    done, errors = Event(), list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()

    Thread(target=run, name="shardwise", daemon=True).start()
    while not done.wait(PATIENCE):
        yield
    if errors:
        raise errors[0]
