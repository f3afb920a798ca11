"""torch's private names that transports need, each behind a function. No other file of this package uses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.errors import RefusedValueError

Options = TypeVar("Options", dist.AllToAllOptions, dist.AllreduceOptions)


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for every kind of device, as in {"cpu": "gloo", "cuda": "nccl"}."""
    names = {device.type: group._get_backend(device).name() for device in group._device_types}
    return names or {"cpu": group.name()}


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long the group waits, in seconds."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except Exception:  # not every backend has the option
        return float(dist.constants.default_pg_timeout.total_seconds())


GLOO = {"cpu": "gloo"}


def new_group(
    store: Store,
    rank: int,
    size: int,
    *,
    backends: Mapping[str, str] = GLOO,
    seconds: float,
    hostname: str | None = None,
) -> dist.ProcessGroup:
    """A process group that torch's registry does not know: also over several jobs, and without a default group.

    All its ranks call. `store`: where they meet, with a prefix that no other group has. `backends`: "gloo" or "nccl" by
    the kind of device, as from `backend_names`. `seconds`: its timeout. `hostname`: an address of this host, whose
    interface gloo uses; by default as torch chooses it. When the last reference goes, so do its sockets and threads.
    """
    unknown = sorted(set(backends.values()) - {"gloo", "nccl"})
    if unknown:
        raise RefusedValueError(f"a group over {unknown[0]} cannot be made here: only over gloo and nccl")
    group, made = dist.ProcessGroup(store, rank, size), dict[str, Any]()
    for device, backend in backends.items():
        if backend not in made:  # one for all its kinds of devices, with keys of its own in the store
            make = _new_gloo if backend == "gloo" else _new_nccl
            made[backend] = make(PrefixStore(f"{backend}/", store), rank, size, timedelta(seconds=seconds), hostname)
        kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
        group._register_backend(torch.device(device), kind, made[backend])
    return group


def alike(group: dist.ProcessGroup, store: Store, rank: int, size: int, *, seconds: float) -> dist.ProcessGroup:
    """A new group with the backends of this one. A group that is written in Python has a method that makes it."""
    if hasattr(group, "alike"):
        return group.alike(store, seconds)
    return new_group(store, rank, size, backends=backend_names(group), seconds=seconds)


def _new_gloo(store: Store, rank: int, size: int, timeout: timedelta, hostname: str | None) -> Any:
    if hostname is None:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    else:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        options._timeout = timeout
        backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def _new_nccl(store: Store, rank: int, size: int, timeout: timedelta, hostname: str | None) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def post_as_batch(
    group: dist.ProcessGroup, device: torch.device, post: Callable[[], list[dist.Work]]
) -> list[dist.Work]:
    """Post messages as one batch where the backend can. The work of the batch then stands for each of its messages."""
    kinds = {one.type for one in group._device_types}
    if device.type not in kinds or not group._get_backend(device).supports_coalescing:
        return post()
    group._start_coalescing(device)
    works = post()
    return [group._end_coalescing(device)] * len(works)


def asynchronous(options: Options) -> Options:
    """Options of a collective call that returns before it is done, as torch's own functions make them."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def move_to_shared_memory(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Move a CPU storage to shared memory; its descriptor, which the storage closes, and its size."""
    file, size = storage._share_fd_cpu_()
    return file, size


def storage_id(storage: torch.UntypedStorage) -> int:
    """Tells apart storages that live at the same time, also at one address."""
    return int(storage._cdata)


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two CPU storages: all tensors that use the one use that of the other now."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # not before torch 2.13
