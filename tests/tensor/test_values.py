"""Any layout to any layout between real processes, to the last bit."""

import numpy as np
import pytest
import torch
from devices import there
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle import in_a_tree
from ranks import ranks  # noqa: F401
from sharded import expect, held

import shardwise as sw
from shardwise.exchange.reduce import BITWISE
from shardwise.testing.strategies import pairs

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def examples(count, world, salt):
    """So many pairs of layouts on owners 0..world-1, the same on every rank."""
    found = []

    @seed(salt)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(pairs(), st.sampled_from([None, 96, 1000]), st.sampled_from([None, 2]))
    def collect(pair, limit, hosts):
        ops = {pair[0].op, pair[1].op}
        mixed = "avg" in ops and not ops.isdisjoint(BITWISE)  # no dtype has averages and bits to reduce
        if max(pair[0].owners() + pair[1].owners()) < world and not mixed:
            found.append((*pair, limit, hosts))

    collect()
    return found


@pytest.mark.devices
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_random_pairs_of_layouts_arrive_to_the_last_bit(ranks, world):  # noqa: F811
    cases = examples(max(80, 320 // world), world, world)  # few draws fit into a small world
    assert len(cases) > 10

    def run(rank):
        done = 0
        for source, target, limit, hosts in cases:
            dtype = np.float64 if "avg" in (source.op, target.op) else np.int64
            values = np.arange(int(np.prod(source.shape)), dtype=dtype).reshape(source.shape) + 1
            try:
                sw.plan(source, target, itemsize=8, max_bytes=limit, hosts=hosts)
            except sw.PlanError:
                limit = None  # too low for this move
            found = sw.reshard(held(values, source, rank), target, max_bytes=limit, hosts=hosts, verify=done % 4 == 0)
            reduced = target if target.op is None else target.whole()
            expect(found if target.op is None else sw.reshard(found, reduced), values, reduced, rank)
            done += 1
        return done

    assert ranks(world, run) == [len(cases)] * world


@pytest.mark.devices
def test_every_dtype_keeps_every_bit(ranks):  # noqa: F811
    def run(rank):
        source, target = sw.Layout.chunk((6, 10), 0, owners=3), sw.parse("6x10/cyclic1=2@3:2,0,1")
        for dtype in DTYPES:
            raw = np.random.default_rng(dtype.itemsize).integers(0, 256, (6, 10, dtype.itemsize), dtype=np.uint8)
            raw &= 1 if dtype == torch.bool else 255
            whole = there(torch.from_numpy(raw)).view(dtype).reshape(6, 10)
            x = sw.ShardedTensor(whole[2 * rank : 2 * rank + 2], source)
            found = sw.reshard(x, target, verify=True).local_tensor()
            columns = [c for piece in target.pieces(rank) for c in range(piece.box.lo[1], piece.box.hi[1])]
            assert found.dtype == dtype
            expected = there(torch.from_numpy(raw[:, columns].copy()))
            assert torch.equal(found.contiguous().view(torch.uint8).reshape(expected.shape), expected), dtype
        return True

    assert all(ranks(3, run))


@pytest.mark.devices
def test_local_tensors_may_have_any_strides(ranks):  # noqa: F811
    values = np.arange(48.0).reshape(8, 6)
    rows, columns = sw.Layout.chunk((8, 6), 0, owners=2), sw.Layout.chunk((8, 6), 1, owners=2)

    def run(rank):
        whole = there(torch.from_numpy(values))
        part = whole[4 * rank : 4 * rank + 4]
        strange = {
            "transposed": part.t().contiguous().t(),
            "every other": torch.stack([part, -part], dim=2)[:, :, 0],
            "backwards in a larger one": torch.cat([part, part])[:4],
            "conjugate": torch.complex(part, -part).conj(),
            "imaginary part of a conjugate": torch.complex(part, -part).conj().imag,
        }
        for name, local in strange.items():
            whole_like = torch.complex(whole, whole) if local.is_complex() else whole
            out = torch.full((3, 8), -1, dtype=local.dtype).t()
            for room in (None, out):
                found = sw.reshard(sw.ShardedTensor(local, rows), columns, out=room).local_tensor()
                assert torch.equal(found, whole_like[:, 3 * rank : 3 * rank + 3]), name
            assert torch.equal(out, whole_like[:, 3 * rank : 3 * rank + 3]), name
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
def test_casts_on_the_way_are_those_of_torch(ranks):  # noqa: F811
    values = np.linspace(-300, 300, 48).reshape(8, 6)
    rows, columns = sw.Layout.chunk((8, 6), 0, owners=2), sw.Layout.chunk((8, 6), 1, owners=2)
    to = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.bool, torch.complex128]

    def run(rank):
        whole = there(torch.from_numpy(values))
        for dtype in to:
            found = sw.reshard(held(values, rows, rank), columns, dtype=dtype, verify=True).local_tensor()
            expected = whole[:, 3 * rank : 3 * rank + 3].to(dtype)
            assert found.dtype == dtype
            assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), dtype
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_for_every_target(ranks, dtype):  # noqa: F811
    targets = ["9x7/R@4", "9x7/S0@4", "9x7/S1@3:3,0,1", "9x7/cyclic0=2@2", "9x7/flat=0-30,30-63@2:1,3", "9x7/R@1:2"]

    def run(rank):
        terms = [torch.from_numpy(np.random.default_rng(r).standard_normal((9, 7))) for r in range(4)]
        terms = [there(term).to(torch.float32).to(dtype) for term in terms]
        expected = in_a_tree(torch.add, [term.to(torch.float32) for term in terms])  # rounded once
        x = sw.ShardedTensor(terms[rank], "9x7/P@4")
        found = [sw.reshard(sw.reshard(x, target, verify=True), "9x7/R@4").local_tensor() for target in targets]
        return [torch.equal(value, expected.to(dtype)) for value in found]

    assert ranks(4, run) == [[True] * len(targets)] * 4
