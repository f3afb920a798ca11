"""Ranks that are killed, leave early or raise in the middle: the others hear of it at once, and nobody hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import both, new_group, raised, use

import shardwise as sw
import shardwise.transports.shared_memory as sharing
from shardwise.exchange import ViewCache, peer_reads
from shardwise.job.session import group_transport
from shardwise.transports import local_peers

PATIENCE = 50  # seconds, of the group
SOON = PATIENCE / 2  # long before that, however busy the machine is
SHAPE = (256, 256)
ROWS, COLUMNS = both(SHAPE, 4)


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def interrupt(*_, **__):
    raise KeyboardInterrupt


MOMENTS = {  # when a rank is killed, and in which way messages go; what it does then
    "in pack": ("staged", lambda then: setattr(ViewCache, "pack", then)),
    "between locations": (
        "staged",
        lambda then: setattr(sharing.SharedMemoryTransport, "_send", _second(sharing.LOCATION, then)),
    ),
    "before it reads": ("staged", lambda then: setattr(sharing.SharedMemoryTransport, "open_message", then)),
    "while it reads": ("read", lambda then: setattr(local_peers, "read", then)),
    "while it copies": ("shared", lambda then: setattr(peer_reads, "copy_all", then)),
    "before it says so": ("staged", lambda then: setattr(sharing.SharedMemoryRound, "finish", then)),
    "between having said so": (
        "shared",
        lambda then: setattr(sharing.SharedMemoryTransport, "_send", _second(sharing.READ, then)),
    ),
    "in the agreement": (
        "small",
        lambda then: setattr(sharing.SharedMemoryTransport, "_send", _second(sharing.ROW, then)),
    ),
}


def _second(kind, then, send=sharing.SharedMemoryTransport._send):
    """Sends one packet of this kind, and then does something else."""
    sent = []

    def sending(transport, owner, what, *args):
        if what == kind and sent:
            then()
        sent.extend([what] * (what == kind))
        return send(transport, owner, what, *args)

    return sending


def x(rank, *, share):
    local = torch.full(ROWS.local_shape(rank), float(rank))
    return sw.ShardedTensor(sw.share_(local) if share else local, ROWS)


def survive(way, rank, arm):
    """What an exchange raises in which rank 2 does something else, whether it was whole, and what happens after it."""
    transport, share = use(way)
    group = new_group(0, 1, 3, seconds=PATIENCE)
    if rank != 2:
        sw.reshard(sw.empty("8x8/S0@3:0,1,3"), "8x8/S1@3:0,1,3", group=group)
    sw.reshard(x(rank, share=share), COLUMNS, transport=transport)
    dist.barrier()
    if rank == 2:
        arm()
    done = []
    kind, text, took = raised(lambda: done.append(sw.reshard(x(rank, share=share), COLUMNS, transport=transport)))
    again = raised(lambda: sw.reshard(x(rank, share=share), COLUMNS, transport=transport))
    if rank != 2:  # who has nothing to do with it
        sw.reshard(sw.empty("64x64/S0@3:0,1,3"), "64x64/S1@3:0,1,3", group=group)
    expected = torch.arange(4.0).repeat_interleave(64)[:, None].expand(256, 64)
    return kind, text, took, again, [torch.equal(found.local_tensor(), expected) for found in done]


UNREAD = {"before it reads", "before it says so"}  # who has packed its messages does not wait for their reader


def check_survivors(reports, moment=None):
    broken = 0
    for kind, text, took, again, whole in reports:
        assert took < SOON
        assert again[2] < SOON
        assert again[0] == "ExchangeError"
        if kind is None:  # it had all that it wanted from the dead, and was not asked for more
            assert whole == [True]
            assert any(word in again[1] for word in ("rank 2 has ended", "an exchange broke on rank")), again[1]
            continue
        broken += 1
        assert kind == "ExchangeError"
        assert "when the transport broke" in text
        assert any(word in text for word in ("rank 2 has ended", "an exchange broke on rank", "memory of rank 2")), text
        assert "destroy the process group and make a new one" in again[1]
    assert broken or moment in UNREAD


@pytest.mark.parametrize("moment", MOMENTS)
def test_survivors_of_a_killed_rank_hear_of_it_at_once(ranks, moment):  # noqa: F811
    way, arm = MOMENTS[moment]
    reports = ranks(4, lambda rank: survive(way, rank, lambda: arm(kill)), patience=PATIENCE, dying={2})
    assert reports.pop(2) is None
    check_survivors(reports, moment)


@pytest.mark.parametrize("moment", ["in pack", "before it reads", "before it says so", "in the agreement"])
def test_an_interrupt_on_one_rank_is_told_to_the_others(ranks, moment):  # noqa: F811
    way, arm = MOMENTS[moment]
    reports = ranks(4, lambda rank: survive(way, rank, lambda: arm(interrupt)), patience=PATIENCE, dying={9})
    kind, _, _, again, _ = reports.pop(2)
    assert (kind, again[0]) == ("KeyboardInterrupt", "ExchangeError")
    assert "broke on rank 2 (KeyboardInterrupt" in again[1]
    check_survivors(reports, moment)


@pytest.mark.parametrize("end", [kill, lambda: os._exit(0)], ids=["killed", "left"])
def test_a_rank_that_is_not_there_any_more_is_named(ranks, end):  # noqa: F811
    reports = ranks(4, lambda rank: survive("staged", rank, end), patience=PATIENCE, dying={2})
    assert reports.pop(2) is None
    check_survivors(reports)
    assert any("rank 2 has ended" in text for _, text, *_ in reports)


def test_a_rank_may_leave_once_it_is_done(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        source, target = both(SHAPE, 2)
        local = torch.full(source.local_shape(rank % 2), float(rank))
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        for owners in ([0, 1], [2, 3]):
            group = new_group(*owners)
            if owners == pair:
                source, target = (sw.Layout.chunk(SHAPE, dim, owners=owners) for dim in (0, 1))
                found = sw.reshard(sw.ShardedTensor(local, source), target, group=group)
        if rank == 0:
            os._exit(0)
        return found.local_tensor()[:, 0].unique().tolist()

    assert ranks(4, run, dying={0}) == [None, [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]


def test_a_child_of_a_killed_rank_does_not_keep_it_alive(ranks, tmp_path):  # noqa: F811
    def arm():
        if os.fork():
            kill()
        while len(list(tmp_path.iterdir())) < 3:  # it lives until all survivors have heard
            time.sleep(0.01)
        os._exit(0)

    def run(rank):
        report = survive("staged", rank, arm)
        (tmp_path / str(rank)).touch()
        return report

    reports = ranks(4, run, patience=PATIENCE, dying={2})
    assert reports.pop(2) is None
    check_survivors(reports)


def test_an_interrupt_while_ranks_meet_leaves_a_transport_that_says_so(ranks):  # noqa: F811
    def run(rank):
        if rank == 1:
            local_peers.MemoryProbe.is_readable = interrupt
        calls = [raised(lambda: sw.reshard(sw.empty("8x8/S0@2"), "8x8/S1@2")) for _ in range(2)]
        return [(kind, text) for kind, text, _ in calls], max(took for *_, took in calls)

    reports = ranks(2, run, patience=PATIENCE, dying={9})
    assert [calls[0][0] for calls, _ in reports] == ["ExchangeError", "KeyboardInterrupt"]
    for calls, took in reports:
        assert calls[1][0] == "ExchangeError"
        assert "destroy the process group and make a new one" in calls[1][1]
        assert took < SOON
    assert "broke on rank 1 (KeyboardInterrupt during the rendezvous)" in reports[1][0][1][1]


def test_one_that_does_not_call_is_waited_for_as_long_as_the_group_says(ranks, tmp_path):  # noqa: F811
    def run(rank):
        use("staged")
        sw.reshard(sw.empty("8x8/S0@2"), "8x8/S1@2")
        group_transport(None).seconds = 1.5
        while rank == 1 and not list(tmp_path.iterdir()):
            time.sleep(0.01)
        report = raised(lambda: sw.reshard(sw.empty("8x8/S0@2"), "8x8/S1@2")) if rank == 0 else None
        (tmp_path / str(rank)).touch()
        return report

    kind, text, took = ranks(2, run, patience=PATIENCE, dying={9})[0]
    assert kind == "ExchangeError"
    assert "nothing came within 1.5 s from rank 1" in text
    assert "a rank did not call" in text
    assert 1.4 < took < SOON
