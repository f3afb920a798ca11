"""What moves cost an accelerator: waits of the host, launches and transfers, counted on the test device."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import every_group, numbered, on_devices
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.testing.device import counting, on_host
from shardwise.testing.ordered_group import ALONE, BESIDE_GLOO

MOVES = {
    "rows to columns": ("64x64/S0@2", "64x64/S1@2"),
    "small": ("4x4/S0@2", "4x4/S1@2"),
    "gather": ("4096/S0@2", "4096/R@2"),
    "sums": ("4096/P@2", "4096/R@2"),
    "small sums": ("4/P@2", "4/R@2"),
}


def second_run(source, target, rank, device):
    """Counts of the second run of a Resharder between these layouts, which does what the first one did."""
    source, target = sw.parse(source), sw.parse(target)
    x = sw.ShardedTensor(numbered(source, rank, device), source)
    room = [torch.zeros(shape, device=device) for shape in target.local_shapes(rank)]
    sync = sw.Resharder({"w": x}, {"w": sw.ShardedTensor(room, target)})
    sync.run()
    before = [on_host(one).clone() for one in room]
    for one in room:
        one.zero_()
    with counting() as counts:
        sync.run()
    for one, first in zip(room, before, strict=True):
        np.testing.assert_array_equal(on_host(one), first)
        assert not first.numel() or first.any()
    return counts


def counts_of(moves, backend, *, hosts=True):
    """Of every move, on both ranks."""
    work = lambda rank, device: [second_run(*move, rank, device) for move in moves]  # noqa: E731
    return [counts for found in on_devices(2, work, backend, hosts=hosts) for counts in found]


@pytest.mark.parametrize(("backend", "waits"), [(ALONE, 1), (BESIDE_GLOO, 0)])
def test_between_hosts_the_host_waits_for_the_agreement_alone(backend, waits):
    """Its headers lie on the device where the group has no backend for the CPU; then they cross over once."""
    for counts in counts_of(MOVES.values(), backend):
        assert counts.waits == counts.to_host == counts.from_host == waits


def test_on_one_host_it_waits_for_nothing():
    for counts in counts_of(MOVES.values(), ALONE, hosts=False):
        assert counts.waits == counts.to_host == counts.from_host == 0


def test_over_gloo_each_message_crosses_over_once():
    for counts in counts_of(MOVES.values(), "gloo"):
        assert counts.waits == counts.to_host == counts.from_host == 1


def launches(counts):
    return counts.copies + counts.kernels


@every_group
def test_launches_do_not_grow_with_the_number_of_pieces(backend):
    """Pieces that are rows: one launch packs all of them, one unpacks them, one copies what stays."""
    moves = [("64x32/S0@2", f"64x32/cyclic0={block}@2") for block in (4, 1)]
    few, many, *others = map(launches, counts_of(moves, backend))
    assert few == many == others[0] == others[1] <= 5


def test_launches_do_not_grow_with_the_size_of_sums():
    """One addition for two terms of up to 2**24 elements, and not one for each block that fits a cache."""
    moves = [(f"{size}/P@2", f"{size}/R@2") for size in (2**12, 2**19)]
    assert len(set(map(launches, counts_of(moves, BESIDE_GLOO)))) == 1


# --- calls that are made once ----------------------------------------------------------------------------------------


def resharded(rank, device):
    """Counts of three equal calls of `reshard`, for every move."""
    found = []
    for source, target in MOVES.values():
        x = sw.ShardedTensor(numbered(sw.parse(source), rank, device), source)
        calls = []
        for _ in range(3):
            with counting() as counts:
                sw.reshard(x, target)
            calls.append(counts)
        found.append(calls)
    return found


@pytest.mark.parametrize(("backend", "waits"), [(ALONE, 1), (BESIDE_GLOO, 0)])
def test_reshard_waits_for_the_agreement_alone_and_the_first_call_launches_what_the_others_do(backend, waits):
    for (first, *others), *more in on_devices(2, resharded, backend, hosts=True):
        for counts in [*others, *(counts for calls in more for counts in calls)]:
            assert counts.waits == counts.to_host == waits
            assert launches(counts) <= 6
        assert first.waits <= 4 * waits  # ranks meet in the first call of all
        assert launches(first) <= 2 + 12 * waits


def test_a_verified_reshard_waits_for_sums_and_not_for_pieces():
    def work(rank, device):
        found = []
        for target in ("64x64/S1@2", "64x64/cyclic0=1@2"):
            x = sw.ShardedTensor(numbered(sw.parse("64x64/S0@2"), rank, device), "64x64/S0@2")
            with counting() as counts:
                sw.reshard(x, target, verify=True)
            found.append(counts.waits)
        return found

    assert on_devices(2, work, BESIDE_GLOO, hosts=True) == [[3, 3]] * 2


def model(count, device, layout="64x48/S0@2", fill=1.0):
    """So many tensors that are sharded between two ranks."""
    shape = sw.parse(layout).local_shape(0)
    return {f"w{at}": sw.ShardedTensor([torch.full(shape, fill, device=device)], layout) for at in range(count)}


def saved(path, count, format):
    """Counts of `checkpoint.save` with so many sharded tensors, and as many plain ones."""

    def work(rank, device):
        plain = {f"plain{at}": torch.full((9, 5), float(at), device=device) for at in range(count)}
        with counting() as counts:
            sw.checkpoint.save({**model(count, device), **plain}, path, format=format, group=dist.group.WORLD)
        return counts

    found = on_devices(2, work, BESIDE_GLOO)
    assert sw.checkpoint.open(path)[f"plain{count - 1}"].read().unique().tolist() == [count - 1.0]
    return found


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_save_waits_twice_however_many_tensors_there_are(format, tmp_path):
    """For samples of plain tensors, which must be equal on all ranks, and for what it writes."""
    for count in (2, 9):
        for counts in saved(tmp_path / str(count), count, format):
            assert counts.waits == counts.to_host == 2


def test_save_brings_large_tensors_over_in_chunks_and_small_ones_together(tmp_path):
    def work(rank, device):
        sizes = (300, 3 * 2**20, 200, 100, 2**21)  # elements of 4 bytes; a chunk has 8 MiB
        state = {str(at): torch.arange(size, dtype=torch.int32, device=device) for at, size in enumerate(sizes)}
        with counting() as counts:
            sw.checkpoint.save(state, tmp_path / "made")
        return counts.waits

    assert on_devices(1, work, BESIDE_GLOO) == [5]  # small ones, two chunks, one chunk, and samples
    for name, entry in sw.checkpoint.open(tmp_path / "made").items():
        found = entry.read()
        np.testing.assert_array_equal(found, np.arange(len(found)), name)


@pytest.mark.parametrize("read", ["once", "each"])
def test_load_waits_for_nothing_and_brings_each_piece_over_once(read, tmp_path):
    count = 5

    def work(rank, device):
        sw.checkpoint.save(model(count, device), tmp_path, group=dist.group.WORLD)
        for pieces, layout in (1, "64x48/S0@2"), (2, "64x48/S1@2"):
            into = model(count, device, layout, fill=0.0)
            with counting() as counts:
                sw.checkpoint.load(tmp_path, into, group=dist.group.WORLD, read=read)
            assert all(one.local_tensor().min().item() == 1.0 for one in into.values())
            assert counts.waits == counts.to_host == 0
            assert 0 < counts.from_host <= pieces * count

    on_devices(2, work, BESIDE_GLOO)


@pytest.mark.parametrize(("backend", "waits"), [(ALONE, 1), (BESIDE_GLOO, 0), ("gloo", 1)])
def test_each_activation_waits_for_its_agreement_alone_or_over_gloo_for_its_message(backend, waits):

    def work(rank, device):
        layers, mesh, found = (
            [torch.nn.Linear(64, 64).to(device) for _ in range(3)],
            DeviceMesh(device.type, [0, 1]),
            [],
        )
        for layer in layers:
            sw.input_reshard(layer, mesh, 0, least=0)
        for _ in range(3):
            x = torch.ones(32, 64, device=device, requires_grad=True)
            with counting() as counts:
                torch.nn.Sequential(*layers)(x).square().sum().backward()
            found.append(counts)
        return found[1:]  # ranks meet in the first

    for found in on_devices(2, work, backend, hosts=True):
        for counts in found:
            assert counts.waits == counts.to_host == 3 * waits
            assert counts.copies <= 3 * (2 + 2 * waits)
