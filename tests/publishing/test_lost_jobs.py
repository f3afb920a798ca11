"""Jobs that are killed or stopped at any moment: the others go on, and nobody ever has a mixture of two versions."""

import signal
import time

import pytest
from moments import ARRIVED, COPYING, RECEIVING, TOLD, at_moment, drops, pull
from separate_jobs import PATIENCE, JobError, by_columns, jobs, until  # noqa: F401

import shardwise as sw
from shardwise.publishing.serving import Server


def subscribers(me):
    return me.publisher._dispatcher.subscribers


# --- subscribers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_subscribers_that_are_killed_cost_the_others_nothing(jobs):  # noqa: F811
    trainer, near, far = jobs.trainer(2, serving=8), jobs.server(2, by_columns(2)), jobs.server(host="b")
    moments = [(*TOLD, 1, None), (*TOLD, 0, "b"), (*COPYING, 1, None), (*RECEIVING, 1, "c"), (*ARRIVED, 0, "d")]
    victims = [
        (rank, jobs.server(2, prepare=at_moment(owner, name, signal.SIGKILL, rank=rank), host=host))
        for owner, name, rank, host in moments
    ]
    trainer.commit(1)
    for _, victim in victims:
        victim.start(pull)
    for rank, victim in victims:
        victim.wait_dead(rank)
    began = time.monotonic()
    assert near.pull() == 1
    assert time.monotonic() < began + 1
    assert far.pull() == 1  # which came to another job of that host just then: once that one is given up
    assert time.monotonic() < began + PATIENCE + 4
    for rank, victim in victims:
        (outcome,) = victim.outcomes([1 - rank]).values()
        assert outcome[0] is None or outcome[0][1] in (0, 1), outcome  # the other rank has no mixture either
    trainer.commit(2)
    assert [near.pull(), far.pull()] == [2, 2]
    for _, victim in victims:
        victim.kill()
    until(lambda: len(drops(trainer)) == len(victims))
    assert all("gave no sign of life for 3 s" in line for line in drops(trainer))
    assert len(trainer.call(subscribers, ranks=[0])[0]) == 2
    until(lambda: trainer.versions == [2])


@pytest.mark.slow
def test_subscribers_that_stand_still_in_a_pull_never_get_a_mixture(jobs):  # noqa: F811
    trainer, near, far = jobs.trainer(2, serving=8), jobs.server(2, by_columns(2)), jobs.server(host="b")
    moments = [
        (*TOLD, 1, 1, None),
        (*COPYING, 0, 2, None),
        (*COPYING, 1, 3, None),
        (*RECEIVING, 1, 1, "c"),
        (*ARRIVED, 0, 1, "d"),
    ]
    stopped = [
        (rank, jobs.server(2, prepare=at_moment(owner, name, signal.SIGSTOP, rank=rank, call=call), host=host))
        for owner, name, rank, call, host in moments
    ]
    trainer.commit(1)
    for _, job in stopped:
        job.start(pull)
    for rank, job in stopped:
        job.wait_stopped(rank)
    for version in 2, 3, 4:  # the training goes on, and so do the others
        trainer.commit(version)
        assert [near.pull(), far.pull()] == [version, version]
    until(lambda: len(drops(trainer)) == len(stopped))
    for version in 5, 6, 7:
        trainer.commit(version)
        assert [near.pull(), far.pull()] == [version, version]
    for rank, job in stopped:
        job.go_on(rank)
    for _, job in stopped:
        found = job.results()
        assert len({(version, cells) for version, cells, _ in found}) == 1, found
        version, cells, error = found[0]
        assert cells == (version or 0), found
        assert (version is None) == (error is not None), found
        assert job.pull() == 7


def test_a_subscriber_that_stands_still_between_pulls_pulls_again(jobs):  # noqa: F811
    trainer, server = jobs.trainer(), jobs.server(2)
    trainer.commit(1)
    assert server.pull() == 1
    server.stop()
    until(lambda: drops(trainer))
    trainer.commit(2)
    server.go_on()
    assert server.pull() == 2


@pytest.mark.slow
def test_memory_of_a_version_that_is_passed_on_is_not_written_while_somebody_may_read_it(jobs):  # noqa: F811
    """Both the reader and the one it reads from stand still, and are given up; then only that one goes on."""
    trainer = jobs.trainer(2)
    holder = jobs.server(2, host="b")
    reader = jobs.server(2, by_columns(2), prepare=at_moment(*COPYING, signal.SIGSTOP, rank=1, call=2), host="b")
    trainer.commit(1)
    assert holder.pull() == 1
    reader.start(pull)
    reader.wait_stopped(1)
    holder.stop()
    until(lambda: len(drops(trainer)) == 2)
    trainer.commit(2)
    holder.go_on()
    assert holder.pull() == 2
    reader.go_on(1)
    assert [(version, cells) for version, cells, _ in reader.results()] == [(1, 1), (1, 1)]
    assert reader.pull() == 2


# --- publishers ------------------------------------------------------------------------------------------------------


def hold_meeting_point(jobs):  # noqa: F811
    """A job that outlives the others, and holds the meeting point."""
    jobs.trainer(publish=False).call(publish_as, "another")


@pytest.mark.slow
def test_publishers_that_are_killed_leave_the_last_version(jobs):  # noqa: F811
    """One of them loses its first rank, the other one its last."""
    hold_meeting_point(jobs)
    trainers = [jobs.trainer(2, name=name) for name in NAMES]
    servers = [jobs.server(2, name=NAMES[0]), jobs.server(name=NAMES[1]), jobs.server(2, name=NAMES[1], host="b")]
    for trainer in trainers:
        trainer.commit(1)
    for server in servers:
        assert server.pull() == 1
    for rank, trainer in enumerate(trainers):
        trainer.commit(2)
        trainer.kill(rank)
    for server in servers:
        server.start(pull)
    for server in servers:
        for version, cells, error in server.results():
            assert (version, cells) == (None, 1)
            assert "no sign of life" in error or "ended" in error or "not made within 3 s" in error, error
        assert server.version == 1
        server.has(1)
    for trainer in trainers:
        trainer.kill()
    again = [jobs.trainer(publish=False) for _ in NAMES]
    for name, trainer in zip(NAMES, again, strict=True):
        trainer.start(publish_as, name)  # once the name is free
    for trainer in again:
        trainer.results()
        trainer.commit(1, step=6)
    for server in servers:
        assert server.pull(step=6) == 1  # of a later publisher


NAMES = ["first", "second"]


def publish_as(me, name):
    me.publisher = sw.publish(me.weights.state, me.at, name, patience=PATIENCE)


@pytest.mark.parametrize("host", [None, "b"], ids=["mapped", "sent"])
def test_a_publisher_that_is_killed_while_it_serves_leaves_no_mixture(jobs, host):  # noqa: F811
    hold_meeting_point(jobs)
    moment = (Server, "_admit") if host is None else RECEIVING
    trainer = jobs.trainer(2, prepare=at_moment(*moment, signal.SIGKILL, rank=1, call=2))
    server = jobs.server(2, by_columns(2), host=host)
    trainer.commit(1)
    assert server.pull() == 1
    trainer.commit(2)
    error = server.fail(keeps=1)
    assert len(error.errors) == 2
    assert server.version == 1


def test_a_publisher_that_stands_still_is_given_up_and_comes_back(jobs):  # noqa: F811
    hold_meeting_point(jobs)
    trainer, server = jobs.trainer(2), jobs.server(2)
    trainer.commit(1)
    assert server.pull() == 1
    trainer.commit(2)
    trainer.stop()
    error = server.fail(keeps=1)
    assert "gave no sign of life for 3 s. The weights are still of version 1" in str(error)
    trainer.go_on()
    assert pulled_once_it_lives(server) == 2


def pulled_once_it_lives(server, seconds=30):
    """What a server pulls when its publisher has given a sign of life, which takes a second or more."""
    end = time.monotonic() + seconds
    while True:
        try:
            return server.pull()
        except JobError as error:
            if "gave no sign of life" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_a_publisher_that_was_replaced_while_it_stood_still_commits_no_more(jobs):  # noqa: F811
    hold_meeting_point(jobs)
    trainer, server = jobs.trainer(2), jobs.server(2)
    trainer.commit(10)
    assert server.pull() == 10
    trainer.stop()
    other = jobs.trainer(1)
    other.commit(3)
    assert server.pull() == 3
    trainer.go_on()
    time.sleep(1.5)
    with pytest.raises(JobError, match="another publisher has taken the name 'policy'") as error:
        trainer.commit(11)
    assert len(error.value.errors) == 2
    assert server.pull() == 3
    trainer.close()
    other.commit(4)
    assert server.pull() == 4
    assert jobs.server().pull() == 4


# --- in place --------------------------------------------------------------------------------------------------------


def test_a_pull_in_place_that_failed_is_of_no_version_until_the_next_whole_one(jobs):  # noqa: F811
    hold_meeting_point(jobs)
    trainer = jobs.trainer(2, prepare=at_moment(*RECEIVING, signal.SIGKILL, rank=1, call=2))
    server = jobs.server(2, by_columns(2), host="b", atomic=False, max_bytes=64)
    trainer.commit(1)
    server.start(pull_in_place)
    for error, version in server.results():
        assert error.endswith("a mixture of versions: 1 of 3 tensors may be written ('w'): pull again")
        assert "a pull of version 1 was broken off, and 1 of 3 tensors may be written ('w')" in version
    trainer.kill()
    again = jobs.trainer(1)
    again.commit(4)
    assert server.pull() == 4
    assert server.version == 4


def test_a_pull_in_place_that_failed_before_it_wrote_leaves_the_version(jobs):  # noqa: F811
    hold_meeting_point(jobs)
    trainer = jobs.trainer(2, prepare=at_moment(*RECEIVING, signal.SIGKILL, rank=1, call=2))
    server = jobs.server(2, by_columns(2), host="b", atomic=False)
    trainer.commit(1)
    assert server.pull() == 1
    trainer.commit(2)
    server.start(pull_in_place)
    for error, version in server.results():
        assert error.endswith("The weights are still of version 1")
        assert version == 1
    server.has(1)


def pull_in_place(me):
    """The error of a pull, and the version after it, or why there is none."""
    try:
        me.subscriber.pull()
    except sw.ShardwiseError as error:
        try:
            return str(error), me.subscriber.version
        except sw.ExchangeError as refusal:
            return str(error), str(refusal)
    return "it was pulled", None
