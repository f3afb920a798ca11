"""A rank that died is named, and no other: on sub-groups, to ranks far from it, and before the first exchange."""

import os
import re
import signal
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from wired import both, new_group, part, raised, use

import shardwise as sw
from shardwise.exchange import ViewCache
from shardwise.job.session import _mesh_transport, group_transport
from shardwise.transports import GroupTransport

PATIENCE = 50  # seconds of the group: nobody may wait for that long
AT_ONCE = PATIENCE / 2
ROWS, COLUMNS = both((96, 400), 4)
VALUES = np.arange(96.0 * 400).reshape(96, 400)


def until(folder, name, count):
    """Stay until so many ranks have come here: nobody may hear of it only because another process ended."""
    (folder / name).touch()
    while len(list(folder.iterdir())) < count:
        time.sleep(0.01)


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def on_mesh(mesh):
    """A call among the ranks of a mesh."""
    x = DTensor.from_local(torch.ones(24, 400), mesh, [Shard(0), Shard(0)], run_check=False)
    return lambda: sw.reshard(x, (mesh, [Shard(1), Shard(1)]))


def check_named(reports):
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert "rank 1 has ended" in text
        assert took < AT_ONCE


@pytest.mark.parametrize("hosts", ["aabbab", "abcdef"])
@pytest.mark.parametrize("moment", ["in the agreement", "in a turn"])
def test_all_ranks_of_a_mesh_hear_at_once_and_other_meshes_go_on(ranks, tmp_path, hosts, moment):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        use("staged")
        mesh, other = (DeviceMesh("cpu", found) for found in ([[0, 1], [2, 3]], [[2, 3], [4, 5]]))
        if rank < 4:
            on_mesh(mesh)()
        if rank > 1:
            on_mesh(other)()
        dist.barrier()
        if rank == 1:
            if moment == "in the agreement":
                kill()
            ViewCache.pack = kill
        found = raised(on_mesh(mesh)) if rank < 4 else None
        until(tmp_path, f"heard {rank}", 5)
        again = raised(on_mesh(other)) if rank > 1 else None
        until(tmp_path, f"done {rank}", 10)
        return found, again

    reports = ranks(6, run, patience=PATIENCE, dying={1})
    check_named([reports[rank][0] for rank in (0, 2, 3)])
    for _, (kind, text, _) in reports[2:]:
        assert kind is None, text


def test_all_ranks_of_a_mesh_hear_of_an_interrupt_far_away(ranks, tmp_path):  # noqa: F811
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def run(rank):
        socket.gethostname = lambda: "abcde"[rank]
        use("staged")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        if rank < 4:
            on_mesh(mesh)()
        dist.barrier()
        if rank == 1:
            ViewCache.pack = interrupt
        found = raised(on_mesh(mesh)) if rank < 4 else None
        until(tmp_path, str(rank), 5)
        return found

    reports = ranks(5, run, patience=PATIENCE, dying={9})[:4]
    assert reports.pop(1)[0] == "KeyboardInterrupt"
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert "an exchange broke on rank 1 (KeyboardInterrupt" in text
        assert took < AT_ONCE


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_died_before_the_first_exchange_is_named_and_not_a_late_one(ranks, tmp_path, hosts, late):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        dist.barrier()
        if rank == 1:
            kill()
        if rank == late:
            until(tmp_path, "late", 3)  # until the others have heard
        found = raised(lambda: sw.reshard(part(VALUES, ROWS, rank), COLUMNS))
        until(tmp_path, str(rank), 4)
        return found

    reports = ranks(4, run, patience=PATIENCE, dying={1})
    del reports[1]
    check_named(reports)
    for _, text, _ in reports:
        assert f"rank {late} has ended" not in text
        assert "ranks" not in text.partition("when the transport broke")[2]


@pytest.mark.parametrize("late", [0, None])
def test_a_rank_of_a_mesh_that_died_before_the_first_exchange_is_named(ranks, tmp_path, late):  # noqa: F811
    def run(rank):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        dist.barrier()
        if rank == 1:
            kill()
        if rank == late:
            until(tmp_path, "late", 3)
        found = raised(on_mesh(mesh)) if rank < 4 else None
        until(tmp_path, str(rank), 4 + (late is not None))
        return found

    reports = ranks(5, run, patience=PATIENCE, dying={1})
    check_named([reports[rank] for rank in (0, 2, 3)])


def test_a_mesh_hears_why_all_of_its_group_broke(ranks, tmp_path):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: "abcde"[rank]
        use("staged")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        x = part(VALUES, ROWS, rank)
        sw.reshard(x, COLUMNS)
        if rank < 4:
            on_mesh(mesh)()
        dist.barrier()
        if rank == 1:
            kill()
        whole = raised(lambda: sw.reshard(x, COLUMNS))
        found = raised(on_mesh(mesh)) if rank < 4 else whole
        until(tmp_path, str(rank), 4)
        return whole, found

    reports = ranks(5, run, patience=PATIENCE, dying={1})
    del reports[1]
    for whole, found in reports:
        check_named([whole, found])


def test_a_timeout_on_a_mesh_leaves_the_group_to_others(ranks, tmp_path):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: "abcde"[rank]
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        found = None
        if rank < 4:
            on_mesh(mesh)()
            _mesh_transport(dist.group.WORLD, (0, 1, 2, 3)).seconds = 1.5
        dist.barrier()
        if rank in (0, 2, 3):
            found = raised(on_mesh(mesh))
        until(tmp_path, str(rank), 5)
        sw.reshard(part(VALUES, ROWS, rank), COLUMNS)
        return found, group_transport(None).broken

    reports = ranks(5, run, patience=PATIENCE, dying={9})
    assert not any(broken for _, broken in reports)
    for kind, text, took in (reports[rank][0] for rank in (0, 2, 3)):
        assert kind == "ExchangeError"
        assert "has ended" not in text
        assert took < AT_ONCE
    late = "from rank 1 when the transport broke: timed out: nothing came within 1.5 s"
    texts = [reports[rank][0][1] for rank in (0, 2, 3)]
    assert any(late in text for text in texts), texts


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
def test_who_never_calls_is_named_when_the_timeout_of_the_first_exchange_is_over(ranks, tmp_path, hosts):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        group = new_group(0, 1, 2, 3, seconds=3)
        found = None if rank == 3 else raised(lambda: sw.reshard(part(VALUES, ROWS, rank), COLUMNS, group=group))
        until(tmp_path, str(rank), 4)
        return found

    for kind, text, took in ranks(4, run, patience=PATIENCE, dying={9})[:3]:
        assert kind == "ExchangeError"
        assert "rank 3 has ended, or has not called" in text
        assert took < AT_ONCE


def test_a_rank_of_a_mesh_may_leave_once_it_is_done(ranks, tmp_path):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: "abcde"[rank]
        use("staged")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        if rank == 4:
            return None
        on_mesh(mesh)()
        if rank == 2:  # its messages come to rank 0 long after those of rank 1
            post = GroupTransport._post

            def slow(transport, receives, sends, tag):
                listed = list(sends)
                first, rest = ([one for one in listed if (one[0] == 0) == late] for late in (False, True))
                works = post(transport, receives, first, tag)
                if rest:
                    time.sleep(1.5)
                return works + post(transport, [], rest, tag)

            GroupTransport._post = slow
        found = raised(on_mesh(mesh))
        if rank == 1:
            os._exit(0)
        until(tmp_path, str(rank), 3)
        return found

    reports = ranks(5, run, patience=PATIENCE, dying={1})
    for kind, text, _ in (reports[rank] for rank in (0, 2, 3)):
        assert kind is None, text


def store_at(file, rank, limit):
    """A store that rank 0 holds, at a port that the system chooses; the others read it in the file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, timeout=limit, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), 4, is_master=False, timeout=limit)


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
@pytest.mark.parametrize("first", [True, False])
def test_the_rank_that_held_the_store_is_named_too(ranks, tmp_path, hosts, first):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        (tmp_path / "met").mkdir(exist_ok=True)
        until(tmp_path / "met", str(rank), 4)
        dist.destroy_process_group()  # with which nobody may still be connecting
        limit = timedelta(seconds=PATIENCE)
        store = store_at(tmp_path / "port", rank, limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
        x = part(VALUES, ROWS, rank)
        if not first:
            sw.reshard(x, COLUMNS)
        dist.barrier()
        if rank == 0:
            kill()
        found = raised(lambda: sw.reshard(x, COLUMNS))
        until(tmp_path, str(rank), 5)  # with the port and the folder
        return found

    for kind, text, took in ranks(4, run, patience=PATIENCE, dying={0})[1:]:
        assert kind == "ExchangeError"
        assert took < AT_ONCE
        cause = text.partition("when the transport broke: ")[2]
        assert re.match(r"rank 0 has ended|ranks 0, .* have ended, or have closed the connection", cause), text
