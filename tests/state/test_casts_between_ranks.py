"""Casts between ranks: codes only by name, no value lost unless that is allowed, the same error on every rank."""

import pytest
import torch
from models import answer, held, numbers, same
from ranks import ranks  # noqa: F401

import shardwise as sw

BF16, F16, F8, I8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
ROWS, COLUMNS = "8x6/S0@4", "8x6/S1@4"
LARGE = numbers(8, 6)
LARGE[5, 1], LARGE[7, 5], LARGE[7, 4] = 7e4, -1e6, float("inf")


def refused(found, *words):
    """All ranks say the same, with these words in it."""
    assert len(set(found)) == 1, found
    for word in words:
        assert word in found[0], found[0]


def columns(dtype):
    return held(torch.full((8, 6), -1.0).to(dtype), COLUMNS)


def as_codes(**others):
    return {"w": held(numbers(8, 6).to(F8), ROWS), "w_scale_inv": held(torch.ones(1, 1), "1x1/R@4"), **others}


CODES = {
    "cast=True": {"cast": True},
    "cast=False": {"cast": False},
    "a dtype": {"cast": BF16},
    "a pattern": {"cast": [("w*", BF16)]},
}


@pytest.mark.devices
def test_a_sync_casts_codes_by_name_alone(ranks):  # noqa: F811
    def run(rank):
        found, into = {}, {"w": columns(BF16)}
        for kind, options in CODES.items():
            found[kind] = answer(lambda o=options: sw.Resharder(as_codes(), into, strict=False, **o).run())
            same(into["w"].local_tensor(), columns(BF16).local_tensor())
        sw.Resharder(as_codes(), into, strict=False, cast=[("w", BF16)]).run()
        same(into["w"].local_tensor(), held(numbers(8, 6).to(F8).to(BF16), COLUMNS).local_tensor())
        scales = {"w": held(numbers(8, 6).to(F8), COLUMNS), "w_scale_inv": held(torch.ones(1, 1).to(BF16), "1x1/R@4")}
        found["scale"] = answer(lambda: sw.Resharder(as_codes(), scales, cast=True))
        found["nothing"] = answer(lambda: sw.Resharder(as_codes(), into, strict=False, cast=[("v", BF16)]))
        return found

    told = ranks(4, run)
    for kind in CODES:
        refused([one[kind] for one in told], "'w'", str(F8), str(BF16), "'w_scale_inv' stands beside it", "cast=[('w'")
    refused([one["scale"] for one in told], "a scale of 'w'")
    refused([one["nothing"] for one in told], "cast= has 'v', which matches no name")


def test_a_sync_that_would_lose_values_writes_nothing(ranks):  # noqa: F811
    def run(rank):
        found = {}
        for verify in (False, True):
            into = {"a": columns(F16), "b": columns(F16)}
            source = {"a": held(numbers(8, 6), ROWS), "b": held(numbers(8, 6), ROWS)}
            sync = sw.Resharder(source, into, cast=True, verify=verify)
            sync.run()
            same(into["b"].local_tensor(), held(numbers(8, 6).to(F16), COLUMNS).local_tensor())
            source["b"].local_tensor().copy_(held(LARGE, ROWS).local_tensor())
            source["a"].local_tensor().add_(1)
            found[verify] = answer(sync.run)
            for name in into:
                same(into[name].local_tensor(), held(numbers(8, 6).to(F16), COLUMNS).local_tensor())
            sw.Resharder(source, into, cast=True, verify=verify, overflow="allow").run()
            same(into["b"].local_tensor(), held(LARGE.to(F16), COLUMNS).local_tensor())
        found["word"] = answer(lambda: sw.Resharder(source, into, cast=True, overflow="ignore"))
        found["apart"] = answer(lambda: sw.Resharder(source, into, cast=True, overflow=("refuse", "allow")[rank % 2]))
        return found

    told = ranks(4, run)
    for verify in (False, True):
        words = ("of 'b'", "torch.float16", "70000", "1e+06", "Nothing was written", "overflow='allow'")
        refused([one[verify] for one in told], *words)
    refused([one["word"] for one in told], "overflow= must be")
    refused([one["apart"] for one in told], "overflow")


def test_a_state_dict_casts_plain_floats_and_what_is_named(ranks):  # noqa: F811
    def run(rank):
        found = {}
        given = as_codes(norm=held(numbers(8, 6), ROWS), ids=held(numbers(8, 6, dtype=torch.int64), ROWS))
        to = {"w": COLUMNS, "w_scale_inv": "1x1/R@4", "norm": COLUMNS, "ids": COLUMNS}
        for kind, dtype in {"dtype": BF16, "pattern": [("*", BF16)], "scale": [("w", None), BF16]}.items():
            found[kind] = answer(lambda dtype=dtype: sw.reshard_state_dict(given, to, dtype=dtype))
        made = sw.reshard_state_dict(given, to, dtype=[("w*", None), BF16])
        assert [tensor.dtype for tensor in made.values()] == [F8, torch.float32, BF16, torch.int64]
        made = sw.reshard_state_dict(given, to, dtype=[("w", BF16)])
        same(made["w"].local_tensor(), held(numbers(8, 6).to(F8).to(BF16), COLUMNS).local_tensor())
        large = {"a": held(LARGE, ROWS)}
        found["lost"] = answer(lambda: sw.reshard_state_dict(large, {"a": COLUMNS}, dtype=F16))
        made = sw.reshard_state_dict(large, {"a": COLUMNS}, dtype=F16, overflow="allow", verify=True)
        same(made["a"].local_tensor(), held(LARGE.to(F16), COLUMNS).local_tensor())
        return found

    told = ranks(4, run)
    refused([one["dtype"] for one in told], "'w'", "'w_scale_inv' stands beside it")
    refused([one["pattern"] for one in told], "'w'", "'w_scale_inv' stands beside it")
    refused([one["scale"] for one in told], "a scale of 'w'")
    refused([one["lost"] for one in told], "of 'a'", "1e+06", "Nothing was written")


@pytest.mark.devices
def test_a_reshard_names_its_tensor_and_loses_nothing(ranks):  # noqa: F811
    def run(rank):
        found, small = {}, numbers(8, 6)
        made = sw.reshard(held(small, ROWS), COLUMNS, dtype=I8)
        same(made.local_tensor(), held(small.to(I8), COLUMNS).local_tensor())
        made = sw.reshard(held(small.to(F8), ROWS), COLUMNS, dtype=BF16)
        same(made.local_tensor(), held(small.to(F8).to(BF16), COLUMNS).local_tensor())
        for dtype in (F16, F8, I8):
            out = columns(dtype)
            found[dtype] = answer(
                lambda dtype=dtype, out=out: sw.reshard(held(LARGE, ROWS), COLUMNS, dtype=dtype, out=out)
            )
            same(out.local_tensor(), columns(dtype).local_tensor())
        found["later"] = answer(sw.reshard(held(LARGE, ROWS), COLUMNS, dtype=F16, async_op=True).wait)
        made = sw.reshard(held(LARGE, ROWS), COLUMNS, dtype=F16, overflow="allow", verify=True)
        same(made.local_tensor(), held(LARGE.to(F16), COLUMNS).local_tensor())
        made = sw.reshard(held(LARGE, ROWS), COLUMNS, dtype=BF16)
        same(made.local_tensor(), held(LARGE.to(BF16), COLUMNS).local_tensor())
        return found

    told = ranks(4, run)
    for kind in told[0]:
        refused([one[kind] for one in told], "of the tensor", "70000", "Nothing was written", "overflow='allow'")


@pytest.mark.devices
def test_sums_that_are_lost_are_known_once_they_are_reduced(ranks):  # noqa: F811
    def run(rank):
        found, terms = {}, torch.full((8, 6), 1e4)
        terms[rank] += 1e5 if rank == 3 else 0.0

        def partial():
            return sw.ShardedTensor(terms.clone(), "8x6/P@4")

        found["fresh"] = answer(lambda: sw.reshard(partial(), COLUMNS, dtype=F16))
        out = columns(F16)
        found["out"] = answer(lambda: sw.reshard(partial(), COLUMNS, dtype=F16, out=out))
        made = sw.reshard(partial(), COLUMNS, dtype=F16, overflow="allow")
        assert rank == 3 or made.local_tensor()[3].isinf().all().item()  # which has no columns
        into = {"a": columns(F16), "b": columns(F16)}
        sync = sw.Resharder({"a": partial(), "b": held(numbers(8, 6), ROWS)}, into, cast=True)
        found["sync"] = answer(sync.run)
        found["again"] = answer(sync.run)
        found["dict"] = answer(lambda: sw.reshard_state_dict({"a": partial()}, {"a": COLUMNS}, dtype=F16))
        terms.fill_(1e4)
        same(sw.reshard(partial(), COLUMNS, dtype=F16).local_tensor(), torch.full_like(out.local_tensor(), 4e4))
        return found

    told = ranks(4, run)
    for kind, written in {
        "fresh": "Nothing was written",
        "out": "out= was written",
        "sync": "All tensors of the target were written",
        "again": "All tensors of the target were written",
        "dict": "Nothing was written",
    }.items():
        refused([one[kind] for one in told], "values of", "the largest in magnitude is 140000", written)


def test_gradients_overflow_as_those_of_torch(ranks):  # noqa: F811
    def run(rank):
        x = sw.ShardedTensor(torch.ones(2, 6, dtype=F16).requires_grad_(), ROWS)
        y = sw.reshard(x, COLUMNS, dtype=torch.float32)
        (y.local_tensor() * 1e6).sum().backward()
        assert x.shards[0].grad.isinf().all().item()

    ranks(4, run)


def test_a_gather_casts_to_plain_floats_and_what_is_named(ranks):  # noqa: F811
    def run(rank):
        found = {}

        def room(dtype):
            return torch.full((8, 6), -1.0).to(dtype) if rank == 0 else None

        x, out = held(numbers(8, 6), ROWS), room(BF16)
        x.gather(0, out)
        if rank == 0:
            same(out, numbers(8, 6).to(BF16))
        found["codes"] = answer(lambda: x.gather(0, room(I8)))
        out = room(I8)
        x.gather(0, out, dtype=I8)
        if rank == 0:
            same(out, numbers(8, 6).to(I8))
        found["lost"] = answer(lambda: held(LARGE, ROWS).gather(0, room(F16), dtype=F16))
        out = room(F16)
        found["out"] = answer(lambda: held(LARGE, ROWS).gather(0, out))
        if rank == 0:
            same(out, room(F16))
        held(LARGE, ROWS).gather(0, out, overflow="allow")
        if rank == 0:
            same(out, LARGE.to(F16))
        return found

    told = ranks(4, run)
    refused([one["codes"] for one in told], "out= is torch.int8", "dtype=torch.int8")
    refused([one["lost"] for one in told], "beyond the range of torch.float16")
    refused([told[0]["out"]], "2 values", "Nothing was written")  # the others cannot know what out= is there
