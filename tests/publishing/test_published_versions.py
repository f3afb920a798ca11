"""The life of a version: committed, held, pulled, waited for, and dropped."""

import time

import pytest
from separate_jobs import JobError, by_columns, jobs, until  # noqa: F401

import shardwise as sw


def call(me, what, name, *args, **kwargs):
    """A method of the publisher or subscriber of a rank."""
    return getattr(getattr(me, what), name)(*args, **kwargs)


def own(me, name):
    """What a rank has kept."""
    return getattr(me, name)


# --- pulls -----------------------------------------------------------------------------------------------------------


def test_as_many_versions_are_held_as_asked_for(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2, keep=2), jobs.server(2, by_columns(2))
    assert (trainer.versions, server.pull(), server.version) == ([], None, None)
    for version in 1, 2, 5, 7:
        trainer.commit(version)
    assert trainer.versions == [5, 7]
    assert server.pull() == 7
    assert server.pull(5) == 5
    assert server.version == 5
    assert server.pull() == 7
    with pytest.raises(JobError, match=r"version 2 .*5, 7") as error:
        server.pull(2)
    assert error.value.kinds == {"RefusedValueError"}
    assert len(error.value.errors) == 2
    server.has(7)
    assert server.version == 7


def test_nothing_happens_where_nothing_is_newer(jobs):  # noqa: F811
    trainer, server = jobs.trainer(), jobs.server(2)
    trainer.commit(3)
    assert server.pull() == 3
    server.call(fill, 6)
    assert server.pull(step=6) == 3
    assert server.pull(3, step=6) == 3


def fill(me, step):
    me.weights.fill(step)


def test_latecomers_get_the_newest_version_at_once(jobs):  # noqa: F811
    trainer = jobs.trainer(2, keep=3)
    trainer.commit(1)
    trainer.commit(2)
    for host in None, "b":
        assert jobs.server(2, host=host).pull() == 2


def test_a_version_is_a_whole_number_and_the_same_on_all_ranks(jobs):  # noqa: F811
    trainer, server = jobs.trainer(keep=2), jobs.server(2)
    trainer.commit(1)
    trainer.commit(2)
    for wrong in "1", 1.0, True:
        error = server.fail(wrong, keeps=0)
        assert error.kinds == {"TypeError"} or "TypeError" in str(error) or "whole number" in str(error)
    server.start(pull_rank, [1, 2])
    assert "version" in str(server.failed(keeps=0))
    assert server.pull(1) == 1


def pull_rank(me, versions):
    return me.subscriber.pull(versions[me.rank])


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_one_rank_waits_for_newer_versions(jobs):  # noqa: F811
    trainer, server = jobs.trainer(), jobs.server(2)
    with pytest.raises(JobError, match=r"no newer version of 'policy' within 0.1 s") as error:
        server.call(call, "subscriber", "wait", timeout=0.1, ranks=[1])
    assert error.value.kinds == {"TimeoutError"}
    server.start(call, "subscriber", "wait", ranks=[1])
    time.sleep(0.05)
    assert server.busy(1)
    trainer.commit(4)
    assert server.results([1]) == [4]
    assert server.pull() == 4
    with pytest.raises(JobError, match="no newer version"):
        server.call(call, "subscriber", "wait", timeout=0.1, ranks=[0])
    assert server.call(call, "subscriber", "wait", newer_than=3, ranks=[0]) == [4]
    with pytest.raises(JobError, match="no newer version"):
        server.call(call, "subscriber", "wait", newer_than=4, timeout=0.1, ranks=[0])


def test_a_function_is_called_with_each_new_version(jobs):  # noqa: F811
    def remember(me):
        me.seen = []

    trainer, server = jobs.trainer(), jobs.server(prepare=remember, subscribe=False)
    trainer.commit(1)
    server.call(subscribe_and_remember)
    trainer.commit(2)
    until(lambda: server.call(own, "seen")[0][-1:] == [2])
    assert server.call(own, "seen")[0] in ([1, 2], [2])


def test_versions_of_a_restarted_publisher_are_newer_also_if_their_numbers_are_lower(jobs):  # noqa: F811
    def remember(me):
        me.seen = []

    trainer, server, idle = jobs.trainer(), jobs.server(2), jobs.server(prepare=remember, subscribe=False)
    trainer.commit(7)
    idle.call(subscribe_and_remember)
    assert server.pull() == 7
    until(lambda: idle.call(own, "seen")[0] == [7])
    trainer.kill()  # and the meeting point with it
    again = jobs.trainer()
    with pytest.raises(JobError, match="no newer version"):
        server.call(call, "subscriber", "wait", timeout=0.1, ranks=[1])
    again.commit(3)
    assert server.call(call, "subscriber", "wait", timeout=10) == [3, 3]
    until(lambda: idle.call(own, "seen")[0] == [7, 3])
    assert server.pull() == 3
    with pytest.raises(JobError, match="no newer version"):
        server.call(call, "subscriber", "wait", timeout=0.1)


def subscribe_and_remember(me):
    me.subscriber = sw.subscribe(me.weights.state, me.at, "policy", on_commit=me.seen.append)


# --- commits ---------------------------------------------------------------------------------------------------------


def test_versions_rise(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server()
    trainer.commit(5)
    for wrong, why in (
        (5, "does not follow version 5"),
        (4, "does not follow version 5"),
        ("6", "whole number"),
        (True, "whole number"),
        (-1, "whole number"),
    ):
        with pytest.raises(JobError, match=why) as error:
            trainer.commit(wrong, step=9)
        assert len(error.value.errors) == 2
    assert trainer.versions == [5]
    assert server.pull() == 5
    trainer.commit(6)
    assert server.pull() == 6


def test_ranks_that_commit_different_versions_commit_none(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server()
    trainer.commit(1)
    with pytest.raises(JobError, match="version") as error:
        trainer.call(commit_rank, [2, 3])
    assert len(error.value.errors) == 2
    assert trainer.versions == [1]
    assert trainer.call(call_versions) == [[1], [1]]
    assert server.pull() == 1
    trainer.commit(3)
    assert server.pull() == 3


def commit_rank(me, versions):
    me.publisher.commit(versions[me.rank])


def call_versions(me):
    return me.publisher.versions


def test_weights_that_became_another_shape_are_not_committed(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server()
    trainer.commit(1)
    trainer.call(cut_off, ranks=[1])
    with pytest.raises(JobError, match="'w' of the state dict") as error:
        trainer.call(commit_rank, [2, 2])
    assert len(error.value.errors) == 2
    assert server.pull() == 1


def cut_off(me):
    me.weights.state["w"].shards[0].resize_(1, 1)


def test_a_version_that_is_not_copied_can_be_pulled_until_it_is_drained(jobs):  # noqa: F811
    trainer = jobs.trainer(2)
    servers = [jobs.server(), jobs.server(2, host="b")]
    before = trainer.call(held_bytes)
    trainer.commit(1, copy=False)
    assert trainer.call(held_bytes) == before
    for server in servers:
        assert server.pull() == 1
    trainer.call(call, "publisher", "drained")
    assert trainer.versions == []
    trainer.call(fill, 4)
    assert [server.pull() for server in servers] == [1, 1]
    assert jobs.server().pull() is None
    trainer.commit(2, copy=False)
    trainer.commit(3)  # drains version 2 first
    assert trainer.versions == [3]
    assert [server.pull() for server in servers] == [3, 3]


def held_bytes(me):
    return me.publisher.bytes


def test_memory_of_versions_is_used_again(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2, keep=2), jobs.server()
    local = [sum(t.nbytes for shards in one.values() for t in shards) for one in trainer.call(shards)]
    for version in range(1, 8):
        trainer.commit(version)
        assert server.pull() == version
        until(lambda number=version: all(len(held) <= 2 and number in held for held in trainer.call(call_versions)))
    assert trainer.call(held_bytes) == [3 * bytes for bytes in local]


def shards(me):
    return me.weights.shards


# --- the end ---------------------------------------------------------------------------------------------------------


def test_publishers_and_subscribers_are_context_managers(jobs):  # noqa: F811
    trainer, server = jobs.trainer(publish=False), jobs.server(subscribe=False)
    trainer.start(publish_in_with)
    assert server.call(pull_in_with) == [(7, 7)]
    (jobs.folder / "done").touch()
    assert trainer.results() == [True]


def publish_in_with(me):
    with sw.publish(me.weights.state, me.at, "policy", patience=3) as publisher:
        me.weights.fill(7)
        publisher.commit(7)
        while not (me.folder / "done").exists():
            time.sleep(0.01)
    with pytest.raises(sw.ExchangeError, match="this publisher is closed"):
        publisher.commit(8)
    return True


def pull_in_with(me):
    with sw.subscribe(me.weights.state, me.at, "policy", patience=3) as subscriber:
        subscriber.wait()
        version = subscriber.pull()
    return version, me.weights.step()


def test_a_name_can_be_published_again_after_it_was_closed(jobs):  # noqa: F811
    hub = jobs.trainer(publish=False)
    hub.call(publish_under, "other")  # holds the meeting point
    trainer, servers = jobs.trainer(2), [jobs.server(2), jobs.server(2, host="b")]
    trainer.commit(8)
    for server in servers:
        assert server.pull() == 8
    trainer.close()
    trainer.close()
    again = jobs.trainer(1)
    again.commit(2, step=5)
    for server in servers:
        assert server.pull(step=5) == 2  # of a later publisher
        assert server.version == 2
    third = jobs.trainer(publish=False)
    with pytest.raises(JobError, match="already has a live publisher: close it first, or give another name="):
        third.publish()
    again.commit(3)
    assert servers[0].pull() == 3


def publish_under(me, name):
    me.publisher = sw.publish(me.weights.state, me.at, name, patience=3)


def test_several_names_at_one_meeting_point_do_not_mix(jobs):  # noqa: F811
    first, second = jobs.trainer(), jobs.trainer(name="value")
    first.commit(1)
    second.commit(4)
    assert jobs.server(2).pull() == 1
    assert jobs.server(2, name="value").pull() == 4
    first.commit(2)
    assert second.versions == [4]
