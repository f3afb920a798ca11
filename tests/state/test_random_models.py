"""Random models between random shardings: every rank has exactly its part of the whole tensors."""

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from models import all_same, held, lies, meshes, numbers
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise import Concat, Stack, Transposed
from shardwise.testing.strategies import KINDS, layouts, shapes

WHOLE_KINDS = tuple(kind for kind in KINDS if kind != "partial")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64)


@st.composite
def models(draw, owners):
    """(shape, dtype, source, target) of some tensors, on owners below that number, and the options of a run."""
    tensors = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(shapes())
        both = []
        for _ in range(2):
            found = draw(layouts(shape, WHOLE_KINDS, max_owners=owners))
            while found.owners()[-1] >= owners:
                found = draw(layouts(shape, WHOLE_KINDS, max_owners=owners))
            both.append(found)
        tensors.append((shape, draw(st.sampled_from(DTYPES)), *both))
    limit = draw(st.sampled_from([None, None, 100, 500]))
    return tensors, {"max_bytes": limit, "verify": draw(st.booleans()), "hosts": draw(st.sampled_from([None, None, 2]))}


def examples(count, owners):
    """So many models, the same on every rank."""
    found = []

    @seed(owners)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(models(owners))
    def collect(model):
        found.append(model)

    collect()
    return found


def value(shape, dtype, at):
    return numbers(*shape, start=7 * at).remainder(97).to(dtype)


@pytest.mark.devices
@pytest.mark.parametrize("owners", [2, 4])
def test_any_model_into_any_other(ranks, owners):  # noqa: F811
    cases = examples(16, owners)
    assert sum(len(tensors) for tensors, _ in cases) > 30

    def run(rank):
        for tensors, options in cases:
            whole = {f"t.{at}": value(shape, dtype, at) for at, (shape, dtype, _, _) in enumerate(tensors)}
            sources = {f"t.{at}": tensor[2] for at, tensor in enumerate(tensors)}
            targets = {f"t.{at}": tensor[3] for at, tensor in enumerate(tensors)}
            given = {name: held(one, sources[name]) for name, one in whole.items()}
            room = {name: held(torch.zeros_like(one), targets[name]) for name, one in whole.items()}
            sync = sw.Resharder(given, room, **options)
            for _ in range(2):
                sync.run()
                for name, one in whole.items():
                    lies(room[name], one, targets[name])
            assert sync.plan.peak_bytes <= (options["max_bytes"] or 2**62)
            back = sw.reshard_state_dict({"model": room, "step": 1}, {"model": sources}, **options)["model"]
            for name, one in whole.items():
                lies(back[name], one, sources[name])
        return len(cases)

    assert ranks(owners, run) == [len(cases)] * owners


def test_any_placements_into_any_others(ranks):  # noqa: F811
    """DTensors on two meshes and plain tensors, against what torch makes of the whole."""
    draw = Random(5)
    shapes = [tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for _ in range(25)]
    picks = [(draw.random(), draw.random(), draw.random(), draw.random()) for _ in shapes]

    def lay(whole, one, two, row, square):
        """A DTensor or a plain tensor, by two random numbers."""
        choices = [Replicate(), *map(Shard, range(whole.ndim))]
        first, second = choices[int(one * 100) % len(choices)], choices[int(two * 100) % len(choices)]
        if one < 0.2:
            return whole.clone()
        if two < 0.5:
            return distribute_tensor(whole.clone(), row, [first])
        return distribute_tensor(whole.clone(), square, [first, Replicate() if first == second else second])

    def local(one):
        return one.to_local() if isinstance(one, DTensor) else one

    def run(rank):
        row, square = meshes()
        whole = {f"w{at}": numbers(*shape, start=at) for at, shape in enumerate(shapes)}
        lain = zip(whole.items(), picks, strict=True)
        both = {name: (lay(one, *p[:2], row, square), lay(one, *p[2:], row, square)) for (name, one), p in lain}
        given, expected = ({name: pair[side] for name, pair in both.items()} for side in (0, 1))
        for options in {}, {"verify": True, "max_bytes": 200}:
            room = {name: torch.zeros_like(one) for name, one in expected.items()}
            sw.Resharder(given, room, **options).run()
            found = sw.reshard_state_dict(given, expected, **options)
            for result in room, found:
                all_same({name: local(one) for name, one in result.items()}, {n: local(e) for n, e in expected.items()})
                assert [type(one) for one in result.values()] == [type(one) for one in expected.values()]

    ranks(4, run)


def test_any_remaps_between_any_shardings(ranks):  # noqa: F811
    """Parts of random sizes in wholes, stacks and transposed tensors at once, there and back."""
    draw = Random(11)
    remap = [Concat("c.*", ["c.*.0", "c.*.1", "c.*.2"], dim=1), Stack("s.*", "s.*.{}", dim=-1), Transposed("t.*")]
    cases = []
    for _ in range(7):
        height, widths = draw.randint(1, 6), [draw.randint(1, 5) for _ in range(3)]
        parts = {f"c.x.{at}": numbers(height, width, start=50 * at) for at, width in enumerate(widths)}
        stack = {f"s.y.{at}": numbers(3, height, start=40 * at) for at in range(draw.randint(1, 4))}
        turned = {"t.z": numbers(height, 4, 3)}
        fused = {
            "t.z": turned["t.z"].permute(2, 1, 0).contiguous(),
            "c.x": torch.cat(list(parts.values()), dim=1),
            "s.y": torch.stack(list(stack.values()), dim=-1),
        }
        cases.append(({**parts, **stack, **turned}, fused))

    def somewhere(shape):
        owners = draw.sample(range(4), draw.randint(1, 4))
        dim = draw.randrange(len(shape))
        return draw.choice([
            sw.Layout.chunk(shape, dim, owners),
            sw.Layout.replicated(shape, owners),
            sw.Layout.cyclic(shape, dim, 1, owners),
            sw.Layout.on_mesh(shape, (2, 2), [f"S{dim}", draw.choice(["R", "S0"])]),
            sw.Layout.flat(shape, [(owners[0], 0, torch.Size(shape).numel())]),
        ])  # fmt: skip

    places = [
        tuple({name: somewhere(tuple(one.shape)) for name, one in side.items()} for side in case) for case in cases
    ]

    def run(rank):
        for (ours, theirs), (here, there) in zip(cases, places, strict=True):
            for source, target, at, to in (ours, theirs, here, there), (theirs, ours, there, here):
                given = {name: held(one, at[name]) for name, one in source.items()}
                room = {name: held(torch.full_like(one, -1), to[name]) for name, one in target.items()}
                sw.Resharder(given, room, remap=remap, verify=True).run()
                for name, one in target.items():
                    lies(room[name], one, to[name])

    ranks(4, run)
