"""What does not fit is refused when a job subscribes, with the first difference; the publisher goes on."""

import pytest
import torch
from separate_jobs import DTYPES, JobError, by_rows, jobs, until  # noqa: F401

import shardwise as sw
from shardwise import Layout


def larger(size):
    return {**by_rows(size), "w": Layout.chunk((13, 10), 0, size)}


def another_name(size):
    return {("v" if name == "w" else name): layout for name, layout in by_rows(size).items()}


def test_the_first_difference_is_told_on_both_sides(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server()
    trainer.commit(1)
    differences = [
        (larger(2), {}, r"'w' .*\(12, 10\).*\(13, 10\)"),
        (another_name(2), {}, "'v'"),
        (by_rows(2), {"w": torch.int64}, "'w' .*int32.*int64"),
        (by_rows(2), {"b": torch.float64}, "'b' .*float32.*float64"),
    ]
    for layouts, dtypes, why in differences:
        other = jobs.server(2, layouts, {**DTYPES, **dtypes}, subscribe=False)
        with pytest.raises(JobError, match=why) as error:
            other.subscribe()
        assert len(error.value.errors) == 2
        other.kill()
    until(lambda: len(warnings(trainer)) == len(differences))
    assert all("does not fit" in line for line in warnings(trainer))
    assert server.pull() == 1
    trainer.commit(2)
    assert server.pull() == 2


def warnings(trainer):
    return [line for line in trainer.log() if "WARNING" in line]


def test_wrong_options_are_refused_on_both_sides(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2, publish=False), jobs.server(2, subscribe=False)
    wrong = [
        ({"name": "a/b"}, "give a short name"),
        ({"name": ""}, "give a short name"),
        ({"at": "nowhere"}, "is not a meeting point"),
        ({"at": "host:123456"}, "is not a meeting point"),
        ({"at": "10.1.2.3:29600"}, "can be reached from other hosts: give key="),
        ({"key": ""}, "key= is empty"),
        ({"patience": 1}, "patience=1: give seconds, at least 3"),
        ({"patience": float("nan")}, "patience=nan: give seconds, at least 3"),
    ]
    for options, why in wrong:
        for call in trainer.publish, server.subscribe:
            with pytest.raises(JobError, match=why) as error:
                call(**options)
            assert len(error.value.errors) == 2
    for options in {"keep": 0}, {"serving": 0}, {"keep": 1.5}, {"backend": "mpi"}:
        with pytest.raises(JobError, match=next(iter(options))):
            trainer.publish(**options)
    trainer.publish().commit(1)
    assert server.subscribe().pull() == 1


def test_ranks_that_want_different_things_are_refused(jobs):  # noqa: F811
    layouts = {"x": Layout.chunk((4,), 0, 2), "y": Layout.chunk((4,), 0, 2)}
    trainer, server = jobs.trainer(2, layouts), jobs.server(2, layouts, subscribe=False)
    with pytest.raises(JobError, match="name") as error:
        server.call(subscribe_rank, [{"name": "a"}, {"name": "b"}])
    assert len(error.value.errors) == 2
    with pytest.raises(JobError, match="different rename=") as error:
        server.call(subscribe_rank, [{}, {"rename": {"x": "y", "y": "x"}}])
    assert len(error.value.errors) == 2
    trainer.commit(1)
    assert server.subscribe().pull() == 1


def subscribe_rank(me, options):
    given = {"name": "policy", **options[me.rank]}
    me.subscriber = sw.subscribe(me.weights.state, me.at, given.pop("name"), timeout=5, **given)


def test_nobody_publishes_in_time(jobs):  # noqa: F811
    server = jobs.server(2, subscribe=False)
    with pytest.raises(JobError, match=r"no publisher of 'policy' within 0.3 s: .*meeting point"):
        server.subscribe(timeout=0.3)
    trainer = jobs.trainer(name="another")
    with pytest.raises(
        JobError, match=r"no publisher of 'policy' within 0.3 s: nobody publishes under that name there"
    ):
        server.subscribe(timeout=0.3)
    trainer.close()


def test_weights_that_cannot_be_written_are_refused(jobs):  # noqa: F811
    def expand(me):
        me.weights.state["b"] = sw.ShardedTensor([torch.zeros(1).expand(7)], Layout.replicated((7,), 1))

    jobs.trainer()
    server = jobs.server(prepare=expand, subscribe=False)
    with pytest.raises(JobError, match="'b' of the target"):
        server.subscribe()


def test_a_value_that_its_target_cannot_hold_is_refused_and_nothing_is_written(jobs):  # noqa: F811
    layouts = {"x": Layout.replicated((4,), 1)}
    trainer = jobs.trainer(1, layouts, {"x": torch.float32})
    servers = [jobs.server(1, layouts, {"x": torch.float16}, cast=True, host=host) for host in (None, "b")]
    trainer.call(commit_value, 1, 1e6)
    for server in servers:
        assert "'x'" in str(server.fail(keeps=0))
        assert server.version is None
    trainer.call(commit_value, 2, 4.0)
    for server in servers:
        assert server.call(pull_values) == [(2, [4.0] * 4)]


def commit_value(me, version, value):
    me.weights.state["x"].shards[0].fill_(value)
    me.publisher.commit(version)


def pull_values(me):
    return me.subscriber.pull(), me.weights.state["x"].shards[0].tolist()
