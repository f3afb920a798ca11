"""What the link between two hosts can do: a plain socket, in turn with what is measured; and the bytes on the link."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.bench.moves import meet
from shardwise.testing import Host


def plain_socket(size: int, sender: int, receiver: int, address: str) -> Callable[[], object]:
    """So many bytes from one rank to another, over one connection that stays open. All ranks call, others do nothing.

    `address` is that of the receiver's host. What is returned moves the bytes, out of and into memory that has been
    touched before: the receiver is done when it has all of them. All ranks get one, to take turns with other jobs.
    """
    server = socket.create_server((address, 0)) if dist.get_rank() == receiver else None
    port = [0 if server is None else server.getsockname()[1]]
    dist.broadcast_object_list(port, src=receiver)
    memory = torch.ones(size if dist.get_rank() in (sender, receiver) else 0, dtype=torch.uint8)
    room = memoryview(memory.numpy())
    if server is not None:
        with server:
            incoming, _ = server.accept()
        return lambda: _receive(incoming, room)
    if dist.get_rank() == sender:
        outgoing = socket.create_connection((address, port[0]))
        return lambda: outgoing.sendall(room)
    return lambda: None


def _receive(connection: socket.socket, room: memoryview) -> None:
    done = 0
    while done < len(room):
        count = connection.recv_into(room[done:])
        if not count:
            raise ConnectionError(f"the sender closed the connection after {done} of {len(room)} bytes")
        done += count


def bytes_on_the_link(sender: Host, work: Callable[[], object]) -> int:
    """What a host sends over its link while all ranks work, headers of packets and retransmissions included."""
    meet()
    before = sender.sent_bytes()
    meet()  # nobody starts before the counter is read
    work()
    meet()
    return sender.sent_bytes() - before
