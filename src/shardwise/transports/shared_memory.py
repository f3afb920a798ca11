"""The transport of ranks of one host, through shared memory; with ranks of other hosts by messages of their group.

A sender packs into memory that others have mapped, and leaves a letter that says where; receivers read it there, and
say so before it is packed into again. What lies in shared memory already, or can be read from the memory of the other
process, is not packed at all: the letter says where the tensors are.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.exchange import in_words
from shardwise.exchange.transport import PeerTensors, PostedRound, Receive, Send
from shardwise.geometry import Ints
from shardwise.transports import message_location as letters
from shardwise.transports import process_memory as attach
from shardwise.transports.failure_notices import CauseError
from shardwise.transports.local_peers import LocalPeers
from shardwise.transports.message_location import LocatedTensors, MessageLocation
from shardwise.transports.process_group import GroupMessages, GroupTransport
from shardwise.transports.segments import Segment, SharedMemoryError, SharedStaging, hand, shared
from shardwise.transports.unix_packets import FAILED, BrokenError, GoneError, Key, Packet, Post

SLOTS, APART, LETTER, READ = range(1, 5)  # kinds of packets
WORTH, RUN = 2**20, 2**16  # bytes from which on it pays to read from another process: of a message, of a run

NOTHING = torch.empty(0, dtype=torch.uint8)

log = logging.getLogger("shardwise")


class SharedMemoryTransport(GroupTransport):
    """A process group whose ranks of one host talk through memory, once all of them have called `meet`."""

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int] | None = None) -> None:
        super().__init__(group, owners)
        self.near, self._spins = LocalPeers(0, {}, {}, frozenset(), all=False, hosts=[]), False
        self.packed, self._over_group = SharedStaging(), False  # True once others of this host wait at the group for us
        self._numbers = count()

    @property
    def _post(self) -> Post:
        """Where there are neighbours; not every system lets processes have an address."""
        return Post.here()

    def meet(self) -> None:
        """Find who is on this host. Everybody on the transport calls, before anything else."""
        try:
            with self.budget():
                super().meet()
                self.near = LocalPeers.met(self.me, self.owners, self.tell)
        except BaseException as error:  # also an interrupt: others may take this one for their neighbour
            self.fail(f"{type(error).__name__} while it met the others")
            raise
        self._spins = len(self.near.addresses) < len(os.sched_getaffinity(0))

    def ahead(self, device: torch.device, *, direct: bool) -> int:
        """All, where nothing goes by messages: what comes is not looked at before it is wanted."""
        apart = self.near.all and direct and device.type == "cpu"
        return sys.maxsize if apart else super().ahead(device, direct=direct)

    def release(self) -> int:
        """With what is packed into."""
        kept = self.packed.bytes
        self.packed.give_back()
        if self.near.addresses:
            hand.tidy(self._post)
        return kept + super().release()

    def check_choice(self, way: Any) -> None:
        """All ways are open where everybody is on this host."""
        if way != "shared" or not self.near.all:
            super().check_choice(way)

    def _not_shared(self) -> str:
        together = "; ".join(map(in_words, self.near.hosts))
        return (
            f"not all ranks can share memory, but only {together} among themselves: the others are on other hosts, in "
            f"other containers, or of other users"
        )

    def _key(self, owner: int, kind: int, tag: int) -> Key:
        """Of packets that come from an owner."""
        return Key(self.near.addresses[owner], self.near.transport, kind, tag)

    def _send(self, owner: int, kind: int, tag: int, payload: Any = b"", segments: Sequence[Segment] = ()) -> None:
        """A packet, after the segments that it names."""
        to, key = self.near.addresses[owner], Key("", self.near.transport, kind, tag)
        try:
            for segment in segments:
                hand.out(self._post, to, segment, seconds=self.left, transport=key.transport)
            self._post.send(to, key, payload, seconds=self.left)
        except TimeoutError as error:
            raise RuntimeError(f"nothing was taken by rank {owner} within {self.seconds:g} s") from error
        except (GoneError, BrokenError, OSError) as error:
            raise self._lost(error) from error

    def collect(self, keys: dict[int, Key], doing: str) -> Iterator[tuple[int, Packet]]:
        """One packet for each of these numbers, as they come."""
        came, left = list[tuple[int, Packet]](), dict(keys)

        def ready() -> bool:
            for number, key in list(left.items()):
                packet = self._post.take(key)
                if packet is not None:
                    came.append((number, packet))
                    del left[number]
            return bool(came)

        while left or came:
            with self._guarded(doing):
                try:
                    self._post.wait(
                        ready,
                        transport=self.near.transport,
                        expected=lambda: [key.sender for key in left.values()],
                        seconds=self.left,
                        spin=self._spins,
                    )
                except TimeoutError as error:
                    late = in_words(self._owners_at({key.sender for key in left.values()}))
                    raise RuntimeError(f"nothing came within {self.seconds:g} s from {late}") from error
                except (GoneError, BrokenError) as error:
                    raise self._lost(error) from error
            yield from came
            came.clear()

    def _cause_of(self, error: RuntimeError) -> str | None:
        """What was told by packets comes first: it was sent before connections were cut."""
        told = self._post.failure(self.near.transport) if self.near.addresses else None
        return told or super()._cause_of(error)

    def _lost(self, error: Exception) -> RuntimeError:
        """What may happen to other processes, as the errors that transports have."""
        if isinstance(error, GoneError):
            return CauseError(f"{in_words(self._owners_at({error.address}))} has ended")
        return CauseError(str(error)) if isinstance(error, BrokenError) else RuntimeError(str(error))

    def _owners_at(self, addresses: Collection[str]) -> list[int]:
        return [owner for owner, address in self.near.addresses.items() if address in addresses]

    # --- agreement ---------------------------------------------------------------------------------------------------

    def slots(
        self, mine: npt.NDArray[np.uint8], sizes: Sequence[int], *, apart: int | None = None
    ) -> Callable[[], Sequence[memoryview]]:
        """A packet for everybody, where all are on this host."""
        if not self.near.all:
            return super().slots(mine, sizes, apart=apart)
        kind, tag = (SLOTS, next(self._numbers)) if apart is None else (APART, apart)
        rows = [memoryview(row)[:size] for row, size in zip(mine, sizes, strict=True)]
        with self._guarded("starting to agree"):
            for owner, row in zip(self.owners, rows, strict=True):
                if owner != self.me:
                    self._send(owner, kind, tag, row)

        def wait() -> list[memoryview]:
            keys = {self.rows[owner]: self._key(owner, kind, tag) for owner in self.near.addresses}
            for row, packet in self.collect(keys, self._meeting):
                rows[row] = memoryview(packet.payload)
            return rows

        return wait

    # --- turns -------------------------------------------------------------------------------------------------------

    def turn(
        self,
        receives: Sequence[Receive],
        sends: Sequence[Send],
        tag: int,
        device: torch.device,
        align: int,
        *,
        direct: bool = True,
    ) -> PostedRound:
        """Letters to those on this host, messages to others."""
        if device.type != "cpu" or not direct or not self.near.addresses:
            return super().turn(receives, sends, tag, device, align)
        hand.tidy(self._post)
        far = [at for at, one in enumerate(receives) if one.peer not in self.near.addresses]
        far_sends = [one for one in sends if one.peer not in self.near.addresses]
        others = None
        if far or far_sends:
            others = super().turn([receives[at] for at in far], far_sends, tag, device, align)
        near_sends = [one for one in sends if one.peer in self.near.addresses]
        by_group, segment = self._letters(near_sends, tag, align)
        near = {at: one for at, one in enumerate(receives) if one.peer in self.near.addresses}
        return SharedMemoryRound(self, tag, near, [one.peer for one in near_sends], others, far, by_group, segment)

    def _letters(self, sends: Sequence[Send], tag: int, align: int) -> tuple[list[GroupMessages], Segment | None]:
        """Say where everything is, once it is there; what does not fit into shared memory goes by messages.

        Those, and the segment that others read.
        """
        takers = Counter(one.same for one in sends)
        unpacked = [self._unpacked(one, alone=takers[one.same] == 1) for one in sends]
        starts, total = _starts([one for one, letter in zip(sends, unpacked, strict=True) if letter is None], align)
        segment, data = self._room(total)
        by_group, packed = list[GroupMessages](), set[int]()
        with self._guarded("posting messages"):
            for one, letter in zip(sends, unpacked, strict=True):
                if letter is not None:
                    self._send(one.peer, LETTER, tag, *letter)
                elif segment is None:
                    by_group.append(self._by_group(one, tag))
                else:
                    start = starts[one.same]
                    if one.same not in packed:
                        one.pack(data[start : start + one.bytes])
                        packed.add(one.same)
                    self._send(one.peer, LETTER, tag, *letters.staged(segment, start))
        return by_group, segment

    def _room(self, size: int) -> tuple[Segment | None, torch.Tensor]:
        """To pack into; None where it cannot be had, or none is needed."""
        try:
            if size:
                return self.packed.take(size)
        except SharedMemoryError as error:
            # as text: who keeps what is logged must not keep what the error's frames have
            log.warning("%s: messages of rank %s take the way over the process group", str(error), self.me)
        return None, NOTHING

    def _by_group(self, one: Send, tag: int) -> GroupMessages:
        room = torch.empty(one.bytes, dtype=torch.uint8)
        one.pack(room)
        self._over_group = True
        self._send(one.peer, LETTER, tag, *letters.by_group())
        return self.swap([], [(one.peer, room)], tag)

    def _unpacked(self, one: Send, *, alone: bool) -> MessageLocation | None:
        """A letter for what need not be packed; None where it must be.

        To read from another process takes longer than from shared memory: what several want is packed once for all.
        """
        place = None if one.outof is None else shared.place(one.outof)
        if place is not None and not one.tensors:
            return letters.staged(*place)
        if not one.tensors:
            return None
        places = [place for tensor in one.tensors if (place := shared.place(tensor)) is not None]
        if len(places) == len(one.tensors):
            return letters.of_tensors(one.tensors, places)
        worth = alone and one.peer in self.near.readers and one.bytes >= WORTH and one.run >= RUN
        return letters.of_tensors(one.tensors, []) if worth else None

    def _read(self, peer: int, here: Ints, there: Ints, sizes: Ints) -> None:
        """Ranges of bytes from addresses of a peer to addresses here."""
        with self._guarded(f"reading from the memory of rank {peer}"):
            attach.read(self.near.processes[peer], here, there, sizes)

    def _tell_of(self, cause: str) -> None:
        """Packets to those on this host; the others, and those who wait for messages of the group, by the group."""
        self.packed.release()
        for address in self.near.addresses.values():
            self._post.try_to_send(address, Key("", self.near.transport, FAILED, 0), cause.encode()[:1000])
        if self.near.addresses:  # what has come will not be taken
            self._post.discard_all(lambda key: key.transport == self.near.transport)
        if not self.near.all or self._over_group:
            super()._tell_of(cause)

    def abandon(self, posted: Any) -> None:
        """Others may read what was packed for as long as they like."""
        super().abandon(posted)
        self.packed.release()
        if isinstance(posted, SharedMemoryRound):
            posted.drop()


class SharedMemoryRound:
    """Letters under way, and messages with other hosts."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        tag: int,
        near: dict[int, Receive],
        sent_to: Sequence[int],
        others: PostedRound | None,
        far: Sequence[int],
        by_group: Sequence[GroupMessages],
        segment: Segment | None,
    ) -> None:
        self._transport, self._tag, self._near, self._sent_to = transport, tag, near, sent_to
        self._others, self._far, self._by_group = others, far, by_group
        self._segment = segment  # until it is read: others must not hear that it is no more before they have opened it

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """Letters as they come, then messages."""
        transport = self._transport
        keys = {at: transport._key(one.peer, LETTER, self._tag) for at, one in self._near.items()}
        for at, packet in transport.collect(keys, f"waiting for {_peers(self._near.values())}"):
            yield at, self._opened(self._near[at], packet)
        for at, found in self._others.arrivals() if self._others else ():
            yield self._far[at], found

    def _opened(self, one: Receive, packet: Packet) -> torch.Tensor | PeerTensors:
        transport, (kind, *said) = self._transport, np.frombuffer(packet.payload, np.int64)[:4].tolist()
        segment = partial(hand.of, transport._post, transport.near.addresses[one.peer])
        if kind == letters.TENSORS:
            return LocatedTensors(packet.payload, segment, partial(transport._read, one.peer))
        if kind == letters.BY_GROUP:
            room = torch.empty(one.bytes, dtype=torch.uint8)
            for _ in transport.swap([(one.peer, room)], [], self._tag).arrivals():
                pass
            return room
        number, size, start = said
        return segment(number, size)[start : start + one.bytes]

    def finish(self) -> None:
        """Tell the senders, and hear from those who were sent to."""
        transport = self._transport
        with transport._guarded("saying that it has read its messages"):
            for one in self._near.values():
                transport._send(one.peer, READ, self._tag)
        keys = {at: transport._key(peer, READ, self._tag) for at, peer in enumerate(self._sent_to)}
        for _ in transport.collect(keys, f"waiting for its messages to be read by {_peers_of(self._sent_to)}"):
            pass
        self._segment = None
        transport.packed.read()
        for swap in self._by_group:
            for _ in swap.arrivals():
                pass
        if self._others is not None:
            self._others.finish()

    def drop(self) -> None:
        """Nobody will open the letters."""
        self._segment = None


def _starts(sends: Sequence[Send], align: int) -> tuple[dict[int, int], int]:
    """Where in staging each message begins, those with the same bytes at the same place; and how long it is in all."""
    starts, total = dict[int, int](), 0
    for one in sends:
        if one.same not in starts:
            starts[one.same] = total
            total += -(-one.bytes // align) * align
    return starts, total


def _peers(receives: Iterable[Receive]) -> str:
    return _peers_of([one.peer for one in receives])


def _peers_of(peers: Sequence[int]) -> str:
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
