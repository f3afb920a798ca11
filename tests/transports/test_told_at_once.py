"""Whatever breaks on one rank: the others hear of it long before the timeout, and are told which rank it was."""

import os
import resource
import signal
import socket
import time
from contextlib import suppress

import numpy as np
import numpy.ma  # numpy imports it at first use, which takes a descriptor
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import both, expect, part, raised, use

import shardwise as sw
import shardwise.exchange.exchange as running
from shardwise.exchange import ViewCache
from shardwise.job.session import group_transport
from shardwise.transports.collectives import wait_for
from shardwise.transports.segments import this_process
from shardwise.transports.unix_packets import PacketSocket

PATIENCE = 50  # seconds of the group: nobody may wait for that long
AT_ONCE = PATIENCE / 2
ROWS, COLUMNS = both((96, 400), 4)
VALUES = np.arange(96.0 * 400).reshape(96, 400)


def until(folder, rank, count):
    """Stay until so many ranks have come here: what others hear, they must not hear because this process ended."""
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < count:
        time.sleep(0.01)


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
@pytest.mark.parametrize("moment", ["in the agreement", "in a turn"])
def test_ranks_of_all_hosts_hear_at_once_which_rank_was_killed(ranks, tmp_path, hosts, moment):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        use("staged")
        x = part(VALUES, ROWS, rank)
        sw.reshard(x, COLUMNS)
        dist.barrier()
        if rank == 1:
            if moment == "in the agreement":
                kill()
            ViewCache.pack = kill
        kind, text, took = raised(lambda: sw.reshard(x, COLUMNS))
        until(tmp_path, rank, 3)
        return kind, text, took

    reports = ranks(4, run, patience=PATIENCE, dying={1})
    del reports[1]
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert "rank 1 has ended" in text
        assert took < AT_ONCE


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
def test_ranks_of_all_hosts_hear_at_once_of_an_interrupt(ranks, tmp_path, hosts):  # noqa: F811
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        use("staged")
        x = part(VALUES, ROWS, rank)
        sw.reshard(x, COLUMNS)
        dist.barrier()  # all have ended it
        if rank == 1:
            ViewCache.pack = interrupt
        kind, text, took = raised(lambda: sw.reshard(x, COLUMNS))
        until(tmp_path, rank, 4)
        return kind, text, took

    reports = ranks(4, run, patience=PATIENCE, dying={9})
    assert reports.pop(1)[0] == "KeyboardInterrupt"
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert "an exchange broke on rank 1 (KeyboardInterrupt" in text
        assert took < AT_ONCE


def allow_files(more):
    """This process can open so many files more, and not one beyond, until what is returned is called."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE), max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + more, before[1]))
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for file in taken[:more]:
        os.close(file)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("who", [{1}, {0, 1, 2, 3}], ids=["one", "all"])
@pytest.mark.parametrize("files", [2, 6])
def test_files_that_run_out_before_ranks_meet_leave_nobody_waiting(ranks, tmp_path, who, files):  # noqa: F811
    def run(rank):
        use("staged")
        torch.ones(2).sum()  # torch opens files of its own for that
        dist.barrier()
        allow = allow_files(files) if rank in who else None
        kind, text, took = raised(lambda: sw.reshard(part(VALUES, ROWS, rank), COLUMNS))
        if allow is not None:
            allow()
        until(tmp_path, rank, 4)
        return kind, text, took

    for kind, text, took in ranks(4, run, patience=PATIENCE, dying={9}):
        assert kind in (None, "ExchangeError")
        assert kind is None or "raise `ulimit -n`" in text
        assert took < AT_ONCE


@pytest.mark.parametrize("files", [0, 1])
def test_descriptors_that_cannot_be_received_are_told_to_all(ranks, tmp_path, files):  # noqa: F811
    def run(rank):
        use("staged")
        x = part(VALUES, ROWS, rank)
        expect(sw.reshard(x, COLUMNS), VALUES, COLUMNS, rank)
        sw.release_staging()
        dist.barrier()
        sw.fingerprint(x)  # what was handed out before is closed by then
        allow = allow_files(files) if rank == 1 else None
        kind, text, took = raised(lambda: sw.reshard(x, COLUMNS))
        if kind is None and rank != 1:  # it had received everything, and hears of it in the next call
            kind, text, took = raised(lambda: sw.reshard(x, COLUMNS))
        if allow is not None:
            allow()
        until(tmp_path, rank, 4)
        return kind, text, took

    reports = ranks(4, run, patience=PATIENCE, dying={9})
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert "too many files open" in text
        assert took < AT_ONCE
    assert all("broke on rank 1" in text for rank, (_, text, _) in enumerate(reports) if rank != 1)


def test_a_stranger_who_floods_an_address_does_not_keep_ranks_from_meeting(ranks):  # noqa: F811
    def run(rank):
        listen = socket.socket.listen
        socket.socket.listen = lambda door, _: listen(door, 8)
        addresses = [None, None]
        dist.all_gather_object(addresses, this_process.packets.address)
        strangers = []
        if rank == 0:
            while True:
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
                try:
                    strangers[-1].connect("\0" + addresses[1])
                except BlockingIOError:
                    break  # nobody else gets in
        dist.barrier()
        rows, columns = both((96, 400), 2)
        expect(sw.reshard(part(VALUES, rows, rank), columns, transport="shared"), VALUES, columns, rank)
        return len(strangers), group_transport(None).local_peers.all

    (flood, met), (_, also) = ranks(2, run, patience=PATIENCE)
    assert flood > 1
    assert met
    assert also


def test_connections_that_say_nothing_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("shardwise.transports.unix_packets.MAX_ANONYMOUS", 3)
    post, strangers = PacketSocket(), []
    try:
        for _ in range(8):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            strangers[-1].connect("\0" + post.address)
            post._poll_once(lambda: False, 0.1)
        assert len(post._sockets) <= 3
    finally:
        post.close()
        for stranger in strangers:
            stranger.close()


def test_all_waits_of_a_call_share_one_timeout(ranks):  # noqa: F811
    def run(rank):
        transport = group_transport(None)
        transport.seconds = 100.0
        with transport.budget():
            transport._end.set(transport._end.get() - 99.0)  # as if so long had been waited for other messages
            assert 0 < transport.left <= 1.0
            with transport.budget():
                assert transport.left <= 1.0  # what is inside belongs to the call
            if rank == 0:
                kind, _, took = raised(lambda: wait_for(transport.post_messages([(1, torch.zeros(4))], [], 7)))
        assert transport.left == 100.0
        return (kind, took) if rank == 0 else time.sleep(2.5)

    kind, took = ranks(2, run, patience=PATIENCE, dying={9})[0]
    assert kind == "ExchangeError"
    assert took < AT_ONCE


@pytest.mark.parametrize("verify", [False, True])
def test_an_interrupt_says_that_the_target_may_be_partly_written(ranks, verify):  # noqa: F811
    def notes(call):
        try:
            call()
        except BaseException as error:
            return type(error).__name__, getattr(error, "__notes__", [])

    def run(rank):
        running.INLINE = 0
        rows, columns = both((96, 400), 2)
        x, out = part(VALUES, rows, rank), sw.empty(columns, dtype=torch.float64)
        sync = sw.Resharder({"w": x}, {"w": out}, verify=verify)
        sync.run()
        sw.reshard(x, out=out)
        group = dist.new_group([0, 1])
        sw.reshard(x, columns, group=group)

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        if rank == 1 and verify:
            torch.Tensor.copy_ = interrupt
        elif rank == 1:
            ViewCache.unpack = interrupt
        found = notes(sync.run)
        return found, None if verify else notes(lambda: sw.reshard(x, out=out, group=group))

    synced, moved = ranks(2, run, patience=PATIENCE, dying={9})[1]
    assert synced[0] == "KeyboardInterrupt"
    assert any("target may be partly written" in note for note in synced[1])
    if not verify:
        assert moved[0] == "KeyboardInterrupt"
        assert any("out= may be partly written" in note for note in moved[1])
