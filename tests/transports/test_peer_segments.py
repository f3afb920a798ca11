"""Segments are handed to other processes before they are named, and given up when they are no more."""

import os

import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, mapped, open_files, part, raised, works

import shardwise as sw
from shardwise.transports.segments import this_process


def test_more_shared_tensors_than_a_packet_takes_descriptors(ranks):  # noqa: F811
    rows, columns = (sw.Layout.chunk((64, 8), dim, owners=2) for dim in (0, 1))
    values = VALUES.reshape(-1)[: 64 * 8].reshape(64, 8)

    def run(rank):
        given = {f"w{at}": part(values + at, rows, rank, shared=True) for at in range(300)}
        found = sw.reshard_state_dict(given, [("*", columns)])
        for at in range(300):
            expect(found[f"w{at}"], values + at, columns, rank)
        return True

    assert all(ranks(2, run))


def test_what_left_with_an_agreement_that_was_refused_can_be_sent_again(ranks):  # noqa: F811
    def run(rank):
        works(rank, shared=True)  # from now on messages leave with the agreement
        x = part(VALUES, ROWS, rank, shared=True)
        strange = sw.Layout.replicated(ROWS.shape, 2)
        kinds = [raised(lambda: sw.reshard(x, strange if rank == 1 else COLUMNS))[0] for _ in range(2)]
        expect(sw.reshard(x, COLUMNS), VALUES, COLUMNS, rank)
        return kinds

    assert ranks(2, run) == [["RefusedValueError"] * 2] * 2


def test_neither_files_nor_memory_pile_up(ranks):  # noqa: F811
    strange = sw.Layout.replicated(ROWS.shape, 2)

    def turn(rank, number):
        shape = (64 + number, 1024)
        rows, columns = (sw.Layout.chunk(shape, dim, owners=2) for dim in (0, 1))
        for shared in (False, True):
            x = part(VALUES, ROWS, rank, shared=shared)
            expect(sw.reshard(x, COLUMNS), VALUES, COLUMNS, rank)
            assert raised(lambda x=x: sw.reshard(x, strange if rank == 1 else COLUMNS))[0] == "RefusedValueError"
            larger = sw.empty(rows, shared=shared)
            larger.local_tensor().fill_(number)
            assert (sw.reshard(larger, columns).local_tensor() == number).all()

    def run(rank):
        found = []
        for number in range(40):
            turn(rank, number)
            found.append((open_files(), mapped()))
        return found

    for found in ranks(2, run):
        assert max(files for files, _ in found[20:]) <= max(files for files, _ in found[:20]) + 2
        assert max(maps for _, maps in found[20:]) <= max(maps for _, maps in found[:20]) + 2
        assert max(maps for _, maps in found) < 16


def test_memory_of_one_that_has_ended_is_let_go(ranks):  # noqa: F811
    def run(rank):
        works(rank, shared=True)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        had = mapped()
        assert raised(lambda: works(rank))[0] == "ExchangeError"
        sw.release_staging()
        return had, mapped()

    had, left = ranks(2, run, dying={1})[0]
    assert had > left == 0


def test_forked_ranks_have_a_socket_and_segments_of_their_own(ranks):  # noqa: F811
    packets, peer_segments = this_process.packets, this_process.peer_segments

    def run(_):
        ours = this_process.packets, this_process.peer_segments
        return [one is other for one, other in zip(ours, (packets, peer_segments), strict=True)]

    assert ranks(2, run) == [[False, False]] * 2
