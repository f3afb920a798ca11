"""The transport of ranks of one host, through shared memory; to ranks of other hosts, by messages of their group.

A sender packs a message into a segment that the receiver has mapped, and sends its location. The receiver reads it
there, and acknowledges it before the segment is packed again. Cells that lie in shared memory already, or that the
receiver can read from the memory of the sender, are not packed at all: the location is that of the tensors.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.exchange import PeerBuffer, in_words
from shardwise.exchange.transport import PeerTensors, PostedRound, Receive, Send
from shardwise.geometry import Ints
from shardwise.transports import local_peers, message_location
from shardwise.transports.endpoint import wait_for
from shardwise.transports.guarded_group import CauseError
from shardwise.transports.local_peers import LocalPeers
from shardwise.transports.message_location import LocatedTensors, MessageLocation
from shardwise.transports.process_group import GroupMessages, GroupTransport
from shardwise.transports.segments import SharedMemoryError, SharedSegment, SharedStaging, this_process
from shardwise.transports.unix_packets import (
    FAILED,
    Packet,
    PacketKey,
    PacketSocket,
    Payload,
    PeerEndedError,
    TransportFailedError,
)

ROW, LOCATION, READ = range(
    1, 4
)  # kinds of packets: a row of an all-to-all, the location of a message, that it was read
WORTH, RUN = 2**20, 2**16  # bytes of a message and of its runs from which on reading from the sender's memory pays

NOTHING = torch.empty(0, dtype=torch.uint8)

log = logging.getLogger("shardwise")


class SharedMemoryTransport(GroupTransport):
    """A process group whose ranks of one host communicate through memory, after the rendezvous."""

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int] | None = None) -> None:
        super().__init__(group, owners)
        self.local_peers, self._spin = LocalPeers(), False
        self.shared_staging = SharedStaging()
        self._used_group = False  # True once a rank of this host waits for a message of the group from this one

    @property
    def _packets(self) -> PacketSocket:
        """Only where there are local peers: not every system allows a socket."""
        return this_process.packets

    def rendezvous(self) -> None:
        """Find the ranks of this host. Everybody on the transport calls, before anything else."""
        try:
            with self.budget():
                super().rendezvous()
                self.local_peers = LocalPeers.find(self.me, self.owners, self.all_gather)
            if self.local_peers.addresses:
                self._packets.keep(self.local_peers.addresses.values())
        except BaseException as error:  # also an interrupt: others may take this rank for their peer
            self.fail(f"{type(error).__name__} during the rendezvous")
            raise
        self._spin = len(self.local_peers.addresses) < len(os.sched_getaffinity(0))

    def twin(self, group: dist.ProcessGroup, token: str) -> Self:
        """With the same local peers, and packets of its own."""
        twin = super().twin(group, token)
        twin.local_peers, twin._spin = self.local_peers.renumbered(token), self._spin
        return twin

    def early_limit(self, device: torch.device, *, direct: bool) -> int:
        """No limit if nothing goes by messages: a location is not looked at before it is needed."""
        by_memory = self.local_peers.all and direct and device.type == "cpu"
        return sys.maxsize if by_memory else super().early_limit(device, direct=direct)

    def release(self) -> int:
        """Give back the shared staging too, and unmap segments that peers have freed."""
        size = self.shared_staging.bytes
        self.shared_staging.give_back()
        if self.local_peers.addresses:
            this_process.peer_segments.tidy()
        return size + super().release()

    @property
    def on_one_host(self) -> bool:
        """As the rendezvous found."""
        return self.local_peers.all or super().on_one_host

    def check_choice(self, choice: object) -> None:
        """Every choice is possible if everybody is on this host."""
        if choice != "shared" or not self.local_peers.all:
            super().check_choice(choice)

    def _why_not_shared(self) -> str:
        hosts = "; ".join(map(in_words, self.local_peers.hosts))
        return (
            f"not all ranks can share memory, but only {hosts} among themselves: the others are on other hosts, in "
            f"other containers, or of other users"
        )

    # --- packets -----------------------------------------------------------------------------------------------------

    def _key(self, owner: int, kind: int, tag: int) -> PacketKey:
        """The key of packets that come from an owner."""
        return PacketKey(self.local_peers.addresses[owner], self.local_peers.transport, kind, tag)

    def _send(
        self, owner: int, kind: int, tag: int, payload: Payload = b"", segments: Sequence[SharedSegment] = ()
    ) -> None:
        """Send a packet, after the segments that it names."""
        address, transport = self.local_peers.addresses[owner], self.local_peers.transport
        try:
            for segment in segments:
                this_process.peer_segments.send(address, segment, seconds=self.left, transport=transport)
            self._packets.send(address, PacketKey("", transport, kind, tag), payload, seconds=self.left)
        except TimeoutError as error:
            raise RuntimeError(f"nothing was taken by rank {owner} within {self.seconds:g} s") from error
        except (PeerEndedError, TransportFailedError, OSError) as error:
            raise self._as_runtime_error(error) from error

    def collect(self, keys: Mapping[int, PacketKey], doing: str) -> Iterator[tuple[int, Packet]]:
        """One packet for each of these numbers, in the order of arrival."""
        arrived, missing = list[tuple[int, Packet]](), dict(keys)

        def ready() -> bool:
            for number, key in list(missing.items()):
                packet = self._packets.take(key)
                if packet is not None:
                    arrived.append((number, packet))
                    del missing[number]
            return bool(arrived)

        while missing or arrived:
            with self.guard(doing):
                self._wait_for_packets(ready, lambda: [key.sender for key in missing.values()])
            yield from arrived
            arrived.clear()

    def _wait_for_packets(self, ready: Callable[[], bool], senders: Callable[[], list[str]]) -> None:
        transport, left, spin = self.local_peers.transport, self.left, self._spin
        try:
            self._packets.wait(ready, transport=transport, expected=senders, seconds=left, spin=spin)
        except TimeoutError as error:
            late = in_words(self._owners_at(senders()))
            raise RuntimeError(f"nothing came within {self.seconds:g} s from {late}") from error
        except (PeerEndedError, TransportFailedError) as error:
            raise self._as_runtime_error(error) from error

    def _cause_of(self, error: RuntimeError) -> str | None:
        """A cause that came by packet is the first: it was sent before connections were closed."""
        cause = self._packets.failure(self.local_peers.transport) if self.local_peers.addresses else None
        return cause or super()._cause_of(error)

    def _as_runtime_error(self, error: Exception) -> RuntimeError:
        """Failures of other processes, as the errors that `guard` expects."""
        if isinstance(error, PeerEndedError):
            return CauseError(f"{in_words(self._owners_at({error.address}))} has ended")
        return CauseError(str(error)) if isinstance(error, TransportFailedError) else RuntimeError(str(error))

    def _owners_at(self, addresses: Collection[str]) -> list[int]:
        return [owner for owner, address in self.local_peers.addresses.items() if address in addresses]

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """A packet for every rank, if all are on this host."""
        if not self.local_peers.all:
            return super().all_to_all(rows, sizes, number, in_order=in_order)
        views = [memoryview(row)[:size] for row, size in zip(rows, sizes, strict=True)]
        with self.guard("starting to agree"):
            for owner, row in zip(self.owners, views, strict=True):
                if owner != self.me:
                    self._send(owner, ROW, number, row)

        def wait() -> list[memoryview]:
            keys = {self.rows[owner]: self._key(owner, ROW, number) for owner in self.local_peers.addresses}
            for row, packet in self.collect(keys, self._waiting_for_all):
                views[row] = memoryview(packet.payload)
            return views

        return wait

    # --- rounds ------------------------------------------------------------------------------------------------------

    def shares_memory(self, peer: int) -> bool:
        """True for ranks of this host."""
        return peer in self.local_peers.addresses

    def post_stream(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> GroupMessages:
        """Over the group, also to ranks of this host."""
        self._used_group = True
        return self.post_messages(receives, sends, tag)

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
        """Send locations to ranks of this host, messages to others."""
        local = self.local_peers.addresses
        if device.type != "cpu" or not direct or not local:
            return super().post_round(receives, sends, tag, device, align)
        this_process.peer_segments.tidy()
        far = [at for at, one in enumerate(receives) if one.peer not in local]
        far_sends, local_sends = (
            [one for one in sends if (one.peer in local) == is_local] for is_local in (False, True)
        )
        far_round = None
        if far or far_sends:
            far_round = super().post_round([receives[at] for at in far], far_sends, tag, device, align)
        group_messages, segment = self._send_locations(local_sends, tag, align)
        local_receives = {at: one for at, one in enumerate(receives) if one.peer in local}
        return SharedMemoryRound(
            self, tag, local_receives, [one.peer for one in local_sends], far_round, far, group_messages, segment
        )

    def _send_locations(
        self, sends: Sequence[Send], tag: int, align: int
    ) -> tuple[list[GroupMessages], SharedSegment | None]:
        """Pack what must be packed, and send the location of every message as soon as it is there.

        Returns the messages that did not fit into shared memory and go over the group, and the segment with the others.
        """
        takers = Counter(one.same for one in sends)
        locations = [self._location_in_place(one, alone=takers[one.same] == 1) for one in sends]
        starts, total = _starts([one for one, place in zip(sends, locations, strict=True) if place is None], align)
        segment, data = self._take_staging(total)
        group_messages, packed = list[GroupMessages](), set[int]()
        with self.guard("posting messages"):
            for one, location in zip(sends, locations, strict=True):
                if location is not None:
                    self._send(one.peer, LOCATION, tag, *location)
                elif segment is None:
                    group_messages.append(self._send_over_group(one, tag))
                else:
                    start = starts[one.same]
                    if one.same not in packed:
                        one.pack(data[start : start + one.bytes])
                        packed.add(one.same)
                    self._send(one.peer, LOCATION, tag, *message_location.in_segment(segment, start))
        return group_messages, segment

    def _take_staging(self, size: int) -> tuple[SharedSegment | None, torch.Tensor]:
        """A segment to pack into; None if it cannot be allocated, or none is needed."""
        try:
            if size:
                return self.shared_staging.take(size)
        except SharedMemoryError as error:
            # as a string: a handler that keeps log records must not keep the frames of the error
            log.warning("%s: messages of rank %s go over the process group", str(error), self.me)
        return None, NOTHING

    def _send_over_group(self, one: Send, tag: int) -> GroupMessages:
        room = torch.empty(one.bytes, dtype=torch.uint8)
        one.pack(room)
        self._used_group = True
        self._send(one.peer, LOCATION, tag, *message_location.in_group_message())
        return self.post_messages([], [(one.peer, room)], tag)

    def _location_in_place(self, one: Send, *, alone: bool) -> MessageLocation | None:
        """The location of a message that need not be packed; None if it must be.

        Reading from another process takes longer than from shared memory: what several ranks want is packed once.
        """
        place_of = this_process.shared_tensors.place
        place = None if one.outof is None else place_of(one.outof)
        if place is not None and not one.tensors:
            return message_location.in_segment(*place)
        if not one.tensors:
            return None
        places = [place for tensor in one.tensors if (place := place_of(tensor)) is not None]
        if len(places) == len(one.tensors):
            return message_location.in_tensors(one.tensors, places)
        worth = alone and one.peer in self.local_peers.readers and one.bytes >= WORTH and one.run >= RUN
        return message_location.in_tensors(one.tensors, []) if worth else None

    def read_memory(self, peer: int, here: Ints, there: Ints, sizes: Ints) -> None:
        """Copy ranges of bytes from addresses of a peer to addresses of this process."""
        with self.guard(f"reading from the memory of rank {peer}"):
            local_peers.read(self.local_peers.processes[peer], here, there, sizes)

    def open_message(self, one: Receive, packet: Packet, tag: int) -> torch.Tensor | PeerTensors:
        """The bytes of a message of this host, or the tensors to read it from, by its location."""
        kind, *words = np.frombuffer(packet.payload, np.int64)[:4].tolist()
        segment = partial(this_process.peer_segments.mapping, self.local_peers.addresses[one.peer])
        if kind == message_location.IN_TENSORS:
            return LocatedTensors(packet.payload, segment, partial(self.read_memory, one.peer))
        if kind == message_location.IN_GROUP_MESSAGE:
            room = torch.empty(one.bytes, dtype=torch.uint8)
            wait_for(self.post_messages([(one.peer, room)], [], tag))
            return room
        number, size, start = words
        return segment(number, size)[start : start + one.bytes]

    # --- failures ----------------------------------------------------------------------------------------------------

    def _announce_failure(self, cause: str) -> None:
        """By packet to ranks of this host; by the group to others, and to those that wait for its messages."""
        self.shared_staging.release()
        key = PacketKey("", self.local_peers.transport, FAILED, 0)
        for address in self.local_peers.addresses.values():
            self._packets.try_to_send(address, key, cause.encode()[:1000])
        if self.local_peers.addresses:  # nobody will take what has arrived, and no thread here may wait for more
            self._packets.end(self.local_peers.transport, cause)
            self._packets.discard_all(lambda key: key.transport == self.local_peers.transport)
        if not self.local_peers.all or self._used_group:
            super()._announce_failure(cause)

    def abandon(self, posted: PostedRound) -> None:
        """Peers may read what was packed for any length of time."""
        super().abandon(posted)
        self.shared_staging.release()
        if isinstance(posted, SharedMemoryRound):
            posted.abandon()


class SharedMemoryRound:
    """A round whose locations are sent to ranks of this host; `far_round` has the messages with other hosts.

    The segment is kept until it is read: peers must not be told that it is freed before they have mapped it.
    """

    def __init__(
        self,
        transport: SharedMemoryTransport,
        tag: int,
        receives: Mapping[int, Receive],
        readers: Sequence[int],
        far_round: PostedRound | None,
        far: Sequence[int],
        group_messages: Sequence[GroupMessages],
        segment: SharedSegment | None,
    ) -> None:
        self._transport, self._tag, self._receives, self._readers = transport, tag, receives, readers
        self._far_round, self._far, self._group_messages, self._segment = far_round, far, group_messages, segment

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """Messages of this host in the order of arrival, then those of others."""
        transport, tag = self._transport, self._tag
        keys = {at: transport._key(one.peer, LOCATION, tag) for at, one in self._receives.items()}
        peers = [one.peer for one in self._receives.values()]
        for at, packet in transport.collect(keys, f"waiting for {_ranks(peers)}"):
            yield at, transport.open_message(self._receives[at], packet, tag)
        for at, message in self._far_round.arrivals() if self._far_round else ():
            yield self._far[at], message

    def finish(self) -> None:
        """Acknowledge what was read, and wait for the acknowledgements of peers."""
        transport, tag = self._transport, self._tag
        with transport.guard("acknowledging the messages that it has read"):
            for one in self._receives.values():
                transport._send(one.peer, READ, tag)
        keys = {at: transport._key(peer, READ, tag) for at, peer in enumerate(self._readers)}
        for _ in transport.collect(keys, f"waiting for its messages to be read by {_ranks(self._readers)}"):
            pass
        self._segment = None
        transport.shared_staging.mark_read()
        for messages in self._group_messages:
            wait_for(messages)
        if self._far_round is not None:
            self._far_round.finish()

    def abandon(self) -> None:
        """Nobody will read the messages."""
        self._segment = None


def _starts(sends: Sequence[Send], align: int) -> tuple[dict[int, int], int]:
    """The offset of each message in staging, where equal messages share one; and the size of all."""
    starts, total = dict[int, int](), 0
    for one in sends:
        if one.same not in starts:
            starts[one.same] = total
            total += -(-one.bytes // align) * align
    return starts, total


def _ranks(peers: Sequence[int]) -> str:
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
