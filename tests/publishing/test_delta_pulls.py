"""Subscribers of other hosts are sent what changed since the version that they have, also after faults."""

import re
import signal

import pytest
from moments import COPYING, RECEIVING, at_moment, drops, pull
from numbered import Sparse
from separate_jobs import jobs, until  # noqa: F401
from small_deltas import between_all_ranks

from shardwise import Layout

SHAPES = {"w": (512, 256), "b": (100_000,)}  # smaller messages are sent as they are


def sparse(layouts, *more):
    """What prepares a job whose weights change little."""

    def prepare(me):
        between_all_ranks(me)
        me.weights = Sparse(me.rank, layouts)
        for one in more:
            one(me)

    return prepare


def rows(size):
    return {name: Layout.chunk(shape, 0, size) for name, shape in SHAPES.items()}


def columns(size):
    return {name: Layout.chunk(shape, len(shape) - 1, size) for name, shape in SHAPES.items()}


def commit(me, version):
    me.weights.fill(version)
    me.publisher.commit(version)


def sent(trainer):
    """Bytes that the first rank of a trainer has sent in deltas, and those that they stand for."""
    lines = [re.search(r"delta of (\d+) bytes instead of (\d+)", line) for line in trainer.log()]
    return [(int(one[1]), int(one[2])) for one in lines if one]


def test_only_changes_are_sent_while_the_version_before_is_held(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=sparse(rows(2)), host="a", delta=True)
    server = jobs.server(2, prepare=sparse(columns(2)), host="b")
    for version in 1, 2, 3:
        trainer.call(commit, version)
        assert server.pull() == version
    assert len(sent(trainer)) == 2
    assert all(few < whole / 4 for few, whole in sent(trainer)), sent(trainer)
    for version in range(4, 9):  # too many: the one that the server has is not held any more
        trainer.call(commit, version)
    assert server.pull() == 8
    assert len(sent(trainer)) == 2
    trainer.call(commit, 9)
    assert server.pull() == 9
    assert server.pull(8) == 8  # an earlier one, on top of a later one
    assert server.pull() == 9


@pytest.mark.parametrize("rank", [0, 1])
def test_a_delta_that_was_broken_off_is_not_built_upon(jobs, rank):  # noqa: F811
    """A rank of the server stands still in the middle of the second pull, when a part of it was written aside."""
    trainer = jobs.trainer(2, prepare=sparse(rows(2)), host="a", delta=True)
    moment = at_moment(*RECEIVING, signal.SIGSTOP, rank=rank, call=4)
    server = jobs.server(2, prepare=sparse(columns(2), moment), host="b", max_bytes=300_000)
    trainer.call(commit, 1)
    assert server.pull() == 1
    trainer.call(commit, 2)
    server.start(pull)
    server.wait_stopped(rank)
    until(lambda: drops(trainer))
    for version in 3, 4, 5:
        trainer.call(commit, version)
    server.go_on(rank)
    for version, cells, error in server.results():
        assert cells == (version or 1), error
    assert server.pull() == 5
    trainer.call(commit, 6)
    assert server.pull() == 6


def test_a_subscriber_builds_on_nothing_that_it_had_to_give_up(jobs):  # noqa: F811
    """A neighbour that reads from it is killed in the middle: the next version comes into new memory, as a whole."""
    trainer = jobs.trainer(2, prepare=sparse(rows(2)), host="a", delta=True)
    first = jobs.server(2, prepare=sparse(columns(2)), host="b")
    moment = at_moment(*COPYING, signal.SIGKILL, rank=1, call=2)
    second = jobs.server(2, prepare=sparse(rows(2), moment), host="b")
    trainer.call(commit, 1)
    assert first.pull() == 1
    second.start(pull)
    second.wait_dead(1)
    until(lambda: drops(trainer))
    for version in 2, 3:
        trainer.call(commit, version)
        assert first.pull() == version
    assert len(sent(trainer)) == 1
