"""Exchanges that are started while another one of the same ranks is on its way."""

import torch
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, part, works

import shardwise as sw


def test_a_progress_function_may_reshard(ranks):  # noqa: F811
    def run(rank):
        calls = []

        def progress(done, total):
            works(rank, transport="shared", factor=len(calls))
            calls.append(done)

        state = {f"w{n}": part(n * VALUES, ROWS, rank) for n in range(4)}
        found = sw.reshard_state_dict(state, [("*", COLUMNS)], max_bytes=2**19, progress=progress, transport="shared")
        for n in range(4):
            expect(found[f"w{n}"], n * VALUES, COLUMNS, rank)
        return calls

    calls, others = ranks(2, run)
    assert calls == others
    assert len(calls) > 1


def test_a_hook_of_backward_may_reshard(ranks):  # noqa: F811
    def run(rank):
        calls, x = [], part(VALUES, ROWS, rank).requires_grad_()
        x.local_tensor().register_hook(lambda grad: calls.append(works(rank, factor=7.0)))
        y = sw.reshard(x, COLUMNS)
        (3 * y.local_tensor()).sum().backward()
        torch.testing.assert_close(x.grad.local_tensor(), torch.full_like(x.local_tensor(), 3.0), rtol=0, atol=0)
        return len(calls)

    assert ranks(2, run) == [1, 1]


def test_calls_between_the_start_of_one_and_its_end(ranks):  # noqa: F811
    def run(rank):
        handle = sw.reshard(part(VALUES, ROWS, rank), COLUMNS, async_op=True)
        works(rank, factor=5.0)
        room = {"w": sw.empty(COLUMNS, dtype=torch.float64)}
        sw.Resharder({"w": part(9 * VALUES, ROWS, rank)}, room).run()
        expect(room["w"], 9 * VALUES, COLUMNS, rank)
        expect(handle.wait(), VALUES, COLUMNS, rank)

    ranks(2, run)
