"""Subscribers of one host that is not the publisher's: a version crosses to it once, and is passed on there."""

import signal
import time

import pytest
from moments import COPYING, at_moment, drops, pull
from separate_jobs import PATIENCE, by_columns, by_rows, jobs, replicated, until  # noqa: F401

import shardwise.publishing.subscriber as subscribing
from shardwise.publishing.serving import Server


def keep_served(me):
    """Remember all pulls that a rank has served: (version, mapped)."""
    real, me.served = Server._serve, []

    def serve(self, order):
        me.served.append((order.version[1], order.mapped))
        return real(self, order)

    Server._serve = serve


def served(*jobs):  # noqa: F811
    """What the first ranks of these jobs have served."""
    return sorted(one for job in jobs for one in job.call(own_served, ranks=[0])[0])


def own_served(me):
    return me.served


def test_a_version_crosses_to_a_host_once(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=keep_served, host="a")
    near, elsewhere = jobs.server(host="a"), jobs.server(2, host="c", prepare=keep_served)
    there = [
        jobs.server(size, layouts(size), host="b", prepare=keep_served)
        for size, layouts in [(1, replicated), (2, by_columns), (2, by_rows)]
    ]
    for version in 1, 2:
        trainer.commit(version)
        for server in (*there, elsewhere, near):
            server.start(pull)
        for server in (*there, elsewhere, near):
            assert all((found, cells) == (version, version) for found, cells, _ in server.results())
        by_publisher = [(version, False), (version, False), (version, True)]  # to b, to c, and mapped on its own host
        assert [one for one in served(trainer) if one[0] == version] == by_publisher
        assert [one for one in served(*there) if one[0] == version] == [(version, True)] * 2
    assert served(elsewhere) == []


def test_subscribers_that_want_other_values_do_not_pass_on_to_each_other(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=keep_served, host="a")
    trainer.commit(1)
    servers = [jobs.server(host="b"), jobs.server(1, {"b": by_rows(1)["b"]}, host="b", strict=False)]
    assert [server.pull() for server in servers] == [1, 1]
    assert served(trainer) == [(1, False)] * 2


def test_verified_pulls_come_from_the_publisher(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=keep_served, host="a")
    trainer.commit(1)
    for options in {}, {"verify": True}, {"verify": True, "host": "a"}:
        assert jobs.server(2, **{"host": "b", **options}).pull() == 1
    assert served(trainer) == [(1, False)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_others_still_get_the_version_of_a_subscriber_that_is_lost_while_it_passes_it_on(jobs, sign):  # noqa: F811
    trainer = jobs.trainer(2, host="a")
    first = jobs.server(2, prepare=at_moment(subscribing.Subscriber, "_reading", sign, rank=1), host="b")
    others = [jobs.server(2, by_columns(2), host="b") for _ in range(2)]
    trainer.commit(1)
    assert first.pull() == 1
    for other in others:
        other.start(pull)
    if sign == signal.SIGSTOP:
        first.wait_stopped(1)
    else:
        first.wait_dead(1)
    began = time.monotonic()
    for other in others:
        assert [(version, cells) for version, cells, _ in other.results()] == [(1, 1)] * 2
    assert time.monotonic() < began + 3 * PATIENCE
    trainer.commit(2)
    for other in others:
        assert other.pull() == 2
    if sign == signal.SIGSTOP:
        until(lambda: drops(trainer))
        first.go_on(1)
        assert first.pull() == 2


def test_a_version_that_was_passed_on_stays_whole_when_its_holder_is_killed_in_the_middle(jobs):  # noqa: F811
    trainer, holder = jobs.trainer(2, host="a"), jobs.server(2, host="b")
    reader = jobs.server(2, by_columns(2), prepare=at_moment(*COPYING, signal.SIGSTOP, rank=0, call=2), host="b")
    trainer.commit(1)
    assert holder.pull() == 1
    reader.start(pull)
    reader.wait_stopped(0)
    holder.kill()
    reader.go_on(0)
    assert [(version, cells) for version, cells, _ in reader.results()] == [(1, 1)] * 2
    trainer.commit(2)
    assert reader.pull() == 2
