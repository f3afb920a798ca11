"""The transport of one pull: a process group over the ranks of two jobs, which lives as long as the pull.

Its rows are those of the serving job, then those of the pulling job. Nothing that comes over it is unpickled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwise.errors import ExchangeError
from shardwise.publishing.meeting import MeetingLostError, MeetingPoint
from shardwise.publishing.orders import Order
from shardwise.transports.guarded_group import NEVER, POLL, CauseError, GuardedGroup, transport_name
from shardwise.transports.members import Members, remember
from shardwise.transports.notice_board import cause_key
from shardwise.transports.process_group import GroupTransport
from shardwise.transports.torch_groups import new_group

if TYPE_CHECKING or sys.platform == "linux":
    from shardwise.transports.local_peers import LocalPeers, introduced
    from shardwise.transports.shared_memory import SharedMemoryTransport as Base
    from shardwise.transports.unix_packets import PeerEndedError, TransportFailedError
else:
    Base = GroupTransport


BACKENDS = {"gloo": {"cpu": "gloo"}, "nccl": {"cpu": "gloo", "cuda": "nccl"}}  # by the kind of device


def _encode(value: object) -> bytes:
    return json.dumps(value).encode()


def _decode(text: bytes) -> Any:
    return json.loads(text)


class PairTransport(Base):
    """Waits as long as the other job lives: `check_alive` raises an error once it is known that it does not."""

    encode, decode = staticmethod(_encode), staticmethod(_decode)

    def __init__(self, group: dist.ProcessGroup, rows: int, check_alive: Callable[[], None], patience: float) -> None:
        super().__init__(group)
        self._check_alive, self._rows = check_alive, rows
        self._alive: dist.ProcessGroup | None = group  # which nothing else keeps
        self.seconds = max(patience, 2 * POLL)

    def leave(self) -> None:
        """End the group now: its threads and descriptors must not wait until this is collected.

        In a thread, for which the interpreter waits at its end: gloo ends after some tens of milliseconds of sleep.
        """
        last, self._alive = [self._alive], None
        Thread(target=last.clear, name="shardwise leaves").start()

    @property
    def left(self) -> float:
        """A piece of a wait may take so long; waits as a whole have no limit."""
        return self.seconds

    def rendezvous(self) -> None:
        """Find ranks of this host. The rows of both jobs are known."""
        everybody = range(self.group.size())
        mine = range(self._rows) if self.me < self._rows else range(self._rows, len(everybody))
        jobs = tuple(int(row >= self._rows) for row in everybody)
        self.members = Members(tuple(everybody), tuple((at, row) for at, row in enumerate(mine)), jobs)
        remember(self.group, self.members)
        if sys.platform == "linux":
            with introduced() as card:
                self.local_peers = LocalPeers.find(self.me, self.owners, self.all_gather(card), self.gather)
            self._spin = len(self.local_peers.addresses) < len(os.sched_getaffinity(0))
        self._rendezvous_done = True

    # --- waits: without a limit; a thread looks around meanwhile ------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Break the transport when the other job ends, or the pull is cancelled: all waits in it end then."""
        done = Event()

        def look() -> None:
            while not done.wait(POLL):
                try:
                    self._check_store()
                except Exception as cause:  # whatever it is: nobody would end the waits if this thread ended
                    self.fail(str(cause), str(cause))
                    return

        thread = Thread(target=look, name="shardwise watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _announce_failure(self, cause: str) -> None:
        """Also end waits for messages of the group: nobody else uses its connections."""
        super()._announce_failure(cause)
        GuardedGroup._announce_failure(self, cause)

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """A transport that the thread has broken raises what the thread has found."""
        if self._failure is not None:
            raise ExchangeError(self._failure)
        with super().guard(doing):
            yield

    def wait(self, work: dist.Work) -> None:
        """As long as it takes."""
        if self._gloo:
            work.wait(NEVER)
        else:
            work.wait()

    def wait_for_collective(self, work: dist.Work) -> None:
        """As long as it takes."""
        self.wait(work)

    def wait_in_order(self, works: Any) -> Callable[[int], None]:
        """As long as it takes."""
        return lambda at: self.wait(works[at])

    def _check_store(self) -> None:
        super()._check_store()
        try:
            self._check_alive()
        except ExchangeError as error:
            raise CauseError(str(error)) from error

    def _wait_for_packets(
        self, ready: Callable[[], bool], senders: Callable[[], list[str]], every: float = POLL
    ) -> None:
        transport, spin = self.local_peers.transport, self._spin
        while not ready():
            try:
                self._packets.wait(ready, transport=transport, expected=senders, seconds=POLL, spin=spin, every=every)
            except TimeoutError:
                self._check_store()
            except (PeerEndedError, TransportFailedError, OSError) as error:
                raise self._as_runtime_error(error) from error


@contextmanager
def join(
    meeting: MeetingPoint, path: str, row: int, order: Order, check_alive: Callable[[], None], patience: float
) -> Iterator[PairTransport]:
    """Join the group of a pull, for as long as the pull takes. All ranks of both jobs call."""
    hostname = None if "GLOO_SOCKET_IFNAME" in os.environ else meeting.local_address()  # torch's own setting wins
    size, backends = order.server_rows + order.subscriber_rows, BACKENDS[order.backend]
    with meeting.connection() as connection:
        store = PrefixStore(f"{path}/group", connection)
        try:
            group = new_group(store, row, size, backends=backends, seconds=patience, hostname=hostname)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ExchangeError(f"the connections of a pull were not made within {patience:g} s: {first}") from error
        transport = PairTransport(group, order.server_rows, check_alive, patience)
        del group
        try:
            with transport.watched(), transport.budget():
                transport.rendezvous()
                yield transport
        finally:
            transport.leave()


def cancel(meeting: MeetingPoint, path: str, order: Order, why: str) -> None:
    """Tell all ranks of a pull that it has ended: those who wait look there every second."""
    everybody = transport_name(range(order.server_rows + order.subscriber_rows))
    with suppress(MeetingLostError):
        meeting.put(f"{path}/admitted", {"order": order.id, "why": why})
        meeting.write_plain(f"{path}/group/{cause_key(everybody)}", why)
