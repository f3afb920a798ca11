"""The test device refuses what CUDA refuses, allows what it allows, and counts what is slow."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import Usage
from groups import on_devices
from torch.utils.checkpoint import checkpoint

from shardwise.testing import on_ranks
from shardwise.testing.device import DEVICE, counting, on_host, synchronize, use_device
from shardwise.testing.ordered_group import ALONE, BESIDE_GLOO


def alone(work):
    """The result of `work(device)` in a process of its own."""
    return on_ranks(1, lambda _: work(use_device()))[0]


def refusals(device):
    x, ones = torch.zeros(3, device=device), torch.ones(3)
    calls = {
        "numpy": x.numpy,
        "array": lambda: np.asarray(x),
        "two devices": lambda: x + ones,
        "the other way": lambda: ones.mul_(x),
        "out": lambda: torch.add(x, x, out=ones),
        "several": lambda: torch.cat([x, ones]),
    }
    for name, call in calls.items():
        with pytest.raises((TypeError, RuntimeError), match="device"):
            print(name, call())
    return x.data_ptr() != on_host(x).data_ptr()


def test_what_cuda_refuses_is_refused():
    assert alone(refusals)


def allowed(device):
    x = torch.arange(12.0, device=device).view(3, 4)
    found = [x.tolist()[1], (2 * x)[1:, ::2].tolist(), (x * torch.tensor(2.0)).sum().item(), (x % 3)[0].tolist()]
    layer = torch.nn.Linear(4, 2).to(device)
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert {layer.weight.device, layer.weight.grad.device} == {device}
    file = io.BytesIO()
    torch.save({"x": x[1:]}, file)
    for where in (None, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["x"]
        assert loaded.device.type == (where or device.type)
        found.append(loaded[0].tolist())
    x.view(-1)[:2].fill_(7)
    return [*found, x[0].tolist(), type(x) is torch.Tensor]


def test_what_cuda_allows_is_allowed():
    row = [4.0, 5.0, 6.0, 7.0]
    thirds = [0.0, 1.0, 2.0, 0.0]
    assert alone(allowed) == [row, [[8.0, 12.0], [16.0, 20.0]], 132.0, thirds, row, row, [7.0, 7.0, 2.0, 3.0], True]


def counted(device):
    x, host = torch.ones(6, 2, device=device), torch.zeros(6, 2)
    found = []
    for work in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.copy_(host),
        lambda: torch._foreach_copy_([x[:3], x[3:]], [torch.zeros(3, 2, device=device)] * 2),
        lambda: torch._foreach_copy_([x[:, :1], x[:, 1:]], [torch.zeros(6, 1, device=device)] * 2),
        lambda: torch._foreach_copy_([x[:3], x[3:]], [host[:3], host[3:]]),
        synchronize,
    ):
        with counting() as counts:
            work()
        found.append((counts.waits, counts.copies, counts.to_host, counts.from_host))
    return found


def test_waits_copies_and_transfers_are_counted():
    one_launch, two = (0, 1, 0, 0), (0, 2, 0, 0)
    assert alone(counted) == [(1, 0, 0, 0), (1, 1, 1, 0), (0, 1, 0, 1), one_launch, two, (0, 2, 0, 2), (1, 0, 0, 0)]


def read_too_early(device):
    x, host = torch.ones(3, device=device), torch.zeros(3)
    host.copy_(x, non_blocking=True)
    early = host.clone()
    x.fill_(5)  # later on the stream
    synchronize()
    return early.tolist(), host.tolist()


def test_a_copy_that_does_not_block_is_garbage_until_someone_waits():
    early, late = alone(read_too_early)
    assert set(early).isdisjoint({0.0, 1.0, 5.0})
    assert late == [1.0, 1.0, 1.0]


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left(device):
    before, size = resident(), 2**25 + 2**20  # so large that it goes back to the system at once
    for _ in range(10):
        x = torch.ones(size, dtype=torch.uint8, device=device)
        y = (x + x)[10:].view(-1, 2)
        del x, y
    return (resident() - before) / size


def test_memory_that_nobody_has_is_freed():
    assert alone(left) < 2


def recomputed(device):
    """Leaves a forward by an exception, with tensors of the device on the way."""
    layer, x = torch.nn.Linear(3, 3).to(device), torch.ones(2, 3, device=device, requires_grad=True)
    checkpoint(lambda x: layer(x).relu() * layer(x), x, use_reentrant=False).sum().backward()
    found, x.grad = x.grad.clone(), None
    (layer(x).relu() * layer(x)).sum().backward()
    return torch.equal(found, x.grad)


def test_an_exception_may_free_memory_of_the_device():
    assert alone(recomputed)


def swapped(rank, device):
    """Two messages whose tags the receiver expects the other way round."""
    first, second = (torch.full((2,), value, device=device) for value in (1.0, 2.0))
    group, peer = dist.group.WORLD, 1 - rank
    group._start_coalescing(device)
    for x, tag in ((first, 5), (second, 6)) if rank == 0 else ((first, 6), (second, 5)):
        (group.send if rank == 0 else group.recv)([x], peer, tag)
    group._end_coalescing(device).wait()
    return first.tolist(), second.tolist()


def test_messages_of_the_ordered_group_have_no_tags():
    assert on_devices(2, swapped, ALONE) == [([1.0, 1.0], [2.0, 2.0])] * 2


def held_up(rank, device):
    """Both ranks send before they receive."""
    ours, theirs = (torch.ones(2, device=device) for _ in range(2))
    sent = dist.group.WORLD.send([ours], 1 - rank, 0)
    received = dist.group.WORLD.recv([theirs], 1 - rank, 0)
    with pytest.raises(RuntimeError, match=r"imeout|imed out|losed"):
        received.wait()
    return sent.is_completed()


def test_messages_outside_a_batch_hold_up_what_follows():
    work = lambda rank: held_up(rank, use_device())  # noqa: E731
    assert on_ranks(2, work, backend=ALONE, patience=1.0, dying=[0, 1]) == [True, True]


def kinds(rank, device):
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(1))
    x = torch.ones(2, device=device)
    dist.all_reduce(x)
    return x.tolist()


def test_the_group_that_is_alone_has_no_backend_for_the_cpu():
    assert on_devices(2, kinds, ALONE) == [[2.0, 2.0]] * 2


def both_kinds(rank, device):
    near, away = torch.ones(1), torch.full((1,), 2.0, device=device)
    for x in (near, away):
        dist.all_reduce(x)
    return near.tolist(), away.tolist()


def test_the_group_beside_gloo_routes_by_device():
    assert on_devices(2, both_kinds, BESIDE_GLOO) == [([2.0], [4.0])] * 2


@pytest.mark.devices(group=False)
def test_tests_with_the_mark_devices_make_their_tensors_there(ranks_on_a_device, request):
    kind = request.node.callspec.params["ranks_on_a_device"]
    assert on_ranks(1, lambda rank: torch.ones(2).device.type) == [kind]


def test_a_test_with_the_mark_fails_where_it_does_not_use_the_device():
    usage = Usage()
    ranks = usage.on_device(DEVICE)
    ranks(2, lambda rank: torch.ones(2, device="cpu").sum().item())
    with pytest.raises(AssertionError, match="nothing on the device"):
        usage.check(group=False)
    ranks(2, lambda rank: torch.ones(2).sum().item())
    usage.check(group=False)
    with pytest.raises(AssertionError, match="no tensor of the device crossed"):
        usage.check(group=True)
    assert ranks(2, lambda rank: dist.all_reduce(torch.ones(2))) == [None, None]
    usage.check(group=True)
