"""Subscribers that come and go by the hundred leave nothing behind; and odd settings of torch in one of them."""

import gc
import json
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from numbered import Weights
from separate_jobs import PATIENCE, by_columns, jobs, until  # noqa: F401

import shardwise as sw
from shardwise.publishing.meeting import Address, MeetingPoint

PROCESSES, EACH = 5, 20
COUNT = PROCESSES * EACH


def resources(me):
    """Descriptors and threads of a process: those of Python and of torch."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def come_and_go(me, times):
    """Subscribe, pull, look at all cells, and leave, again and again."""
    found = []
    for _ in range(times):
        me.weights.fill(0)
        with sw.subscribe(me.weights.state, me.at, "policy", patience=PATIENCE, timeout=20) as subscriber:
            found.append((subscriber.pull(), me.weights.step()))
    gc.collect()  # connections of pulls that failed because another one left end with their errors
    return found


def keys(folder):
    """All entries of the store that the library has written."""
    port, limit = json.loads((folder / "meeting").read_text())["port"], timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
    return sorted(key.split("/", 2)[2] for key in store.list_keys() if "shardwise/policy/" in key)


def without_collector(me):
    """Nothing may wait for Python's collector, which many trainers turn off."""
    gc.disable()


@pytest.mark.slow
def test_a_hundred_subscribers_that_come_and_go_leave_nothing_behind(jobs):  # noqa: F811
    trainer = jobs.trainer(2, serving=4, prepare=without_collector)
    trainer.commit(1)
    servers = [jobs.server(subscribe=False, host="b" if number < 2 else None) for number in range(PROCESSES)]
    for server in servers:
        server.call(come_and_go, 1)
    before = most = trainer.call(resources)
    for server in servers:
        server.start(come_and_go, EACH)
    while any(server.busy() for server in servers):
        now = trainer.call(resources)
        most = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(most, now, strict=True)]
        time.sleep(0.05)
    for server in servers:
        assert server.results() == [[(1, 1)] * EACH]
    for (files, threads), (most_files, most_threads) in zip(before, most, strict=True):
        assert most_files <= files + 20 * PROCESSES, (before, most)
        assert most_threads <= threads + 10 * PROCESSES, (before, most)
    until(lambda: trainer.call(subscribers, ranks=[0]) == [[]])
    until(lambda: back_to(trainer, before))
    until(lambda: len(keys(jobs.folder)) <= 5)  # those of ended pulls are removed after a while
    assert [key.split("/")[0] for key in keys(jobs.folder)] == ["beat", "beat", "catalog", "publisher", "versions"]


def back_to(trainer, before):
    """True if the ranks of a trainer have no more than they had, but for a few connections that are used again."""
    now = trainer.call(resources)
    return all(a <= c + 12 and b <= d for (a, b), (c, d) in zip(now, before, strict=True))


def subscribers(me):
    return me.publisher._dispatcher.subscribers


@pytest.mark.slow
@pytest.mark.parametrize("hub", [False, True], ids=["meeting at the publisher", "meeting at a hub"])
def test_a_hundred_subscribers_at_a_time_cost_the_trainer_little(jobs, hub):  # noqa: F811
    if hub:
        jobs.start().call(hold, jobs.at)
    trainer = jobs.trainer(serving=4)
    servers = [jobs.server(subscribe=False, host="b" if number < 2 else None) for number in range(PROCESSES)]
    ((files, threads),) = trainer.call(resources)
    for server in servers:
        server.start(subscribe_often, EACH)
    for server in servers:
        server.results()
    ((idle_files, idle_threads),) = trainer.call(resources)
    assert idle_files <= files + (0 if hub else 2 * COUNT) + 30
    assert idle_threads <= threads + 2
    trainer.commit(1)
    for server in servers:
        server.start(pull_all)
    most_files, most_threads = 0, 0
    while any(server.busy() for server in servers):
        ((now_files, now_threads),) = trainer.call(resources)
        most_files, most_threads = max(most_files, now_files), max(most_threads, now_threads)
        time.sleep(0.02)
    assert [server.results() for server in servers] == [[[(1, 1)] * EACH]] * PROCESSES
    assert most_files <= idle_files + 4 * EACH  # of the pulls that are served at a time
    assert most_threads <= idle_threads + 4 * 5


def hold(me, at):
    me.meeting = MeetingPoint(Address.of(at), None)
    assert me.meeting.hold()


def subscribe_often(me, times):
    """Many servers in one process, each with its own weights."""
    me.many = []
    for _ in range(times):
        weights = Weights(0, me.weights.layouts, me.weights.dtypes)
        me.many.append((sw.subscribe(weights.state, me.at, "policy", patience=PATIENCE, timeout=20), weights))


def pull_all(me):
    return [(subscriber.pull(), weights.step()) for subscriber, weights in me.many]


def test_several_subscribers_of_one_process_do_not_mix(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server(subscribe=False)
    trainer.commit(1)
    assert server.call(subscribe_in_threads, 4) == [[(1, 1)] * 4]


def subscribe_in_threads(me, count):
    found = [None] * count

    def run(at):
        weights = Weights(0, me.weights.layouts, me.weights.dtypes)
        with sw.subscribe(weights.state, me.at, "policy", patience=PATIENCE) as subscriber:
            found[at] = subscriber.pull(), weights.step()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# --- odd settings ----------------------------------------------------------------------------------------------------


def on_meta(me):
    torch.set_default_device("meta")


def in_doubles(me):
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("odd", [on_meta, in_doubles])
@pytest.mark.parametrize("host", [None, "b"], ids=["mapped", "sent"])
def test_defaults_of_torch_make_no_difference(jobs, odd, host):  # noqa: F811
    trainer = jobs.trainer(2, prepare=odd)
    server = jobs.server(2, by_columns(2), prepare=odd, host=host)
    for version in 1, 2:
        trainer.commit(version)
        assert server.pull() == version


def test_weights_of_an_inference_mode_are_published_and_filled(jobs):  # noqa: F811
    trainer, server = jobs.trainer(), jobs.server()
    trainer.call(commit_in_inference_mode, 1)
    assert server.call(pull_in_inference_mode) == [(1, 1)]
    assert server.pull() == 1


def commit_in_inference_mode(me, version):
    with torch.inference_mode():
        me.weights.fill(version)
        me.publisher.commit(version)


def pull_in_inference_mode(me):
    with torch.inference_mode():
        return me.subscriber.pull(), me.weights.step()


def test_parameters_that_need_gradients_are_published_and_filled(jobs):  # noqa: F811
    def require(me):
        for shards in me.weights.shards.values():
            for shard in shards:
                if shard.is_floating_point():
                    shard.requires_grad_()

    trainer, server = jobs.trainer(2, prepare=require), jobs.server(2, prepare=require)
    trainer.call(commit_without_gradients, 1)
    assert server.call(pull_without_gradients) == [(1, 1)] * 2


def commit_without_gradients(me, version):
    with torch.no_grad():
        me.weights.fill(version)
    me.publisher.commit(version)


def pull_without_gradients(me):
    version = me.subscriber.pull()
    with torch.no_grad():
        return version, me.weights.step()
