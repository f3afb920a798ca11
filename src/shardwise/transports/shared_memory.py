"""The transport of ranks of one host, through shared memory; to ranks of other hosts, by messages of their group.

A sender packs a message into a segment that the receiver has mapped, and sends its location. The receiver reads it
there, and marks in the segment that it has: the sender looks there before it packs over it, and does not wait at the
end of a call. Cells that lie in shared memory already, or that the receiver can read from the memory of the sender, are
not packed at all: the location is that of the tensors. Their sender waits until they are read.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.exchange import PeerBuffer, in_words
from shardwise.exchange.transport import PeerTensors, PostedMessages, PostedRound, Receive, Send
from shardwise.geometry import Ints
from shardwise.planning import Hosts
from shardwise.transports import local_peers, message_location
from shardwise.transports.collectives import wait_for
from shardwise.transports.guarded_group import CauseError
from shardwise.transports.local_peers import LocalPeers, hosts_of
from shardwise.transports.message_location import LocatedTensors, MessageLocation
from shardwise.transports.process_group import GroupMessages, GroupTransport
from shardwise.transports.segments import (
    Readers,
    SharedMemoryError,
    SharedSegment,
    SharedStaging,
    StagedRound,
    mark_read,
    this_process,
)
from shardwise.transports.unix_packets import (
    FAILED,
    LOOK,
    Packet,
    PacketKey,
    PacketSocket,
    Payload,
    PeerEndedError,
    TransportFailedError,
)

# kinds of packets: a row of an all-to-all; the location of a message, and that it was read; a small message
ROW, LOCATION, READ, SMALL = range(1, 5)
MOST_SLOTS = 16  # ranks of one host that write to everybody; more of them agree by a tree, which is fewer packets
MOST_UNASKED = 2**14  # bytes of a small message
IN_SLOT_BETWEEN_HOSTS = 2**12  # bytes
WORTH, RUN = 2**20, 2**16  # bytes of a message and of its runs from which on reading from the sender's memory pays
TOGETHER = 2**20  # bytes of a round that are packed before the rows of the agreement leave, in the same packets
SOON = 1e-3  # seconds between looks whether staging was read, in the rare case that this has to be waited for

Held = dict[int, tuple[PacketKey, Payload]]

log = logging.getLogger("shardwise")


class SharedMemoryTransport(GroupTransport):
    """A process group whose ranks of one host communicate through memory, after the rendezvous."""

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int] | None = None) -> None:
        super().__init__(group, owners)
        self.local_peers, self._spin = LocalPeers(), False
        self.shared_staging = SharedStaging()
        self._held: Held | None = None  # packets that leave with the next one to an owner
        self._used_group = False  # True once a rank of this host waits for a message of the group from this one

    @property
    def _packets(self) -> PacketSocket:
        """Only where there are local peers: not every system allows a socket."""
        return this_process.packets

    def rendezvous(self) -> None:
        """Find the ranks of this host. Everybody on the transport calls, before anything else."""
        try:
            with self.budget(), local_peers.introduced() as mine:
                cards = self.meet(mine)
                self.local_peers = LocalPeers.find(self.me, self.owners, cards, self.gather)
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

    @property
    def most_slots(self) -> int:
        """Fewer where every slot is a packet."""
        return MOST_SLOTS if self.local_peers.all else super().most_slots

    @property
    def most_in_slot(self) -> int:
        """Less between hosts: an all-to-all carries the whole slot over the links at every call, whatever is in it."""
        return super().most_in_slot if len(self.local_peers.hosts) < 2 else IN_SLOT_BETWEEN_HOSTS

    @property
    def most_unasked(self) -> int:
        """A packet that nobody takes does no harm."""
        return MOST_UNASKED if self.local_peers.all else super().most_unasked

    def discard_unasked(self, number: int) -> None:
        """All that peers have sent before they agreed has arrived."""
        if self.local_peers.all:
            transport = self.local_peers.transport
            self._packets.failure(transport)  # reads what has arrived
            self._packets.discard_all(lambda key: key[1:3] == (transport, SMALL) and key.tag >> 31 == number)

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

    @property
    def hosts(self) -> Hosts | None:
        """By who can share memory with whom."""
        return hosts_of(tuple(map(tuple, self.local_peers.hosts)))

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
        first = self._held.pop(owner, None) if self._held else None
        try:
            for segment in segments:
                this_process.peer_segments.send(address, segment, seconds=self.left, transport=transport)
            key = PacketKey("", transport, kind, tag)
            self._packets.send(address, key, payload, seconds=self.left, first=first)
        except TimeoutError as error:
            raise RuntimeError(f"nothing was taken by rank {owner} within {self.seconds:g} s") from error
        except (PeerEndedError, TransportFailedError, OSError) as error:
            raise self._as_runtime_error(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Rows of an agreement are held back, to leave with the locations of messages."""
        self._held = {}
        try:
            yield
            self._send_held()
        finally:
            self._held = None

    def _send_held(self) -> None:
        held, self._held = self._held, None
        with self.guard("starting to agree"):
            for owner, (key, payload) in (held or {}).items():
                self._send(owner, key.kind, key.tag, payload)

    def collect(self, keys: Mapping[int, PacketKey], doing: str) -> Iterator[tuple[int, Packet]]:
        """One packet for each of these numbers, in the order of arrival."""
        if not keys:
            return
        missing, packets = dict(keys), self._packets

        def arrived() -> list[int]:
            return [number for number, key in missing.items() if packets.has(key)]

        while missing:
            if not arrived():
                with self.guard(doing):
                    self._wait_for_packets(lambda: bool(arrived()), lambda: [key.sender for key in missing.values()])
            for number in arrived():
                packet = packets.take(missing.pop(number))
                assert packet is not None, "it has arrived, and nobody else asks for it"
                yield number, packet

    def _wait_for_packets(
        self, ready: Callable[[], bool], senders: Callable[[], list[str]], every: float = LOOK
    ) -> None:
        transport, left, spin = self.local_peers.transport, self.left, self._spin
        try:
            self._packets.wait(ready, transport=transport, expected=senders, seconds=left, spin=spin, every=every)
        except TimeoutError as error:
            silent = self._packets.silent(self.local_peers.addresses.values(), transport)
            late = [address for address in senders() if address in silent] or silent or senders()
            waits = "" if self.local_peers.all else "timed out: "  # that rank may only wait for another host
            text = f"{waits}nothing came within {self.seconds:g} s from {in_words(self._owners_at(late))}"
            raise RuntimeError(text) from error
        except (PeerEndedError, TransportFailedError, OSError) as error:
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
                if owner != self.me and self._held is not None:
                    self._held[owner] = PacketKey("", self.local_peers.transport, ROW, number), row
                elif owner != self.me:
                    self._send(owner, ROW, number, row)

        def wait() -> list[memoryview]:
            keys = {self.rows[owner]: self._key(owner, ROW, number) for owner in self.local_peers.addresses}
            for row, packet in self.collect(keys, self._waiting_for_all):
                views[row] = memoryview(packet.payload)
            return views

        return wait

    def post_small(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> SmallMessages:
        """By packet to ranks of this host, over the group to others."""
        local = self.local_peers.addresses
        with self.guard("starting to agree"):
            for peer, message in sends:
                if peer in local:
                    self._send(peer, SMALL, tag, bytes_of(message.cpu()))
        far = [at for at, (peer, _) in enumerate(receives) if peer not in local]
        far_sends = [one for one in sends if one[0] not in local]
        posted = super().post_small([receives[at] for at in far], far_sends, tag) if far or far_sends else None
        return SmallMessages(self, receives, tag, posted, far)

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
        bytes_ = sum(one.bytes for one in receives) + sum(one.bytes for one in sends)
        if self._held and bytes_ > TOGETHER:  # others may agree meanwhile
            self._send_held()
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
        local_receives = {at: one for at, one in enumerate(receives) if one.peer in local}
        return SharedMemoryRound(
            self, tag, local_receives, self._send_locations(local_sends, tag, align, bytes_), far_round, far
        )

    def _send_locations(self, sends: Sequence[Send], tag: int, align: int, most: int) -> PostedLocations:
        """Pack what must be packed, and send the location of every message as soon as it is there."""
        takers = Counter(one.same for one in sends)
        locations = [self._location_in_place(one, alone=takers[one.same] == 1) for one in sends]
        packing = [one for one, place in zip(sends, locations, strict=True) if place is None]
        starts, total = _starts(packing, align)
        staged = self._take_staging(total, [one.peer for one in packing], most)
        waiting, group_messages, packed = list[int](), list[GroupMessages](), set[int]()
        with self.guard("posting messages"):
            for one, location in zip(sends, locations, strict=True):
                if location is not None:
                    waiting.append(one.peer)
                    self._send(one.peer, LOCATION, tag, *location)
                elif staged is None:
                    waiting.append(one.peer)
                    group_messages.append(self._send_over_group(one, tag))
                else:
                    start = starts[one.same]
                    if one.same not in packed:
                        one.pack(staged.room[start : start + one.bytes])
                        packed.add(one.same)
                    place = message_location.in_segment(staged.staging.segment, staged.start + start, staged.number)
                    self._send(one.peer, LOCATION, tag, *place)
        return PostedLocations(waiting, group_messages, staged)

    def _take_staging(self, size: int, readers: Sequence[int], most: int) -> StagedRound | None:
        """Room to pack into; None if it cannot be allocated, or none is needed."""
        if not size:
            return None
        addresses = {self.rows[owner]: self.local_peers.addresses[owner] for owner in readers}
        known = Readers(addresses, len(self.owners), self.local_peers.transport)
        try:
            staged = self.shared_staging.take(size, most, known, self._wait_until_read)
        except SharedMemoryError as error:
            # as a string: a handler that keeps log records must not keep the frames of the error
            log.warning("%s: messages of rank %s go over the process group", str(error), self.me)
            return None
        this_process.peer_segments.keep_until_read(staged)
        return staged

    def _wait_until_read(self, staged: StagedRound) -> None:
        owners = [self.owners[row] for row in staged.readers]
        with self.guard(f"waiting for its messages to be read by {_ranks(owners)}"):
            self._wait_for_packets(lambda: not staged.late(), staged.late, SOON)

    def _send_over_group(self, one: Send, tag: int) -> GroupMessages:
        room = torch.empty(one.bytes, dtype=torch.uint8, device="cpu")
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
            local_peers.read(self._packets.connect(self.local_peers.addresses[peer]), here, there, sizes)

    def open_message(self, one: Receive, packet: Packet, tag: int) -> OpenedMessage:
        """The bytes of a message of this host, or the tensors to read it from, by its location."""
        kind, *words = message_location.words_of(packet.payload)
        address = self.local_peers.addresses[one.peer]
        if kind == message_location.IN_SEGMENT:
            number, size, start, round_number = words
            segment = this_process.peer_segments.mapping(address, number, size)
            return OpenedMessage(segment[start : start + one.bytes], (segment, round_number) if round_number else None)
        if kind == message_location.IN_TENSORS:
            mapping = partial(this_process.peer_segments.mapping, address)
            return OpenedMessage(LocatedTensors(packet.payload, mapping, partial(self.read_memory, one.peer)))
        room = torch.empty(one.bytes, dtype=torch.uint8, device="cpu")
        wait_for(self.post_messages([(one.peer, room)], [], tag))
        return OpenedMessage(room)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _announce_failure(self, cause: str) -> None:
        """By packet to ranks of this host; by the group to others, and to those that wait for its messages."""
        self.shared_staging.end()
        this_process.shared_tensors.keep_pages()
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


class OpenedMessage(NamedTuple):
    """A message of a peer. `staging`: the segment that it was packed into, and the number of its round."""

    message: torch.Tensor | PeerTensors
    staging: tuple[torch.Tensor, int] | None = None


class PostedLocations(NamedTuple):
    """What a round has sent to ranks of this host.

    `waiting`: to whom it must have been read before the round is done, because it lies in tensors or goes over the
    group. `staged`: the messages that were packed.
    """

    waiting: Sequence[int]
    group_messages: Sequence[GroupMessages]
    staged: StagedRound | None


class SharedMemoryRound:
    """A round whose locations are sent to ranks of this host; `far_round` has the messages with other hosts."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        tag: int,
        receives: Mapping[int, Receive],
        posted: PostedLocations,
        far_round: PostedRound | None,
        far: Sequence[int],
    ) -> None:
        self._transport, self._tag, self._receives, self._posted = transport, tag, receives, posted
        self._far_round, self._far = far_round, far
        self._staged, self._in_place = list[tuple[torch.Tensor, int]](), list[int]()  # what was received

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """Messages of this host in the order of arrival, then those of others."""
        transport, tag = self._transport, self._tag
        keys = {at: transport._key(one.peer, LOCATION, tag) for at, one in self._receives.items()}
        peers = [one.peer for one in self._receives.values()]
        for at, packet in transport.collect(keys, f"waiting for {_ranks(peers)}"):
            one = self._receives[at]
            opened = transport.open_message(one, packet, tag)
            if opened.staging is None:
                self._in_place.append(one.peer)
            else:
                self._staged.append(opened.staging)
            yield at, opened.message
        for at, message in self._far_round.arrivals() if self._far_round else ():
            yield self._far[at], message

    def finish(self) -> None:
        """Tell peers that their messages were read, and wait until they have read what lies in tensors of this rank."""
        transport, tag, waiting = self._transport, self._tag, self._posted.waiting
        for staging, number in self._staged:
            mark_read(staging, transport.rows[transport.me], number)
        if self._in_place:
            with transport.guard("acknowledging the messages that it has read"):
                for peer in self._in_place:
                    transport._send(peer, READ, tag)
        keys = {at: transport._key(peer, READ, tag) for at, peer in enumerate(waiting)}
        for _ in transport.collect(keys, f"waiting for its messages to be read by {_ranks(waiting)}"):
            pass
        for messages in self._posted.group_messages:
            wait_for(messages)
        if self._far_round is not None:
            self._far_round.finish()

    def abandon(self) -> None:
        """Nobody will read the messages. (The transport keeps this round, but must not keep their memory.)"""
        staged = self._posted.staged
        if staged is not None:
            self._transport.shared_staging.forget(staged)
            this_process.peer_segments.forget(staged)
            self._posted = self._posted._replace(staged=None)


class SmallMessages:
    """Messages of a small collective: packets of ranks of this host, and those of others."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        receives: Sequence[PeerBuffer],
        tag: int,
        posted: PostedMessages | None,
        far: Sequence[int],
    ) -> None:
        self._transport, self._receives, self._tag, self._posted, self._far = transport, receives, tag, posted, far

    def arrivals(self) -> Iterator[int]:
        """Packets in the order of arrival, then the others."""
        transport, far = self._transport, set(self._far)
        near = {at: one for at, one in enumerate(self._receives) if at not in far}
        keys = {at: transport._key(peer, SMALL, self._tag) for at, (peer, _) in near.items()}
        for at, packet in transport.collect(keys, transport._waiting_for_all):
            room = near[at][1]
            if room.device.type == "cpu":
                room.numpy()[:] = np.frombuffer(packet.payload, np.uint8)
            else:
                room.copy_(torch.frombuffer(bytearray(packet.payload), dtype=torch.uint8))
            yield at
        for number in self._posted.arrivals() if self._posted else ():
            yield self._far[number]


def _starts(sends: Sequence[Send], align: int) -> tuple[dict[int, int], int]:
    """The offset of each message in staging, where equal messages share one; and the size of all."""
    starts, total = dict[int, int](), 0
    for one in sends:
        if one.same not in starts:
            starts[one.same] = total
            total += -(-one.bytes // align) * align
    return starts, total


def bytes_of(cells: torch.Tensor) -> memoryview:
    """The bytes of a tensor that has nothing but bytes."""
    data: Any = cells.numpy()
    return memoryview(data)


def _ranks(peers: Sequence[int]) -> str:
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
