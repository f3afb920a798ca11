"""Worlds of hundreds of ranks in one process: what each sends, what all hear, and what the clock says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import ExchangeError
from shardwise.exchange import Exchange, Proposal
from shardwise.exchange.agreement import WORDS
from shardwise.testing.worlds import SimulatedWorld
from shardwise.transports.collectives import BRANCHES, FIRST
from shardwise.transports.direct import MOST
from shardwise.transports.endpoint import MOST_SLOTS

LARGE = MOST_SLOTS + 44


@given(st.integers(MOST + 1, 70), st.sampled_from(["max", "sum"]), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_numbers_are_reduced_with_two_messages_for_every_rank_but_one(count, op, seed):
    numbers = np.random.default_rng(seed).integers(-(2**60), 2**60, (count, 3))
    run = SimulatedWorld(count).run(lambda one: one.all_reduce(torch.from_numpy(numbers[one.me]), op, 0)())
    expected = numbers.max(axis=0) if op == "max" else numbers.sum(axis=0)
    for found in run.results:
        np.testing.assert_array_equal(found.numpy(), expected)
    assert run.messages == 2 * (count - 1)
    assert run.most.messages <= BRANCHES + 1


@given(st.lists(st.integers(0, 3 * FIRST), min_size=MOST + 1, max_size=40), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_everybody_gets_everybodys_value_in_order(sizes, different):
    values = [bytes([at % different]) * size for at, size in enumerate(sizes)]
    run = SimulatedWorld(len(values)).run(lambda one: one.all_gather(values[one.me]))
    assert run.results == [values] * len(values)
    assert run.messages <= 4 * (len(values) - 1)


def proposals(world, brings):
    """What every rank hears, or raises, where rank r brings `brings(r)`; and the traffic."""

    def work(transport):
        try:
            return Exchange(transport, brings(transport.me)).start().finish()
        except ExchangeError as error:
            return str(error)

    return world.run(work)


def test_a_large_world_agrees_with_few_messages():
    run = proposals(SimulatedWorld(LARGE), lambda _: Proposal({"operation": "reshard"}))
    assert run.results == [None] * LARGE
    assert (run.messages, run.bytes) == (2 * (LARGE - 1), 2 * (LARGE - 1) * 2 * 8 * WORDS)
    assert run.most.peers == BRANCHES + 1


def test_a_large_world_refuses_with_few_messages():
    run = proposals(SimulatedWorld(LARGE), lambda me: Proposal({"operation": "reshard", "dtype": me == 7}))
    (text,) = set(run.results)
    assert "rank 7: True" in text
    assert f"ranks 0-6, 8-{LARGE - 1}: False" in text
    assert run.most.messages <= 3 * (BRANCHES + 1)


def test_one_rank_tells_a_large_world_with_few_messages():
    fields = {"operation": "reshard", "shape": (3, 4)}
    unknown = frozenset({"shape"})
    run = proposals(SimulatedWorld(LARGE), lambda me: Proposal(fields, frozenset() if me == 9 else unknown))
    assert run.results == [[fields if rank == 9 else None for rank in range(LARGE)]] * LARGE
    assert run.most.messages <= 3 * (BRANCHES + 1)


@given(st.sampled_from(["R", "S1", "R,S1@5x4", "S0@20:19,18,17,16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1,0"]))
@settings(max_examples=4, deadline=None)
def test_a_run_sends_what_its_plan_says_beside_the_agreement(to):
    target = to if "@" in to else f"{to}@20"
    plan = sw.plan("400x4000/S0@20", f"400x4000/{target}", itemsize=2)  # messages too large for slots
    world = SimulatedWorld(20, per_host=4)
    run, agreement = world.exchange(plan), world.exchange(sw.plan("20/S0@20", "20/S0@20", itemsize=2))
    assert run.messages - agreement.messages == plan.messages
    assert run.bytes - agreement.bytes == plan.bytes_moved


def test_a_clock_tells_what_a_message_takes():
    world = SimulatedWorld(2, per_host=1, latency=1e-3, bandwidth=1e6)
    agreement = world.exchange(sw.plan("2/S0@2", "2/S0@2", itemsize=2)).seconds
    whole = world.exchange(sw.plan("100000/S0@1:0", "100000/S0@1:1", itemsize=2)).seconds
    assert whole - agreement == pytest.approx(1e-3 + 2e5 / 1e6)


def test_partial_sums_run_too():
    plan = sw.plan("64x6/P@8", "64x6/S0@8", itemsize=4)
    assert SimulatedWorld(8, per_host=4).exchange(plan, dtype=torch.float32).most.peers == 7


def test_a_rank_that_waits_for_ever_is_an_error():
    with pytest.raises(ExchangeError, match="rank 1 waits for rank 0, which does not send"):
        SimulatedWorld(2).run(lambda one: one.me and one.all_gather(one.me))
