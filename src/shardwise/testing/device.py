"""A device for tests, where there is no accelerator: its memory is that of the CPU, but only its operations reach it.

Its tensors are plain `torch.Tensor`s of a device called "far". It refuses what CUDA refuses: the address of a tensor
cannot be read by the host, `numpy()` raises, and an operation takes tensors of one device, or scalars of the CPU. It
allows what CUDA allows, and counts what makes an accelerator slow. The values of a non-blocking copy to the host are
garbage until someone waits for the device. It has one stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.exchange.buffers import bytes_at

DEVICE = "far"
FAR = 1 << 52  # added to the address of memory: no process has memory there
GARBAGE = 0xA5
Kernel = Callable[..., Any]


@dataclass
class Counts:
    """What an accelerator did: `waits` of the host for the device, `kernels` and `copies` launched, and transfers.

    `calls` are those of a process group with its tensors.

    A copy of many tensors at once is one launch where CUDA makes it one: if each pair has the same strides, without
    gaps, on one device.
    """

    waits: int = 0
    kernels: int = 0
    copies: int = 0
    to_host: int = 0
    from_host: int = 0
    calls: int = 0


class _Stream:
    """What the device does, in order: copies that the host has not waited for, counts."""

    def __init__(self) -> None:
        self.pending = list[tuple[torch.Tensor, torch.Tensor]]()  # what becomes of host memory, once it is waited for
        self.counts = list[Counts]()
        self.libraries = list[torch.library.Library]()  # an operation is registered as long as they live

    def count(self, **more: int) -> None:
        for counts in self.counts:
            for name, number in more.items():
                setattr(counts, name, getattr(counts, name) + number)

    def wait(self) -> None:
        self.count(waits=1)
        for host, values in self.pending:
            host.copy_(values)
        self.pending.clear()


_stream = _Stream()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what the device does inside.

    >>> from shardwise.testing import on_ranks
    >>> def work(rank):
    ...     x = torch.ones(2, 3, device=use_device())
    ...     with counting() as counts:
    ...         total = (x + x).sum().item()
    ...     return total, counts.waits
    >>> on_ranks(1, work)
    [(12.0, 1)]
    """
    counts = Counts()
    _stream.counts.append(counts)
    try:
        yield counts
    finally:
        _stream.counts.remove(counts)


def count_call() -> None:
    """A process group was called with tensors of the device."""
    _stream.count(calls=1)


def synchronize() -> None:
    """Wait for the device, as `torch.cuda.synchronize`."""
    _stream.wait()


def use_device() -> torch.device:
    """Make the device known to torch in this process, for as long as it lives. Call it on the ranks of `on_ranks`."""
    if not _stream.libraries:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(DEVICE, _Backend())
        _register()
    return torch.device(DEVICE, 0)


class OneStream:
    """The stream of the device: all that it does is in order."""

    def wait_stream(self, other: object) -> None:
        """There is no other."""

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize()


class _Backend:
    """The module `torch.far`. One device, which has no random numbers of its own."""

    Stream = OneStream
    current_stream = staticmethod(lambda *_: OneStream())

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    set_device = staticmethod(lambda _: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])

    @staticmethod
    @contextmanager
    def device(_: object) -> Iterator[None]:
        yield

    stream = device

    @staticmethod
    def synchronize(device: object = None) -> None:
        synchronize()


# --- memory ----------------------------------------------------------------------------------------------------------


class _Place(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    """Memory as DLPack hands it over: the only way to make a storage of this device with an address, without C++.

    It begins what was allocated; the size and the bytes follow. `free` is the deleter: a function in Python cannot be
    called while an exception is on its way.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("place", _Place),
        ("ndim", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


PRIVATE_USE, UNSIGNED = 12, 1  # of DLPack
HEAD = 128  # bytes before those of a tensor
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_free = ctypes.cast(_libc.free, ctypes.c_void_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _on_device(size: int) -> torch.Tensor:
    """So many bytes of the device, at least one: they need an address of their own."""
    start = _libc.malloc(HEAD + size)
    if not start:
        raise MemoryError(f"the device has no {size} bytes left")
    managed = _Managed.from_address(start)
    managed.data, managed.size, managed.shape = start + HEAD | FAR, size, start + _Managed.size.offset
    managed.place, managed.ndim, managed.type = _Place(PRIVATE_USE, 0), 1, _Type(UNSIGNED, 8, 1)
    managed.strides, managed.offset, managed.context, managed.deleter = None, 0, None, _free
    found: torch.Tensor = torch._C._from_dlpack(_capsule(start, b"dltensor", None))
    return found


def on_host(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a CPU tensor, while that lives: a test looks where the host must not."""
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")  # which out= may make larger
    storage = x.untyped_storage()
    memory = torch.from_numpy(bytes_at(storage.data_ptr() ^ FAR, storage.nbytes()))
    room = torch.empty(0, dtype=x.dtype, device="cpu")
    room.set_(memory.untyped_storage(), int(x.storage_offset()), x.shape, x.stride())
    room = room.conj() if x.is_conj() else room
    return torch._neg_view(room) if x.is_neg() else room


def _moved(x: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor on the device, with all of its storage."""
    size = x.untyped_storage().nbytes()
    memory = _on_device(max(size, 1))
    ctypes.memmove(memory.untyped_storage().data_ptr() ^ FAR, x.untyped_storage().data_ptr(), size)
    elements = memory[: size // x.itemsize * x.itemsize].view(x.dtype)
    return elements.as_strided(x.shape, x.stride(), x.storage_offset())


def _location(storage: Any) -> str | None:
    return DEVICE if storage.device.type == DEVICE else None


def _restored(storage: Any, location: str) -> torch.UntypedStorage | None:
    """A storage that was pickled on the device."""
    if not location.startswith(DEVICE):
        return None
    return _moved(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)).untyped_storage()


# --- operations ------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# operations on shapes alone: those of the CPU do not look at values
_SHAPES = (aten.as_strided, aten.view, aten._reshape_alias, aten.unfold, aten.alias, aten.set_)
# the host has to know the values
_WAITS = (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.is_set_to)
_INDEXED = (aten.index, aten.index_put_, aten._index_put_impl_)  # indices may be on the CPU


def _is_far(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == DEVICE


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of the device: that of the CPU, on the same memory."""
    packet = op.overloadpacket
    if packet in _SHAPES and _is_far(args[0]):
        return op.redispatch(_CPU, *args, **kwargs)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    _check_one_device(op, given, packet in _INDEXED)
    _stream.count(kernels=1)
    if packet in _WAITS:
        _stream.wait()
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    memory = {id(x): _memory(x) for x in given}
    args_there, kwargs_there = tree_map(lambda x: memory.get(id(x), x), (args, kwargs))
    found = (packet if _has_plain_numbers(op, args) else op)(*args_there, **kwargs_there)
    written = _written(op, args, kwargs)
    for one in filter(_is_far, written):
        _resize(one, memory[id(one)])
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map(lambda x: _result(x, given) if isinstance(x, torch.Tensor) else x, found)


def _has_plain_numbers(op: Any, args: Sequence[Any]) -> bool:
    """True where torch hands a number over where the operation has a tensor: another overload takes it."""
    pairs = zip(op._schema.arguments, args, strict=False)
    return any(type(x) in (bool, int, float, complex) and str(one.type) == "Tensor" for one, x in pairs)


def _memory(x: Any) -> Any:
    return on_host(x) if _is_far(x) else x


def _result(x: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result as a tensor of the device: a view of one that was given, or new."""
    for one in given:
        if _is_far(one) and one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() | FAR:
            alike = one if one.dtype == x.dtype else _viewed(one, x.dtype)
            return alike.as_strided(x.shape, x.stride(), x.storage_offset())
    return _moved(x)


def _viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a tensor of the device as elements of another dtype, such as the parts of complex numbers."""
    alike = torch.empty(0, dtype=dtype, device=x.device)
    return aten.set_.source_Storage.redispatch(_CPU, alike, x.untyped_storage())


def _resize(x: torch.Tensor, memory: torch.Tensor) -> None:
    """Where an operation has made its out= larger."""
    if x.shape != memory.shape:
        aten.set_.source_Tensor.redispatch(_CPU, x, _moved(memory))


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation returns, because it writes them."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    values = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    writes = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [values[one.name] for one in writes if one.name in values][: len(schema.returns)]


def _check_one_device(op: Any, given: Sequence[torch.Tensor], indexed: bool) -> None:
    strange = [x for x in given if not _is_far(x) and x.ndim]
    if strange and any(map(_is_far, given)) and not indexed:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE}:0 and "
            f"{strange[0].device}! ({op})"
        )


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between any two devices."""
    _stream.count(copies=1, from_host=not _is_far(source), to_host=not _is_far(target))
    there, here = _memory(target), _memory(source)
    if _is_far(target):
        there.copy_(here)
        return target
    if non_blocking:
        _stream.pending.append((there, here.to(there.dtype, copy=True)))
        (_bytes_of(target) if target.untyped_storage().nbytes() == target.nbytes else there).fill_(GARBAGE)
        return target
    _stream.wait()
    there.copy_(here)
    return target


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Of the whole storage of a CPU tensor."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source, non_blocking)


def _to_copy(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """To another device or dtype. Values are cast on the device, as CUDA does, before they go to the host."""
    dtype, there = dtype or x.dtype, x.device if device is None else device
    form = memory_format or torch.preserve_format
    target = torch.empty_like(x, dtype=dtype, device=there, memory_format=form)
    return target.copy_(x, non_blocking=non_blocking)


def _foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    """One launch where CUDA has one; otherwise a copy for each pair."""
    if not _in_one_launch(targets, sources):
        for target, source in zip(targets, sources, strict=True):
            _copy(target, source, non_blocking)
        return
    _stream.count(copies=1)
    torch._foreach_copy_([on_host(x) for x in targets], [on_host(x) for x in sources])


def _in_one_launch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    alike = all(a.shape == b.shape and a.stride() == b.stride() for a, b in zip(targets, sources, strict=True))
    dense = all(_is_far(x) and _is_dense(x) for x in (*targets, *sources))
    return alike and dense and len({x.dtype for x in sources}) == len({x.dtype for x in targets}) == 1


def _is_dense(x: torch.Tensor) -> bool:
    """True if its elements lie one after the other, in any order of the dims."""
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    return all(stride == prod(size for _, size in dims[:at]) for at, (stride, _) in enumerate(dims))


def _empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    return _moved(torch.empty(size, dtype=options.get("dtype"), device="cpu"))


def _empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    return _moved(torch.empty_strided(size, stride, dtype=options.get("dtype"), device="cpu"))


def _register() -> None:
    library: Any = torch.library.Library
    every, own = library("_", "IMPL"), library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    kernels: dict[str, Kernel] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "copy_": _copy,
        "_to_copy": _to_copy,
        "_foreach_copy_": _foreach_copy,
    }
    for name, kernel in kernels.items():
        own.impl(name, kernel, "PrivateUse1")
    _stream.libraries += [every, own]
    torch.serialization.register_package(0, _location, _restored)
