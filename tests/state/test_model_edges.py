"""The edges of whole models: memory that is shared or changes, options that are wrong, ranks that are not alike.

Every refusal is the same text on all ranks, before anything was written, and the group goes on after it.
"""

import threading
from functools import partial

import pytest
import torch
from devices import device_type
from models import dtensor, held, lies, numbers, same, same_refusals, usable
from nested import TORCH, by_boxes, terms
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise import Concat, Stack, Transposed
from shardwise import sharded_tensor as ours
from shardwise.exchange import exchange as exchanging
from shardwise.job import progress
from shardwise.job.session import group_transport
from shardwise.state import flatten_state_dict

WHOLE = numbers(8, 6)
ROWS, COLUMNS = "8x6/S0@2", "8x6/S1@2"
MOVED = [("kept*", None), ("*", COLUMNS)]


def source(names="qk"):
    return {name: held(WHOLE + at, ROWS) for at, name in enumerate(names)}


def room(names="qk", layout=COLUMNS):
    return {name: held(WHOLE * 0 - 1, layout) for name in names}


def local(value):
    """This rank's tensor of something that has one."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value.shards[0] if isinstance(value, sw.ShardedTensor) else value


def sync(given, into, **options):
    """Make a Resharder and run it; where that is refused, nothing was written."""
    try:
        sw.Resharder(given, into, **options).run()
    except sw.ExchangeError:
        for value in into.values():
            same(local(value), torch.full_like(local(value), -1))
        raise


def heard(call, *args, **options):
    """What is raised, and as what, for many cases in one run; the group can be used after it."""
    try:
        call(*args, **options)
    except sw.ExchangeError as error:
        found = f"{type(error).__name__}: {error}"
    except Exception as error:
        found = f"on this rank alone: {error!r}"
    else:
        found = "not refused"
    usable()
    return found


def refusals(ranks, cases, count=2):  # noqa: F811
    """All ranks raise the same for every case: (what a rank calls, words that are in the error)."""
    found = ranks(count, lambda rank: {name: heard(call, rank) for name, (call, _) in cases.items()})
    same_refusals(found, **{name: words for name, (_, words) in cases.items()})


# --- memory that is given back ---------------------------------------------------------------------------------------


def test_memory_that_a_kept_tensor_shares_is_not_given_back(ranks):  # noqa: F811
    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        for options in {}, {"max_bytes": 100}, {"verify": True}:
            plain, rows = [WHOLE.clone() for _ in range(3)], [dtensor(WHOLE.clone(), mesh, Shard(0)) for _ in range(2)]
            tied = [
                (plain[0], plain[0]),
                (plain[1], plain[1][2:4]),
                (plain[2][:], plain[2]),
                (rows[0], rows[0]),
                (rows[1], sw.ShardedTensor(rows[1].to_local(), ROWS)),
            ]
            for moved, kept in tied:
                before = local(kept).clone()
                found = sw.reshard_state_dict({"a": moved, "kept": kept}, MOVED, free=True, **options)
                lies(found["a"], WHOLE, COLUMNS)
                assert found["kept"] is kept
                same(local(kept), before)

    ranks(2, run)


def test_a_buffer_of_many_tensors_is_given_back_once_the_last_of_them_was_sent(ranks):  # noqa: F811
    def run(rank):
        buffer = torch.cat([WHOLE.chunk(2)[rank] + at for at in range(3)])
        views = {f"v{at}": sw.ShardedTensor(part.detach(), ROWS) for at, part in enumerate(buffer.split(4))}
        given, gone, seen = views | source("abcde"), StorageWeakRef(buffer.untyped_storage()), []
        del buffer, views
        found = sw.reshard_state_dict(
            given, MOVED, free=True, max_bytes=100, progress=lambda done, total: seen.append(gone.expired())
        )
        for at in range(3):
            lies(found[f"v{at}"], WHOLE + at, COLUMNS)
        assert len(seen) == 8  # a bucket for every tensor
        assert seen[:2] == [False] * 2
        assert seen[4:] == [True] * 4

    ranks(2, run)


# --- dims in another order -------------------------------------------------------------------------------------------

ORDERS = {
    (0, 0): "'w': (0, 0) is not a permutation of the 2 dims of the target",
    (0, 5): "there is no dim 5",
    (1,): "'w': (1,) is not a permutation",
    (0, 1, 0): "'w': (0, 1, 0) is not a permutation",
    "10": "there is no dim '1'",
    1: "(by Transposed(name='w', order=1))",
}


def test_an_order_that_is_none_is_refused_and_nothing_is_written_around_the_target(ranks):  # noqa: F811
    def run(rank):
        around, found = torch.full((10, 10), -1.0), {}
        for order in ORDERS:
            found[str(order)] = heard(
                sync, {"w": numbers(6, 6)}, {"w": around[2:8, 2:8]}, remap=[Transposed("w", order)]
            )
            same(around, torch.full((10, 10), -1.0))
        return found

    same_refusals(ranks(2, run), **{str(order): words for order, words in ORDERS.items()})


@pytest.mark.devices
def test_the_source_is_the_target_with_its_dims_in_that_order(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(5, 3, 4)
        for order in (2, 0, 1), [-1, 0, -2]:
            into = {"w": torch.zeros(3, 4, 5)}
            sw.Resharder({"w": held(whole, "5x3x4/S0@2")}, into, remap=[Transposed("w", order)]).run()
            same(into["w"].permute(*order), whole)

    ranks(2, run)


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.devices
def test_verified_moves_of_little_or_nothing(ranks):  # noqa: F811
    def run(rank):
        into = {"w": held(WHOLE * 0 - 1, COLUMNS), "bias": None}
        for at, others in enumerate([{"bias": None}, {}]):
            sw.Resharder({"w": held(WHOLE + at, ROWS), **others}, into, verify=True).run()
            lies(into["w"], WHOLE + at, COLUMNS)
            assert into["bias"] is None
        empty, none = torch.zeros(0, 6), {"a": WHOLE, "deep": {"b": held(WHOLE, ROWS)}}
        sw.Resharder({}, {}, verify=True).run()
        sw.Resharder({"z": held(empty, "0x6/S0@2")}, {"z": empty.clone()}, verify=True).run()
        assert sw.reshard_state_dict({}, MOVED, verify=True) == {}
        found = sw.reshard_state_dict(none, [("*", None)], verify=True)
        assert found["a"] is WHOLE
        assert found["deep"]["b"] is none["deep"]["b"]
        found = sw.reshard_state_dict({"z": empty}, [("*", "0x6/S1@2")], verify=True)["z"]
        lies(found, empty, "0x6/S1@2")
        usable()

    ranks(2, run)


@pytest.mark.devices
def test_terms_are_verified_by_what_they_come_to(ranks):  # noqa: F811
    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        given, into = {"w": held(WHOLE, ROWS), "t": terms(WHOLE * 2, mesh)}, room("wt")
        sw.Resharder(given, into, verify=True, max_bytes=100).run()
        moved = sw.reshard_state_dict(given, MOVED, verify=True, max_bytes=100)
        for tensors in (into, moved):
            lies(tensors["w"], WHOLE, COLUMNS)
            lies(tensors["t"], WHOLE * 2, COLUMNS)
        given, into = {"t": terms(torch.ones(512, 64), mesh)}, {"t": torch.zeros(512, 64)}
        sync, reduce = sw.Resharder(given, into, verify=True), exchanging.reduce

        def wrong(target, *others):
            exchanging.reduce = reduce
            reduce(target, *others)
            target.view(-1)[:1] += rank  # on one of them, once

        exchanging.reduce = wrong
        found = heard(sync.run)
        same(into["t"], torch.zeros(512, 64))
        return {"wrong": found}

    same_refusals(ranks(2, run), wrong=["verify: 't' did not arrive as sent", "Nothing was written"])


# --- memory that is shared -------------------------------------------------------------------------------------------


def other_sharding(rank):
    rows = held(WHOLE * 0 - 1, ROWS)
    sync({"w": rows}, {"w": sw.ShardedTensor(rows.shards[0].view(8, 3), COLUMNS)})


def overlapping(rank, **options):
    buffer = torch.full((6, 6), -1.0)
    sync(source(), {"q": sw.ShardedTensor(buffer[:4], ROWS), "k": sw.ShardedTensor(buffer[2:], ROWS)}, **options)


def expanded(rank, on=(0, 1), **options):
    thin = torch.full((1, 6), -1.0)
    sync({"w": WHOLE}, {"w": thin.expand(8, 6) if rank in on else torch.full((8, 6), -1.0)}, **options)


SHARED = {
    "another sharding": (other_sharding, "'w' of the target shares memory with 'w' of the source: give it its own"),
    "targets": (overlapping, "'q' of the target shares memory with 'k' of the target"),
    "verified targets": (partial(overlapping, verify=True), "'q' of the target shares memory with 'k' of the target"),
    "a stride of none": (expanded, "elements of 'w' of the target share memory: shape (8, 6), strides (0, 1)"),
    "verified stride": (partial(expanded, verify=True), "elements of 'w' of the target share memory"),
    "on one rank": (partial(expanded, on=[1]), ["rank 1 cannot take part", "'w' of the target share memory"]),
}


def test_memory_that_would_be_written_twice_or_read_after_it_was_written(ranks):  # noqa: F811
    refusals(ranks, SHARED)


@pytest.mark.devices
def test_tensors_change_places_only_by_way_of_others(ranks):  # noqa: F811
    def run(rank):
        both, swap = source("ab"), {"a": "b", "b": "a"}
        text = heard(sw.Resharder, both, both, rename=swap)
        lies(both["a"], WHOLE, ROWS)
        sw.Resharder(both, both, rename=swap, verify=True).run()
        lies(both["a"], WHOLE + 1, ROWS)
        lies(both["b"], WHOLE, ROWS)
        return {"text": text}

    same_refusals(ranks(2, run), text=["of the target shares memory with", "of the source: give it its own"])


def test_memory_that_may_be_shared(ranks):  # noqa: F811
    def run(rank):
        for options in {}, {"verify": True}:
            buffer = torch.full((8, 6), -1.0)  # columns of one among those of the other
            into = {"q": sw.ShardedTensor(buffer[:, 0::2], COLUMNS), "k": sw.ShardedTensor(buffer[:, 1::2], COLUMNS)}
            sw.Resharder(source(), into, **options).run()
            lies(into["q"], WHOLE, COLUMNS)
            lies(into["k"], WHOLE + 1, COLUMNS)
            part = WHOLE[:, 3 * rank : 3 * rank + 3]
            same(buffer, torch.stack([part, part + 1], dim=2).reshape(8, 6))
            tied = held(WHOLE * 0, COLUMNS)
            again = sw.ShardedTensor(tied.shards[0].view(8, 3), COLUMNS)
            sw.Resharder(dict.fromkeys("ab", held(WHOLE, ROWS)), {"a": tied, "b": again}, **options).run()
            lies(again, WHOLE, COLUMNS)
            both = source()
            sw.Resharder(both, both, **options).run()
            sw.Resharder(both, dict(both), **options).run()
            lies(both["k"], WHOLE + 1, ROWS)

    ranks(2, run)


@pytest.mark.parametrize("side", ["source", "target"])
def test_memory_that_lies_otherwise_at_the_same_address(ranks, side):  # noqa: F811
    def run(rank):
        whole, found = numbers(8, 4), {}
        for layout in "8x4/S0@2", "8x4/S1@2":
            lying = ["8x4/S0@2", layout] if side == "source" else [layout, "8x4/S0@2"]
            given, into = {"w": held(whole, lying[0])}, {"w": held(whole * 0 - 1, lying[1])}
            moved = sw.Resharder(given, into)
            moved.run()
            shard = (given if side == "source" else into)["w"].shards[0]
            before = shard.data_ptr()
            shard.data = shard.data.t()  # 4 x 4
            assert shard.data_ptr() == before
            moved.run()
            turned = torch.cat([part.t() for part in whole.chunk(2)]) if side == "source" else whole
            lies(into["w"], turned, lying[1])
            kept = shard.data
            if rank == 1:
                shard.data = shard.data[:2]
            found[layout] = heard(moved.run)
            shard.data = kept
            into["w"].shards[0].fill_(-1)
            moved.run()
            lies(into["w"], turned, lying[1])
        return found

    words = [f"rank 1 cannot take part in this sync: 'w' of the {side} should have [(4, 4)]", "but has [((2, 4)"]
    same_refusals(ranks(2, run), **{"8x4/S0@2": words, "8x4/S1@2": words})


# --- remaps ----------------------------------------------------------------------------------------------------------


def fused(shape=(16, 6)):
    return {"qk": torch.full(shape, -1.0)}


def experts():
    return {f"e.{at}": numbers(6, 4) for at in range(3)}, {"e": torch.full((3, 6, 4), -1.0)}


def vectors():
    return {"q": WHOLE[0].clone(), "k": WHOLE[1].clone()}


QK = Concat("qk", ["q", "k"])
REMAPS = {
    "stack without a number": (
        lambda rank: sync(*experts(), remap=[Stack("e", "e.*")]),
        "Stack(whole='e', part='e.*', dim=0): `part` needs {} where the number of a part is",
    ),
    "stack of one": (
        lambda rank: sync({"x": numbers(6, 4)}, experts()[1], remap=[Stack("e", "x")]),
        "`part` needs {}",
    ),
    "stack dim": (lambda rank: sync(*experts(), remap=[Stack("e", "e.{}", 3)]), "there is no dim 3 in a shape of 3"),
    "stack word": (lambda rank: sync(*experts(), remap=[Stack("e", "e.{}", "x")]), "there is no dim 'x'"),
    "stack in nothing": (
        lambda rank: sync(experts()[0], {"e": torch.tensor(-1.0)}, remap=[Stack("e", "e.{}")]),
        "there is no dim 0 in a shape of 0 dims",
    ),
    "concat dim": (
        lambda rank: sync(source(), fused(), remap=[Concat("qk", ["q", "k"], 2)]),
        "'qk': there is no dim 2 in a shape of 2 dims",
    ),
    "concat dim below": (
        lambda rank: sync(source(), fused(), remap=[Concat("qk", ["q", "k"], -3)]),
        "'qk': there is no dim -3 in a shape of 2 dims",
    ),
    "fewer dims": (lambda rank: sync(vectors(), fused((2, 6)), remap=[QK]), "a part has 1 dims, but 'qk' has 2"),
    "no dims": (
        lambda rank: sync({"q": torch.tensor(1.0), "k": torch.tensor(2.0)}, fused((2,)), remap=[QK]),
        "a part has 0 dims, but 'qk' has 1",
    ),
    "whole without dims": (lambda rank: sync(vectors(), fused(()), remap=[QK]), "'qk': there is no dim 0"),
    "two rules": (
        lambda rank: sync(source(), fused(), remap=[QK, Concat("q?", ["k", "q"])]),
        f"'qk' would come both from {QK} and from Concat(whole='q?', parts=['k', 'q'], dim=0, sizes=None)",
    ),
    "the same rule twice": (
        lambda rank: sync(source(), fused(), remap=[QK, Concat("qk", ["q", "k"])]),
        f"'qk' would come both from {QK} and from {QK}",
    ),
    "the same part twice": (
        lambda rank: sync({"q": WHOLE}, fused(), remap=[Concat("qk", ["q", "q"])]),
        "Concat(whole='qk', parts=['q', 'q'], dim=0, sizes=None): `parts` must be a list of different names",
    ),
    "parts in a word": (
        lambda rank: sync(source(), fused(), remap=[Concat("qk", "qk")]),
        "`parts` must be a list of different names",
    ),
    "no rule": (
        lambda rank: sync(source(), fused(), remap=["qk"]),
        "RefusedTypeError: Resharder: remap= must be a list of Concat, Interleaved, Stack, Transposed, Rotary, Padded, "
        "but has 'qk'",
    ),
    "a word": (lambda rank: sync(source(), fused(), remap="qk"), "remap= must be a list of Concat, Interleaved, St"),
    "a misspelt part": (
        lambda rank: sync(source(), fused(), remap=[Concat("qk", ["q", "kk"])]),
        ["the source has nothing for 'qk'", "Concat(whole='qk', parts=['q', 'kk'], dim=0, sizes=None) fit nothing"],
    ),
    "a misspelt whole": (
        lambda rank: sync(source(), fused(), remap=[Transposed("z"), Concat("kq", ["q", "k"])]),
        "Transposed(name='z', order=None), Concat(whole='kq', parts=['q', 'k'], dim=0, sizes=None) fit nothing",
    ),
}


def test_rules_of_a_remap_that_cannot_be(ranks):  # noqa: F811
    refusals(ranks, REMAPS)


# --- what is no state dict -------------------------------------------------------------------------------------------

CALLS = {
    "source": lambda given: sw.Resharder(given, room("w")),
    "target": lambda given: sw.Resharder(source("w"), given),
    "reshard_state_dict": lambda given: sw.reshard_state_dict(given, MOVED),
    "flatten_sharded_tensors": sw.flatten_sharded_tensors,
}
NONE = {
    "Linear": (lambda: nn.Linear(2, 2), "a state dict is a mapping, not Linear: give its state_dict()"),
    "Tensor": (lambda: torch.zeros(2), "a state dict is a mapping, not Tensor"),
    "ShardedTensor": (lambda: held(WHOLE, ROWS), "a state dict is a mapping, not ShardedTensor"),
    "list": (lambda: [torch.zeros(2)], "a state dict is a mapping, not list"),
    "int": (lambda: 5, "a state dict is a mapping, not int"),
}


def test_what_is_no_state_dict(ranks):  # noqa: F811
    def run(rank):
        found = {}
        for name, (make, words) in NONE.items():
            with pytest.raises(TypeError) as error:
                flatten_state_dict(make())
            assert str(error.value) == words
            for where, call in CALLS.items():
                found[f"{name} {where}"] = heard(call, make())
                found[f"{name} {where} on one"] = heard(call, make() if rank == 1 else source("w"))
        return found

    expected = {}
    for name, (_, words) in NONE.items():
        for where in CALLS:
            operation = "Resharder" if where in ("source", "target") else where
            expected[f"{name} {where}"] = f"RefusedTypeError: {operation}: {words}"
            expected[f"{name} {where} on one"] = (
                f"RefusedTypeError: rank 1 cannot take part in this {operation}: {words}"
            )
    same_refusals(ranks(2, run), **expected)


def in_itself(rank, kind):
    """A state dict; on rank 1 there is a way back to itself."""
    given = source("w")
    if rank == 1 and kind == "dict":
        given["self"] = given
    elif rank == 1:
        given["deep"] = [WHOLE, {"list": [given["w"]]}]
        given["deep"][1]["list"].append(given["deep"])
    return given


def test_a_state_dict_that_contains_itself_on_one_rank(ranks):  # noqa: F811
    words = {"dict": "the state dict contains itself at self", "list": "contains itself at deep.1.list.1"}
    cases = {
        f"{where} {kind}": (lambda rank, call=call, kind=kind: call(in_itself(rank, kind)), ["rank 1 cannot", said])
        for where, call in CALLS.items()
        for kind, said in words.items()
    }
    refusals(ranks, cases)


# --- tensors that cannot be read or written --------------------------------------------------------------------------


def sparse(rank):
    return {"w": WHOLE.to_sparse() if rank == 1 else WHOLE.clone()}


def quantized():
    return {"w": torch.quantize_per_tensor(WHOLE, 1.0, 0, torch.qint8)}


def turned(kind, here=True):
    """A view that is conjugate or negative; plain ones on ranks where it is not to be."""
    value = torch.complex(WHOLE, WHOLE + 1)
    value = value.conj() if kind == "conj" else value.conj().imag
    return {"w": value if here else value.resolve_conj().resolve_neg()}


def plain(like):
    return {"w": torch.full((8, 6), -1.0, dtype=like["w"].dtype)}


def in_inference_mode(make, here=True):
    with torch.inference_mode(here):
        return make()


RESOLVE = "is a conjugate or negative view: resolve_conj() and resolve_neg() make it plain"
UNREADABLE = {
    "sparse": (lambda rank: sw.reshard_state_dict(sparse(rank), MOVED), ["rank 1", "'w'", "sparse_coo"]),
    "sparse source": (lambda rank: sync(sparse(rank), room("w")), ["rank 1", "'w' of the source", "sparse_coo"]),
    "sparse target": (
        lambda rank: sw.Resharder(source("w"), sparse(rank)),
        ["rank 1", "'w' of the target", "sparse_coo"],
    ),
    "quantized": (lambda rank: sw.reshard_state_dict(quantized(), MOVED), "Error: "),
    "quantized sync": (lambda rank: sw.Resharder(quantized(), quantized()), "Error: "),
    "conjugate": (lambda rank: sw.reshard_state_dict(turned("conj"), MOVED), f"'w' of the state dict {RESOLVE}"),
    "conjugate source": (
        lambda rank: sync(turned("conj"), plain(turned("conj"))),
        f"Resharder: 'w' of the source {RESOLVE}",
    ),
    "conjugate on one": (
        lambda rank: sync(turned("conj", rank == 1), plain(turned("conj"))),
        f"rank 1 cannot take part in this Resharder: 'w' of the source {RESOLVE}",
    ),
    "conjugate target": (
        lambda rank: sw.Resharder(plain(turned("conj")), turned("conj")),
        f"'w' of the target {RESOLVE}",
    ),
    "negative source": (lambda rank: sync(turned("neg"), room("w")), f"'w' of the source {RESOLVE}"),
    "negative target": (lambda rank: sw.Resharder(source("w"), turned("neg")), f"'w' of the target {RESOLVE}"),
    "inference": (
        lambda rank: sync(source("w"), in_inference_mode(lambda: room("w"))),
        "Resharder: 'w' of the target was made in inference mode, and can only be written there",
    ),
    "inference, verified": (
        lambda rank: sync(source("w"), in_inference_mode(lambda: room("w")), verify=True),
        "Resharder: 'w' of the target was made in inference mode",
    ),
    "inference on one": (
        lambda rank: sync(source("w"), in_inference_mode(lambda: room("w"), rank == 1)),
        "rank 1 cannot take part in this Resharder: 'w' of the target was made in inference mode",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_that_cannot_be_read_or_written(ranks):  # noqa: F811
    refusals(ranks, UNREADABLE)


def test_what_was_made_in_inference_mode_is_written_there_alone(ranks):  # noqa: F811
    def run(rank):
        found = {}
        for verify in False, True:
            for whose in "all", "one":
                into = in_inference_mode(lambda: room("q"), whose == "all" or rank == 1)
                moved = in_inference_mode(lambda: sw.Resharder(source("q"), into, verify=verify))  # noqa: B023
                found[f"{whose} {verify}"] = heard(moved.run)
                same(local(into["q"]), torch.full((8, 3), -1.0))
                in_inference_mode(moved.run)
                lies(into["q"], WHOLE, COLUMNS)
                if whose == "all":  # once it was run, nothing is looked up anew
                    assert heard(moved.run) == found[f"{whose} {verify}"]
                    in_inference_mode(moved.run)
        return found

    words = "'q' of the target was made in inference mode, and can only be written there"
    told = {"all": f"Error: sync: {words}", "one": f"Error: rank 1 cannot take part in this sync: {words}"}
    same_refusals(ranks(2, run), **{f"{whose} {v}": text for whose, text in told.items() for v in (False, True)})


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no dtype that nothing is cast to")
def test_a_dtype_that_nothing_is_cast_to(ranks):  # noqa: F811
    def into():
        return {"w": torch.full((8, 6), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}

    words = "torch.float32 cannot be cast to torch.float4_e2m1fn_x2"
    cases = {
        "state dict": (lambda rank: sw.reshard_state_dict(source(), MOVED, dtype=torch.float4_e2m1fn_x2), words),
        "sync": (lambda rank: sw.Resharder(source("w"), into(), cast=True), f"RefusedValueError: Resharder: {words}"),
    }
    refusals(ranks, cases)


def test_values_that_cannot_be_pickled(ranks):  # noqa: F811
    lock, function = threading.Lock(), lambda: 3

    def run(rank):
        found = sw.reshard_state_dict(
            {"w": held(WHOLE, ROWS), "lock": lock, "deep": [{"fn": function}]}, {"w": COLUMNS}
        )
        lies(found["w"], WHOLE, COLUMNS)
        assert found["lock"] is lock
        assert found["deep"][0]["fn"] is function
        return {
            str(at): heard(
                sw.reshard_state_dict, {"w": held(WHOLE, "8x6/R@1"), "x": one} if rank == 0 else None, [("w", COLUMNS)]
            )
            for at, one in enumerate([lock, function])
        }

    told = "rank 0 cannot take part in this reshard_state_dict: "
    same_refusals(ranks(2, run), **{"0": [told, "cannot pickle '_thread.lock'"], "1": [told, "pickle", "lambda"]})


# --- progress --------------------------------------------------------------------------------------------------------


def test_a_progress_that_fails_on_one_rank_ends_the_run_on_all(ranks):  # noqa: F811
    def run(rank):
        given, into, seen = source("abcd"), room("abcd"), []

        def progress(done, total):
            seen.append((done, total))
            if fails and rank == 1 and len(seen) == 2:
                raise KeyError("enough")

        moved, found = sw.Resharder(given, into, max_bytes=100, progress=progress), {}
        calls = {
            "sync": moved.run,
            "state dict": lambda: sw.reshard_state_dict(given, MOVED, max_bytes=100, progress=progress),
        }
        for name, call in calls.items():
            fails = True
            found[name] = heard(call)
            assert seen == [(192, 768), (384, 768)]
            seen.clear()
            fails = False
            call()
            assert seen == [(192, 768), (384, 768), (576, 768), (768, 768)]
            seen.clear()
        for at, name in enumerate("abcd"):
            lies(into[name], WHOLE + at, COLUMNS)
        return found

    told = "rank 1 cannot take part in this"
    words = {"sync": f"{told} sync: KeyError: 'enough'", "state dict": f"{told} reshard_state_dict: KeyError: 'enough'"}
    same_refusals(ranks(2, run), **words)


def test_progress_ends_with_everything_also_where_there_is_nothing_to_do(ranks):  # noqa: F811
    def run(rank):
        seen = []
        how = {"progress": lambda *at: seen.append(at)}
        for options in {}, {"verify": True}:
            sw.Resharder({}, {}, **how, **options).run()
            sw.reshard_state_dict(source(), [("*", None)], **how, **options)
            sw.Resharder(source("abc"), room("abc"), **how, **options).run()
            assert seen == [(0, 0), (0, 0), (576, 576)]
            seen.clear()
            sw.Resharder(source("abc"), room("abc"), max_bytes=100, **how, **options).run()
            assert seen == [(192, 576), (384, 576), (576, 576)]
            seen.clear()

    ranks(2, run)


def test_only_the_first_rank_shows_a_bar_and_only_where_a_person_sees_it(ranks, monkeypatch, capfd):  # noqa: F811
    def run(rank):
        shown, real = [], progress._bar
        monkeypatch.setattr(progress, "_bar", lambda: shown.append(rank) or real())
        sw.Resharder(source(), room(), progress="bar").run()
        sw.reshard_state_dict(source(), MOVED, progress="bar")
        return len(shown)

    assert ranks(2, run) == [2, 0]
    assert "sync" not in "".join(capfd.readouterr())
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    ranks(2, run)
    _, shown = capfd.readouterr()
    assert "sync" in shown
    assert "MiB" in shown


# --- options ---------------------------------------------------------------------------------------------------------


def failing(name):
    raise KeyError("what")


def state_dict(rank, to=MOVED, **options):
    return sw.reshard_state_dict(source(), to, **options)


def renamed(rank, rename):
    sync(source(), room(), rename=rename)


NO_RULES = (
    "RefusedTypeError: reshard_state_dict: to= must be a mapping, rules [(pattern, target), ...] or a function, not"
)
NO_PAIR = "a rule is a pair (pattern, target), such as ('*', target), not"
NO_HOSTS = "hosts must be a number of owners per host, or owner -> host, or a mesh, not ['a', 'b']"
OPTIONS = {
    **{
        f"max_bytes={most!r} {name}": (call, f"max_bytes= must be a whole number of bytes, or None, not {most!r}")
        for most in (0, -1, "x")
        for name, call in {
            "sync": lambda rank, most=most: sync(source(), room(), max_bytes=most),
            "state dict": partial(state_dict, max_bytes=most),
        }.items()
    },
    "dtype": (
        partial(state_dict, dtype="float32"),
        "RefusedTypeError: reshard_state_dict: dtype= must be a torch.dtype",
    ),
    "to None": (partial(state_dict, to=None), f"{NO_RULES} None; [('*', target)] gives all tensors one target"),
    "to a number": (partial(state_dict, to=5), f"{NO_RULES} 5"),
    "to a placement": (partial(state_dict, to="S0"), f"{NO_RULES} 'S0'"),
    "to names": (partial(state_dict, to=["a"]), f"{NO_PAIR} 'a'"),
    "to triples": (partial(state_dict, to=[("*", COLUMNS, 1)]), f"{NO_PAIR} ('*', '8x6/S1@2', 1)"),
    "to a mesh": (
        lambda rank: state_dict(rank, (init_device_mesh(device_type(), (2,)), ["S0"])),
        f"{NO_PAIR} DeviceMesh",
    ),
    "to what fails": (partial(state_dict, to=failing), "the target of 'q': KeyError: 'what'"),
    "no mesh": (partial(state_dict, to=[("*", "S0")]), "the target of 'q': 'S0' has no mesh: give mesh="),
    "no mesh for many": (partial(state_dict, to={"q": COLUMNS, "k": ["S0"]}), "the target of 'k': ['S0'] has no mesh"),
    "rename to None": (partial(renamed, rename=lambda name: None), "a name or a list of names for 'q', not None"),
    "rename fails": (partial(renamed, rename=failing), "rename= failed for 'q': KeyError: 'what'"),
    "rename by a number": (partial(renamed, rename=5), "rename= failed for 'q'"),
    "rename by names": (partial(renamed, rename=["a"]), "a rule is a pair of a pattern and the new name, not 'a'"),
    "rename by triples": (partial(renamed, rename=[("a", "b", "c")]), "a rule is a pair"),
    "rename a number": (
        partial(renamed, rename={5: "q"}),
        "a rule is a pair of a pattern and the new name, not (5, 'q')",
    ),
    "rename to no name": (partial(renamed, rename={"q": None}), "must give a name or a list of names for 'q'"),
    "hosts": (lambda rank: sync(source(), room(), hosts=["a", "b"]), f"Resharder: {NO_HOSTS}"),
    "hosts of a state dict": (partial(state_dict, hosts=["a", "b"]), f"reshard_state_dict: {NO_HOSTS}"),
}


def test_options_that_cannot_be(ranks):  # noqa: F811
    refusals(ranks, OPTIONS)


def differing(name):
    return f"the ranks disagree on the {name} of this", "rank 0: False; rank 1: True"


DIFFER = {
    "cast": (lambda rank: sync(source(), room(), cast=rank == 1), differing("cast")),
    "strict": (lambda rank: sync(source(), room(), strict=rank == 1), differing("strict")),
    "verify": (lambda rank: state_dict(rank, [("*", None)], verify=rank == 1), differing("verify")),
    "free": (lambda rank: state_dict(rank, [("*", None)], free=rank == 1), differing("free")),
    "targets": (
        lambda rank: state_dict(rank, [("k", [COLUMNS, ROWS][rank]), ("*", COLUMNS)]),
        "the ranks' arguments differ: 'targets' 'k' 'layout' is 8x6/S1@2 on rank 0, but 8x6/S0@2 on rank 1",
    ),
    "kept": (lambda rank: state_dict(rank, [("k", [COLUMNS, None][rank]), ("*", COLUMNS)]), "'k' is only on rank 0"),
    "order": (
        lambda rank: sync(source(), fused(), remap=[Concat("qk", ["q", "k"] if rank else ["k", "q"])]),
        ["the ranks' arguments differ: 'links' 'qk' 'k' is", "on rank 0, but"],
    ),
    "names": (
        lambda rank: sync(source(), room(), rename={"q": "k", "k": "q"} if rank else None),
        "the ranks' arguments differ: 'links' 'q' 'q' is only on rank 0",
    ),
}


def test_options_that_differ_if_only_in_words(ranks):  # noqa: F811
    refusals(ranks, DIFFER)


def test_patterns_of_one_character_and_placements_for_all_axes(ranks):  # noqa: F811
    def run(rank):
        mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
        given = source(["l.0.q", "l.0.k", "l.0.o", "l.10.q", "norm", "last"])
        rules = [("l.?.[qkv]", COLUMNS), ("norm", Replicate()), ("last", sw.Replicate()), ("*", "R")]
        found = sw.reshard_state_dict(given, rules, mesh=mesh)
        for at, (name, value) in enumerate(found.items()):
            if at < 2:
                lies(value, WHOLE + at, COLUMNS)
            else:
                assert value.placements == (Replicate(), Replicate()), name
                same(value.to_local(), WHOLE + at)
        several = sw.reshard_state_dict(given, [("*.[!o]", ["S0", "R"]), ("*", "R")], mesh=mesh)
        assert [str(several[name].placements[0]) for name in ("l.0.q", "l.0.o")] == ["S(0)", "R"]

    ranks(2, run)


# --- memory that is staged, and many tensors -------------------------------------------------------------------------

STAGED = {  # how they lie, how they are to lie, dtypes
    "from one to all": ("R@1", "R@4", torch.float32, torch.float32),
    "gathered": ("S1@4", "R@4", torch.float32, torch.float32),
    "turned": ("S0@4", "S1@4", torch.float32, torch.float32),
    "cast": ("S0@4", "R@4", torch.float32, torch.bfloat16),
}


def test_no_rank_stages_more_than_was_promised(ranks):  # noqa: F811
    def staged(most, count, size, source, target, dtype, becomes):
        """How much both ways to move so many tensors keep, and what the plan said of it."""
        whole, transport = numbers(*size, dtype=dtype), group_transport(None)
        given = {f"w{at}": held(whole + at, f"{size[0]}x{size[1]}/{source}") for at in range(count)}
        asked = f"{size[0]}x{size[1]}/{target}"
        into = {name: held(torch.zeros(size, dtype=becomes), asked) for name in given}
        moved, found = sw.Resharder(given, into, max_bytes=most, cast=dtype != becomes), []
        again = partial(sw.reshard_state_dict, given, [("*", asked)], dtype=becomes, max_bytes=most)
        for call in moved.run, moved.run, again:
            transport.release()
            call()
            found.append(transport.release())
        lies(into[f"w{count - 1}"], (whole + count - 1).to(becomes), asked)
        assert max(found) <= moved.plan.peak_bytes
        assert moved.plan.peak_bytes <= (most or 2**28)
        return max(found)

    def run(rank):
        found = {}
        for most in 40_000, 400_001, None:
            for name, how in STAGED.items():
                found[name] = max(found.get(name, 0), staged(most, 4, (129, 255), *how))
            found["in rounds"] = staged(most, 1, (512, 300), *STAGED["gathered"])
        return found

    found = ranks(4, run)
    for name in found[0]:
        assert max(one[name] for one in found) > 0, name  # it is not that all of it travelled with the headers


def test_thousands_of_tiny_tensors_travel_at_once(ranks):  # noqa: F811
    def run(rank):
        rows, columns = sw.parse("2x2/S0@2"), sw.parse("2x2/S1@2")
        wholes = numbers(2000, 2, 2)
        given = {f"layers.{at}.w": sw.ShardedTensor(whole[rank : rank + 1], rows) for at, whole in enumerate(wholes)}
        into = {name: sw.ShardedTensor(torch.zeros(2, 1), columns) for name in given}
        moved = sw.Resharder(given, into)
        assert len(list(moved.plan.buckets())) == 1
        for _ in range(2):
            moved.run()
            same(torch.stack([value.shards[0] for value in into.values()]), wholes[:, :, rank : rank + 1])
            wholes += 1  # which the source has the memory of

    ranks(2, run)


# --- shards of shards ------------------------------------------------------------------------------------------------


def in_strips(rank, api):
    """The rows of this rank, in two parts by columns."""
    part = WHOLE.chunk(2)[rank]
    boxes = [((0, 0), (4, 3), rank), ((0, 3), (4, 3), rank)]
    return by_boxes((4, 6), boxes, [part[:, :3].clone(), part[:, 3:].clone()], api)


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_shards_that_are_sharded_tensors(ranks):  # noqa: F811
    quarters = [(r, (4 * r, 3 * j), (4 * r + 4, 3 * j + 3)) for r in (0, 1) for j in (0, 1)]
    outer = {
        "single": lambda rank, inner: sw.ShardedTensor(inner, ROWS),
        "offsets": lambda rank, inner: ours.init_from_local_shards(
            [ours.Shard.from_tensor_and_offsets(inner, [4 * rank, 0], rank)], 8, 6
        ),
    }

    def run(rank):
        for make in outer.values():
            for api in ours, TORCH:
                found = sw.flatten_sharded_tensors({"deep": {"x": make(rank, in_strips(rank, api))}})["deep"]["x"]
                lies(found, WHOLE, sw.Layout.boxes((8, 6), quarters))
                same(found.gather(None), WHOLE)
        found = sw.flatten_sharded_tensors({"x": sw.ShardedTensor(held(WHOLE, ROWS), "8x6/R@2")})["x"]
        lies(found, WHOLE, ROWS)
        same(found.gather(None), WHOLE)

    ranks(2, run)


def test_shards_of_shards_with_different_dtypes(ranks):  # noqa: F811
    def nested(rank):
        inner = held(WHOLE.to([torch.float32, torch.float64][rank]), ROWS)
        return {"layers": {0: {"w": sw.ShardedTensor(inner, "8x6/R@2")}}}

    words = "'layers.0.w' has different dtypes on different ranks: ['torch.float32', 'torch.float64']"
    refusals(ranks, {"dtypes": (lambda rank: sw.flatten_sharded_tensors(nested(rank)), words)})


@pytest.mark.devices
def test_runs_in_and_outside_of_inference_mode(ranks):  # noqa: F811
    def run(rank):
        for one in False, True:
            given, room = {"w": held(WHOLE, ROWS)}, {"w": held(WHOLE * 0, COLUMNS)}
            sync = sw.Resharder(given, room)
            with torch.inference_mode(rank == 0 or not one):
                sync.run()
            lies(room["w"], WHOLE, COLUMNS)
            given["w"].shards[0].add_(1)
            sync.run()
            lies(room["w"], WHOLE + 1, COLUMNS)

    ranks(2, run)


def test_slices_of_one_buffer_give_it_back_together(ranks):  # noqa: F811
    def run(rank):
        buffer = torch.arange(72.0).reshape(12, 6)
        given = {f"v{n}": sw.ShardedTensor(part, "8x6/S0@2") for n, part in enumerate(buffer.split(4))}
        expected = [torch.cat([part, part]) for part in buffer.clone().split(4)]
        storage = buffer.untyped_storage()
        found = sw.reshard_state_dict(given, [("*", COLUMNS)], free=True, max_bytes=100)
        assert storage.nbytes() == 0
        for n, whole in enumerate(expected):
            lies(found[f"v{n}"], whole, COLUMNS)

    ranks(2, run)


def test_one_rule_alone_is_a_list_of_one(ranks):  # noqa: F811
    def run(rank):
        given = {"q": held(WHOLE, ROWS), "k": held(WHOLE + 100, ROWS)}
        room = {"qk": sw.ShardedTensor(torch.zeros(16, 3), "16x6/S1@2")}
        sw.Resharder(given, room, remap=sw.Concat("qk", ["q", "k"])).run()
        lies(room["qk"], torch.cat([WHOLE, WHOLE + 100]), "16x6/S1@2")

    ranks(2, run)
