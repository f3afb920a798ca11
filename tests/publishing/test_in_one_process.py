"""Publishers and subscribers of one process, and of ranks that do other things together, too."""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from separate_jobs import until

import shardwise as sw
from shardwise.errors import RefusedValueError
from shardwise.testing import on_ranks

PATIENCE = 3.0


def test_a_version_that_is_sent_inside_a_process_arrives_whole(tmp_path):
    at, source, target = tmp_path / "meeting", {"w": torch.arange(1000.0)}, {"w": torch.zeros(1000)}
    with (
        sw.publish(source, at, "policy", patience=PATIENCE) as publisher,
        sw.subscribe(target, at, "policy", patience=PATIENCE, verify=True) as subscriber,
    ):
        for version in range(3):
            source["w"].add_(1)
            publisher.commit(version)
            assert subscriber.pull() == version
            assert torch.equal(target["w"], source["w"])


def test_a_version_is_sent_between_all_ranks_of_a_job_that_publishes_and_subscribes(tmp_path):
    def work(rank):
        source = sw.ShardedTensor(torch.full((4, 6), float(rank)), "8x6/S0@2")
        target = sw.empty("8x6/S1@2")
        at = tmp_path / "meeting"
        with (
            sw.publish({"w": source}, at, "policy", patience=PATIENCE) as publisher,
            sw.subscribe({"w": target}, at, "policy", patience=PATIENCE, verify=True) as subscriber,
        ):
            for version in range(2):
                source.local_tensor().add_(10)
                publisher.commit(version)
                dist.barrier()
                assert subscriber.pull() == version
                whole = torch.tensor([0.0, 1.0]).repeat_interleave(4) + 10 * (version + 1)
                assert torch.equal(target.local_tensor(), whole[:, None].expand(8, 3))
                dist.barrier()
        return True

    assert on_ranks(2, work) == [True, True]


def test_ranks_go_on_together_after_one_of_them_has_subscribed_to_another_and_left(tmp_path):
    def work(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        source, target = sw.ShardedTensor(torch.ones(200, 400), "400x400/S0@2"), sw.empty("400x400/S1@2")
        sync, weights, at = sw.Resharder({"w": source}, {"w": target}), {"w": torch.zeros(1000)}, tmp_path / "meeting"
        sync.run()
        if rank == 0:
            publisher = sw.publish(weights, at, "policy", group=groups[0], patience=PATIENCE)
            publisher.commit(1)
        else:
            with sw.subscribe(weights, at, "policy", group=groups[1], patience=PATIENCE) as subscriber:
                subscriber.wait()
                subscriber.pull()
        dist.barrier()
        if rank == 0:
            until(lambda: not publisher._server._addresses)  # it has heard that the subscriber has left
        dist.barrier()
        for step in (2.0, 3.0):
            source.local_tensor().fill_(step)
            sync.run()
            assert torch.equal(target.local_tensor(), torch.full((400, 200), step))
        return True

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize(
    ("again", "why"),
    [
        ({"w": torch.arange(8.0)}, r"'w' has shape \(8,\) and torch.float32 now, but had shape \(4,\)"),
        ({"w": torch.arange(4)}, "'w' has shape .* and torch.int64 now, but had shape .* and torch.float32"),
        ({"v": torch.arange(4.0)}, "'w' is not published, but had shape"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_a_restarted_publisher_of_other_tensors_is_refused(tmp_path, again, why):
    at, target = tmp_path / "meeting", {"w": torch.zeros(4)}
    with sw.publish({"w": torch.ones(4)}, at, "policy", patience=PATIENCE) as publisher:
        subscriber = sw.subscribe(target, at, "policy", patience=PATIENCE)
        publisher.commit(1)
        subscriber.pull()
    with sw.publish(again, at, "policy", patience=PATIENCE) as publisher, subscriber:
        publisher.commit(2)
        with pytest.raises(RefusedValueError, match=why):
            subscriber.pull()
        assert target["w"].tolist() == [1, 1, 1, 1]
        assert subscriber.version == 1


def test_targets_that_share_some_memory_are_refused(tmp_path):
    at, memory = tmp_path / "meeting", torch.zeros(6)
    with sw.publish({"a": torch.ones(4), "b": torch.ones(4)}, at, "policy", patience=PATIENCE) as publisher:
        publisher.commit(1)
        with pytest.raises(ValueError, match="'a' of the target shares memory with 'b' of the target"):
            sw.subscribe({"a": memory[:4], "b": memory[2:]}, at, "policy", patience=PATIENCE)
        target = {"a": torch.nn.Parameter(torch.zeros(4)), "b": torch.nn.Parameter(torch.zeros(4))}
        with sw.subscribe(target, at, "policy", patience=PATIENCE) as subscriber:
            subscriber.pull()
            target["a"].data, target["b"].data = memory[:4], memory[2:]
            publisher.commit(2)
            with pytest.raises(ValueError, match="'a' of the target shares memory with 'b' of the target"):
                subscriber.pull()
            target["b"].data = memory[:4]  # tied weights
            assert subscriber.pull() == 2


def test_a_publisher_that_is_closed_ends_the_pulls_that_it_serves(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.publishing.subscriber.answer_challenge", interrupt)
    at = tmp_path / "meeting"
    publisher = sw.publish({"w": torch.ones(4)}, at, "policy", patience=60)
    publisher.commit(1)
    subscriber = sw.subscribe({"w": torch.zeros(4)}, at, "policy", patience=60, verify=True)
    with pytest.raises(KeyboardInterrupt):
        subscriber.pull()
    until(lambda: pulls_that_are_served() == 1)
    publisher.close()
    assert pulls_that_are_served() == 0
    subscriber.close()


def pulls_that_are_served():
    return sum(thread.name == "shardwise pull" for thread in threading.enumerate())


def test_threads_pull_one_after_the_other(tmp_path):
    at, source, target = tmp_path / "meeting", {"w": torch.zeros(10**5)}, {"w": torch.zeros(10**5)}
    with (
        sw.publish(source, at, "policy", patience=PATIENCE) as publisher,
        sw.subscribe(target, at, "policy", patience=PATIENCE) as subscriber,
        ThreadPoolExecutor(2) as threads,
    ):
        for version in range(8):
            source["w"].fill_(version)
            publisher.commit(version)
            pulls = [threads.submit(subscriber.pull) for _ in range(2)]
            assert [one.result() for one in pulls] == [version, version]
            assert torch.equal(target["w"], source["w"])


def test_a_forked_process_leaves_those_of_its_parent_alone(tmp_path):
    at, source, target = tmp_path / "meeting", {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with (
        sw.publish(source, at, "policy", patience=PATIENCE) as publisher,
        sw.subscribe(target, at, "policy", patience=PATIENCE) as subscriber,
    ):
        publisher.commit(1)
        subscriber.pull()
        assert fork(partial(refuse_all, publisher, subscriber)) == 0
        assert at.exists()
        publisher.commit(2)
        assert subscriber.pull() == 2
        with sw.subscribe({"w": torch.zeros(4)}, at, "policy", patience=PATIENCE, timeout=1) as another:
            assert another.pull() == 2


def fork(work):
    """The exit code of a forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refuse_all(publisher, subscriber):
    for call in (partial(publisher.commit, 2), subscriber.pull):
        with pytest.raises(sw.ExchangeError, match="of the process that this one was forked from"):
            call()
    subscriber.close()
    publisher.close()  # as at the end of the interpreter
    return 0


def test_a_version_with_a_value_out_of_range_is_refused_at_once_and_the_next_one_is_mapped_again(tmp_path, caplog):
    at, source, target = tmp_path / "meeting", {"w": torch.ones(4)}, {"w": torch.zeros(4, dtype=torch.float16)}
    with (
        sw.publish(source, at, "policy", patience=PATIENCE) as publisher,
        sw.subscribe(target, at, "policy", patience=PATIENCE, cast=True) as subscriber,
    ):
        source["w"][0] = 1e9
        publisher.commit(1)
        with pytest.raises(RefusedValueError, match=r"beyond the range of torch\.float16"):
            subscriber.pull()
        until(lambda: any("failed" in line for line in caplog.messages))
        source["w"][0] = 2
        publisher.commit(2)
        assert subscriber.pull() == 2
        assert target["w"].tolist() == [2, 1, 1, 1]
        assert sum("failed" in line for line in caplog.messages) == 1


def test_a_subscriber_with_terms_of_partial_sums_does_not_pass_them_on(tmp_path, monkeypatch):
    def work(rank):
        monkeypatch.setattr("shardwise.publishing.local_job.host_of_this_process", lambda: "another")
        source, at = {"w": sw.ShardedTensor(torch.full((4,), rank + 1.0), "8/S0@2")}, tmp_path / "meeting"
        targets = [{"w": sw.empty("8/P@2")}, {"w": sw.empty("8/S0@2")}]
        with sw.publish(source, at, "policy", patience=PATIENCE) as publisher:
            publisher.commit(1)
            dist.barrier()
            subscribers = [sw.subscribe(target, at, "policy", patience=PATIENCE) for target in targets]
            for subscriber in subscribers:
                subscriber.pull()
            for subscriber in subscribers:
                subscriber.close()
        return [target["w"].local_tensor().tolist() for target in targets]

    (terms, rows), (others, more) = on_ranks(2, work)
    assert (torch.tensor(terms) + torch.tensor(others)).tolist() == rows + more == [1.0] * 4 + [2.0] * 4
