"""What all transports have in common: small collectives and rounds, made of messages; the queue that runs calls.

The tag of a collective keeps it apart from other messages, so it may run between other calls of the same owners.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import cached_property
from itertools import count, pairwise
from threading import Condition, Thread
from typing import Any, TypeVar
from weakref import WeakSet
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.transport import PeerBuffer, PostedMessages, PostedRound, Receive, ReduceOp, Send

T = TypeVar("T")


def all_to_all(over: Endpoint, rows: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
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


def all_reduce(over: Endpoint, numbers: torch.Tensor, op: ReduceOp, tag: int) -> torch.Tensor:
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


def all_gather(over: Endpoint, value: T, tag: int, device: torch.device) -> list[T]:
    """Everybody's values. Equal values are one object: they must not be changed.

    After step k an owner has the values of the next 2**k owners, so large groups need few messages too.
    """
    me, count = over.rows[over.me], len(over.owners)
    texts = [over.encode(value)]  # of this owner and the next ones, in a circle
    while len(texts) < count:
        step = len(texts)
        target, source = over.owners[me - step], over.owners[(me + step) % count]
        texts += _pass_on(over, texts[: count - step], target, source, tag, device)
    values = {text: over.decode(text) for text in set(texts)}
    return [values[texts[(row - me) % count]] for row in range(count)]


def wait_for(posted: PostedMessages) -> None:
    """Wait until all messages have arrived and are sent."""
    for _ in posted.arrivals():
        pass


def _exchange_numbers(
    over: Endpoint, row: int, tag: int, *, send: torch.Tensor | None = None, like: torch.Tensor | None = None
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
    over: Endpoint, texts: list[bytes], target: int, source: int, tag: int, device: torch.device
) -> list[bytes]:
    """Send encoded values to one owner and receive those of another: the size first, since only the sender knows it."""
    mine = torch.frombuffer(bytearray(_joined(texts)), dtype=torch.uint8).to(device)
    size = torch.tensor([len(mine)], device=device)
    size_there = torch.empty_like(size)
    wait_for(over.post_messages([(source, size_there)], [(target, size)], tag))
    received = mine.new_empty(int(size_there))
    wait_for(over.post_messages([(source, received)], [(target, mine)], tag))
    return _separated(received.cpu().numpy().tobytes())


def _joined(texts: Sequence[bytes]) -> bytes:
    """Several strings of bytes as one: equal ones travel once."""
    once = list(dict.fromkeys(texts))
    rows = {text: row for row, text in enumerate(once)}
    numbers = [len(texts), len(once), *(rows[text] for text in texts), *map(len, once)]
    return np.array(numbers, np.int64).tobytes() + b"".join(once)


def _separated(data: bytes) -> list[bytes]:
    """The inverse.

    >>> _separated(_joined([b"a", b"", b"a"]))
    [b'a', b'', b'a']
    """
    count, different = np.frombuffer(data, np.int64, 2).tolist()
    numbers = np.frombuffer(data, np.int64, 2 + count + different)[2:]
    ends = [0, *np.cumsum(numbers[count:]).tolist()]
    body = data[8 * (2 + len(numbers)) :]
    once = [body[start:stop] for start, stop in pairwise(ends)]
    return [once[row] for row in numbers[:count].tolist()]


EARLY_BYTES = 2**22  # of a round that is worth posting before all have agreed, although it needs staging
CPU = torch.device("cpu")


class Endpoint:
    """One owner's end of a transport: what all transports have in common, made of `post_messages`."""

    name: str
    tagged: bool
    # of values that everybody gets; a transport between jobs has others, because it must not unpickle
    encode: Callable[[Any], bytes] = staticmethod(pickle.dumps)
    decode: Callable[[bytes], Any] = staticmethod(pickle.loads)

    def __init__(self, me: int, owners: Sequence[int]) -> None:
        self.assign_owners(me, owners)
        self.numbers: Iterator[int] = count()
        self.agreed = set[bytes]()
        self.staging = Staging()
        self.views = WeakSet[ViewCache]()
        self._resources = dict[type[object], object]()

    def assign_owners(self, me: int, owners: Sequence[int]) -> None:
        """Set who is on this transport."""
        self.me, self.owners = me, tuple(owners)
        self.rows = {owner: row for row, owner in enumerate(self.owners)}

    @cached_property
    def queue(self) -> SerialQueue:
        """Runs the calls that use this transport."""
        return SerialQueue(self)

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """Every transport has its own."""
        raise NotImplementedError

    def post_stream(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """By default as other messages."""
        return self.post_messages(receives, sends, tag)

    def shares_memory(self, peer: int) -> bool:
        """By default all goes by messages."""
        return False

    def collective_tag(self, kind: str, number: int | None = None) -> int:
        """The tag of messages outside rounds: they meet only those of the same owners and kind."""
        return crc32(f"{self.name} {kind} {number}".encode()) >> 1

    def resource(self, kind: type[T], make: Callable[[], T]) -> T:
        """The one object of this type that belongs to the transport, made at first use."""
        if kind not in self._resources:
            self._resources[kind] = make()
        resource = self._resources[kind]
        assert isinstance(resource, kind), "made by another function"
        return resource

    def budget(self) -> AbstractContextManager[None]:
        """By default a transport has no timeout."""
        return nullcontext()

    def early_limit(self, device: torch.device, *, direct: bool) -> int:
        """Nothing where messages cannot be told apart."""
        return EARLY_BYTES if self.tagged else -1

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """Whole rows, by messages."""
        wait = all_to_all(self, torch.from_numpy(rows), self.collective_tag("all_to_all", number))
        return lambda: [memoryview(row) for row in wait().numpy()]

    def all_reduce(
        self, numbers: torch.Tensor, op: ReduceOp, number: int, *, in_order: bool = True
    ) -> Callable[[], torch.Tensor]:
        """By messages."""
        return lambda: all_reduce(self, numbers, op, self.collective_tag("all_reduce", number))

    def all_gather(self, value: T) -> list[T]:
        """By messages."""
        return all_gather(self, value, self.collective_tag("all_gather"), CPU)

    def post_round(
        self,
        receives: Sequence[Receive],
        sends: Sequence[Send],
        tag: int,
        device: torch.device,
        align: int,
        *,
        direct: bool = True,
    ) -> PostedRound:
        """Post the messages of a round; those that cannot stay in place go through staging."""
        sizes = [one.bytes for one in receives if one.into is None] + [one.bytes for one in sends if one.outof is None]
        staged = iter(self.staging.take(sizes, device, align=align))
        rooms = [next(staged) if one.into is None else one.into for one in receives]

        def messages() -> Iterator[PeerBuffer]:
            for one in sends:
                room = next(staged) if one.outof is None else one.outof
                if one.outof is None:
                    one.pack(room)
                yield one.peer, room

        buffers = [(one.peer, room) for one, room in zip(receives, rooms, strict=True)]
        return MessageRound(self.post_messages(buffers, messages(), tag), receives, rooms)

    def abandon(self, posted: PostedRound) -> None:
        """By default nothing is posted early."""

    def release(self) -> int:
        """Give back staging and the views of repeated exchanges; the number of bytes of staging."""
        size = self.staging.bytes
        self.staging.release()
        for views in list(self.views):
            views.release()
        return size


class MessageRound:
    """A round by messages."""

    def __init__(self, messages: PostedMessages, receives: Sequence[Receive], rooms: Sequence[torch.Tensor]) -> None:
        self._messages, self._receives, self._rooms = messages, receives, rooms

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | None]]:
        """In the order of arrival."""
        for at in self._messages.arrivals():
            yield at, self._rooms[at] if self._receives[at].into is None else None

    def finish(self) -> None:
        """All was sent when the last message had arrived."""


Task = tuple[Callable[[], Any], Future[Any]]


class SerialQueue:
    """Runs tasks one after the other. All that a task waits for is within one timeout of the transport.

    Each submitted task starts a thread, which runs the tasks before it too. Where only the order of messages tells them
    apart, the waiting thread runs them, so that calls reach the transport in program order.
    """

    def __init__(self, transport: Endpoint) -> None:
        self._threaded, self._budget = transport.tagged, transport.budget
        self._tasks = deque[Task]()
        self._turn = Condition()
        self._busy = False  # a task is being done

    @property
    def idle(self) -> bool:
        """True if no task is queued or running."""
        return not self._busy and not self._tasks

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run it after all tasks that were submitted before."""
        future = Pending[T](self)
        with self._turn:
            self._tasks.append((as_here(lambda: self._limited(work)), future))
        if self._threaded:
            Thread(target=self._drain, args=(future,), name="shardwise", daemon=True).start()
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Run it after all submitted tasks and wait for it; in this thread if the queue is idle."""
        if not self.idle:
            return self.submit(work).result()
        with self._turn:
            self._busy = True
        try:
            return self._limited(work)
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _limited(self, work: Callable[[], T]) -> T:
        with self._budget():
            return work()

    def _drain(self, until: Future[Any]) -> None:
        """Run tasks in order until this one is done."""
        while not until.done():
            with self._turn:
                self._turn.wait_for(lambda: not self._busy)
                if until.done():
                    return
                work, future = self._tasks.popleft()
                self._busy = True
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()


class Pending(Future[T]):
    """A future of a queue. If the queue has no thread, the waiting thread runs its tasks."""

    def __init__(self, queue: SerialQueue) -> None:
        super().__init__()
        self._queue = queue

    def result(self, timeout: float | None = None) -> T:
        """The result, or the error."""
        if not self._queue._threaded:
            self._queue._drain(self)
        return super().result(timeout)


def as_here(work: Callable[[], T]) -> Callable[[], T]:
    """Run with the inference mode, stream and budget of the calling thread."""
    context = copy_context()
    inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> T:
        with torch.inference_mode(inference), torch.cuda.stream(stream) if stream else nullcontext():
            return context.run(work)

    return run
