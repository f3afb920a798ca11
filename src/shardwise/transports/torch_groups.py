"""torch's private names that transports need, each behind a function. No other file of this package uses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

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


def post_as_batch(
    group: dist.ProcessGroup, device: torch.device, post: Callable[[], list[dist.Work]]
) -> list[dist.Work]:
    """Post messages as one batch where the backend can. The work of the batch then stands for each of its messages."""
    if type(group) is not dist.ProcessGroup or not group._get_backend(device).supports_coalescing:
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
