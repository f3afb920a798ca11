"""What this process keeps for all of its process groups: its packet socket, segments of peers, shared tensors."""

from __future__ import annotations

import os
from threading import Lock

from shardwise.transports.segments import PeerSegments, SharedTensors
from shardwise.transports.unix_packets import PacketSocket


class ThisProcess:
    """One per process. A forked child keeps its tensors, and gets a socket and peers of its own at first use."""

    def __init__(self) -> None:
        self.shared_tensors = SharedTensors()
        self._lock, self._packets, self._peer_segments = Lock(), None, None

    _packets: PacketSocket | None
    _peer_segments: PeerSegments | None

    @property
    def packets(self) -> PacketSocket:
        """Its socket, opened at first use. Not every system allows one: an OSError."""
        with self._lock:  # threads that come at the same time get the same one
            if self._packets is None:
                self._packets = PacketSocket()
            return self._packets

    @property
    def peer_segments(self) -> PeerSegments:
        """Segments that go to peers, and come from them, over its socket."""
        packets = self.packets
        with self._lock:
            if self._peer_segments is None:
                self._peer_segments = PeerSegments(packets)
            return self._peer_segments

    def after_fork(self) -> None:
        """Sockets and mappings of peers are the parent's: close them. A thread of the parent may have held the lock."""
        packets = self._packets
        self._lock, self._packets, self._peer_segments = Lock(), None, None
        if packets is not None:
            packets.close()


this_process = ThisProcess()
os.register_at_fork(after_in_child=this_process.after_fork)
