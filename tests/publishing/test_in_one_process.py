"""Publishers and subscribers of one process, and of ranks that do other things together, too."""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from separate_jobs import LIMIT, free_port, until

import shardwise as sw
from shardwise.errors import RefusedValueError
from shardwise.publishing.publisher import Publisher
from shardwise.publishing.target import PullTarget
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


def test_a_publisher_that_is_closed_waits_for_connections_to_a_subscriber_that_is_gone(tmp_path, monkeypatch):
    """A thread inside torch would abort the process as it ends."""
    monkeypatch.setattr("shardwise.publishing.subscriber.join", interrupt)
    at = tmp_path / "meeting"
    publisher = sw.publish({"w": torch.ones(4)}, at, "policy", patience=4)
    publisher.commit(1)
    subscriber = sw.subscribe({"w": torch.zeros(4)}, at, "policy", patience=4, verify=True)
    with pytest.raises(KeyboardInterrupt):
        subscriber.pull()
    until(lambda: pulls_that_are_served() == 1)
    publisher.close()
    assert pulls_that_are_served() == 0
    assert publisher.versions == []
    subscriber.close()


def interrupt(*_):
    raise KeyboardInterrupt


def test_weights_are_of_no_version_after_an_interrupt_while_they_are_received_in_place(tmp_path, monkeypatch):
    at, source, target = tmp_path / "meeting", {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    publisher = sw.publish(source, at, "policy", patience=PATIENCE)
    options = {"patience": PATIENCE, "verify": True, "atomic": False}
    with publisher, sw.subscribe(target, at, "policy", **options) as subscriber:
        publisher.commit(1)
        assert subscriber.pull() == 1
        source["w"].fill_(2)
        publisher.commit(2)
        with monkeypatch.context() as patch:
            patch.setattr(PullTarget, "received", interrupt)
            with pytest.raises(KeyboardInterrupt):
                subscriber.pull()
        assert target["w"].tolist() == [2] * 4
        with pytest.raises(sw.ExchangeError, match="the weights are of no version: a pull of version 2 was broken off"):
            _ = subscriber.version
        assert subscriber.pull() == subscriber.version == 2
        with monkeypatch.context() as patch:
            patch.setattr(PullTarget, "received", interrupt)
            publisher.commit(3)
            with pytest.raises(KeyboardInterrupt):
                subscriber.pull()
        publisher.close()
        with pytest.raises(sw.ExchangeError):
            subscriber.pull()
        assert subscriber._client.weights == "The weights may be a mixture of versions: pull again"


def test_a_version_cannot_be_read_before_all_ranks_have_agreed(tmp_path, monkeypatch):
    readable, agree = list[list[int]](), Publisher._agree

    def look(publisher, *args):
        finish = agree(publisher, *args)

        def look_and_finish():
            readable.append(publisher._versions.numbers)
            finish()
            if len(readable) == 2:
                raise sw.ExchangeError("another rank refuses")

        return look_and_finish

    monkeypatch.setattr(Publisher, "_agree", look)
    with sw.publish({"w": torch.ones(4)}, tmp_path / "meeting", "policy", patience=PATIENCE) as publisher:
        publisher.commit(1)
        with pytest.raises(sw.ExchangeError, match="another rank refuses"):
            publisher.commit(2)
        assert readable == [[], [1]]
        assert publisher._versions.numbers == [1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (torch.eye(3).to_sparse(), "'w' of the state dict has no memory to read or write: it is torch.sparse_coo"),
        (torch.ones(3, dtype=torch.complex64).conj(), "'w' of the state dict is a conjugate or negative view"),
    ],
    ids=["sparse", "conjugate"],
)
@pytest.mark.parametrize("warm", [True, False])
def test_tensors_that_cannot_be_read_are_refused_before_anything_is_published(tmp_path, wrong, why, warm):
    with pytest.raises((sw.ExchangeError, ValueError), match=why):
        sw.publish({"w": wrong}, tmp_path / "meeting", "policy", patience=PATIENCE, warm=warm)
    assert not (tmp_path / "meeting").exists()


def test_ranks_that_give_different_secrets_are_refused(tmp_path):
    def work(rank):
        at, key, groups = f"127.0.0.1:{port}", "ab"[rank], [dist.new_group([0]), dist.new_group([0, 1])]
        with pytest.raises(RefusedValueError, match="the ranks give different secrets: give the same key= on all"):
            sw.publish({"w": torch.ones(4)}, at, "policy", key=key, patience=PATIENCE)
        publisher = sw.publish({"w": torch.ones(4)}, at, "policy", key="a", group=groups[0]) if rank == 0 else None
        with pytest.raises(RefusedValueError, match="the ranks give different secrets: give the same key= on all"):
            sw.subscribe({"w": torch.ones(4)}, at, "policy", key=key, patience=PATIENCE, group=groups[1])
        if publisher:
            publisher.close()
        return True

    port = free_port()
    assert on_ranks(2, work) == [True, True]


def test_the_timeout_of_a_group_may_be_shorter_than_that_of_subscribe(tmp_path):
    def work(rank):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        with pytest.raises(sw.ExchangeError, match=r"no publisher of 'policy' within 2\.5 s") as error:
            sw.subscribe({"w": torch.ones(4)}, tmp_path / "meeting", "policy", group=group, timeout=2.5)
        return str(error.value)

    first, second = on_ranks(2, work)
    assert first == second


def test_a_function_may_pull_at_once_and_is_called_again_after_an_error(tmp_path, caplog):
    at, called, made = tmp_path / "meeting", list[int](), threading.Event()

    def on_commit(version):
        made.wait(LIMIT)
        called.append(subscriber.pull())
        if version == 1:
            raise ZeroDivisionError

    with sw.publish({"w": torch.ones(4)}, at, "policy", patience=PATIENCE) as publisher:
        publisher.commit(1)
        options = {"patience": PATIENCE, "on_commit": on_commit}
        with sw.subscribe({"w": torch.zeros(4)}, at, "policy", **options) as subscriber:
            made.set()
            until(lambda: "on_commit failed for version 1. It is called again for the next one" in caplog.text)
            publisher.commit(2)
            until(lambda: len(called) == 2)
    assert called == [1, 2]
    assert caplog.text.count("on_commit failed") == 1


def test_numbers_and_timeouts_of_a_wait_are_checked(tmp_path):
    at = tmp_path / "meeting"
    with (
        sw.publish({"w": torch.ones(4)}, at, "policy"),
        sw.subscribe({"w": torch.zeros(4)}, at, "policy") as subscriber,
    ):
        with pytest.raises(TypeError, match="version '1' is of type str: give a whole number"):
            subscriber.wait(newer_than="1", timeout=0)
        with pytest.raises(ValueError, match="timeout='soon': give seconds, 0 or more"):
            subscriber.wait(timeout="soon")


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
