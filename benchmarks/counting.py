"""The bytes that go from rank to rank, counted where they go, not where they were planned."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from shardwise.exchange import peer_reads
from shardwise.transports.message_location import IN_SEGMENT, LocatedTensors
from shardwise.transports.shared_memory import SharedMemoryTransport


class Counted:
    """Bytes that this rank sends in messages of its group, or reads of what others of its host have.

    These are: packed messages; runs in the memory of another process; views of shared memory.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._send = dist.ProcessGroup.send
        self._opened, self._read = SharedMemoryTransport.open_message, LocatedTensors.read
        self._copy_all = peer_reads.copy_all

    def __enter__(self) -> Counted:
        with ExitStack() as stack:
            stack.enter_context(patch.object(dist.ProcessGroup, "send", lambda *args: self._count_sent(*args)))
            stack.enter_context(
                patch.object(SharedMemoryTransport, "open_message", lambda *args: self._count_opened(*args))
            )
            stack.enter_context(patch.object(LocatedTensors, "read", lambda *args: self._count_read(*args)))
            stack.enter_context(patch.object(peer_reads, "copy_all", lambda *args: self._count_copied(*args)))
            self._patches = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _count_sent(self, group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> Any:
        self.bytes += sum(tensor.nbytes for tensor in tensors)
        return self._send(group, tensors, *args)

    def _count_opened(self, transport: SharedMemoryTransport, one: Any, packet: Any, tag: int) -> Any:
        found = self._opened(transport, one, packet, tag)
        if isinstance(found.message, torch.Tensor) and np.frombuffer(packet.payload, np.int64)[0] == IN_SEGMENT:
            self.bytes += found.message.nbytes
        return found

    def _count_read(self, theirs: LocatedTensors, here: Any, tensor: Any, offset: Any, sizes: Any) -> None:
        self.bytes += int(sizes.sum())
        self._read(theirs, here, tensor, offset, sizes)

    def _count_copied(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        self._copy_all(ours, theirs)
        self.bytes += sum(view.nbytes for view in ours)
