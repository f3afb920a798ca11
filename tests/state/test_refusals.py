"""What cannot be synced: the same error on every rank, before anything has moved, and the group goes on."""

import pytest
import torch
from models import answer, held, lies, meshes, numbers, refused, same, same_refusals
from nested import terms
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import Concat, Stack, Transposed
from shardwise.exchange import ViewCache

WHOLE = numbers(8, 6)
ROWS, COLUMNS = "8x6/S0@4", "8x6/S1@4"


def source(**others):
    return {"q.weight": held(WHOLE, ROWS), "k.weight": held(WHOLE + 1, ROWS), **others}


def target(**others):
    return {"q.weight": held(WHOLE * 0 - 1, COLUMNS), "k.weight": held(WHOLE * 0 - 1, COLUMNS), **others}


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def untouched(values):
    """Nothing was written to the target."""
    for value in values.values():
        if value is not None:
            for tensor in value.shards:
                same(tensor, torch.full_like(tensor, -1))


def refusals(ranks, cases, make=sw.Resharder):  # noqa: F811
    """What all ranks say of every case: (source, target, options) by rank, and words that must be in it."""

    def run(rank):
        found = {}
        for name, (case, _) in cases.items():
            given, room, options = case(rank)
            found[name] = answer(lambda given=given, room=room, options=options: make(given, room, **options))
            untouched(room or {})
        return found

    same_refusals(ranks(4, run), **{name: words for name, (_, words) in cases.items()})


def wide(value=-1):
    return held(torch.full((6, 8), float(value)), "6x8/S1@4")


NAMES = {
    "missing": (lambda rank: (without(source(), "k.weight"), target(), {}), ["the source has nothing for 'k.weight'"]),
    "extra": (
        lambda rank: (source(), without(target(), "q.weight"), {}),
        ["the target has no 'q.weight'", "nearest: 'k.weight'", "strict=False"],
    ),
    "misspelt": (
        lambda rank: (source(), {"q.weigth": target()["q.weight"], "k.weight": target()["k.weight"]}, {}),
        ["nothing for 'q.weigth'", "nearest: 'q.weight'"],
    ),
    "misspelt but not strict": (
        lambda rank: (source(), {**without(target(), "q.weight"), "q.weigth": target()["q.weight"]}, {"strict": False}),
        ["nothing for 'q.weigth'", "nearest: 'q.weight'"],
    ),
    "many": (
        lambda rank: ({f"layers.{i}.w": held(WHOLE, ROWS) for i in range(20)}, target(), {"strict": False}),
        ["the source has nothing for 'q.weight', 'k.weight'"],
    ),
    "shape": (
        lambda rank: (source(), {**target(), "q.weight": wide()}, {}),
        ["'q.weight' has shape (8, 6) in the source, but (6, 8) in the target"],
    ),
    "dtype": (
        lambda rank: ({name: value.to(torch.float64) for name, value in source().items()}, target(), {}),
        ["'q.weight' is torch.float64 in the source and torch.float32 in the target", "cast=True"],
    ),
    "two of one name": (
        lambda rank: (source(), target(), {"rename": {"k.weight": "q.weight"}}),
        ["'q.weight' and 'k.weight' would both be 'q.weight'"],
    ),
    "renamed away": (
        lambda rank: (source(), target(), {"rename": [("q.*", "model.q.*")]}),
        ["nothing for 'q.weight'", "nearest: 'k.weight'"],
    ),
    "cast to a dtype": (
        lambda rank: (source(), target(), {"cast": torch.float16}),
        ["cast= makes 'q.weight' torch.float16, but the target is torch.float32"],
    ),
    "stars": (lambda rank: (source(), target(), {"rename": {"q.weight": "*.x.*"}}), ["'*.x.*' has 2 stars"]),
    "nobody has a source": (lambda rank: (None, target(), {}), ["no rank has a source"]),
    "nobody has a target": (lambda rank: (source(), None, {}), ["no rank has a target"]),
}


def test_names_shapes_and_dtypes_that_do_not_fit(ranks):  # noqa: F811
    refusals(ranks, NAMES)


def test_leaves_of_one_dotted_name(ranks):  # noqa: F811
    def run(rank):
        twice = {"a.b": held(WHOLE, ROWS), "a": {"b": held(WHOLE + 1, ROWS)}}
        one = {"a": {"b": held(WHOLE * 0 - 1, COLUMNS)}}
        said = [
            answer(lambda: sw.Resharder(twice, one, strict=False)),
            answer(lambda: sw.Resharder(one, twice, strict=False)),
        ]
        untouched(one["a"])
        return said

    for said in ranks(4, run):
        assert ["both called 'a.b'" in text for text in said] == [True, True]


def test_a_cast_that_would_lose_the_imaginary_part(ranks):  # noqa: F811
    def case(rank):
        return {"q.weight": held(WHOLE.cfloat(), ROWS)}, without(target(), "k.weight"), {"cast": True}

    refusals(ranks, {"complex": (case, ["complex64", "imaginary"])})


REMAPS = {
    "too few rows": (
        lambda rank: (source(), {"qk": held(WHOLE * 0 - 1, ROWS)}, {"remap": [Concat("qk", ["q.weight", "k.weight"])]}),
        ["'qk'", "its parts have 16 along dim 0, but 'qk' has 8"],
    ),
    "other columns": (
        lambda rank: (
            source(),
            {"qk": held(torch.full((16, 5), -1.0), "16x5/S0@4")},
            {"remap": [Concat("qk", ["q.weight", "k.weight"])]},
        ),
        ["'q.weight' has shape (8, 6), but its part of 'qk' has (8, 5)"],
    ),
    "a part is missing": (
        lambda rank: (
            source(),
            {"qkv": held(torch.full((24, 6), -1.0), "24x6/S0@4")},
            {"remap": [Concat("qkv", ["q.weight", "k.weight", "v.weight"])]},
        ),
        ["the source has nothing for 'qkv'"],
    ),
    "one expert too few": (
        lambda rank: (
            {f"e.{i}": held(WHOLE, ROWS) for i in range(3)},
            {"e": held(torch.full((4, 8, 6), -1.0), "4x8x6/S0@4")},
            {"remap": [Stack("e", "e.{}")]},
        ),
        ["the source has nothing for 'e'"],
    ),
    "not transposed": (
        lambda rank: (source(), target(), {"remap": [Transposed("q.weight")]}),
        ["'q.weight' has shape (8, 6) in the source, but (6, 8) is what becomes (8, 6) (by Transposed("],
    ),
    "terms": (
        lambda rank: (
            {"qk": terms(numbers(16, 6), meshes()[0])},
            target(),
            {"remap": [Concat("qk", ["q.weight", "k.weight"])]},
        ),
        ["partial", "reduce it first"],
    ),
}


def test_remaps_that_do_not_fit(ranks):  # noqa: F811
    refusals(ranks, REMAPS)


DISAGREE = {
    "one name": (
        lambda rank: (source(), {**target(), ("x" if rank == 2 else "y"): held(WHOLE * 0 - 1, ROWS)}, {}),
        ["the target has other names on rank 2 than on rank 0", "'x', 'y'"],
    ),
    "one name more": (
        lambda rank: ({**source(), **({"v.weight": held(WHOLE, ROWS)} if rank == 1 else {})}, target(), {}),
        ["the source has other names on rank 1 than on rank 0", "'v.weight'"],
    ),
    "one layout": (
        lambda rank: (source(), {**target(), "k.weight": held(WHOLE * 0 - 1, ROWS if rank == 3 else COLUMNS)}, {}),
        ["'k.weight' of the target has layout 8x6/S1@4 on rank 0, but 8x6/S0@4 on rank 3"],
    ),
    "one dtype": (
        lambda rank: (
            {**source(), "k.weight": held(WHOLE.to([torch.float32, torch.float64][rank == 2]), ROWS)},
            target(),
            {},
        ),
        ["'k.weight' of the source has dtype torch.float32 on rank 0, but torch.float64 on rank 2"],
    ),
    "one shape": (
        lambda rank: ({**source(), "k.weight": wide(1) if rank == 1 else held(WHOLE, ROWS)}, target(), {}),
        ["'k.weight' of the source has shape (8, 6) on rank 0, but (6, 8) on rank 1"],
    ),
    "rename": (
        lambda rank: (source(), target(), {"rename": {"q.*": "k.*", "k.*": "q.*"} if rank == 1 else None}),
        ["'links' 'q.weight' 'q.weight' is only on rank 0"],
    ),
    "max_bytes": (
        lambda rank: (source(), target(), {"max_bytes": 64 if rank == 3 else 65}),
        ["disagree on the max_bytes", "rank 3: "],
    ),
    "verify": (
        lambda rank: (source(), target(), {"verify": rank == 2}),
        ["the ranks disagree on the verify of this Resharder", "rank 2: True"],
    ),
    "strict": (
        lambda rank: ({**source(), "x": held(WHOLE, ROWS)}, target(), {"strict": rank != 1}),
        ["the target has no 'x'"],
    ),
    "None everywhere": (
        lambda rank: ({**source(), "k.weight": None}, target(), {}),
        ["'k.weight'"],
    ),
}


def test_ranks_that_disagree(ranks):  # noqa: F811
    refusals(ranks, DISAGREE)


def test_ranks_that_disagree_on_the_hosts(ranks):  # noqa: F811
    """Also where the plans differ and the tensors are large, so that somebody would wait for a message."""

    def run(rank):
        whole = numbers(64, 256)
        given, room = {"w": held(whole, "64x256/S0@4")}, {"w": held(whole * 0 - 1, "64x256/R@4")}

        def sync():
            sw.Resharder(given, room, hosts=2 if rank == 1 else None).run()

        text = refused(sync)
        untouched(room)
        return {"hosts": text}

    same_refusals(ranks(4, run, timeout=20), hosts=["'hosts' is ['None'] on rank 0", "on rank 1"])


@pytest.mark.parametrize("side", ["source", "target"])
def test_memory_of_another_shape_since_the_last_run(ranks, side):  # noqa: F811
    def run(rank):
        found = {}
        for options in {}, {"verify": True}, {"max_bytes": 64}:
            given = {"q": WHOLE.clone(), "k": held(WHOLE, ROWS)}
            room = {"q": held(WHOLE * 0, COLUMNS), "k": held(WHOLE * 0, ROWS)}
            sync = sw.Resharder(given, room, **options)
            sync.run()
            for value in room.values():
                value.shards[0].fill_(-1)
            shard = (given if side == "source" else room)["k"].shards[0]
            before = shard.data
            if rank == 1:
                shard.data = torch.full((3, 6), -1.0)
            found[str(options)] = refused(sync.run)
            untouched(room)
            shard.data = before
            sync.run()
            lies(room["q"], WHOLE, COLUMNS)
            lies(room["k"], WHOLE, ROWS)
        return found

    found = ranks(4, run)
    same_refusals(found, **{name: ["rank 1", f"'k' of the {side}", "(3, 6)"] for name in found[0]})


@pytest.mark.devices
def test_one_wrong_bit_leaves_the_target_as_it_was(ranks):  # noqa: F811
    def run(rank):
        unpack = ViewCache.unpack

        def flip(self, message, buffer, tensors):
            if rank == 2:
                buffer[0] ^= 1
            unpack(self, message, buffer, tensors)

        given, room = source(), target()
        sync, found = sw.Resharder(given, room, verify=True), []
        ViewCache.unpack = flip
        for call in sync.run, lambda: sw.reshard_state_dict(given, [("*", COLUMNS)], verify=True, free=True):
            with pytest.raises(sw.ExchangeError, match=r"verify: .*did not arrive as sent") as error:
                call()
            found.append(str(error.value))
        ViewCache.unpack = unpack
        untouched(room)
        sync.run()
        for at, name in enumerate(given):  # neither moved nor given back
            lies(given[name], WHOLE + at, ROWS)
            lies(room[name], WHOLE + at, COLUMNS)
        return found

    found = ranks(4, run)
    assert found == [found[0]] * 4
