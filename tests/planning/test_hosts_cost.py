"""What hosts cost a plan that reduces: at most twice the staging, and twice the rounds and one more for each step."""

import random

import numpy as np
import pytest
import torch

from shardwise import parse, plan
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor
from shardwise.planning import Hosts

FACTORS = [[64], [2, 32], [8, 8], [16, 4], [32, 2], [4, 4, 4], [2, 2, 16], [4, 2, 8], [16, 2, 2]]


def side(draw, kinds):
    """A grid of 64 owners."""
    mesh = draw.choice(FACTORS)
    return ",".join(draw.choice(kinds) for _ in mesh) + "@" + "x".join(map(str, mesh))


def reducing(seed, count):
    """Random pairs of which the source is partial and the target is not, with owners per host."""
    draw = random.Random(seed)
    while count:
        source, target = side(draw, ["P", "P", "R", "S0", "S1"]), side(draw, ["R", "S0", "S1"])
        if "P" in source:
            count -= 1
            yield source, target, draw.choice([2, 4, 8])


@pytest.mark.parametrize("shape", ["1024x1024", "256x256", "64x16384", "8x40"])
def test_hosts_take_at_most_twice_the_staging_of_terms(shape):
    for source, target, hosts in reducing(shape, 40):
        apart, together = (plan(f"{shape}/{source}", f"{shape}/{target}", hosts=given) for given in (None, hosts))
        assert together.most_bytes <= 2 * apart.most_bytes, (source, target, hosts)
        assert together.peak_bytes <= together.most_bytes, (source, target, hosts)
        assert apart.peak_bytes <= apart.most_bytes, (source, target)


@pytest.mark.parametrize("shape", ["1024x1024", "256x256", "64x16384"])
def test_hosts_take_at_most_twice_the_rounds_of_terms_and_one_more_for_each_step(shape):
    for source, target, hosts in reducing(shape, 40):
        pair, limit = (
            (f"{shape}/{source}", f"{shape}/{target}"),
            {"1024x1024": 2**20, "256x256": 2**16}.get(shape, 2**20),
        )
        apart, together = (plan(*pair, hosts=given, max_bytes=limit) for given in (None, hosts))
        assert together.rounds <= together.most_rounds <= 2 * apart.most_rounds + 3, (source, target, hosts)
        assert max(apart.peak_bytes, together.peak_bytes) <= limit, (source, target, hosts)


@pytest.mark.parametrize(
    ("source", "target", "hosts"),
    [
        ("P@64", "S0@64", 8),
        ("R,R,P@4x4x4", "S1,S0@32x2", 8),
        ("P@64", "S1,S0,S1@4x4x4", 2),
        ("P@64", "R@64", 8),
        ("R,P@32x2", "R@64", 4),
        ("P,R@2x32", "R@64", 8),
        ("P@64", "R@64:64-127", 8),
    ],
)
def test_an_owner_stages_little_more_than_its_terms_where_they_are_reduced(source, target, hosts):
    tensor = 4 * 1024 * 1024
    for given in (None, hosts):
        made = plan(f"1024x1024/{source}", f"1024x1024/{target}", hosts=given)
        assert made.peak_bytes <= made.most_bytes <= 4 * tensor


def test_what_every_host_can_reduce_alone_crosses_to_nobody():
    made = plan("1024x1024/R,R,P@4x4x4", "1024x1024/S1,S0@32x2", hosts=8)
    assert len(made.legs) == 1
    assert made.bytes_across == 0


def test_takers_of_a_host_share_what_they_hand_on_evenly():
    made = plan("1024x1024/P,R@8x8", "1024x1024/R@64", hosts=8)
    assert made.peak_bytes <= 2 * 4 * 1024 * 1024


def test_a_model_has_one_plan_for_each_kind_of_move():
    hosts, shapes = Hosts.of(8, np.arange(96)), [(64 * n, 128) for n in range(1, 6)]
    links, sources, targets = [], {}, {}
    for n in range(100):
        name, shape = f"layer {n}", shapes[n % 5]
        text, whole = "x".join(map(str, shape)), Subtensor.whole(shape)
        sources[name] = TensorInfo(shape, torch.bfloat16, parse(f"{text}/S0@64"), "cpu")
        targets[name] = TensorInfo(shape, torch.bfloat16, parse(f"{text}/R,S1@4x8:64-95"), "cpu")
        links.append(Link(name, name, whole, whole))
    made = ModelPlan.of(links, sources, targets, hosts=hosts)
    assert len({id(link.plan) for link in made.links}) == len(shapes)
    assert len({id(link.plan.hosts) for link in made.links}) == 1


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_hosts_add_up_terms_of_every_width_that_has_fewer_bytes_as_sums(itemsize):
    made = plan("2048x1152/P@8", "2048x1152/R@8", itemsize=itemsize, hosts=4)
    crossing = sum(copy.box.volume for copy in made.copies if copy.source // 4 != copy.target // 4)
    assert (len(made.legs), crossing) == (2, 2 * 2048 * 1152)
