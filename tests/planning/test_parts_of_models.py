"""One owner's part of a large model: what is counted grows with the shapes that differ, not with the tensors."""

import sys
import tracemalloc

import numpy as np
import pytest
import torch

from shardwise import parse
from shardwise.job import plan as job_plan
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import links
from shardwise.layout import Grid
from shardwise.planning import Hosts, plan_parts

TRAINERS, SERVERS = 4096, 1024
OWNERS = TRAINERS + SERVERS


@pytest.fixture
def nothing_remembered():
    caches = job_plan._cached_plan, job_plan._heeded, sys.modules["shardwise.planning.plan"]._part

    def forget():
        for cache in caches:
            cache.cache_clear()

    forget()
    yield forget
    forget()


def model(tensors, shapes):
    """A fully sharded trainer and tensor parallel servers; equal layouts are one object, as those of DTensors are."""
    kinds = []
    for n in range(shapes):
        shape, target = (64 * (1 + n % 40), 512 * (1 + n // 40)), ("R,S1@128x8", "S0,R@128x8")[n % 2]
        texts = f"S0@{TRAINERS}", f"{target}:{TRAINERS}-{OWNERS - 1}"
        layouts = [parse(f"{shape[0]}x{shape[1]}/{text}") for text in texts]
        kinds.append([TensorInfo(shape, torch.bfloat16, layout, "cpu") for layout in layouts])
    names = {f"layers.{n}.weight": kinds[n % shapes] for n in range(tensors)}
    return tuple({name: pair[side] for name, pair in names.items()} for side in (0, 1))


def planned(sources, targets, hosts, owner):
    """As a Resharder does it: links by name, plans, buckets, and the part of one owner in each."""
    shapes = [{name: info.shape for name, info in side.items()} for side in (sources, targets)]
    made = ModelPlan.of(links(*shapes), sources, targets, hosts=hosts)
    for bucket in made.buckets():
        plan_parts([made.links[at].plan for at in bucket], owner)
    return made, [one.plan.part(owner) for one in made.links]


@pytest.mark.parametrize("owner", [777, TRAINERS + 100])
@pytest.mark.parametrize("hosts", [None, 8])
def test_a_model_is_planned_once_for_every_shape(nothing_remembered, monkeypatch, hosts, owner):
    digests, digest = [], Grid.digest
    monkeypatch.setattr(Grid, "digest", lambda grid: digests.append(grid) or digest(grid))
    hosts = hosts and Hosts.of(hosts, np.arange(OWNERS))
    made, parts = planned(*model(300, 20), hosts, owner)
    assert len(made.links) == 300
    assert len({id(one.plan) for one in made.links}) == 20
    assert len({id(part) for part in parts}) == 20
    assert len(digests) == 2 * 20  # a layout is looked at once to know whether it is another one


@pytest.mark.parametrize("hosts", [None, 8])
def test_parts_of_a_model_take_memory_for_their_copies_and_the_world_once_for_every_shape(nothing_remembered, hosts):
    hosts = hosts and Hosts.of(hosts, np.arange(OWNERS))
    sides = model(200, 20)
    planned(*sides, hosts, 777)
    nothing_remembered()
    tracemalloc.start()
    try:
        _, parts = planned(*sides, hosts, 777)
        words = tracemalloc.get_traced_memory()[1] // 8
    finally:
        tracemalloc.stop()
    copies = sum(len(part.copies) for part in {id(part): part for part in parts}.values())
    assert words <= 4 * (20 * OWNERS + copies)
