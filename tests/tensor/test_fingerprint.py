"""One fingerprint for the same values under every sharding, another one for any others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ranks  # noqa: F401
from sharded import held

import shardwise as sw
from shardwise.exchange.buffers import ElementGather
from shardwise.job.sums import box_sums
from shardwise.testing import on_ranks

SHARDINGS = [
    "6x10/S0@4",
    "6x10/S1@3:2,0,1",
    "6x10/R@2:1,3",
    "6x10/R@1",
    "6x10/P@4",
    "6x10/Pmax,S0@2x2",
    "6x10/cyclic1=3@4",
    "6x10/flat=0-7,7-51,51-60@3",
    "6x10/overlapping=0:4,0:10+2:6,0:10@2:3,3",
]


@pytest.mark.devices
def test_it_is_the_same_under_every_sharding(ranks):  # noqa: F811
    def run(rank):
        found = set()
        for text in SHARDINGS:
            layout = sw.parse(text)
            values = np.random.default_rng(5).integers(-99, 99, (6, 10)).astype(np.float64)
            x = held(values, layout, rank) if rank in layout else sw.ShardedTensor([], layout)
            found.add(sw.fingerprint(x))
        return found

    everywhere = set.union(*ranks(4, run), *ranks(5, run))
    assert len(everywhere) == 1
    assert len(everywhere.pop()) == 32


def test_shape_and_dtype_count(ranks):  # noqa: F811
    def run(rank):
        zeros = torch.zeros(2, 6)
        return [
            sw.fingerprint(sw.ShardedTensor(local, text))
            for local, text in [
                (zeros, "4x6/S0@2"),
                (zeros.reshape(6, 2), "12x2/S0@2"),
                (zeros.to(torch.int32), "4x6/S0@2"),
                (zeros.double(), "4x6/S0@2"),
                (torch.zeros(0, 3), "0x3/S0@2"),
                (torch.zeros(()), "scalar/R@2"),
            ]
        ]

    first, second = ranks(2, run)
    assert first == second
    assert len(set(first)) == len(first)


def sums(values):
    return tuple(box_sums(torch.from_numpy(values), [0] * values.ndim, values.shape).tolist())


@given(st.data())
@settings(max_examples=150)
def test_swapping_any_two_elements_changes_it(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex128]))
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    values = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=dtype).copy()
    i, j = (data.draw(st.integers(0, values.size - 1)) for _ in range(2))
    swapped = values.copy()
    swapped[[i, j]] = swapped[[j, i]]
    differ = values.tobytes() != swapped.tobytes()
    assert (sums(values.reshape(shape)) != sums(swapped.reshape(shape))) == differ


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex128])
def test_sign_bits_alone_never_cancel(dtype):
    values = np.ones((8, 8), dtype=dtype)
    seen = {sums(values)}
    for count in range(1, 65):
        values.reshape(-1)[:count] = -1
        seen.add(sums(values))
    assert len(seen) == 65


def test_rows_or_columns_that_change_places_are_seen():
    values = np.random.default_rng(1).standard_normal((16, 16))
    orders = [np.random.default_rng(s).permutation(16) for s in range(50)]
    found = {sums(values)} | {sums(values[o].copy()) for o in orders} | {sums(values[:, o].copy()) for o in orders}
    assert len(found) == 101


def test_verify_finds_one_wrong_bit(ranks):  # noqa: F811
    def run(rank):
        put = ElementGather.put

        def flip(self, message, buffer):
            flipped = bytearray(buffer)
            flipped[5] ^= rank == 1
            return put(self, message, memoryview(flipped))

        ElementGather.put = flip
        values = np.arange(60.0).reshape(6, 10)
        for target in ("6x10/S1@2", "6x10/R@2", "6x10/cyclic0=1@2"):
            with pytest.raises(sw.ExchangeError, match=r"verify: a tensor of shape \(6, 10\)"):
                sw.reshard(held(values, sw.parse("6x10/S0@2"), rank), target, verify=True)
        ElementGather.put = put
        sw.reshard(held(values, sw.parse("6x10/S0@2"), rank), "6x10/S1@2", verify=True)
        return True

    assert all(ranks(2, run))


EQUAL = np.array(  # sums that are 0
    [
        218889986,
        -16057853,
        134152201,
        -320245,
        50133745,
        -251063558,
        -16976123,
        -317980414,
        15988987,
        67044596,
        131844,
        0,
    ],
    dtype=np.int32,
)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_made_to_have_the_same_fingerprint_do_not_pass_verify(ranks, dtype):  # noqa: F811
    """Who knows the weights can find such: verify draws others every time."""
    values, made = np.zeros(12, dtype=np.int32), EQUAL

    def run(rank):
        layout = sw.parse("12/R@1")
        shown = {sw.fingerprint(held(bits.view(dtype), layout, rank)) for bits in (values, made)}
        put = ElementGather.put

        def replaced(self, message, buffer):
            assert bytes(buffer) == values.tobytes()
            return put(self, message, memoryview(bytearray(made.tobytes())))

        ElementGather.put = replaced
        source, target = held(values.view(dtype), layout, rank), sw.parse("12/R@1:1")
        with pytest.raises(sw.ExchangeError, match="verify: a tensor"):
            sw.reshard(source, target, verify=True, transport="group")
        with pytest.raises(sw.ExchangeError, match="verify: 'w' did not arrive"):
            sw.reshard_state_dict({"w": source}, {"w": target}, verify=True, transport="group")
        ElementGather.put = put
        return shown

    assert len(set.union(*ranks(2, run))) == 1


def test_cells_may_lie_in_any_way(ranks):  # noqa: F811
    def run(rank):
        found = set()
        for step in (1, 7):  # a dim of one cell may have any stride
            local = torch.zeros(8, dtype=torch.float64)[::step][:1].fill_(rank + 1)
            found.add(sw.fingerprint(sw.ShardedTensor(local, "2/S0@2")))
        return len(found)

    assert ranks(2, run) == [1, 1]


def test_it_is_the_same_tomorrow():
    """Fingerprints are kept and compared later. A change of these needs a new version, and a line in the changelog."""
    values = torch.arange(3000, dtype=torch.int32).reshape(3, 1000)
    assert on_ranks(1, lambda _rank: sw.fingerprint(sw.ShardedTensor(values, "3x1000/R@1"))) == [
        "9c8d151bb3523b9c49b9a9bcc4e22629"
    ]
