"""Over every transport and in every way through memory, the same bits arrive in the same places."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ranks import ranks  # noqa: F401
from wired import WAYS, use

import shardwise as sw
from shardwise.testing.strategies import layouts, shapes

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64, torch.float8_e4m3fn, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
JUNK = 85  # what memory holds that no cell lies in
WORLD = 4


def plain(shape, dtype):
    return torch.full(shape, JUNK).to(dtype)


def turned(shape, dtype):
    return plain(shape[::-1], dtype).permute(tuple(reversed(range(len(shape)))))


def spaced(shape, dtype):
    if not shape:
        return plain((3,), dtype)[1]
    return plain([2 * size + 1 for size in shape], dtype)[tuple(slice(1, None, 2) for _ in shape)]


def shifted(shape, dtype):
    return plain((shape[0] + 2, *shape[1:]), dtype)[1:-1] if shape else plain((3,), dtype)[2]


FORMS = (plain, turned, spaced, shifted)


def bits(tensor):
    """Its bits, in the order of its cells."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def local(layout, rank, dtype, form, number):
    """Random bits for this rank's shards; numbers if they are reduced, which transports must do in the same order."""
    shapes = layout.local_shapes(rank) if rank in layout else ()
    random, found = np.random.default_rng([number, rank if layout.op else 0]), list[torch.Tensor]()
    whole = random.standard_normal(layout.shape)
    for at, shape in enumerate(shapes):
        tensor = form(shape, dtype)
        if layout.op is not None:
            tensor.copy_(torch.from_numpy(np.random.default_rng([number, rank, at]).standard_normal(shape)) * 100)
        else:
            raw = sw.testing.scatter(whole, layout)[rank][at]
            seeds = torch.from_numpy(np.ascontiguousarray(raw)).reshape(shape)
            tensor.copy_(_junk(seeds, dtype))
        found.append(tensor)
    return found


def _junk(seeds, dtype):
    """A value of the dtype for every seed, with strange bits among them."""
    raw = np.frombuffer(np.ascontiguousarray(seeds.numpy()).tobytes() * 2, np.uint8).reshape(2, *seeds.shape, 8)
    raw = np.concatenate([raw[0], raw[1]], axis=-1)[..., : dtype.itemsize]
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(seeds.shape)


@st.composite
def moves(draw):
    """A source, a target and how to go from one to the other."""
    shape, both = draw(shapes()), list[sw.Layout]()
    while len(both) < 2:
        found = draw(layouts(shape, max_owners=WORLD))
        both += [found] * (found.owners()[-1] < WORLD)
    op = both[0].op or both[1].op
    dtype = draw(st.sampled_from(DTYPES)) if op is None else REDUCED.get(op, torch.float32)
    limit, hosts = draw(st.sampled_from([None, 96, 1000])), draw(st.sampled_from([None, None, 2]))
    return *both, limit, hosts, dtype, draw(st.sampled_from(FORMS)), draw(st.sampled_from(FORMS))


REDUCED = {"band": torch.int32, "bor": torch.int32, "bxor": torch.int64}


def examples(count, salt):
    """Moves, the same on every rank."""
    found = []

    @seed(salt)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(moves())
    def collect(move):
        found.append(move)

    collect()
    return found


def allowed(source, target, limit, hosts, dtype):
    try:
        sw.plan(source, target, itemsize=dtype.itemsize, max_bytes=limit, hosts=hosts)
    except sw.PlanError:
        return None
    return limit


@pytest.mark.parametrize("salt", [1])
def test_random_moves_bring_the_same_bits_in_every_way(ranks, salt):  # noqa: F811
    cases = examples(40, salt)

    def run(rank):
        for number, (source, target, limit, hosts, dtype, form, room) in enumerate(cases):
            limit = allowed(source, target, limit, hosts, dtype)
            expected = None
            for way in WAYS:
                transport, share = use(way)
                tensors = local(source, rank, dtype, form, number)
                x = sw.ShardedTensor(sw.share_(tensors) if share else tensors, source) if tensors else None
                shapes = target.local_shapes(rank) if rank in target else ()
                out = [room(shape, dtype) for shape in shapes] if number % 2 and shapes else None
                options = {"max_bytes": limit, "hosts": hosts, "transport": transport, "verify": number % 5 == 0}
                found = sw.reshard(x, target, out=out, **options)
                now = [bits(shard) for shard in found.shards] if found is not None else None
                expected = now if way == "group" else expected
                assert now == expected, (way, str(source), str(target), limit, hosts, dtype, form, room)
        return len(cases)

    assert ranks(WORLD, run, timeout=120) == [len(cases)] * WORLD
