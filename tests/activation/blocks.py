"""Modules whose inputs are the same on every rank, and steps of training to compare: what these tests share."""

import gc
import threading
import time

import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
from devices import device_type, there
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from shardwise.activation.sharded_activation import ShardedActivation

SIZES = (2, 3, 4)


def line():
    """A mesh of all ranks."""
    _forget_parent()
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("tp",))


def grid():
    """2x2 ranks."""
    _forget_parent()
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


def _forget_parent():
    """What this process was forked with is not looked at by the garbage collector, which would copy all of it."""
    if not gc.get_freeze_count():
        gc.freeze()


def resharded(module, mesh, dim=0, **options):
    """Also what is small is kept in parts."""
    return sw.input_reshard(module, mesh, dim, **{"least": 0, **options})


def whole_numbers(*shape, seed=0, dtype=torch.float64):
    """Sums and products of them are exact, in whatever order."""
    random = torch.Generator().manual_seed(seed)
    return there(torch.randint(-4, 5, shape, generator=random, device="cpu")).to(dtype)


def numbers(*shape, seed=0, dtype=torch.float32):
    return there(torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")).to(dtype)


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def bits(x):
    """The bytes of a tensor."""
    return (
        local(x.detach())
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
    )


def same(found, expected):
    """Equal to the last bit, one by one."""
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(bits(mine), bits(theirs))


def differs(x, group=None):
    """True where the ranks have other values: if they were mixed up, it would show."""
    everybody = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, bits(x).tolist(), group=group)
    return any(one != everybody[0] for one in everybody)


def fresh(inputs):
    """Copies of the tensors, as leaves of a new graph."""

    def leaf(x):
        if not isinstance(x, torch.Tensor):
            return x
        return there(x.detach()).clone().requires_grad_(x.dtype.is_floating_point or x.dtype.is_complex)

    return tree_map(leaf, inputs)


def cotangent(x):
    """Whole numbers, most of them different."""
    return torch.linspace(-16, 32, x.numel(), dtype=torch.float64).round().reshape(x.shape).to(x.dtype)


def pull(output):
    """Go back from an output, with another weight for each element."""
    local(output).backward(cotangent(local(output)))


def step(module, *inputs, seed=None, **named):
    """Forward and backward: the output, and the gradients of inputs and parameters. Chance differs per rank."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    args, kwargs = fresh((inputs, named))
    output = module(*args, **kwargs)
    pull(output)
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return [output.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]


def compared(module, mesh, *inputs, steps=2, options=None, **named):
    """The same steps without and with `input_reshard`; what it did, and the gradients."""
    plain = step(module, *inputs, **named)
    resharded(module, mesh, **(options or {}))
    with sw.activation.measure() as account:
        for _ in range(steps):
            same(step(module, *inputs, **named), plain)
    sw.input_reshard_handle(module).remove()
    same(step(module, *inputs, **named), plain)
    return account, plain


def everywhere(number, group=None):
    """The sum of all ranks' numbers."""
    total = torch.tensor([number])
    dist.all_reduce(total, group=group)
    return int(total)


def kept_in_parts(account, *, tensors, size, steps=2, group=None):
    """So many tensors of so many bytes in all were kept in parts in each step, each gathered once."""
    total = account.total
    assert (total.tensors, total.bytes_saved, total.gathers) == (steps * tensors, steps * size, steps * tensors)
    assert everywhere(total.bytes_kept, group) == steps * size
    assert total.bytes_gathered == total.bytes_saved - total.bytes_kept


def settle():
    """Wait until no thread is busy with what was kept, and drop what nobody holds."""
    for thread in threading.enumerate():
        if thread.name == "shardwise":
            thread.join()
    gc.collect()


def soon(found):
    """True once it is: a thread of gloo holds tensors a moment longer than who waited for it."""
    end = time.monotonic() + 5
    settle()
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
        settle()
    return found()


def kept_alive(count):
    """True where so many values are kept in parts."""
    return soon(lambda: sum(type(one) is ShardedActivation for one in gc.get_objects()) == count)


def hooks_are_off():
    """What is saved now is saved as it is."""
    x = torch.ones(3, requires_grad=True)
    y = x * x
    assert y.grad_fn._raw_saved_self is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert y.grad_fn._saved_self is x


class Copied(torch.autograd.Function):
    """The same in forward; in backward the sum over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum over ranks in forward; the same in backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def share(whole, dim, group):
    """This rank's share of a tensor."""
    return whole.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


class WholeMLP(nn.Module):
    """What `MLP` computes, on one rank."""

    def __init__(self, width=12, hidden=26, act=nn.ReLU):
        super().__init__()
        self.up, self.down, self.act = (nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False), act())
        self.double()
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(whole_numbers(*p.shape, seed=seed))

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class MLP(nn.Module):
    """Columns of the first weight and rows of the second on each rank, summed by hand."""

    def __init__(self, whole, group=None):
        super().__init__()
        self.group, self.act = group, whole.act
        parts = (whole.up.weight, 0), (whole.up.bias, 0), (whole.down.weight, 1)
        self.up, self.bias, self.down = (nn.Parameter(share(p.detach(), dim, group)) for p, dim in parts)

    def forward(self, x):
        x = self.act(nn.functional.linear(Copied.apply(x, self.group), self.up, self.bias))
        return Summed.apply(nn.functional.linear(x, self.down), self.group)
