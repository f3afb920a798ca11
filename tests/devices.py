"""Runs tests on a device too: those with the mark `devices`. On its ranks new tensors lie on the device by default."""

import sys

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.testing import on_ranks
from shardwise.testing.device import DEVICE, counting, use_device
from shardwise.testing.ordered_group import BESIDE_GLOO


def device_type():
    """That of the default device, as meshes take it."""
    return torch.get_default_device().type


def there(x):
    """A tensor on the default device. One of the CPU is itself there, and not a copy."""
    return x.to(torch.get_default_device())


class Usage:
    """What a test did with the test device, on all its ranks. Of other devices nothing is counted."""

    def __init__(self):
        self.calls = self.launches = 0

    def on_device(self, device):
        """As `on_ranks` on a kind of device. The group moves its memory if this machine has one for each rank."""
        return self._on_far if device == DEVICE else _on_cuda

    def _on_far(self, count, work, **options):
        def run(rank):
            device = use_device()
            with counting() as counts:
                return _run_there(device, rank, work), counts.calls, counts.copies + counts.kernels

        reports = on_ranks(count, run, **{"backend": BESIDE_GLOO, **options})
        for _, calls, launches in filter(None, reports):  # a rank that died has none
            self.calls += calls
            self.launches += launches
        return [report and report[0] for report in reports]

    def check(self, *, group):
        """The test must have used the device: with `group`, its tensors must have crossed a process group."""
        assert self.launches, "this test has the mark `devices`, but it did nothing on the device"
        assert self.calls or not group, (
            "this test has the mark `devices`, but no tensor of the device crossed a process group: make meshes with "
            "device_type() and tensors with there(), or mark it devices(group=False) if it sends none"
        )


def _on_cuda(count, work, **options):
    many = torch.cuda.device_count()  # which does not start CUDA: no fork could use it then
    backend = "cpu:gloo,cuda:nccl" if many >= count else "gloo"
    run = lambda rank: _run_there(torch.device("cuda", rank % many), rank, work)  # noqa: E731
    return on_ranks(count, run, **{"backend": backend, **options})


def _run_there(device, rank, work):
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _let_tests_look()
    torch.set_default_device(device)
    _move_constants(getattr(work, "__globals__", {}))
    try:
        return work(rank)
    finally:
        torch.set_default_device(None)


def _move_constants(names):
    """Tensors that the module of a test made on the CPU when it was imported. (Other processes do not see it.)"""
    for name, value in list(names.items()):
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            names[name] = tree_map_only(torch.Tensor, there, value)


def _let_tests_look():
    """numpy() of a tensor of the device copies it, where a test calls it: what is not of the library."""
    numpy, array = torch.Tensor.numpy, torch.Tensor.__array__

    def look(refusing, tensor, *args, **kwargs):
        caller = sys._getframe(2).f_globals.get("__name__", "")
        away = tensor.device.type not in ("cpu", "meta") and not caller.startswith("shardwise.")
        return refusing(tensor.cpu() if away else tensor, *args, **kwargs)

    torch.Tensor.numpy = lambda tensor, *args, **kwargs: look(numpy, tensor, *args, **kwargs)
    torch.Tensor.__array__ = lambda tensor, *args, **kwargs: look(array, tensor, *args, **kwargs)
