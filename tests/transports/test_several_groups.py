"""Several groups of the same processes: each has its own transport, and none ever takes what belongs to another."""

import time

from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, in_threads, new_group, part, raised, works

import shardwise as sw
from shardwise.exchange import ViewCache


def test_a_thread_for_each_group_in_any_order(ranks):  # noqa: F811
    def run(rank):
        groups = [new_group(0, 1) for _ in range(2)]

        def calls(number):
            time.sleep(0.02 * (number ^ rank))
            for turn in range(10):
                works(rank, groups[number], factor=10 * number + turn + 1)

        return in_threads(lambda: calls(0), lambda: calls(1))

    assert [kind for report in ranks(2, run) for kind, _, _ in report] == [None] * 4


def test_one_shared_tensor_goes_over_two_groups_in_another_order_on_every_rank(ranks):  # noqa: F811
    def run(rank):
        groups = [new_group(0, 1) for _ in range(2)]
        for group in groups:
            works(rank, group)
        x = part(VALUES, ROWS, rank, shared=True)

        def call(number):
            time.sleep(0.2 * (number ^ rank))
            sw.reshard(x, COLUMNS, group=groups[number])

        return in_threads(lambda: call(0), lambda: call(1))

    assert [text for report in ranks(2, run) for _, text, _ in report] == [""] * 4


def test_segments_come_and_go_in_two_threads(ranks):  # noqa: F811
    def run(rank):
        groups = [new_group(0, 1, 2) for _ in range(2)]

        def calls(number):
            for turn in range(20):
                rows, columns = (sw.Layout.chunk((64 + 8 * turn, 192), dim, owners=3) for dim in (0, 1))
                values = VALUES.reshape(-1)[: 192 * (64 + 8 * turn)].reshape(rows.shape) + number
                found = sw.reshard(part(values, rows, rank, shared=turn % 2 == 0), columns, group=groups[number])
                assert found.local_tensor().equal(part(values, columns, rank).local_tensor())

        return in_threads(lambda: calls(0), lambda: calls(1))

    assert [text for report in ranks(3, run) for _, text, _ in report] == [""] * 6


def test_a_new_group_works_after_another_one_of_the_same_ranks_broke(ranks):  # noqa: F811
    def run(rank):
        pack, other = ViewCache.pack, new_group(0, 1)
        works(rank, other)
        ViewCache.pack = _out_of_luck if rank == 1 else pack
        broke, again = raised(lambda: works(rank)), raised(lambda: works(rank))
        ViewCache.pack = pack
        works(rank, other)  # one that was there before, and one that is new
        works(rank, new_group(0, 1))
        return broke, again

    reports = ranks(2, run, dying={9})
    assert [broke[0] for broke, _ in reports] == ["ExchangeError", "ZeroDivisionError"]
    assert "an exchange broke on rank 1 (ZeroDivisionError: no luck)" in reports[0][0][1]
    assert all("destroy the process group and make a new one" in again[1] for _, again in reports)


def test_what_has_come_for_one_group_is_there_after_another_one_broke(ranks):  # noqa: F811
    def run(rank):
        breaking, other = (new_group(0, 1) for _ in range(2))
        works(rank, other)
        if rank == 0:  # its messages of the other group come while rank 1 waits for those of the one that breaks
            return in_threads(lambda: works(rank, other, factor=2), lambda: later(lambda: works(rank, breaking)))
        pack, ViewCache.pack = ViewCache.pack, _out_of_luck
        broke = raised(lambda: works(rank, breaking))
        ViewCache.pack = pack
        return raised(lambda: works(rank, other, factor=2)), broke

    assert [[kind for kind, _, _ in report] for report in ranks(2, run)] == [
        [None, "ExchangeError"],
        [None, "ZeroDivisionError"],
    ]


def later(call):
    time.sleep(0.3)
    call()


def _out_of_luck(*_, **__):
    raise ZeroDivisionError("no luck")
