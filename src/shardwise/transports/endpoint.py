"""What all transports have in common: collectives and rounds, made of messages; the queue that runs calls.

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
from itertools import count
from threading import Condition, Thread
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.transport import PeerBuffer, PostedMessages, PostedRound, Receive, ReduceOp, Send
from shardwise.transports import collectives

T = TypeVar("T")


EARLY_BYTES = 2**22  # of a round that is worth posting before all have agreed, although it needs staging
MOST_IN_SLOT = 2**14  # bytes of a message beside a header
MOST_SLOTS = 256  # in larger groups nobody writes to everybody; headers are reduced instead
CPU = torch.device("cpu")


@runtime_checkable
class Releasing(Protocol):
    """A resource that keeps memory for later."""

    def release(self) -> int:
        """Give it back; the number of bytes."""
        ...


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

    def message_device(self, device: torch.device) -> torch.device:
        """Where messages of tensors on this device lie: by default in CPU memory."""
        return CPU

    def post_small(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> PostedMessages:
        """Messages of small collectives: by default as others."""
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

    def together(self) -> AbstractContextManager[None]:
        """By default what is sent leaves at once."""
        return nullcontext()

    @property
    def most_slots(self) -> int:
        """By default so many owners write to everybody."""
        return MOST_SLOTS

    @property
    def most_in_slot(self) -> int:
        """By default what costs little more than the header beside it."""
        return MOST_IN_SLOT

    @property
    def most_unasked(self) -> int:
        """By default nothing: a message that nobody receives would stay."""
        return 0

    def discard_unasked(self, number: int) -> None:
        """By default there are none."""

    def early_limit(self, device: torch.device, *, direct: bool) -> int:
        """Nothing where messages cannot be told apart."""
        return EARLY_BYTES if self.tagged else -1

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """Whole rows, by messages."""
        wait = collectives.all_to_all(self, torch.from_numpy(rows), self.collective_tag("all_to_all", number))
        return lambda: [memoryview(row) for row in wait().numpy()]

    def all_reduce(
        self, numbers: torch.Tensor, op: ReduceOp, number: int, *, in_order: bool = True
    ) -> Callable[[], torch.Tensor]:
        """By messages."""
        return lambda: collectives.all_reduce(self, numbers, op, self.collective_tag("all_reduce", number))

    def all_gather(self, value: T) -> list[T]:
        """By messages."""
        return collectives.all_gather(self, value, self.collective_tag("all_gather"), CPU)

    def gather(self, value: T, among: Sequence[int]) -> list[T]:
        """The values of some owners, this one among them, which alone call."""
        return collectives.all_gather(
            Some(self, among), value, self.collective_tag("all_gather"), self.message_device(CPU)
        )

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
        return size + sum(one.release() for one in self._resources.values() if isinstance(one, Releasing))


class Some(Endpoint):
    """Some owners of a transport, for a collective of their own."""

    def __init__(self, over: Endpoint, owners: Sequence[int]) -> None:
        super().__init__(over.me, owners)
        self.encode, self.decode, self._over = over.encode, over.decode, over

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """Over the transport of all."""
        return self._over.post_messages(receives, sends, tag)


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
