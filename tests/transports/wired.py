"""What the tests of the transport of one host share: tensors on ranks, what a call raised, and what a process holds."""

import math
import os
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor  # ranks would import it one by one, which takes a second each

import shardwise as sw
import shardwise.exchange.exchange as running
import shardwise.exchange.peer_reads as fetching
import shardwise.transports.shared_memory as sharing

WAYS = ("group", "small", "staged", "read", "read as a message", "shared")
ROWS, COLUMNS = sw.Layout.chunk((64, 1024), 0, owners=2), sw.Layout.chunk((64, 1024), 1, owners=2)
VALUES = np.arange(64.0 * 1024).reshape(64, 1024)  # messages of 128 KiB between two ranks: none is small


def both(shape, owners):
    """Rows and columns of a tensor."""
    return sw.Layout.chunk(shape, 0, owners=owners), sw.Layout.chunk(shape, 1, owners=owners)


def part(values, layout, rank, *, shared=False, group=None):
    """This rank's part of an array, or None where it holds nothing."""
    if rank not in layout:
        return None
    shards = [torch.from_numpy(shard.copy()) for shard in sw.testing.scatter(values, layout)[rank]]
    return sw.ShardedTensor(sw.share_(shards) if shared else shards, layout, group)


def expect(found, values, layout, rank):
    """This rank has exactly its part of the array."""
    shards = sw.testing.scatter(values, layout)[rank] if rank in layout else []
    assert (found is None) == (rank not in layout)
    for tensor, array in zip(found.shards if shards else [], shards, strict=True):
        np.testing.assert_array_equal(tensor.detach().numpy(), array, strict=True)


def works(rank, group=None, *, transport="auto", shared=False, factor=1.0):
    """Ranks 0 and 1 can reshard."""
    found = sw.reshard(part(factor * VALUES, ROWS, rank, shared=shared), COLUMNS, group=group, transport=transport)
    expect(found, factor * VALUES, COLUMNS, rank)


def raised(call):
    """The error of a call, its type and text, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None, "", time.monotonic() - began


def new_group(*ranks, seconds=10):
    """A group that does not wait for long."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))


def in_threads(*calls):
    """What each call raised, each in a thread of its own."""
    found, one = [None] * len(calls), threading.Lock()

    def work(at):
        with one:  # torch makes its pool of threads anew in every thread of a forked process, and not two at a time
            torch.set_num_threads(1)
        found[at] = raised(calls[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def open_files():
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def mapped():
    """How many pieces of shared memory this process has mapped, of torch or ours."""
    with open("/proc/self/maps") as file:
        return sum("memfd:shardwise" in line or "/torch_" in line for line in file)


def use(way):
    """Make this rank, of forked ones, take a way through memory whatever the sizes; what transport= and share_ get."""
    attached = way.startswith("read")
    sharing.WORTH = sharing.RUN = 0 if attached else math.inf
    fetching.SHORT = math.inf if "as a message" in way else 0
    running.INLINE = 2**14 if way == "small" else 0
    return "group" if way == "group" else "shared", way == "shared"
