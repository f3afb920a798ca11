"""Memory that goes from one process to another of the same host: the receiver maps what a version lies in."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.messages import Tensors
from shardwise.job.side import Side
from shardwise.job.snapshot import MemorySpec, Snapshot, bytes_in_one_piece, cut_up
from shardwise.layout import local_shapes
from shardwise.publishing.catalog import Infos

if TYPE_CHECKING or sys.platform == "linux":
    from shardwise.transports.local_peers import host_id
    from shardwise.transports.segments import this_process
    from shardwise.transports.unix_packets import PacketKey, PeerEndedError, TransportFailedError

ARENA = 101  # the kind of packets: which segment a version lies in
CPU = torch.device("cpu")


class UnmappableError(ExchangeError):
    """Memory of another process cannot be mapped here: it has to be sent instead."""


def host_of_this_process() -> str | None:
    """Equal for processes that can map each other's memory; None where none can."""
    if sys.platform != "linux":
        return None
    try:
        _ = this_process.packets.address
        return json.dumps(host_id())
    except OSError:
        return None


def address_of_this_process() -> str:
    """Where others of this host reach it; empty where they cannot."""
    return this_process.packets.address if host_of_this_process() is not None else ""


def close_connections(addresses: Iterable[str]) -> None:
    """To processes that have left, or are lost."""
    for address in addresses:
        this_process.peer_segments.disconnect(address)


def _key(sender: str, order: str) -> PacketKey:
    return PacketKey(sender, crc32(b"shardwise mapped pulls"), ARENA, crc32(order.encode()) >> 1)


def send_memory(side: Side, addresses: Sequence[str], order: str, patience: float) -> None:
    """Send the memory of a version to processes of this host, or word that it is not in shared memory."""
    segment = side.segment if isinstance(side, Snapshot) else None
    key = _key("", order)
    this_process.peer_segments.tidy()
    for address in addresses:
        try:
            this_process.packets.connect(address)
            if segment is not None:
                this_process.peer_segments.send(address, segment, seconds=patience, transport=key.transport)
            words = f"{segment.number} {segment.size}" if segment else ""
            this_process.packets.send(address, key, words.encode(), seconds=patience)
        except (OSError, PeerEndedError, TransportFailedError, TimeoutError) as error:
            raise ExchangeError(f"cannot send the memory of a version: {type(error).__name__}: {error}") from error


class MappedVersion:
    """The memory of all ranks of a server, mapped into this process. It stays as it is while this is used."""

    def __init__(self, infos: Infos, pieces: Mapping[int, torch.Tensor]) -> None:
        self._tensors = dict[int, dict[str, Tensors]]()
        for owner, piece in pieces.items():
            specs = {
                name: [MemorySpec(shape, info.dtype, CPU) for shape in local_shapes(info.layout, owner)]
                for name, info in infos.items()
            }
            if bytes_in_one_piece(specs) > len(piece):
                raise UnmappableError("the memory of a version is smaller than its tensors")
            self._tensors[owner] = cut_up(piece, specs)

    def __call__(self, owner: int, name: str) -> Tensors:
        """The local tensors of an owner."""
        return self._tensors[owner][name]


def receive_memory(
    senders: Mapping[int, str], order: str, check_alive: Callable[[], None], patience: float
) -> dict[int, torch.Tensor]:
    """Map what the ranks of a server send, by their rows."""
    this_process.peer_segments.tidy()
    arrived, packets = dict[int, str](), this_process.packets

    def ready() -> bool:
        for row, address in senders.items():
            if row not in arrived and (packet := packets.take(_key(address, order))) is not None:
                arrived[row] = packet.payload.decode()
        return len(arrived) == len(senders)

    def expected() -> list[str]:
        waiting = [address for row, address in senders.items() if row not in arrived]
        for address in waiting:  # it may have closed its connection because another subscriber here has left
            packets.expect_again(address)
        return waiting

    end, transport = time.monotonic() + 2 * patience, _key("", order).transport
    while not ready():
        try:
            packets.wait(ready, transport=transport, expected=expected, seconds=1.0, spin=False)
        except TimeoutError:
            check_alive()
            if time.monotonic() > end:
                raise ExchangeError(f"the memory of a version did not arrive within {2 * patience:g} s") from None
        except (PeerEndedError, TransportFailedError) as error:
            raise ExchangeError("a process of the server has ended") from error
    if not all(arrived.values()):
        raise UnmappableError("the version is not in shared memory")
    return {row: _mapped(senders[row], words) for row, words in arrived.items()}


def _mapped(address: str, words: str) -> torch.Tensor:
    number, size = map(int, words.split())
    return this_process.peer_segments.mapping(address, number, size)
