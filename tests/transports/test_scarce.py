"""Where shared memory or descriptors cannot be allocated: messages take another way, or the remedy is named."""

import ctypes
import errno
import fcntl
import logging
import os
import resource

import pytest
import torch
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, open_files, part, raised, use, works

import shardwise as sw
from shardwise.transports import segments, torch_groups
from shardwise.transports.segments import SharedMemoryError


def denied(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Full:
    """A system that maps no more."""

    def mmap(self, *_):
        ctypes.set_errno(errno.ENOMEM)
        return segments.MAP_FAILED


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))


SCARCE = {
    "denied": (
        lambda: setattr(os, "memfd_create", denied),
        "the system refuses shared memory: Operation not permitted",
    ),
    "full": (lambda: setattr(os, "posix_fallocate", full), "bytes of shared memory cannot be allocated: No space left"),
    "not sealed": (
        lambda: setattr(fcntl, "fcntl", denied),
        "of shared memory cannot be allocated: Operation not perm",
    ),
    "limited": (limited, "bytes of shared memory cannot be allocated: File too large"),
    "not mapped": (
        lambda: setattr(segments, "_libc", Full()),
        "bytes of shared memory cannot be mapped: Cannot allocate",
    ),
}


def heard():
    """What is logged from now on."""
    found, handler = [], logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logging.getLogger("shardwise").addHandler(handler)
    return found


@pytest.mark.parametrize("case", SCARCE)
def test_a_rank_without_shared_memory_sends_over_the_group(ranks, case):  # noqa: F811
    make_scarce, words = SCARCE[case]

    def run(rank):
        use("staged")
        works(rank)
        before, log = open_files(), heard()
        if rank == 1:
            sw.release_staging()
            make_scarce()
        for transport in ("auto", "shared", "group"):
            works(rank, transport=transport)
        assert open_files() <= before
        return log

    without, scarce = ranks(2, run)
    assert without == []
    assert {level for level, _ in scarce} == {"WARNING"}
    assert all(words in text and "messages of rank 1 go over the process group" in text for _, text in scarce)


def test_memory_that_comes_back_is_used_again(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        works(rank)
        kept, fallocate = sw.release_staging(), os.posix_fallocate
        os.posix_fallocate = full
        works(rank)
        assert sw.release_staging() == 0
        os.posix_fallocate = fallocate
        works(rank)
        assert sw.release_staging() == kept > 0
        return True

    assert all(ranks(2, run))


@pytest.mark.parametrize("swap", [False, torch_groups.CAN_SWAP])
@pytest.mark.parametrize("call", [lambda: sw.empty("9/S0@1", shared=True), lambda: sw.share_(torch.zeros(9))])
def test_tensors_that_cannot_be_shared_are_refused(monkeypatch, call, swap):
    monkeypatch.setattr(torch_groups, "CAN_SWAP", swap)
    monkeypatch.setattr(os, "memfd_create", denied)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255]))
    with pytest.raises(SharedMemoryError, match=r"the system refuses shared memory|36 bytes do not fit into /dev/shm"):
        call()


@pytest.mark.parametrize("call", [lambda: sw.empty("9/S0@1", shared=True), lambda: sw.share_(torch.zeros(9))])
def test_more_tensors_than_files_may_be_open_are_refused_with_the_remedy(call):
    before, kept = resource.getrlimit(resource.RLIMIT_NOFILE), [call()]
    most = max(map(int, os.listdir("/proc/self/fd"))) + 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with pytest.raises(SharedMemoryError, match=r"shared memory: .*Too many open files.*; raise `ulimit -n`"):
            kept.extend(call() for _ in range(most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_receiver_with_too_many_files_open_says_so(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        works(rank)
        sw.release_staging()
        if rank == 1:
            most = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            taken = [os.dup(0) for _ in range(most - open_files() + 1)]
            assert taken is not None
        report = raised(lambda: works(rank))
        return raised(lambda: works(rank)) if report[0] is None and rank == 0 else report  # it may have got everything

    reports = ranks(2, run, patience=6, dying={9})
    assert all(kind == "ExchangeError" for kind, _, _ in reports), reports
    assert "raise `ulimit -n`" in reports[1][1]


# --- a small /dev/shm ------------------------------------------------------------------------------------------------


def small_shm(size):
    """Give this process a /dev/shm of its own; False where the system does not allow it."""
    libc, new_namespace, private = ctypes.CDLL(None, use_errno=True), 0x20000, 0x44000
    return not (
        libc.unshare(new_namespace)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode())
    )


def test_a_small_dev_shm_is_enough_for_all_but_share_of_an_older_torch(ranks):  # noqa: F811
    def run(rank):
        torch_groups.CAN_SWAP = False
        if not small_shm(2**18):
            return "not allowed"
        use("staged")
        works(rank, transport="shared")  # 256 KiB per rank
        x = sw.empty(ROWS, dtype=torch.float64, shared=True)
        x.local_tensor().copy_(part(VALUES, ROWS, rank).local_tensor())
        expect(sw.reshard(x, COLUMNS, transport="shared"), VALUES, COLUMNS, rank)
        few = sw.share_([torch.ones(2**14) for _ in range(3)])  # 192 KiB
        refused = raised(lambda: sw.share_([torch.ones(2**14), torch.ones(2**14)]))
        assert all(float(one.sum()) == 2**14 for one in few)
        works(rank, transport="shared")
        return refused[:2]

    for found in ranks(2, run):
        if found == "not allowed":
            pytest.skip("no mount namespaces here")
        assert found[0] == "SharedMemoryError"
        assert "65536 bytes do not fit into /dev/shm, which has 0 left" in found[1]
        assert "empty(shared=True)" in found[1]
