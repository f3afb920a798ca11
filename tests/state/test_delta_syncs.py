"""Syncs that send only what changed: the same bits as a plain sync after every step, whatever happens in between."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from devices import device_type
from models import held, lies, numbers
from ranks import ranks  # noqa: F401
from test_random_models import examples, value
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise import Concat, Transposed
from shardwise.exchange import delta_blocks
from shardwise.exchange.delta_round import DeltaRound
from shardwise.job.deltas import PAUSE, changed_cells
from shardwise.job.snapshot import Snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(monkeypatch):
    """Every message may be a delta, in blocks of a few cells."""
    monkeypatch.setattr(delta_blocks, "BLOCK", 16)
    monkeypatch.setattr(delta_blocks, "SEGMENT", 100)
    monkeypatch.setattr("shardwise.exchange.exchange.SMALLEST", 1)
    monkeypatch.setattr("shardwise.exchange.exchange.INLINE", 0)
    delta_blocks.segments_of.cache_clear()
    yield
    delta_blocks.segments_of.cache_clear()


def refill(tensor, whole):
    """Write a rank's part of the whole, in place."""
    if tensor is not None:
        for ours, theirs in zip(tensor.shards, held(whole, tensor.layout).shards, strict=True):
            ours.copy_(theirs)


def stepped(whole, step, fraction=0.05):
    """The whole with some other elements, the same on every rank."""
    random = torch.Generator().manual_seed(step)
    changed = torch.rand(whole.shape, generator=random) < fraction
    return torch.where(changed, ~whole if whole.dtype == torch.bool else 3 - whole, whole)


def sent_bytes(sync):
    """What this rank has sent in its last run in messages that may be deltas, and what they would have had."""
    return tuple(sync._job.traffic)


@pytest.mark.parametrize(("owners", "count"), [(2, 8), (4, 5)])
def test_any_model_into_any_other_over_several_steps(ranks, tiny, owners, count):  # noqa: F811
    cases = examples(count, owners)

    def run(rank):
        sent = 0
        for tensors, options in cases:
            whole = {f"t.{at}": value(shape, dtype, at) for at, (shape, dtype, _, _) in enumerate(tensors)}
            sources = {f"t.{at}": tensor[2] for at, tensor in enumerate(tensors)}
            targets = {f"t.{at}": tensor[3] for at, tensor in enumerate(tensors)}
            given = {name: held(one, sources[name]) for name, one in whole.items()}
            room, plain = (
                {name: held(torch.zeros_like(one), targets[name]) for name, one in whole.items()} for _ in range(2)
            )
            syncs = sw.Resharder(given, room, delta="always", **options), sw.Resharder(given, plain, **options)
            for step in range(3):
                for sync in syncs:
                    sync.run()
                for name, one in whole.items():
                    lies(room[name], one, targets[name])
                    assert sw.fingerprint(room[name]) == sw.fingerprint(plain[name])
                whole = {name: stepped(one, step) for name, one in whole.items()}
                for name, one in whole.items():
                    refill(given[name], one)
                sent += syncs[0]._deltas.compares
        return sent

    assert ranks(owners, run) == [2 * len(cases)] * owners


SHAPE = (1024, 1024)


def big(dtype=torch.bfloat16, owners=4, group=None):
    """Rows to columns: the whole, this rank's parts, and the layout of the target."""
    whole = (numbers(*SHAPE) % 251).to(dtype)
    layouts = sw.Layout.chunk(SHAPE, 0, range(owners)), sw.Layout.chunk(SHAPE, 1, range(owners))
    parts = held(whole, layouts[0], group), held(torch.zeros_like(whole), layouts[1], group)
    return whole, {"w": parts[0]}, {"w": parts[1]}, layouts[1]


@pytest.mark.devices
def test_few_bytes_travel_where_few_elements_change(ranks):  # noqa: F811
    def run(rank):
        whole, given, room, layout = big()
        sync = sw.Resharder(given, room, delta="always")
        assert sync.delta_bytes == given["w"].shards[0].nbytes  # before the first run
        found = []
        for fraction in (0.05, 0.02, 0, 1, 0.05):
            sync.run()
            lies(room["w"], whole, layout)
            found.append(sent_bytes(sync))
            whole = stepped(whole, 7, fraction)
            refill(given["w"], whole)
        assert sync.delta_bytes == sync._deltas.base.bytes == given["w"].shards[0].nbytes
        return found

    for sent in ranks(4, run):
        dense = 3 * 256 * 256 * 2
        assert [one[1] for one in sent] == [dense] * 5
        assert sent[0][0] == sent[4][0] == dense  # nothing to compare with; all changed
        assert sent[3][0] < 300
        assert [one[0] / dense < most for one, most in zip(sent[1:3], (0.09, 0.045), strict=True)] == [True, True]


@pytest.mark.devices
def test_values_are_compared_as_they_travel(ranks):  # noqa: F811
    """A float32 that changes below the precision of bfloat16 is not sent; signs of zeros and bits of NaNs are."""

    def run(rank):
        shape = (64, 4096)
        layouts = sw.Layout.chunk(shape, 0, range(2)), sw.Layout.chunk(shape, 1, range(2))
        whole = numbers(*shape) % 97 + 1
        given = {"w": held(whole, layouts[0])}
        room = {"w": held(torch.zeros(shape, dtype=torch.bfloat16), layouts[1])}
        sync = sw.Resharder(given, room, cast=True, delta="always")
        assert sync.delta_bytes == 32 * 4096 * 2  # as bfloat16
        assert "this rank keeps 256.00 KiB for deltas" in sync.explain()
        sync.run()
        sizes = []
        steps = (lambda w: w * (1 + 1e-6)), (lambda w: torch.where(w < 9, -0.0, w)), (lambda w: w.where(w > 90, 0.0))
        for step in steps:
            whole = step(whole)
            refill(given["w"], whole)
            sync.run()
            lies(room["w"], whole.to(torch.bfloat16), layouts[1])
            sizes.append(sent_bytes(sync)[0])
        assert sync.delta_bytes == sync._deltas.base.bytes
        return sizes

    for small, some, _ in ranks(2, run):
        assert small < 300 < some < 0.2 * 32 * 2048 * 2


@pytest.mark.devices
def test_fused_transposed_and_verified_targets_get_the_same_bits(ranks, tiny):  # noqa: F811
    remap = [Concat("qkv", ["q", "k", "v"], dim=0), Transposed("t")]

    def run(rank):
        parts = {name: numbers(8, 6, start=100 * at) for at, name in enumerate("qkv")} | {"t": numbers(6, 10)}
        parts["s"], pair = torch.tensor(5.0), sw.Layout.replicated((), 2)
        here = {n: sw.Layout.chunk(tuple(p.shape), 0, [3, 1]) if p.ndim else pair for n, p in parts.items()}
        there = {
            "qkv": sw.Layout.cyclic((24, 6), 1, 1, range(4)),
            "t": sw.Layout.chunk((10, 6), 1, range(3)),
            "s": sw.Layout.replicated((), 4),
        }
        for verify in False, True:
            given = {name: held(one, here[name]) for name, one in parts.items()}
            room = {"t": torch.zeros(10, 6), "qkv": torch.zeros(24, 6), "s": torch.zeros(())}
            room = {name: held(one, there[name]) for name, one in room.items()}
            sync = sw.Resharder(given, room, remap=remap, verify=verify, delta="always")
            whole = parts
            for step in range(4):
                sync.run()
                lies(room["qkv"], torch.cat([whole[name] for name in "qkv"]), there["qkv"])
                lies(room["t"], whole["t"].T.contiguous(), there["t"])
                lies(room["s"], whole["s"], there["s"])
                assert sync.delta_bytes == sync._deltas.base.bytes
                assert sync._deltas.compares == bool(step)
                whole = {name: stepped(one, step, 0.2) for name, one in whole.items()}
                for name, one in whole.items():
                    refill(given[name], one)

    ranks(4, run)


@pytest.mark.devices
def test_parameters_that_an_optimizer_changes(ranks):  # noqa: F811
    """DTensors, from float32 in rows to bfloat16 in columns; a target that is whole on every rank, too."""

    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        rows = torch.nn.Parameter(distribute_tensor(numbers(512, 512), mesh, [Shard(0)]))
        columns = distribute_tensor(torch.zeros(512, 512, dtype=torch.bfloat16), mesh, [Shard(1)])
        given, room = {"a": rows, "b": rows}, {"a": columns, "b": torch.zeros(512, 512)}
        sync, optimizer = sw.Resharder(given, room, cast=True, delta="always"), torch.optim.SGD([rows], lr=1.0)
        compared, sent = [], []
        for step in range(8):
            sync.run()
            whole = rows.detach().full_tensor()
            assert torch.equal(columns.full_tensor(), whole.bfloat16())
            assert torch.equal(room["b"], whole)
            compared.append(sync._deltas.compares)
            sent.append(sent_bytes(sync))
            if step == 2:
                columns.mul_(2)
            if step == 4:
                torch._foreach_mul_([columns], 2.0)
            if step == 6 and rank == 1:
                columns.detach().to_local().add_(1)
            rows.grad = distribute_tensor((torch.arange(512 * 512).view(512, 512) % 30 == 0).float(), mesh, [Shard(0)])
            optimizer.step()
        assert sync.delta_bytes == sync._deltas.base.bytes == 256 * 512 * (2 + 4)
        assert sent[1][0] < 0.1 * sent[1][1]
        return compared

    assert ranks(2, run) == [[False, True, True, False, True, False, True, False]] * 2


@pytest.mark.parametrize("verify", [False, True])
def test_a_target_that_somebody_wrote_to_is_sent_whole(ranks, verify):  # noqa: F811
    def run(rank):
        whole, given, room, layout = big()
        sync = sw.Resharder(given, room, delta="always", verify=verify)
        compared = []
        for step in range(5):
            sync.run()
            compared.append(sync._deltas.compares)
            lies(room["w"], whole, layout)
            if step == 1 and rank == 2:
                room["w"].shards[0][3, 5] = 77
            if step == 2 and rank == 3:
                room["w"].shards[0].zero_()
        return compared

    assert ranks(4, run) == [[False, True, False, False, True]] * 4


@pytest.mark.devices
def test_the_run_after_one_that_failed_is_sent_whole(ranks):  # noqa: F811
    def run(rank):
        whole, given, room, layout = big(torch.float32)
        room = {"w": held(torch.zeros(SHAPE, dtype=torch.float16), layout)}
        sync = sw.Resharder(given, room, cast=True, delta="always")
        sync.run()
        sync.run()
        assert sync._deltas.compares
        refill(given["w"], whole + (1e6 if rank == 1 else 1))
        with pytest.raises(sw.ExchangeError, match="beyond the range"):
            sync.run()
        refill(given["w"], whole + 1)
        sync.run()
        lies(room["w"], (whole + 1).half(), layout)
        assert not sync._deltas.compares
        refill(given["w"], whole + 2)
        sync.run()
        lies(room["w"], (whole + 2).half(), layout)
        assert sync._deltas.compares

    ranks(4, run)


def test_auto_stops_for_some_runs_where_all_changes(ranks):  # noqa: F811
    def run(rank):
        whole, given, room, layout = big()
        sync = sw.Resharder(given, room, delta="auto", transport="group")
        compared = []
        for step in range(PAUSE + 6):
            sync.run()
            lies(room["w"], whole, layout)
            compared.append((sync._deltas.compares, bool(sync.delta_bytes)))
            assert sync.delta_bytes == sync._deltas.base.bytes
            whole = stepped(whole, step, 1 if step < 3 else 0.01)
            refill(given["w"], whole)
        return compared

    took, paused, compares = (False, True), (False, False), (True, True)
    expected = [took, compares, *[paused] * (PAUSE + 1), took, compares, compares]
    assert ranks(4, run) == [expected] * 4


def test_a_job_sends_what_changed_between_two_snapshots(ranks):  # noqa: F811
    """Also to targets that were given another version by other means, as long as it is the base."""

    def run(rank):
        whole, given, room, layout = big()
        sync = sw.Resharder(given, room)
        job, sizes = sync._job, []
        held_versions = [Snapshot({"w": list(given["w"].shards)}) for _ in range(2)]
        held_versions[0].take({"w": list(given["w"].shards)})
        refill(room["w"], whole)
        for step in range(3):
            whole = stepped(whole, step)
            refill(given["w"], whole)
            base, version = (held_versions[(step + at) % 2] for at in (0, 1))
            version.take({"w": list(given["w"].shards)})

            def changed(name, dtype, version=version, base=base):
                return changed_cells(version.memory(name), base.memory(name), dtype)

            job.run(version, sync._target, check=lambda: None, fresh=False, delta="always", changed=changed)
            lies(room["w"], whole, layout)
            sizes.append(job.traffic.sent / job.traffic.dense)
        return max(sizes)

    assert max(ranks(4, run)) < 0.09


def test_ranks_of_one_host_need_no_deltas(ranks):  # noqa: F811
    def run(rank):
        whole, given, room, layout = big()
        sync = sw.Resharder(given, room, delta=True)
        for _ in range(2):
            sync.run()
            lies(room["w"], whole, layout)
        assert (sync.delta_bytes, sent_bytes(sync)) == (0, (0, 0))
        assert "for deltas" not in sync.explain()

    ranks(4, run)


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_deltas_cross_hosts_and_ranks_of_one_host_share_memory(ranks, hosts):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        whole, given, room, layout = big()
        both = sw.Layout.replicated(SHAPE, 4)
        copies = {"w": held(torch.zeros_like(whole), both)}
        shared = {"w": held(torch.zeros_like(whole), both)}
        syncs = [
            sw.Resharder(given, room, delta=True),
            sw.Resharder(given, copies, delta=True, hosts=2),
            sw.Resharder(given, shared, delta=True, hosts=2, verify=True, max_bytes=2**22),
        ]
        for step in range(3):
            for sync in syncs:
                sync.run()
            lies(room["w"], whole, layout)
            lies(copies["w"], whole, both)
            lies(shared["w"], whole, both)
            whole = stepped(whole, step)
            refill(given["w"], whole)
        return [sent_bytes(sync) for sync in syncs]

    reports = ranks(4, run)
    for sent in reports:
        assert sent[0][1] == 2 * 256 * 256 * 2  # to the two ranks of the other host
        assert sent[0][0] < 0.09 * sent[0][1]
    for number in (1, 2):
        crossed = [sum(one[number][at] for one in reports) for at in (0, 1)]
        assert crossed[0] < 0.09 * crossed[1]


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_who_waits_for_a_delta_of_a_killed_rank_hears_at_once(ranks, tmp_path, hosts):  # noqa: F811
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        whole, given, room, _ = big()
        sync = sw.Resharder(given, room, delta="always")
        sync.run()
        refill(given["w"], stepped(whole, 1))
        if rank == 1:
            DeltaRound._encode = kill
        began = time.monotonic()
        with pytest.raises(sw.ExchangeError, match="rank 1 has ended"):
            sync.run()
        (tmp_path / str(rank)).touch()
        while len(list(tmp_path.iterdir())) < 3:  # others must not hear it because this process ended
            time.sleep(0.01)
        return time.monotonic() - began

    reports = ranks(4, run, patience=50, dying={1})
    assert all(took < 25 for rank, took in enumerate(reports) if rank != 1)


def test_options_that_differ_or_do_not_exist_are_refused(ranks):  # noqa: F811
    def run(rank):
        _, given, room, _ = big(owners=2)
        with pytest.raises(ValueError, match="delta= must be True, False"):
            sw.Resharder(given, room, delta="sometimes")
        with pytest.raises(ValueError, match="the ranks disagree on the delta"):
            sw.Resharder(given, room, delta=rank == 1)

    ranks(2, run)


def test_a_rank_that_dies_while_deltas_are_on_the_link_ends_the_others(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group(range(4))
        whole, given, room, _ = big(group=group)
        sync = sw.Resharder(given, room, delta="always", group=group)
        sync.run()
        refill(given["w"], stepped(whole, 1))
        if rank == 1:

            def broken(*_):
                raise MemoryError("no room")

            DeltaRound._encode = broken
        with pytest.raises((sw.ExchangeError, MemoryError), match="no room"):
            sync.run()
        return True

    assert ranks(4, run) == [True] * 4


def test_cells_are_compared_bit_for_bit():
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        base = torch.arange(700_000).remainder(13).to(dtype)
        now = base.clone()
        now[::999] = ~now[::999] if dtype == torch.bool else -now[::999]
        bits = [one.view(torch.uint8).reshape(len(base), -1) for one in (now, base)]
        (found,) = changed_cells([now], [base], dtype)
        assert torch.equal(found, (bits[0] != bits[1]).any(dim=1))
        (turned,) = changed_cells([now.reshape(700, 1000).T], [base.reshape(700, 1000).T], dtype, update=True)
        assert torch.equal(turned, found.reshape(700, 1000).T)
        assert torch.equal(base.view(torch.uint8), now.view(torch.uint8))
    assert changed_cells([], [], torch.float32) == []
    assert not dist.is_initialized()
