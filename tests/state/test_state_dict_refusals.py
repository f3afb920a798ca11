"""What cannot be resharded: the same error on every rank, before anything has moved, and the group goes on."""

import pytest
import torch.distributed as dist
from models import answer, dtensor, held, lies, meshes, numbers, same_refusals
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import Shard

import shardwise as sw

WHOLE = numbers(8, 6)
ROWS, COLUMNS = "8x6/S0@4", "8x6/S1@4"


def source():
    return {"q.weight": held(WHOLE, ROWS), "k.weight": held(WHOLE + 1, ROWS), "step": 3}


def asked(**others):
    return {"q.weight": COLUMNS, "k.weight": COLUMNS, **others}


def like(**others):
    return {"q.weight": held(WHOLE, COLUMNS), "k.weight": held(WHOLE, COLUMNS), **others}


ASKED = {
    "missing": (lambda rank: {"q.weight": COLUMNS}, {}, ["to= has no target for 'k.weight'", "None leaves"]),
    "extra": (lambda rank: asked(bias=COLUMNS), {}, ["has no 'bias'"]),
    "misspelt": (
        lambda rank: {"q.weigth": COLUMNS, "k.weight": COLUMNS},
        {},
        ["'q.weigth'", "nearest: 'q.weight'"],
    ),
    "misspelt beside what is right": (
        lambda rank: asked(**{"q.weigth": COLUMNS}),
        {},
        ["has no 'q.weigth'", "nearest: 'q.weight'"],
    ),
    "missing in what to look like": (
        lambda rank: {"q.weight": held(WHOLE, COLUMNS), "step": 1},
        {},
        ["to= has no target for 'k.weight'", "nearest: 'q.weight'"],
    ),
    "extra in what to look like": (
        lambda rank: like(**{"qq.weight": held(WHOLE, COLUMNS)}),
        {},
        ["has no 'qq.weight'", "nearest: 'q.weight'"],
    ),
    "shape": (
        lambda rank: asked(**{"k.weight": "6x8/S0@4"}),
        {},
        ["the target of 'k.weight': the tensor has shape (8, 6), but the target (6, 8)"],
    ),
    "shape of what to look like": (
        lambda rank: like(**{"k.weight": numbers(6, 8)}),
        {},
        ["(8, 6)", "(6, 8)"],
    ),
    "no rule": (lambda rank: [("q.*", COLUMNS)], {}, ["the target of 'k.weight': no rule matches", "'q.*'"]),
    "no mesh": (lambda rank: [("*", "S0")], {}, ["has no mesh: give mesh="]),
    "no target": (lambda rank: lambda name: 5, {}, ["5 is not a target"]),
    "no layout": (lambda rank: lambda name: "8x6/S2@4", {}, ["no dim 2"]),
    "a function that fails": (lambda rank: lambda name: int(name), {}, ["invalid literal", "'q.weight'"]),
    "different": (
        lambda rank: [("*", COLUMNS if rank == 1 else "8x6/R@4")],
        {},
        ["the ranks' arguments differ", "on rank 1"],
    ),
    "different for one": (
        lambda rank: asked(**{"k.weight": "8x6/S1@4:1,0,2,3" if rank == 3 else COLUMNS}),
        {},
        ["the ranks' arguments differ", "on rank"],
    ),
    "one fails": (
        lambda rank: [("*" if rank != 2 else "q*", COLUMNS)],
        {},
        ["rank 2", "the target of 'k.weight': no rule matches"],
    ),
    "max_bytes": (
        lambda rank: asked(),
        {"max_bytes": lambda rank: 64 + rank},
        ["disagree on the max_bytes", "rank 1: 65"],
    ),
    "free": (lambda rank: asked(), {"free": lambda rank: rank == 1}, ["disagree on the free", "rank 1: True"]),
    "verify": (lambda rank: asked(), {"verify": lambda rank: rank == 1}, ["disagree on the verify", "rank 1: True"]),
}


def test_what_is_asked_for_and_cannot_be(ranks):  # noqa: F811
    def run(rank):
        given, found = source(), {}
        for name, (to, options, _) in ASKED.items():
            how = {"free": True, **{key: value(rank) for key, value in options.items()}}
            wanted = to(rank)
            found[name] = answer(lambda wanted=wanted, how=how: sw.reshard_state_dict(given, wanted, **how))
            lies(given["q.weight"], WHOLE, ROWS)  # neither moved nor given back
            lies(given["k.weight"], WHOLE + 1, ROWS)
        return found

    same_refusals(ranks(4, run), **{name: words for name, (_, _, words) in ASKED.items()})


GIVEN = {
    "one name": (lambda rank: {"x" if rank == 2 else "y": held(WHOLE, ROWS)}, ["other names on rank 2", "'x', 'y'"]),
    "one name more": (
        lambda rank: {"x": held(WHOLE, ROWS), **({"z": WHOLE} if rank else {})},
        ["other names on rank 1 than on rank 0", "'z'"],
    ),
    "another order": (
        lambda rank: {name: held(WHOLE, ROWS) for name in ("xy" if rank else "yx")},
        ["other names on rank 1"],
    ),
    "one layout": (
        lambda rank: {"x": held(WHOLE, COLUMNS if rank == 3 else ROWS)},
        ["'x' of the state dict has layout 8x6/S0@4 on rank 0, but 8x6/S1@4 on rank 3"],
    ),
    "one kind": (
        lambda rank: {"x": WHOLE if rank == 1 else held(WHOLE, ROWS)},
        ["'x' of the state dict is sharded on some ranks, but a plain tensor on rank 1"],
    ),
    "nobody": (lambda rank: None, ["no rank has a state dict"]),
    "no memory": (
        lambda rank: {"x": dtensor(WHOLE.clone(), meshes()[0], Shard(0)).to("meta" if rank == 1 else "cpu")},
        ["'x'", "meta"],
    ),
}


def test_state_dicts_that_cannot_be_one(ranks):  # noqa: F811
    def run(rank):
        given = {name: make(rank) for name, (make, _) in GIVEN.items()}
        return {
            name: answer(lambda one=one: sw.reshard_state_dict(one, lambda name: COLUMNS))
            for name, one in given.items()
        }

    same_refusals(ranks(4, run), **{name: words for name, (_, words) in GIVEN.items()})


def test_owners_outside_of_the_group(ranks):  # noqa: F811
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group, pair = groups[rank // 2], [0, 1] if rank < 2 else [2, 3]
        mine = sw.Layout.chunk((8, 6), 0, pair)
        found = {}
        calls = {
            "source": lambda: sw.Resharder(source(), source(), group=group),
            "target": lambda: sw.Resharder(
                {"q.weight": held(WHOLE, mine)}, {"q.weight": held(WHOLE, COLUMNS)}, group=group
            ),
            "asked for": lambda: sw.reshard_state_dict({"w": held(WHOLE, mine)}, {"w": COLUMNS}, group=group),
            "given": lambda: sw.reshard_state_dict(source(), [("*", mine)], group=group),
        }
        for name, call in calls.items():
            with pytest.raises(ValueError, match=r"ranks (0, 1|2, 3)") as error:
                call()
            assert isinstance(error.value, sw.ExchangeError)
            found[name] = str(error.value)
            again = sw.reshard_state_dict(
                {"w": held(WHOLE, mine)}, {"w": sw.Layout.chunk((8, 6), 1, pair)}, group=group
            )
            lies(again["w"], WHOLE, sw.Layout.chunk((8, 6), 1, pair))
        return found

    found = ranks(4, run, timeout=20)
    assert (found[0], found[2]) == (found[1], found[3])
    for name, text in found[0].items():
        assert "names ranks 2, 3, but those who call are ranks 0, 1" in text, name
