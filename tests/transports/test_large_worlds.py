"""Many ranks of one host: the same values and errors, few descriptors, and no more packets than there are messages."""

import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from test_told_at_once import AT_ONCE, PATIENCE, kill, until
from wired import expect, open_files, part, raised

import shardwise as sw
from shardwise.job.session import group_transport
from shardwise.transports.shared_memory import MOST_SLOTS
from shardwise.transports.unix_packets import PacketSocket

MANY = 64
OTHERS = 32  # descriptors of a rank that have to do with nobody


def layouts(world):
    return {to: sw.parse(f"{2 * world}x{world}/{to}@{world}") for to in ("S0", "S1", "R", "P")}


def counting():
    """The packets that this process sends from now on, by their receivers."""
    sent, send = Counter(), PacketSocket.send

    def counted(self, to, *args, **options):
        sent[to] += 1
        return send(self, to, *args, **options)

    PacketSocket.send = counted
    return sent


@pytest.mark.slow
def test_64_ranks_move_values_with_few_descriptors_and_packets(ranks):  # noqa: F811
    by, whole = layouts(MANY), np.arange(2.0 * MANY * MANY).reshape(2 * MANY, MANY)
    to_the_next = [*range(1, MANY), 0]
    shifted = sw.Layout.chunk(whole.shape, 0, owners=to_the_next)
    wide = np.arange(2.0**14 * MANY).reshape(MANY, 2**14)  # rows that are too long for small messages
    wide_rows, wide_shifted = (sw.Layout.chunk(wide.shape, 0, owners=owners) for owners in (range(MANY), to_the_next))

    def run(rank):
        x = part(whole, by["S0"], rank)
        before, report = open_files(), {}
        expect(sw.reshard(x, by["S0"]), whole, by["S0"], rank)
        sent = counting()
        expect(sw.reshard(x, by["S0"]), whole, by["S0"], rank)
        report["agree"] = sum(sent.values()), open_files() - before
        sent.clear()
        expect(sw.reshard(x, shifted), whole, shifted, rank)
        report["shift"] = sum(sent.values()), open_files() - before
        expect(sw.reshard(part(wide, wide_rows, rank), wide_shifted), wide, wide_shifted, rank)
        report["staged"] = open_files() - before
        dist.barrier()  # those who are ahead connect to everybody
        sent.clear()
        expect(sw.reshard(x, by["R"]), whole, by["R"], rank)
        report["gather"] = sum(sent.values()), open_files() - before
        expect(sw.reshard(x, by["S1"]), whole, by["S1"], rank)
        terms = sw.ShardedTensor(torch.full(whole.shape, 1.0 + rank), by["P"])
        total = np.full(whole.shape, MANY * (MANY + 1) / 2, np.float32)
        expect(sw.reshard(terms, by["S0"]), total, by["S0"], rank)
        some = sw.Layout.chunk(whole.shape, 1, owners=range(3))
        y = sw.reshard(x, some)  # held by few ranks
        expect(sw.reshard(y, by["S0"]), whole, by["S0"], rank)  # of which the others know nothing
        return report

    for report in ranks(MANY, run):
        tree = 1 + 4  # the owner above, and those below
        assert report["agree"][0] <= tree
        assert report["agree"][1] <= OTHERS + 2 * tree
        assert report["shift"][0] <= tree + 1
        assert report["shift"][1] <= OTHERS + 2 * (tree + 2)
        assert report["staged"] <= OTHERS + 2 * (tree + 2)
        assert report["gather"][0] <= tree + MANY - 1
        assert report["gather"][1] + MANY <= OTHERS + 2 * (MANY - 1)  # with the sockets of gloo, one to everybody


def test_refusals_are_the_same_on_all_ranks_of_a_large_world(ranks):  # noqa: F811
    world = 2 * MOST_SLOTS
    by, whole = layouts(world), np.ones((2 * world, world))

    def run(rank):
        x = part(whole, by["S0"], rank)
        other = raised(lambda: sw.reshard(x, by["R" if rank == world - 1 else "S1"]))[:2]
        sent = counting()
        wrong = raised(lambda: sw.reshard(torch.ones(3) if rank == 5 else x, by["S1"]))[:2]
        packets = sum(sent.values())
        expect(sw.reshard(x, by["S1"]), whole, by["S1"], rank)
        return other, wrong, packets, len(group_transport(None)._packets._queues)

    reports = ranks(world, run)
    ((other, wrong, _, _),) = {(other, wrong, 0, 0) for other, wrong, _, _ in reports}
    assert f"ranks 0-{world - 2}" in other[1]
    assert f"rank {world - 1}" in other[1]
    assert "rank 5 cannot take part" in wrong[1]
    assert max(packets for _, _, packets, _ in reports) <= world - 1 + 3 * 5  # small messages, headers, explanations
    assert max(queues for *_, queues in reports) == 0  # small messages that nobody took are gone


def test_who_does_not_call_is_named_by_all_ranks_of_a_large_world(ranks, tmp_path):  # noqa: F811
    world, late = MOST_SLOTS + 4, MOST_SLOTS + 1
    by, whole = layouts(world), np.ones((2 * world, world))

    def run(rank):
        x = part(whole, by["S0"], rank)
        sw.reshard(x, by["S1"])
        dist.barrier()
        group_transport(None).seconds = 2.0
        found = (None, "", 0.0) if rank == late else raised(lambda: sw.reshard(x, by["S1"]))
        until(tmp_path, rank, world)
        return found

    reports = ranks(world, run, patience=PATIENCE, dying={world})
    assert reports.pop(late)[0] is None
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert f"nothing came within 2 s from rank {late}" in text
        assert took < AT_ONCE


@pytest.mark.parametrize("dead", [0, MOST_SLOTS + 3])
def test_all_ranks_of_a_large_world_hear_at_once_of_one_that_was_killed(ranks, tmp_path, dead):  # noqa: F811
    world = MOST_SLOTS + 4
    by, whole = layouts(world), np.ones((2 * world, world))

    def run(rank):
        x = part(whole, by["S0"], rank)
        sw.reshard(x, by["S0"])
        dist.barrier()
        if rank == dead:
            time.sleep(0.5)
            kill()
        if rank == 7:
            time.sleep(1.0)  # one that does not wait when the others hear of it
        found = raised(lambda: sw.reshard(x, by["S1"]))
        until(tmp_path, rank, world - 1)
        return found

    reports = ranks(world, run, patience=PATIENCE, dying={dead})
    del reports[dead]
    for kind, text, took in reports:
        assert kind == "ExchangeError"
        assert f"rank {dead} has ended" in text
        assert took < AT_ONCE
