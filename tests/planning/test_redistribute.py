"""The model of DTensor.redistribute gives the figures that one works out by hand, and torch's own collectives."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import parse
from shardwise.planning import redistributed
from shardwise.testing import on_ranks

V = 8 * 6  # cells


@pytest.mark.parametrize(
    ("source", "target", "cells", "on_cpus"),
    [
        ("S0@4", "S0@4", 0, 0),
        ("R@4", "S1@4", 0, 0),
        ("S0@4", "R@4", 3 * V, 3 * V),  # everybody lacks three quarters
        ("P@4", "S0@4", 3 * V, 3 * V),  # a quarter of what everybody has stays
        ("P@4", "R@4", 6 * V, 6 * V),  # the two, one after the other
        ("S0@4", "S1@4", 3 * V // 4, 3 * V),  # a quarter stays; without all-to-all everybody gets all first
        ("S0,R@2x2", "R,R@2x2", 2 * V, 2 * V),  # two gathers over 2, each for V cells
        ("S0,S1@2x2", "R,R@2x2", V + 2 * V, V + 2 * V),  # the second gather is of what the first has replicated
        ("S0,S0@2x2", "R,S0@2x2", V + 2 * V, V + 2 * V),  # inside out over R, then cut again for nothing
        ("S0,S1@2x2", "S1,S0@2x2", V + V + 0, V + 2 * V),  # over R inside; all-to-all of half of 2 V, or gather
    ],
)
def test_figures_are_those_worked_out_by_hand(source, target, cells, on_cpus):
    layouts = parse(f"8x6/{source}"), parse(f"8x6/{target}")
    assert redistributed(*layouts, 4).bytes == 4 * cells
    assert redistributed(*layouts, 4, all_to_all=False).bytes == 4 * on_cpus


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("S0@4", "S0@2", "different meshes"),
        ("S0@4", "S0,R@2x2", "different meshes"),
        ("S0@2:0,1", "S0@2:1,0", "different meshes"),
        ("S0@4", "P@4", "partial sum"),
        ("P@4", "Pmax@4", "partial sum"),
        ("S0@2", "split0=3,5@2", "lies on a mesh"),
    ],
)
def test_what_redistribute_cannot_do_is_said(source, target, why):
    found = redistributed(parse(f"8x6/{source}"), parse(f"8x6/{target}"), 4)
    assert found.bytes is None
    assert why in found.why_not


TORCHS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
COLLECTIVES = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "all_reduce"}


def collectives(source, target):
    """How often torch calls each, on a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = DTensor.from_local(torch.ones(2, 2), mesh, [TORCHS[word] for word in source], run_check=False)
    with CommDebugMode() as seen:
        x.redistribute(mesh, [TORCHS[word] for word in target])
    return {str(op): count for op, count in seen.get_comm_counts().items()}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("S0,R", "R,R"),
        ("S0,S0", "R,S0"),
        ("S0,S1", "S1,S0"),
        ("P,S0", "S0,S0"),
        ("P,R", "R,S1"),
        ("S0,S1", "R,S1"),
        ("P,P", "S0,S0"),
    ],
)
def test_torch_calls_the_collectives_of_the_model(source, target):
    steps = redistributed(parse(f"4x4/{source}@2x2"), parse(f"4x4/{target}@2x2"), 4, all_to_all=False).steps
    expected = Counter(COLLECTIVES[step.split()[0]] for step in steps if not step.startswith("cut"))
    seen = Counter[str]()
    for op, count in on_ranks(4, lambda rank: collectives(source.split(","), target.split(",")))[0].items():
        seen[next(name for name in COLLECTIVES.values() if name in op)] += count
    assert seen == expected
