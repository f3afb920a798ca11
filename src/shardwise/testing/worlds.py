"""Large worlds in one process: the real exchange code on every rank, counted messages and a clock, but no data."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move, PeerBuffer, Proposal, ViewCache
from shardwise.exchange.messages import Message, Pair, Tensors
from shardwise.planning import Plan
from shardwise.transports.endpoint import Endpoint

T = TypeVar("T")
Key = tuple[int, int, int]  # sender, receiver and tag
STACK = 2**20  # bytes of a thread: there may be thousands
META = torch.device("meta")  # tensors that have shapes, and no data


class RankTraffic(NamedTuple):
    """What one rank has sent: messages, their bytes, and to how many ranks."""

    messages: int
    bytes: int
    peers: int


@dataclass(frozen=True)
class WorldRun(Generic[T]):
    """What came of a run: everybody's results and traffic in the order of the ranks, and when the last was done."""

    results: list[T]
    traffic: list[RankTraffic]
    seconds: float

    @property
    def messages(self) -> int:
        """All that were sent."""
        return sum(one.messages for one in self.traffic)

    @property
    def bytes(self) -> int:
        """Of all messages."""
        return sum(one.bytes for one in self.traffic)

    @property
    def most(self) -> RankTraffic:
        """The largest number of messages, of bytes and of peers that any rank had."""
        return RankTraffic(*map(max, zip(*self.traffic, strict=True)))


@dataclass(frozen=True)
class SimulatedWorld:
    """So many ranks in one process, `per_host` on each host.

    Messages of a rank leave one after the other, and arrive so. Each takes a `latency` and the time of its bytes at
    a `bandwidth`, with other values inside a host: the model of `Plan.estimate`. What ranks compute takes no time.
    Tensors are those of a device: their small messages do not ride with the agreement.

    >>> import shardwise as sw
    >>> world = SimulatedWorld(64, per_host=8)
    >>> run = world.exchange(sw.plan("64x64/S0@64", "64x64/S1@64", itemsize=2))
    >>> run.most.peers
    63
    """

    ranks: int
    per_host: int = 1
    latency: float = 20e-6
    bandwidth: float = 10e9
    host_latency: float = 5e-6
    host_bandwidth: float = 50e9

    def run(self, work: Callable[[SimulatedTransport], T]) -> WorldRun[T]:
        """Call `work(transport)` on every rank. Raises the first error; a rank that would wait for ever has one."""
        turns = _Turns()
        transports = [SimulatedTransport(rank, self, turns) for rank in range(self.ranks)]
        results = turns.run([partial(work, transport) for transport in transports])
        return WorldRun(results, [one.traffic for one in transports], max(one.now for one in transports))

    def exchange(self, *plans: Plan, dtype: torch.dtype = torch.bfloat16, times: int = 1) -> WorldRun[None]:
        """Carry out plans, as the tensors of one exchange. `times`: from the second on, ranks know that they agree."""

        def work(transport: SimulatedTransport) -> None:
            for _ in range(times):
                moves = [_without_data(plan, transport.me, dtype) for plan in plans]
                proposal = Proposal({"operation": "simulated"})
                Exchange(transport, proposal, moves, device=META, views=_NoCopies()).start(alone=True).finish()

        return self.run(work)

    def cost(self, one: int, other: int, size: int) -> float:
        """Seconds that a message takes between two ranks."""
        if one // self.per_host == other // self.per_host:
            return self.host_latency + size / self.host_bandwidth
        return self.latency + size / self.bandwidth


class _NoCopies(ViewCache):
    """Nothing is packed or unpacked."""

    def pack(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        pass

    def unpack(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        pass

    def copy(self, key: Hashable, pairs: Iterable[tuple[Pair, Tensors, Tensors]]) -> None:
        pass


def _without_data(plan: Plan, rank: int, dtype: torch.dtype) -> Move:
    source, target = (
        [
            torch.empty(shape, dtype=dtype, device=META)
            for shape in (layout.local_shapes(rank) if rank in layout else ())
        ]
        for layout in (plan.source, plan.target)
    )
    return Move.of(plan, rank, source, target, dtype)


class _Turns:
    """Runs functions in threads of which one runs at a time: the next when it waits for something, or is done."""

    def __init__(self) -> None:
        self._ready, self._waiting = deque[threading.Lock](), dict[Key, threading.Lock]()
        self._mine, self._end = threading.local(), threading.Lock()
        self._errors = list[BaseException]()
        self.mail = defaultdict[Key, deque[_Sent]](deque)  # what was sent and is not received yet

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Their results, in their order. Raises what was raised first."""
        results = [None] * len(tasks)
        before = threading.stack_size(STACK)
        try:
            threads = [threading.Thread(target=self._run, args=(at, task, results)) for at, task in enumerate(tasks)]
            self._end.acquire()
            self._ready.extend(_locked() for _ in tasks)
            self._gates = list(self._ready)
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._hand_on()
        self._end.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return results

    def _run(self, at: int, task: Callable[[], Any], results: list[Any]) -> None:
        self._mine.gate = self._gates[at]
        self._mine.gate.acquire()
        try:
            results[at] = task()
        except BaseException as error:
            self._errors.append(error)
        self._hand_on()

    def wait(self, key: Key) -> bool:
        """Let others run until something comes for this key; False if it never will."""
        gate = self._waiting[key] = self._mine.gate
        self._hand_on()
        gate.acquire()
        return self._waiting.pop(key, None) is None

    def came(self, key: Key) -> None:
        """Something came: who waits for it may run."""
        gate = self._waiting.pop(key, None)
        if gate is not None:
            self._ready.append(gate)

    def _hand_on(self) -> None:
        if self._ready:
            self._ready.popleft().release()
        elif self._waiting:  # all wait: one of them hears that nothing will come
            next(iter(self._waiting.values())).release()
        else:
            self._end.release()


def _locked() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(frozen=True)
class _Sent:
    """A message, and when it began and ceased to leave."""

    data: torch.Tensor
    begun: float
    gone: float


class SimulatedTransport(Endpoint):
    """One rank's end. `now` is its clock; it is busy sending and receiving until `_out` and `_in`."""

    name, tagged = "simulated", True

    def __init__(self, me: int, world: SimulatedWorld, turns: _Turns) -> None:
        super().__init__(me, range(world.ranks))
        self._world, self._turns = world, turns
        self.now = self._out = self._in = 0.0
        self._sent, self._bytes, self._peers = 0, 0, set[int]()

    @property
    def traffic(self) -> RankTraffic:
        """What it has sent so far."""
        return RankTraffic(self._sent, self._bytes, len(self._peers))

    def message_device(self, device: torch.device) -> torch.device:
        """Any device."""
        return device

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> SimulatedMessages:
        """They leave at once."""
        for peer, message in sends:
            self._send(peer, message, tag)
        return SimulatedMessages(self, receives, tag)

    def _send(self, peer: int, message: torch.Tensor, tag: int) -> None:
        begun = max(self.now, self._out)
        self._out = begun + self._world.cost(self.me, peer, message.nbytes)
        self._sent, self._bytes = self._sent + 1, self._bytes + message.nbytes
        self._peers.add(peer)
        key = self.me, peer, tag
        self._turns.mail[key].append(_Sent(message if message.is_meta else message.clone(), begun, self._out))
        self._turns.came(key)

    def take(self, peer: int, tag: int) -> torch.Tensor:
        """The next message of a peer, once it is here."""
        key = peer, self.me, tag
        queue = self._turns.mail[key]
        if not queue and not self._turns.wait(key):
            raise ExchangeError(f"rank {self.me} waits for rank {peer}, which does not send")
        sent = queue.popleft()
        if not queue:
            del self._turns.mail[key]
        size = self._world.cost(peer, self.me, sent.data.nbytes)
        self._in = max(max(self._in, sent.begun) + size, sent.gone)
        self.now = max(self.now, self._in)
        return sent.data

    def sends_are_gone(self) -> None:
        """Wait until all has left."""
        self.now = max(self.now, self._out)

    def fail(self, reason: str) -> None:
        """Nothing is left to drop: a failure ends the run."""


class SimulatedMessages:
    """Messages in flight."""

    def __init__(self, transport: SimulatedTransport, receives: Sequence[PeerBuffer], tag: int) -> None:
        self._transport, self._receives, self._tag = transport, receives, tag

    def arrivals(self) -> Iterator[int]:
        """In the order of the receives."""
        for at, (peer, room) in enumerate(self._receives):
            data = self._transport.take(peer, self._tag)
            if not room.is_meta:
                room.copy_(data)
            yield at
        self._transport.sends_are_gone()
