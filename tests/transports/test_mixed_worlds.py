"""Ranks of several hosts in one exchange: memory where they share one, messages of the group elsewhere."""

import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import both, expect, part, raised, use

import shardwise as sw
from shardwise.job.session import group_transport
from shardwise.transports.local_peers import LocalPeers, introduced
from shardwise.transports.segments import ThisProcess
from shardwise.transports.unix_packets import PacketSocket, PeerEndedError

ROWS, COLUMNS = both((96, 400), 4)
VALUES = np.arange(96.0 * 400).reshape(96, 400)
WORLDS = {  # the hosts of ranks, None where one cannot meet others: which of them can share memory
    "two and two": ("aabb", [[1], [0], [3], [2]],
                    "only ranks 0, 1; ranks 2, 3 among themselves"),
    "every other": ("abab", [[2], [3], [0], [1]],
                    "only ranks 0, 2; ranks 1, 3 among themselves"),
    "one alone": ("aaab", [[1, 2], [0, 2], [0, 1], []],
                  "only ranks 0-2; rank 3 among themselves"),
    "one that cannot": (["a", None, "a", "a"], [[2, 3], [], [0, 3], [0, 2]],
                        "only ranks 0, 2, 3; rank 1 among themselves"),
    "all alone": ("abcd", [[]] * 4,
                  "only rank 0; rank 1; rank 2; rank 3 among themselves"),
    "nobody can": ([None] * 4, [[]] * 4, "only rank 0; rank 1; rank 2; rank 3 among"),
}  # fmt: skip


def on_host(name):
    """This rank is on a host of that name; without one the system gives it no sockets to meet others by."""

    def denied(_):
        raise PermissionError

    if name is None:
        ThisProcess.packets = property(denied)
    else:
        socket.gethostname = lambda: name


@pytest.mark.parametrize("world", WORLDS)
def test_hosts_are_found_and_both_transports_carry_one_exchange(ranks, world):  # noqa: F811
    hosts_of, near, words = WORLDS[world]

    def run(rank):
        on_host(hosts_of[rank])
        use("staged")
        for way in ("staged", "shared"):
            _, share = use(way)
            for hosts in (None, 2):
                for _ in range(2):
                    x = part(VALUES, ROWS, rank, shared=share)
                    expect(sw.reshard(x, COLUMNS, hosts=hosts), VALUES, COLUMNS, rank)
                    out = torch.empty(COLUMNS.local_shape(rank), dtype=torch.float64)
                    expect(sw.reshard(x, COLUMNS, hosts=hosts, out=out, max_bytes=40_000), VALUES, COLUMNS, rank)
                    whole = sw.Layout.replicated(ROWS.shape, 4)
                    expect(sw.reshard(x, whole, hosts=hosts, verify=True), VALUES, whole, rank)
                    terms = sw.ShardedTensor(torch.full((96, 400), rank + 0.5), "96x400/P@4")
                    summed = sw.reshard(terms, COLUMNS, hosts=hosts)
                    assert (summed.local_tensor() == 8).all()
        refused = [raised(lambda: sw.reshard(x, COLUMNS, transport="shared"))[:2]]
        state = {"w": x}
        refused.append(raised(lambda: sw.reshard_state_dict(state, {"w": COLUMNS}, transport="shared"))[:2])
        refused.append(raised(lambda: sw.Resharder(state, {"w": sw.empty(COLUMNS)}, transport="shared"))[:2])
        expect(sw.reshard(x, COLUMNS, transport="group"), VALUES, COLUMNS, rank)
        return sorted(group_transport(None).local_peers.addresses), refused

    reports = ranks(4, run)
    assert [found for found, _ in reports] == near
    assert len({str(refused) for _, refused in reports}) == 1
    for kind, text in reports[0][1]:
        assert kind == "RefusedValueError"
        assert words in text
        assert 'transport="auto" uses what there is' in text


def test_one_that_goes_while_it_is_met_is_no_neighbour(monkeypatch):
    def gone(_, address):
        raise PeerEndedError(address)

    monkeypatch.setattr(PacketSocket, "connect", gone)
    with introduced() as mine:
        near = LocalPeers.find(0, [0, 1], [mine, mine], lambda value, _: [value, value])
    assert (near.addresses, near.all) == ({}, False)


def test_a_sub_group_may_share_what_the_world_cannot(ranks):  # noqa: F811
    def run(rank):
        on_host("ab"[rank // 2])
        use("staged")
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        first = rank // 2 * 2
        source, target = (sw.Layout.chunk((96, 400), dim, owners=[first, first + 1]) for dim in (0, 1))
        x = part(VALUES, source, rank)
        expect(sw.reshard(x, target, group=groups[rank // 2], transport="shared"), VALUES, target, rank)
        return raised(lambda: sw.reshard(part(VALUES, ROWS, rank), COLUMNS, transport="shared"))[0]

    assert ranks(4, run) == ["RefusedValueError"] * 4


def test_ranks_that_disagree_on_the_transport_are_told(ranks):  # noqa: F811
    def run(rank):
        x, transport = part(VALUES, ROWS, rank), "group" if rank == 2 else "auto"
        report = raised(lambda: sw.reshard(x, COLUMNS, transport=transport))[:2]
        nonsense = raised(lambda: sw.reshard(x, COLUMNS, transport="pigeons"))[:2]
        return report, nonsense

    reports = ranks(4, run)
    assert len({str(report) for report in reports}) == 1
    (kind, text), (_, nonsense) = reports[0]
    assert kind == "RefusedValueError"
    assert "the ranks disagree on the transport= of this reshard: ranks 0, 1, 3: auto; rank 2: group" in text
    assert """transport= must be "auto", "group" or "shared", not 'pigeons'""" in nonsense


def test_alone_every_transport_will_do(ranks):  # noqa: F811
    def run(rank):
        for transport in ("auto", "group", "shared"):
            expect(sw.reshard(part(VALUES, sw.parse("96x400/R@1"), rank), "96x400/S0@1", transport=transport), VALUES,
                   sw.parse("96x400/S0@1"), rank)  # fmt: skip
        return True

    assert ranks(1, run) == [True]
