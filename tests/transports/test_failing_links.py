"""Ranks on hosts of their own, whose links and processes fail: who is named, what is whole, and that nobody waits."""

import os
import re
import signal
import time
from datetime import timedelta
from threading import Thread

import numpy as np
import pytest
import torch
import torch.distributed as dist
from wired import both, expect, part, raised

import shardwise as sw
from shardwise.exchange import ViewCache
from shardwise.job.session import group_transport
from shardwise.testing import hosts, on_ranks, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=f"no hosts: {why_no_hosts()}")
PATIENCE = 50  # seconds of the group, where nobody may wait for that long
AT_ONCE = PATIENCE / 2
VALUES = np.arange(384.0 * 1024).reshape(384, 1024)  # 3 MiB: messages of 192 KiB between 4 ranks
ROWS, COLUMNS = both(VALUES.shape, 4)


def joined(work, folder, patience=PATIENCE):
    """`work(rank)` in a job whose store is on the host of rank 0, as a launcher makes it."""

    def run(rank):
        until_all(folder, f"met{rank}", 4)
        dist.destroy_process_group()  # with which nobody may still be connecting
        file, limit = folder / "port", timedelta(seconds=patience)
        if rank == 0:
            store = dist.TCPStore(ADDRESS, 0, 4, is_master=True, timeout=limit, wait_for_workers=False)
            (folder / "new").write_text(str(store.port))
            (folder / "new").rename(file)
        else:
            wait_for(file)
            store = dist.TCPStore(ADDRESS, int(file.read_text()), 4, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
        return work(rank)

    return run


ADDRESS = "10.213.0.1"  # of the first host


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def until_all(folder, name, count):
    """Stay until so many ranks have come here: nobody may hear of anything only because another process ended."""
    (folder / name).touch()
    while len(list(folder.glob(f"{name[:-1]}*"))) < count:
        time.sleep(0.01)


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def calls(rank):
    """A reshard of this rank, and a run of a Resharder of the same tensor."""
    x, out = part(VALUES, ROWS, rank), sw.empty(COLUMNS, dtype=torch.float64)
    sync = sw.Resharder({"w": x}, {"w": out})
    return {"reshard": lambda: sw.reshard(x, COLUMNS), "run": sync.run}, out


@pytest.mark.parametrize("call", ["reshard", "run"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_by_all_on_its_host_and_on_others(tmp_path, call, killed):
    def work(rank):
        mine, _ = calls(rank)
        mine[call]()
        dist.barrier()
        if rank == killed:
            ViewCache.pack = kill
        kind, text, took = raised(mine[call])
        heard = time.monotonic()
        until_all(tmp_path, f"heard{rank}", 3)
        return kind, text, took, heard

    with hosts(2) as (a, b):
        reports = on_ranks(4, joined(work, tmp_path), hosts=[a, a, b, b], dying={killed})
    del reports[killed]
    for kind, text, took, _ in reports:
        assert kind == "ExchangeError"
        assert f"rank {killed} has ended" in text
        assert took < AT_ONCE
    assert max(heard for *_, heard in reports) - min(heard for *_, heard in reports) < 1  # usually some milliseconds


def carry_on(rank, cut):
    """Calls while links fail: all complete, and every bit is right."""
    mine, out = calls(rank)
    dist.barrier()
    if rank == 0:
        Thread(target=cut).start()
    time.sleep(0.1)
    for _ in range(3):
        expect(mine["reshard"](), VALUES, COLUMNS, rank)
        out.local_tensor().zero_()
        mine["run"]()
        expect(out, VALUES, COLUMNS, rank)
        assert sw.reshard(part(VALUES, ROWS, rank), COLUMNS, verify=True) is not None
    return True


def test_calls_complete_over_a_link_that_was_down_for_some_seconds(tmp_path):
    def work(rank):
        def cut():
            b.link_down()
            time.sleep(3)
            b.link_up()

        start = time.monotonic()
        done = carry_on(rank, cut)
        return done and time.monotonic() - start

    with hosts(2) as (a, b):
        took = on_ranks(4, joined(work, tmp_path), hosts=[a, a, b, b])
    assert all(one > 3 for one in took)


def test_calls_complete_while_every_tenth_packet_is_lost(tmp_path):
    def work(rank):
        return carry_on(rank, lambda: a.lose(0.1))

    with hosts(2, delay=0.001) as (a, b):
        assert all(on_ranks(4, joined(work, tmp_path), hosts=[a, a, b, b]))


@pytest.mark.parametrize("moment", ["in the agreement", "in a round"])
def test_a_link_that_stays_down_is_an_error_on_every_rank_that_says_who_was_not_reached(tmp_path, moment):
    def work(rank):
        mine, out = calls(rank)
        mine["run"]()
        out.local_tensor().fill_(-1)
        dist.barrier()
        time.sleep(0.5)  # a rank may leave the barrier before its last messages have reached the other host
        group_transport(None).seconds = 3.0
        if moment == "in a round":
            cut_before_packing(rank)
        else:  # before anybody sends: a rank that has received everything may return
            if rank == 0:
                cut()
            wait_for(tmp_path / "cut")
        notes = notes_of(mine["run"])
        until_all(tmp_path, f"heard{rank}", 4)
        return *notes, bool((out.local_tensor() == -1).all())

    def cut():
        b.link_down()
        (tmp_path / "cut").touch()

    def cut_before_packing(rank):
        pack = ViewCache.pack

        def packing(*args, **options):
            if rank == 0 and not (tmp_path / "cut").exists():
                cut()
            wait_for(tmp_path / "cut")
            return pack(*args, **options)

        ViewCache.pack = packing

    with hosts(2) as (a, b):
        reports = on_ranks(4, joined(work, tmp_path), hosts=[a, a, b, b], dying={9})
    for rank, (kind, text, notes, took, untouched) in enumerate(reports):
        assert kind == "ExchangeError"
        assert took < AT_ONCE
        if rank < 2:
            named = "ranks ([01], )?2, 3 have ended, or have not called, or cannot be reached"
            alone = "waiting for ranks [01].* to call too when the transport broke: .*imed out"  # nobody answered
            assert re.search(f"{named}|{alone}", text), text
        else:
            assert "neither ranks 0, 1 on other hosts nor the store of the group can be reached" in text
        assert untouched or any("target may be partly written" in note for note in notes)


def notes_of(call):
    """The error of a call, its type, text and notes, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", []), time.monotonic() - began
    return None, "", [], time.monotonic() - began
