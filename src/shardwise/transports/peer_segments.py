"""Which shared segments peers have of this process, and which of theirs are mapped here."""

from __future__ import annotations

from collections import defaultdict, deque
from threading import Lock
from weakref import finalize

import torch

from shardwise.errors import ExchangeError
from shardwise.transports.segments import SharedSegment, map_file
from shardwise.transports.unix_packets import PacketKey, PacketSocket, close_files

SEGMENT, FREED = range(2)  # kinds of packets of transport 0: a segment, tagged by its number; numbers of freed segments


class PeerSegments:
    """Segments by the address of the peer and their number. `tidy` drops those that are freed, or whose owner ended."""

    def __init__(self, packets: PacketSocket) -> None:
        self._packets, self._lock = packets, Lock()
        self._sent = defaultdict[str, set[int]](set)
        self._freed = defaultdict[str, deque[int]](deque)  # segments that are gone here, and that the peer still has
        self._mapped = defaultdict[str, dict[int, torch.Tensor]](dict)

    def send(self, address: str, segment: SharedSegment, *, seconds: float, transport: int) -> None:
        """Send a segment to a peer, once. It has to arrive before a message that names it."""
        with self._lock:
            if segment.number not in self._sent[address]:
                key = PacketKey("", 0, SEGMENT, segment.number)
                self._packets.send(address, key, files=[segment.file], seconds=seconds, transport=transport)
                self._sent[address].add(segment.number)
                finalize(segment, self._freed[address].append, segment.number).atexit = False

    def mapping(self, address: str, number: int, size: int) -> torch.Tensor:
        """The bytes of a peer's segment, mapped at first use."""
        with self._lock:
            mapped = self._mapped[address]
            if number not in mapped:
                mapped[number] = self._map(address, number, size)
            return mapped[number]

    def _map(self, address: str, number: int, size: int) -> torch.Tensor:
        """Packets of a process arrive in order, so its segment is here before a message names it."""
        packet = self._packets.take(PacketKey(address, 0, SEGMENT, number))
        if packet is None:
            raise ExchangeError(f"segment {number} of {address} was named, but has not arrived")
        try:
            return map_file(packet.files[0], size)
        finally:
            close_files(packet.files)

    def tidy(self) -> None:
        """Tell peers which segments are freed here, and unmap those that peers have freed, or left when they ended."""
        with self._lock:
            for address in filter(self._packets.has_ended, {*self._sent, *self._mapped}):
                self._forget_peer(address)
            self._send_freed()
            for address, mapped in self._mapped.items():
                while (packet := self._packets.take(PacketKey(address, 0, FREED, 0))) is not None:
                    for number in map(int, packet.payload.split(b",")):
                        mapped.pop(number, None)
                        self._packets.discard(PacketKey(address, 0, SEGMENT, number))  # sent, but never named

    def _forget_peer(self, address: str) -> None:
        """It will not report what it has freed: its segments would stay mapped for ever."""
        for segments in (self._sent, self._freed, self._mapped):
            segments.pop(address, None)
        self._packets.discard_all(lambda key: key.sender == address)

    def _send_freed(self) -> None:
        for address, freed in self._freed.items():
            numbers = sorted({freed.popleft() for _ in range(len(freed))})
            self._sent[address].difference_update(numbers)
            if numbers:
                key = PacketKey("", 0, FREED, 0)
                self._packets.try_to_send(address, key, ",".join(map(str, numbers)).encode())
