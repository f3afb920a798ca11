"""Bytes that are the same on every rank of a group: each rank keeps only its part, and backward gathers the whole."""

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
from shardwise.containers.torch_private import after_backward, backward_task
from shardwise.errors import ExchangeError
from shardwise.exchange.transport import PeerBuffer, PostedMessages
from shardwise.transports import GroupTransport

ALIGN = 64  # bytes: where parts begin
CPU = torch.device("cpu")
PATIENCE = 3.0  # seconds until a waiting rank helps those that may wait for something else

Site = tuple[str, int]  # a module, and which of the tensors that it saves


class PostedGather(NamedTuple):
    """Messages under way: first a header of every rank, then its part of the whole."""

    header: torch.Tensor  # this rank's
    headers: dict[int, torch.Tensor]  # of the others
    header_swap: PostedMessages
    whole: torch.Tensor
    part_swap: PostedMessages


class ActivationStore:
    """All activations sharded over one transport, numbered in the order in which they were saved."""

    def __init__(self, transport: GroupTransport) -> None:
        self.transport = transport
        self.lock = RLock()  # backward may run in threads of its own
        self._numbers = count()
        self._activations = WeakValueDictionary[int, ShardedActivation]()
        self._times = Counter[Site]()  # how often each site was restored
        self._task: int | None = None  # the current backward pass
        self._whole = WeakValueDictionary[int, ShardedActivation]()  # restored in it
        self._last: Site | None = None  # the last one that backward needed
        self._follows = dict[Site, Site | None]()  # what came after each site the last time
        self._wrong = set[tuple[Site, Site]]()  # where that was a wrong guess
        self._left = list[PostedGather]()  # messages that may still write into memory, for as long as the group lives

    @staticmethod
    def of(transport: GroupTransport) -> ActivationStore:
        """The store of a transport."""
        return transport.resource(ActivationStore, lambda: ActivationStore(transport))

    def shard(self, whole: torch.Tensor, digest: int, site: Site, label: str, account: Account) -> ShardedActivation:
        """Keep this rank's part of these bytes. `site` is the same in every forward pass."""
        activation = ShardedActivation(self, next(self._numbers), whole, digest, site, label, account)
        self._activations[activation.number] = activation
        return activation

    def spans(self, total: int) -> Iterator[tuple[int, slice]]:
        """Every owner, and which of so many bytes are its part."""
        owners = self.transport.owners
        cuts = [total * row // len(owners) // ALIGN * ALIGN for row in range(len(owners))] + [total]
        for row, owner in enumerate(owners):
            yield owner, slice(cuts[row], cuts[row + 1])

    def tag(self, *what: object) -> int:
        """A tag for messages about these things alone."""
        return crc32(f"{self.transport.name} activations {what}".encode()) >> 1

    def next_gather(self, site: Site) -> tuple[Site, int]:
        """Which gather this is: the same on every rank, whatever else happens in between.

        Nothing counted in forward goes in: ranks may have failed there, tried again or given up.
        """
        self._times[site] += 1
        return site, self._times[site]

    # --- a backward pass ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Backward needs an activation: in the current pass, or in a new one after the last was interrupted."""
        task = backward_task()
        if task is None or task != self._task:
            self.end()
            self._task = task
            if task is not None:
                after_backward(self.end)

    def end(self) -> None:
        """The pass is over: activations that outlive it, because they are retained, become parts again."""
        with self.lock:
            if self._last is not None:
                self._follows[self._last] = None
            self._task = self._last = None
            for activation in list(self._whole.values()):
                activation.shrink()
            self._whole.clear()

    def note_use(self, activation: ShardedActivation) -> None:
        """Learn the order of uses, and shrink what came before, if autograd has not dropped it."""
        if activation.number not in self._whole:
            if self._last is not None:
                self._follows[self._last] = activation.site
            self._last = activation.site
        for other in list(self._whole.values()):
            if other.served and other is not activation:
                other.shrink()
        self._whole[activation.number] = activation

    def _others(self, number: int) -> Iterator[ShardedActivation]:
        """What else this pass may need: first what was saved before, the latest first."""
        known = sorted(self._activations)
        at = bisect_left(known, number)
        for n in [*reversed(known[:at]), *known[at:]]:
            activation = self._activations.get(n)
            if activation is not None and n != number and n not in self._whole and not activation.under_way:
                yield activation

    def restore_ahead(self, activation: ShardedActivation) -> None:
        """Start on what came next in the last backward pass, so that it is there when backward needs it.

        On nothing else: this rank would wait in vain for what another rank has dropped, or never needs.
        """
        site = self._follows.get(activation.site)
        if site is None or (activation.site, site) in self._wrong or self._task is None:
            return
        for other in self._others(activation.number):
            if other.number < activation.number and other.site == site:
                other.guess = activation.site, site
                other.post()
                return

    def help_others(self, number: int) -> None:
        """Start on another one: ranks that go in another order may wait for that before they come to this.

        Only where it is clear which one they wait for: a site that was saved more than once has an order of its own.
        """
        sites = Counter(activation.site for activation in self._activations.values())
        for other in self._others(number):
            if sites[other.site] == 1:
                other.post()
                return

    def abandon(self, posted: PostedGather, guess: tuple[Site, Site] | None) -> None:
        """Keep the memory of messages that this rank will not wait for, because a guess was wrong."""
        self._left.append(posted)
        if guess is not None:
            self._wrong.add(guess)


class ShardedActivation:
    """This rank's part of some bytes that are the same on all ranks."""

    def __init__(
        self,
        store: ActivationStore,
        number: int,
        whole: torch.Tensor,
        digest: int,
        site: Site,
        label: str,
        account: Account,
    ) -> None:
        self.store, self.number, self.digest, self.account = store, number, digest, account
        self.site, self.label = site, label
        self.guess: tuple[Site, Site] | None = None  # why it was restored ahead
        self.bytes, self.device = whole.numel(), whole.device
        self._mine = dict(store.spans(self.bytes))[store.transport.me]
        self._part: torch.Tensor | None = whole[self._mine].clone()  # None while the whole is there
        self.uses = 0  # by how many saved tensors
        self._left = 0  # of those, in this backward pass
        self._posted: PostedGather | None = None
        self._whole: torch.Tensor | None = None
        account.kept(self.bytes, self._mine.stop - self._mine.start)

    @property
    def under_way(self) -> bool:
        """True where it is or will be whole."""
        return self._part is None

    @property
    def served(self) -> bool:
        """True once this backward pass has used it as often as it was saved."""
        return self._left <= 0

    def post(self) -> PostedGather:
        """Send this rank's part to all others, and receive theirs, without waiting."""
        assert self._part is not None, "not under way"
        transport, gather = self.store.transport, self.store.next_gather(self.site)
        whole = torch.empty(self.bytes, dtype=torch.uint8, device=transport.message_device(self.device))
        part = whole[self._mine].copy_(self._part)
        spans = {owner: span for owner, span in self.store.spans(self.bytes) if owner != transport.me}
        header = torch.tensor([self.digest, self.bytes], device=transport.message_device(CPU))
        headers = {owner: torch.empty_like(header) for owner in spans}
        header_swap = transport.post_messages(
            [(owner, other.view(torch.uint8)) for owner, other in headers.items()],
            [(owner, header.view(torch.uint8)) for owner in spans],
            self.store.tag("header", gather),
        )
        # parts of different sizes never meet: their tags differ, and the headers tell why
        receives: list[PeerBuffer] = [(owner, whole[span]) for owner, span in spans.items() if span.start < span.stop]
        sends: list[PeerBuffer] = [(owner, part) for owner in spans if part.numel()]
        part_swap = transport.post_messages(receives, sends, self.store.tag("part", gather, self.bytes))
        self._posted, self._part = PostedGather(header, headers, header_swap, whole, part_swap), None
        self.account.gathered(self.bytes - part.numel())
        return self._posted

    def whole(self) -> torch.Tensor:
        """The bytes, restored. Every rank of the group needs the same in its backward pass, in whatever order."""
        with self.store.lock:
            self.store.begin()
            if self._whole is None:
                self._restore()
            whole = self._whole
            assert whole is not None, "restored"
            self._left -= 1
            self.store.note_use(self)
            self.store.restore_ahead(self)
            if backward_task() is None:
                self.store.end()
            return whole

    def _restore(self) -> None:
        posted = self._posted or self.post()
        for _ in _patiently(lambda: self._wait(posted), at_once=not self.store.transport.tagged):
            self.store.help_others(self.number)
        self._whole, self._posted, self._left = posted.whole.to(self.device), None, self.uses

    def _wait(self, posted: PostedGather) -> None:
        _finish(posted.header_swap)
        headers = {owner: tuple(header.tolist()) for owner, header in posted.headers.items()}
        headers[self.store.transport.me] = self.digest, self.bytes
        if len(set(headers.values())) > 1:
            raise ExchangeError(f"input_reshard: {difference(self.label, headers)}")
        _finish(posted.part_swap)

    def shrink(self) -> None:
        """Keep only the part again."""
        if self._whole is not None:
            self._part, self._whole = self._whole[self._mine].clone(), None

    def __del__(self) -> None:
        posted = getattr(self, "_posted", None)
        if posted is not None:
            self.store.abandon(posted, self.guess)


def _finish(swap: PostedMessages) -> None:
    for _ in swap.arrivals():
        pass


def _patiently(work: Callable[[], None], *, at_once: bool) -> Iterator[None]:
    """Do the work, and yield from time to time while it takes long."""
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
