"""Every rank raises the same clear error: nobody hangs, nothing half-filled is returned, and the group stays usable."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401

import shardwise as sw

ROWS, COLUMNS = sw.Layout.chunk((8, 6), 0, owners=4), sw.Layout.chunk((8, 6), 1, owners=4)
VALUES = np.arange(48.0, dtype=np.float32).reshape(8, 6)
BIG = sw.Layout.chunk((1024, 1024), 0, owners=4), sw.Layout.chunk((1024, 1024), 1, owners=4)


def rows(rank, layout=ROWS, values=VALUES):
    return sw.ShardedTensor(torch.from_numpy(sw.testing.scatter(values, layout)[rank][0].copy()), layout)


def raised(call):
    """The error of a call, its type and text, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None, "", time.monotonic() - began


def usable(rank):
    """The group can still reshard."""
    found = sw.reshard(rows(rank), COLUMNS)
    np.testing.assert_array_equal(found.local_tensor().numpy(), sw.testing.scatter(VALUES, COLUMNS)[rank][0])


def same_refusal(reports, *words):
    """All ranks raised one ExchangeError with one text, in time, and it says these words."""
    assert {kind for kind, _, _ in reports} <= {"ExchangeError", "RefusedValueError", "RefusedTypeError"}
    assert len({(kind, text) for kind, text, _ in reports}) == 1, reports
    assert max(took for _, _, took in reports) < 20  # seconds; the group would wait for minutes
    for word in words:
        assert word in reports[0][1]


DISAGREEMENTS = {
    "shape": lambda x: sw.reshard(
        sw.ShardedTensor(x.local_tensor()[:, :5].contiguous(), "8x5/S0@4"), sw.Layout.chunk((8, 5), 1, owners=4)
    ),
    "dtype": lambda x: sw.reshard(x.to(torch.float64), COLUMNS),
    "source": lambda x: sw.reshard(sw.ShardedTensor(x.shards, "8x6/S0@4:1,0,2,3"), COLUMNS),
    "target": lambda x: sw.reshard(x, "8x6/R@4"),
    "dtype=": lambda x: sw.reshard(x, COLUMNS, dtype=torch.float64),
    "max_bytes=": lambda x: sw.reshard(x, COLUMNS, max_bytes=2**20),
    "hosts=": lambda x: sw.reshard(x, COLUMNS, hosts=2),
    "verify=": lambda x: sw.reshard(x, COLUMNS, verify=True),
    "gradient": lambda x: sw.reshard(x.requires_grad_(), COLUMNS),
    "operation": lambda x: sw.fingerprint(x),
}


def test_ranks_that_disagree_raise_the_same_error_that_names_the_field(ranks):  # noqa: F811
    def run(rank):
        reports = {}
        for field, strange in DISAGREEMENTS.items():
            usable(rank)  # also after all have agreed once, when messages leave with the agreement
            call = strange if rank == 1 else lambda x: sw.reshard(x, COLUMNS)
            reports[field] = raised(lambda call=call: call(rows(rank)))
        usable(rank)
        return reports

    reports = ranks(4, run)
    for field in DISAGREEMENTS:
        same_refusal([report[field] for report in reports], f"disagree on the {field}", "rank 1:", "ranks 0, 2, 3:")


BAD = {
    "a plain tensor": (lambda x: sw.reshard(x.local_tensor(), COLUMNS), "does not say where its cells live"),
    "no target": (lambda x: sw.reshard(x, 3.5), "is not a target"),
    "bad notation": (lambda x: sw.reshard(x, "8x6/S0@four"), "expected how many owners"),
    "another shape": (lambda x: sw.reshard(x, "8x7/S0@4"), "needs one shape"),
    "owners outside the group": (lambda x: sw.reshard(x, "8x6/S0@2:3,9"), "names rank 9, but those who call"),
    "gaps": (lambda x: sw.reshard(x, sw.Layout.boxes((8, 6), [(0, (0, 0), (4, 6))])), "has no owner"),
    "a limit too low": (lambda x: sw.reshard(x, COLUMNS, max_bytes=1), "max_bytes"),
    "out of a wrong shape": (lambda x: sw.reshard(x, COLUMNS, out=torch.empty(3)), "out= must have tensors of shapes"),
    "out of a wrong dtype": (lambda x: sw.reshard(x, COLUMNS, out=torch.empty(8, 2, dtype=torch.int32)), "out= must"),
    "out in the source": (lambda x: sw.reshard(x, ROWS, out=x.local_tensor()), "shares memory"),
    "a cast that loses": (
        lambda x: sw.reshard(x.to(torch.complex64), COLUMNS, dtype=torch.float32),
        "imaginary part would be lost",
    ),
    "no such reduction": (
        lambda x: sw.reshard(sw.ShardedTensor(torch.zeros(8, 6), "8x6/Pbor@4"), COLUMNS),
        "cannot be reduced by 'bor'",
    ),
    "out while autograd follows": (
        lambda x: sw.reshard(x.requires_grad_(), COLUMNS, out=torch.empty(8, 2)),
        "autograd follows",
    ),
}


def test_bad_input_of_one_rank_or_of_all_is_told_to_all(ranks):  # noqa: F811
    def run(rank):
        reports = {}
        for case, (call, _) in BAD.items():
            usable(rank)
            mine = call if rank == 2 else lambda x: sw.reshard(x, COLUMNS)
            reports[case] = [raised(lambda call=call: call(rows(rank))) for call in (call, mine)]
        usable(rank)
        return reports

    reports = ranks(4, run)
    for case, (_, words) in BAD.items():
        everybody, one = zip(*(report[case] for report in reports), strict=True)
        assert len({kind for kind, _, _ in everybody}) == 1
        same_refusal(everybody[:1], words)
        assert all(words in text for _, text, _ in everybody), everybody
        same_refusal(one, words, "rank 2 cannot take part")


def test_a_rank_that_lost_its_part_of_the_source_is_named(ranks):  # noqa: F811
    def run(rank):
        report = raised(lambda: sw.reshard(None if rank == 3 else rows(rank), COLUMNS))
        usable(rank)
        return report

    same_refusal(ranks(4, run), "rank 3 cannot take part", "gives rank 3 tensors of shapes [(2, 6)], not None")


def test_nobody_holds_the_source(ranks):  # noqa: F811
    same_refusal(ranks(2, lambda rank: raised(lambda: sw.reshard(None, "4/S0@2"))), "none of ranks 0, 1 holds a part")


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "out"])
def test_survivors_of_a_killed_rank_raise_and_say_what_they_waited_for(ranks, when, given):  # noqa: F811
    source, target = BIG

    def run(rank):
        values = np.ones(source.shape, dtype=np.float32)
        x, out = rows(rank, source, values), torch.zeros(target.local_shape(rank)) if given else None
        dist.barrier()
        if rank == 2:
            _die(when)
        done = []
        kind, text, took = raised(lambda: done.append(sw.reshard(x, target, out=out)))
        again = raised(lambda: sw.reshard(x, target))
        whole = [bool((found.local_tensor() == 1).all()) for found in done]
        return kind, text, took, again, whole

    reports = ranks(4, run, patience=6, dying={2})
    assert reports[2] is None
    for kind, text, took, again, whole in (reports[0], reports[1], reports[3]):
        if when == "after" and kind is None:
            assert whole == [True]  # all that was asked of the dead had been sent
        else:
            assert kind == "ExchangeError"
            assert "waiting for" in text or "posting messages" in text, text
            assert "make a new one" in again[1]
        assert again[0] == "ExchangeError"
        assert took < 15


def _die(when):
    """End this process before it takes part, once it has agreed, or once it has sent its first message."""
    if when == "before":
        os._exit(1)
    calls = {
        "during": ("shardwise.transports.process_group", "post_messages"),
        "after": ("shardwise.transports.process_group", "arrivals"),
    }
    module = __import__(calls[when][0], fromlist=["GroupTransport"])
    owner = module.GroupTransport if when == "during" else module.GroupMessages
    setattr(owner, calls[when][1], lambda *_: os._exit(1))


def test_an_error_in_the_middle_breaks_the_group_for_all(ranks):  # noqa: F811
    source, target = BIG

    def run(rank):
        if rank == 1:
            from shardwise.exchange import ViewCache

            ViewCache.pack = _out_of_luck
        values = np.ones(source.shape, dtype=np.float32)
        return raised(lambda: sw.reshard(rows(rank, source, values), target))

    reports = ranks(4, run, patience=6, dying=(9,))
    assert [kind for kind, _, _ in reports] == ["ExchangeError", "ZeroDivisionError", "ExchangeError", "ExchangeError"]
    assert max(took for _, _, took in reports) < 15


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("transport", ["auto", "group"])
def test_the_error_says_whether_out_may_be_partly_written(ranks, given, transport):  # noqa: F811
    source, target = BIG

    def notes(call, kind=sw.ExchangeError):
        with pytest.raises(kind) as caught:
            call()
        return "\n".join(caught.value.__notes__)

    def run(rank):
        x = rows(rank, source, np.ones(source.shape, dtype=np.float32))
        out = torch.zeros(target.local_shape(rank)) if given else None
        refused = notes(lambda: sw.reshard(x, target if rank else source, out=out, transport=transport))
        if rank == 1:
            from shardwise.exchange import ViewCache

            ViewCache.pack = _out_of_luck
            return refused, notes(lambda: sw.reshard(x, target, out=out, transport=transport), ZeroDivisionError)
        return refused, notes(lambda: sw.reshard(x, target, out=out, transport=transport))

    reports = ranks(4, run, patience=6, dying=(9,))
    assert ("what was given as out= may be partly written" in reports[1][1]) == given
    for refused, broken in reports:
        assert "partly written" not in refused  # nothing was written: the ranks did not agree
        assert given or "partly written" not in broken  # others may hear of it before they write


def _out_of_luck(*_, **__):
    raise ZeroDivisionError


def test_without_a_process_group_the_remedy_is_named():
    assert not dist.is_initialized()
    with pytest.raises(sw.ExchangeError, match="init_process_group"):
        sw.reshard(sw.ShardedTensor(torch.zeros(4), "4/S0@1"), "4/R@1")
