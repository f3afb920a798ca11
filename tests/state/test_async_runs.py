"""Asynchronous runs: the values are those of the call, whatever the caller does beside the move."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from devices import device_type
from models import held, lies, numbers, sharded, weights
from ranks import ranks  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.containers.delivered import DeliveredTensor, Delivery

pytestmark = pytest.mark.slow

ROWS, COLUMNS = "64x48/S0@2", "64x48/S1@2"
WHOLE = numbers(64, 48)


def pair(**options):
    """A source, a target, and the sync from one to the other."""
    source, target = held(WHOLE, ROWS), held(WHOLE * 0, COLUMNS)
    return source, target, sw.Resharder({"w": source}, {"w": target}, **options)


def change(tensor, value):
    with torch.no_grad():
        tensor.local_tensor().fill_(value)


def add(tensor, value):
    with torch.no_grad():
        tensor.local_tensor().add_(value)


def message(call):
    """What it says when it fails."""
    with pytest.raises(Exception) as error:  # noqa: PT011  the text is looked at by the test
        call()
    return f"{type(error.value).__name__}: {error.value}", getattr(error.value, "__notes__", [])


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.devices
@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "group"}, {"verify": True}, {"max_bytes": 2000}, {"verify": True, "max_bytes": 2000}],
    ids=str,
)
def test_the_values_are_those_of_the_call(ranks, options):  # noqa: F811
    def run(rank):
        source, target, sync = pair(**options)
        for step in range(4):
            handle = sync.run(async_op=True)
            add(source, 1)  # at once
            handle.wait()
            assert handle.done()
            handle.wait()
            lies(target, WHOLE + step, COLUMNS)

    ranks(2, run)


def test_runs_in_a_row_wait_for_each_other(ranks):  # noqa: F811
    def run(rank):
        source, target, sync = pair()
        handles = []
        for _ in range(5):
            handles.append(sync.run(async_op=True))
            assert all(handle.done() for handle in handles[:-1])
            add(source, 1)
        handles[-1].wait()
        lies(target, WHOLE + 4, COLUMNS)
        sync.run()
        lies(target, WHOLE + 5, COLUMNS)
        sync.run(async_op=True)
        add(source, 1)
        sync.run()  # waits for the last
        lies(target, WHOLE + 6, COLUMNS)

    ranks(2, run)


def test_a_model_is_trained_while_its_weights_move(ranks):  # noqa: F811
    """FSDP's own collectives, and those of the caller, beside the move."""

    def run(rank):
        source, target = sharded("fsdp", seed=1), sharded("tp", seed=2)
        sync = sw.Resharder(source.state_dict(), target.state_dict())
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
        for step in range(3):
            expected = weights(source)
            handle = sync.run(async_op=True)
            source(torch.arange(8).reshape(1, 8) + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            total = torch.tensor([float(rank)])
            for _ in range(20):
                dist.all_reduce(total)
                total /= 4
            handle.wait()
            found = weights(target)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)

    ranks(4, run)


def test_other_exchanges_and_runs_at_the_same_time(ranks):  # noqa: F811
    """Runs of several Resharders, beside calls of the caller's own group that use the same sockets."""

    def run(rank):
        syncs = [pair(), pair(transport="group"), pair(max_bytes=2000)]
        own = held(WHOLE, ROWS)
        for step in range(8):
            handles = [sync.run(async_op=True) for *_, sync in syncs]
            for source, *_ in syncs:
                add(source, 1)
            other = sw.reshard(own, COLUMNS, async_op=True)
            lies(sw.reshard(own, COLUMNS), WHOLE, COLUMNS)
            lies(other.wait(), WHOLE, COLUMNS)
            sw.release_staging()
            for handle, (_, target, _) in zip(reversed(handles), reversed(syncs), strict=True):
                handle.wait()
                lies(target, WHOLE + step, COLUMNS)

    ranks(2, run)


def test_ranks_may_choose_after_the_first_run(ranks):  # noqa: F811
    """Servers wait in their call, trainers do not."""

    def run(rank):
        source, target, sync = pair()
        sync.run(async_op=True).wait()
        for step in range(3):
            handle = sync.run(async_op=rank == 0)
            add(source, 1)
            if handle is not None:
                handle.wait()
            lies(target, WHOLE + step, COLUMNS)

    ranks(2, run)


def test_the_first_run_must_be_asynchronous_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        _, target, sync = pair()
        said = message(lambda: sync.run(async_op=rank == 0))[0]
        sync.run(async_op=True).wait()
        lies(target, WHOLE, COLUMNS)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "the ranks disagree on the operation" in first


def test_memory_that_was_replaced_is_found(ranks):  # noqa: F811
    def run(rank):
        weight = torch.nn.Parameter(held(WHOLE, ROWS).local_tensor())
        target = held(WHOLE * 0, COLUMNS)
        mesh = DeviceMesh(device_type(), [0, 1])
        source = DTensor.from_local(weight, mesh, [Shard(0)])
        sync = sw.Resharder({"w": source}, {"w": target})
        for step in range(3):
            handle = sync.run(async_op=True)
            source._local_tensor = source._local_tensor.detach() + 1
            handle.wait()
            lies(target, WHOLE + step, COLUMNS)

    ranks(2, run)


@pytest.mark.devices
def test_casts_and_remaps(ranks):  # noqa: F811
    def run(rank):
        given = {f"w{at}": held(WHOLE + at, ROWS) for at in range(2)}
        target = {"all": held(torch.zeros(128, 48, dtype=torch.bfloat16), "128x48/S1@2")}
        sync = sw.Resharder(given, target, remap=[sw.Concat("all", ["w0", "w1"])], cast=True)
        handle = sync.run(async_op=True)
        for one in given.values():
            change(one, 7.0)
        handle.wait()
        lies(target["all"], torch.cat([WHOLE, WHOLE + 1]).bfloat16(), "128x48/S1@2")

    ranks(2, run)


def test_what_autograd_saved_of_the_target_is_not_used(ranks):  # noqa: F811
    def run(rank):
        _, target, sync = pair()
        local = target.local_tensor()
        versions = [local._version]
        x = torch.ones_like(local, requires_grad=True)
        product = (x * local).sum()
        handle = sync.run(async_op=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        handle.wait()
        versions.append(local._version)
        sync.run(async_op=True).wait()
        assert versions[0] < versions[1] < local._version

    ranks(2, run)


def test_the_size_of_the_snapshot_is_known(ranks):  # noqa: F811
    def run(rank):
        source = {"w": held(WHOLE, "64x48/S0@1"), "b": held(numbers(10), "10/R@2")}
        target = {"w": held(WHOLE, "64x48/S1@2"), "b": held(numbers(10), "10/R@2")}
        sync = sw.Resharder(source, target)
        sizes = [sync.snapshot_bytes]
        sync.run(async_op=True).wait()
        return [*sizes, sync.snapshot_bytes]

    assert ranks(2, run) == [[4 * (64 * 48 + 10)] * 2, [40, 40]]


# --- errors ----------------------------------------------------------------------------------------------------------


def spoil(source, target, what):
    """Memory that does not fit; what puts it back."""
    tensor = {"source": source, "target": target}[what]
    good = tensor.shards[0].data
    tensor.shards[0].data = good[:-1].clone()

    def repair():
        tensor.shards[0].data = good

    return repair


@pytest.mark.devices
@pytest.mark.parametrize("what", ["source", "target"])
@pytest.mark.parametrize("options", [{}, {"verify": True}], ids=str)
def test_an_error_of_one_rank_is_raised_by_the_wait_of_all(ranks, what, options):  # noqa: F811
    def run(rank):
        source, target, sync = pair(**options)
        sync.run(async_op=True).wait()
        repair = spoil(source, target, what) if rank == 1 else lambda: None
        handle = sync.run(async_op=True)
        said, _ = message(handle.wait)
        assert message(handle.wait)[0] == said
        repair()
        add(source, 1)
        sync.run(async_op=True).wait()
        lies(target, WHOLE + 1, COLUMNS)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "rank 1 cannot take part in this sync" in first
    assert f"'w' of the {what}" in first


@pytest.mark.parametrize("again", [False, True])
def test_an_error_that_nobody_saw_is_raised_by_the_next_run(ranks, again):  # noqa: F811
    def run(rank):
        source, target, sync = pair()
        repair = spoil(source, target, "source") if rank == 1 else lambda: None
        sync.run(async_op=True)
        repair()
        said, notes = message(lambda: sync.run(async_op=again))
        assert any("for which nobody waited" in note for note in notes)
        sync.run()
        lies(target, WHOLE, COLUMNS)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "'w' of the source" in first


def test_a_rank_that_saw_the_error_hears_of_one_that_did_not(ranks):  # noqa: F811
    def run(rank):
        source, target, sync = pair()
        repair = spoil(source, target, "source") if rank == 1 else lambda: None
        handle = sync.run(async_op=True)
        if rank == 0:
            message(handle.wait)
        else:
            while not handle.done():
                time.sleep(0.01)
        repair()
        said, _ = message(sync.run)
        assert "'w' of the source" in said
        sync.run()
        lies(target, WHOLE, COLUMNS)

    ranks(2, run)


def test_overflow_is_refused_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        source, target = held(WHOLE, ROWS), held(WHOLE.half() * 0, COLUMNS)
        sync = sw.Resharder({"w": source}, {"w": target}, cast=True)
        sync.run(async_op=True).wait()
        if rank == 1:
            change(source, 1e6)
        handle = sync.run(async_op=True)
        change(source, 1.0)
        said, _ = message(handle.wait)
        lies(target, WHOLE.half(), COLUMNS)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "beyond the range of torch.float16" in first


@pytest.mark.parametrize("verify", [False, True])
def test_memory_on_both_sides_is_refused(ranks, verify):  # noqa: F811
    """A tensor that does not change may be both; but an asynchronous run would write it back after it was trained."""

    def run(rank):
        source, target = held(WHOLE, ROWS), held(WHOLE * 0, COLUMNS)
        both = held(numbers(8), "8/R@2")
        if rank == 1:
            sync = sw.Resharder({"w": source, "b": both}, {"w": target, "b": both}, verify=verify)
        else:
            sync = sw.Resharder({"w": source, "b": both}, {"w": target, "b": held(numbers(8), "8/R@2")}, verify=verify)
        sync.run()
        said, _ = message(sync.run(async_op=True).wait)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "'b' of the target shares memory with 'b' of the source: an asynchronous run would" in first


def test_targets_that_are_handed_over(ranks):  # noqa: F811
    def run(rank):
        source, found = held(WHOLE, ROWS), []
        layout = sw.parse(COLUMNS)
        delivery = Delivery(("w",), lambda filled: found.append(filled["w"][0].clone()))
        target = DeliveredTensor(delivery, layout, torch.float32, device=torch.device("cpu"), group=None, owner=rank)
        sync = sw.Resharder({"w": source}, {"w": target})
        for step in range(2):
            handle = sync.run(async_op=True)
            add(source, 1)
            handle.wait()
            torch.testing.assert_close(found[step], (WHOLE + step).chunk(2, 1)[rank], rtol=0, atol=0)
        delivery = sync._target._delivered["w"].delivery
        object.__setattr__(delivery, "take", refuse if rank == 1 else lambda filled: None)
        return message(sync.run(async_op=True).wait)[0]

    first, second = ranks(2, run)
    assert first == second
    assert "MemoryError: no memory" in first


def test_inference_mode(ranks):  # noqa: F811
    def run(rank):
        with torch.inference_mode():
            source, target, sync = pair()
            for step in range(2):
                handle = sync.run(async_op=True)
                add(source, 1)
                handle.wait()
                lies(target, WHOLE + step, COLUMNS)

    ranks(2, run)


def test_a_snapshot_that_cannot_be_allocated_is_an_error_of_all(ranks):  # noqa: F811
    def run(rank):
        _, target, sync = pair()
        if rank == 1:
            import shardwise.state.resharder as module

            kept, module.Snapshot = module.Snapshot, refuse
        said, _ = message(sync.run(async_op=True).wait)
        if rank == 1:
            module.Snapshot = kept
        sync.run(async_op=True).wait()
        lies(target, WHOLE, COLUMNS)
        return said

    first, second = ranks(2, run)
    assert first == second
    assert "MemoryError: no memory" in first


def refuse(*_):
    raise MemoryError("no memory")


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_a_rank_that_dies_is_an_error_of_the_others(ranks, transport):  # noqa: F811
    def run(rank):
        source, target = held(WHOLE, "64x48/S0@3"), held(WHOLE * 0, "64x48/S1@3")
        sync = sw.Resharder({"w": source}, {"w": target}, transport=transport)
        sync.run(async_op=True).wait()
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        handle = sync.run(async_op=True)
        said, _ = message(handle.wait)
        taken = time.monotonic() - start
        again, _ = message(lambda: sync.run(async_op=True).wait())
        assert "make a new Resharder" in again
        sync = handle = None  # its thread ends with it
        gc.collect()
        end = time.monotonic() + 5
        while any(thread.name == "shardwise run" for thread in threading.enumerate()) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(thread.name == "shardwise run" for thread in threading.enumerate())
        return said, taken

    *reports, _ = ranks(3, run, dying={2}, patience=10.0)
    for said, taken in reports:
        assert said.startswith("ExchangeError")
        assert taken < 8


def test_a_rank_that_never_calls_is_an_error_after_the_timeout(ranks):  # noqa: F811
    def run(rank):
        *_, sync = pair()
        sync.run(async_op=True).wait()
        dist.barrier()
        sync._transport.seconds = 1.0
        if rank == 0:
            said, _ = message(sync.run(async_op=True).wait)
            assert "rank 1" in said
        dist.barrier()

    ranks(2, run)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_group_of_some_ranks_keeps_their_numbers(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([2, 1])
        if rank == 0:
            return
        rows, columns = "64x48/S0@2:1,2", "64x48/S1@2:1,2"
        source, target = held(WHOLE, rows, group), held(WHOLE * 0, columns, group)
        sync = sw.Resharder({"w": source}, {"w": target}, group=group)
        sync.run(async_op=True).wait()
        lies(target, WHOLE, columns)

    ranks(3, run)


# --- resources -------------------------------------------------------------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


def tasks():
    return len(os.listdir("/proc/self/task"))


def settled(measure, limit):
    """What it is in the end: threads take a moment to go."""
    end = time.monotonic() + 5
    while measure() > limit and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return measure()


def test_many_runs_leave_nothing_behind(ranks):  # noqa: F811
    def run(rank):
        source, _, sync = pair()
        sync.run()
        before = open_files(), tasks()
        sync.run(async_op=True).wait()
        during = open_files(), tasks()
        for _ in range(50):
            sync.run(async_op=True)
            add(source, 1)
        sync.run()
        assert settled(open_files, during[0]) <= during[0]
        assert settled(tasks, during[1]) <= during[1]
        dist.barrier()
        del sync
        assert settled(tasks, before[1]) <= before[1]
        dist.barrier()
        for _ in range(2):  # peers hear of freed segments with the next messages
            lies(sw.reshard(source, COLUMNS), WHOLE + 50, COLUMNS)
        assert settled(open_files, before[0]) <= before[0]

    ranks(2, run)


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
import shardwise as sw
from shardwise.job import background

background.AT_EXIT = 0.5
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)


def sync(transport):
    source = sw.ShardedTensor(torch.ones(512, 1024), "1024x1024/S0@2")
    made = sw.Resharder({"w": source}, {"w": sw.empty("1024x1024/S1@2")}, transport=transport)
    made.run(async_op=True).wait()
    return made


both, auto, group = sync("auto"), sync("auto"), sync("group")
dist.barrier()
both.run(async_op=True)
if rank == 0:
    auto.run(async_op=True)
    group.run(async_op=True)
print("end", flush=True)
if rank == 1:
    time.sleep(2)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_during_runs(tmp_path):
    """It finishes what the others take part in, and gives up what they do not."""
    command, place = [sys.executable, "-c", SCRIPT], str(tmp_path / "store")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([*command, str(rank), place], env=env, **pipes) for rank in range(2)]
    try:
        said = [
            one.communicate(timeout=120) for one in processes
        ]  # a busy machine takes 30 seconds to import torch twice
    finally:
        for one in processes:
            one.kill()
    assert [one.returncode for one in processes] == [0, 0], said
    assert [out.strip() for out, _ in said] == ["end", "end"]
    assert said[0][1].count("an asynchronous run failed, and wait() was not called") == 2
    assert said[1][1] == ""
