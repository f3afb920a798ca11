"""Tensors of the test device arrive as CPU tensors do: over every group, from and to every kind of memory."""

import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import every_group, numbered, on_devices
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.activation import measure
from shardwise.exchange.buffers import ViewCache
from shardwise.testing import on_ranks
from shardwise.testing.device import on_host, use_device
from shardwise.testing.ordered_group import ALONE, BESIDE_GLOO

pytestmark = pytest.mark.slow

PAIRS = [
    ("12x8/S0@3", "12x8/S1@3"),
    ("40x64/S0@3", "40x64/S1@3"),
    ("12x8/cyclic0=1@3", "12x8/R@2"),
    ("8/P@3", "8/R@3"),  # 32 bytes: small messages of terms
    ("600x50/P@3", "600x50/S0@3"),
    ("600x50/Pavg@2:1,2", "600x50/S1@3"),
    ("6x4/S0@1:2", "6x4/S1@2"),  # rank 2 holds only the source, the others only the target
]


def moved(rank, device):
    """Every pair is moved on the device as on the CPU. The CPU's part is computed without messages."""
    for pair in PAIRS:
        for dtype in (torch.float32, torch.bfloat16):
            source, target = map(sw.parse, pair)
            every = {r: [t.double().numpy() for t in numbered(source, r, "cpu", dtype)] for r in source.owners()}
            wanted = sw.testing.simulate(sw.plan(source, target), every)
            x = sw.ShardedTensor(numbered(source, rank, device, dtype), source) if rank in source else None
            found = sw.reshard(x, target, verify=dtype == torch.float32)
            if rank not in target:
                continue
            (ours,), (theirs,) = found.shards, wanted[rank]
            assert (ours.device, ours.dtype) == (device, dtype)
            np.testing.assert_array_equal(on_host(ours).double(), torch.tensor(theirs).to(dtype).double(), str(pair))
    return True


@pytest.mark.parametrize(("backend", "hosts"), [("gloo", False), ("gloo", True), (ALONE, True), (BESIDE_GLOO, False)])
def test_every_pair_arrives(backend, hosts):
    assert all(on_devices(3, moved, backend, hosts=hosts))


def between_kinds(rank, device):
    """Sources on one kind of device, targets on the other; some ranks hold one side only."""
    found = []
    for here, there in (("cpu", device), (device, "cpu")):
        source, target = sw.parse("64x64/S0@2"), sw.parse("64x64/S1@2:1,2")
        ours = sw.ShardedTensor(numbered(source, rank, here), source) if rank in source else None
        room = torch.zeros(64, 32, device=there) if rank in target else None
        theirs = sw.ShardedTensor(room, target) if room is not None else None
        sw.Resharder({"w": ours}, {"w": theirs}, verify=True).run()
        found.append(None if room is None else room.cpu())
    return found


@pytest.mark.parametrize("backend", ["gloo", BESIDE_GLOO])
def test_sources_and_targets_may_be_on_different_kinds_of_devices(backend):
    source = sw.parse("64x64/S0@2")
    whole = torch.cat([numbered(source, rank, "cpu")[0] for rank in range(2)])
    for hosts in (False, True):
        nothing, left, right = on_devices(3, between_kinds, backend, hosts=hosts)
        assert nothing == [None, None]
        for number in range(2):
            np.testing.assert_array_equal(torch.cat([left[number], right[number]], dim=1), whole)


def by_default(rank):
    torch.set_default_device(use_device())
    x = sw.ShardedTensor(torch.full((2, 4), float(rank)), "4x4/S0@2")
    found = sw.reshard(x, "4x4/S1@2", verify=True)
    handle = sw.reshard(x, "4x4/R@2", async_op=True)
    return sw.fingerprint(x) == sw.fingerprint(found) == sw.fingerprint(handle.wait()), found.device.type


@every_group
def test_the_device_may_be_the_default_for_new_tensors(backend):
    def work(rank):
        socket.gethostname = lambda: f"host {rank}"
        return by_default(rank)

    assert on_ranks(2, work, backend=backend) == [(True, "far")] * 2


def one_wrong_bit(rank, device):
    unpack = ViewCache.unpack

    def flip(self, message, buffer, tensors):
        buffer[5:6] ^= rank
        unpack(self, message, buffer, tensors)

    ViewCache.unpack = flip
    x = sw.ShardedTensor(numbered(sw.parse("64x64/S0@2"), rank, device), "64x64/S0@2")
    for target in ("64x64/cyclic0=1@2", "64x64/cyclic1=2@2"):
        with pytest.raises(sw.ExchangeError, match=r"verify: a tensor of shape \(64, 64\)"):
            sw.reshard(x, target, verify=True)
    return True


@every_group
def test_verify_finds_one_wrong_bit_of_the_device(backend):
    assert all(on_devices(2, one_wrong_bit, backend, hosts=True))


def deltas(rank, device):
    x, room = torch.zeros(512, 128, device=device), torch.zeros(1024, 64, device=device)
    source, target = sw.ShardedTensor(x, "1024x128/S0@2"), sw.ShardedTensor(room, "1024x128/S1@2")
    sync = sw.Resharder({"w": source}, {"w": target}, delta=True)
    for step in range(3):
        x.view(-1)[step::97] = step + rank
        sync.run()
    return (sw.fingerprint(source) == sw.fingerprint(target)), bool(room.any().item())


@pytest.mark.parametrize("backend", ["gloo", ALONE])
def test_deltas_of_device_tensors(backend):
    assert on_devices(2, deltas, backend, hosts=True) == [(True, True)] * 2


def saved_and_loaded(rank, device, path, read):
    rows = sw.ShardedTensor(numbered(sw.parse("64x48/S0@2"), rank, device), "64x48/S0@2")
    sw.checkpoint.save({"w": rows, "step": torch.tensor(7, device=device)}, path, group=dist.group.WORLD)
    columns, step = sw.ShardedTensor(torch.zeros(64, 24, device=device), "64x48/S1@2"), torch.zeros(1, device=device)[0]
    sw.checkpoint.load(
        path, {"w": columns, "step": step}, group=dist.group.WORLD, read=read, cast=[("step", step.dtype)]
    )
    return sw.fingerprint(rows) == sw.fingerprint(columns), step.item()


@pytest.mark.parametrize(("backend", "read"), [("gloo", "once"), (ALONE, "once"), (BESIDE_GLOO, "each")])
def test_checkpoints_are_saved_from_and_loaded_into_the_device(backend, read, tmp_path):
    def work(rank, device):
        return saved_and_loaded(rank, device, tmp_path / "made", read)

    assert on_devices(2, work, backend) == [(True, 7.0)] * 2


def activations(rank, device):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64).to(device), torch.randn(32, 64, device=device, requires_grad=True)
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    sw.input_reshard(layer, DeviceMesh(device.type, [0, 1]), 0, least=0, check=True)
    with measure() as measured:
        layer(x).square().sum().backward()
    assert measured.bytes_kept < measured.bytes_saved
    return torch.equal(layer.weight.grad, expected)


@every_group
def test_activations_are_sharded_on_the_device(backend):
    assert on_devices(2, activations, backend, hosts=True) == [True, True]
