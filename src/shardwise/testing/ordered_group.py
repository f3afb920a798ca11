"""A process group between tensors of the test device: without tags, as nccl; messages meet by their order alone.

All that is asked of it runs in a thread, one call after the other, as on a stream. A message outside a batch holds up
what comes after it until the peer takes it. What waits for it therefore hangs here where it could hang over nccl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.testing.device import DEVICE, count_call, on_host, use_device

ALONE, BESIDE_GLOO = "ordered", "gloo-and-ordered"  # as nccl alone, and as cpu:gloo,cuda:nccl
# as torch asks a group for them, and as gloo calls them
SAME = (
    "allreduce allreduce_coalesced broadcast allgather allgather_coalesced _allgather_base reduce reduce_scatter "
    "_reduce_scatter_base gather scatter alltoall alltoall_base barrier"
)
COLLECTIVES = {name: name for name in SAME.split()} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
Post = Callable[[], list[dist.Work]]


def register_backends() -> None:
    """Make the device and the two backends known to torch in this process."""
    use_device()
    if ALONE not in dist.Backend.backend_list:
        dist.Backend.register_backend(ALONE, _alone, devices=[DEVICE])
        dist.Backend.register_backend(BESIDE_GLOO, _beside_gloo, devices=["cpu", DEVICE])


def _alone(store: Store, rank: int, size: int, timeout: timedelta) -> OrderedGroup:
    return OrderedGroup(store, rank, size, timeout, beside_gloo=False)


def _beside_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> OrderedGroup:
    return OrderedGroup(store, rank, size, timeout, beside_gloo=True)


class Route(NamedTuple):
    """What a group has for one kind of device."""

    title: str
    options: object
    supports_coalescing: bool

    def name(self) -> str:
        """As torch calls it."""
        return self.title


class OrderedWork(dist.Work):
    """A call that the thread of the group will make."""

    def __init__(self, future: Future[None], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._future, self._tensors = future, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done. (With CUDA the stream would wait, and not the host.)"""
        self._future.result(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """True if `wait` would return immediately."""
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        """The tensors of the call."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done when it is asked for."""
        self.wait()
        done = torch.futures.Future[list[torch.Tensor]]()
        done.set_result(self._tensors)
        return done


class OrderedGroup(dist.ProcessGroup):
    """Moves the memory of the device over a gloo group of its own. CPU tensors go over another, or are refused."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, beside_gloo: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one of the two ways
        self._store, self._label = store, ""
        self._gloo = {
            kind: dist.ProcessGroupGloo(PrefixStore(f"{kind}/", store), rank, size, timeout)
            for kind in ([DEVICE, "cpu"] if beside_gloo else [DEVICE])
        }
        self._calls = SimpleQueue[tuple[Post, Future[None]]]()
        self._order = Counter[tuple[str, int]]()  # of messages to and from each peer
        self._batch: list[Post] | None = None
        Thread(target=_serve, args=(self._calls,), name="ordered group", daemon=True).start()

    # --- what torch asks of a group ----------------------------------------------------------------------------------

    def name(self) -> str:
        """Of its backend."""
        return ALONE

    getBackendName = name  # noqa: N815  # as torch's C++ asks for it

    @property
    def pg_name(self) -> str:
        """As torch registers it."""
        return self._label

    group_name = pg_name  # type: ignore[assignment]

    def _set_group_name(self, name: Any) -> None:
        self._label = name
        super()._set_group_name(name)

    def get_group_store(self) -> Store:
        """Where its ranks met."""
        return self._store

    def alike(self, store: Store, seconds: float) -> OrderedGroup:
        """A new group of its ranks, with the same backends, which meet in that store."""
        beside_gloo = "cpu" in self._gloo
        return OrderedGroup(store, self.rank(), self.size(), timedelta(seconds=seconds), beside_gloo=beside_gloo)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._gloo]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._gloo:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        gloo = self._gloo[device.type]
        return Route("gloo" if device.type == "cpu" else ALONE, gloo.options, device.type == DEVICE)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _collective(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        gloo = self._gloo[self._kind(tensors)]
        if gloo is not self._gloo[DEVICE]:
            found: dist.Work = getattr(gloo, name)(*args, **kwargs)
            return found
        args, kwargs = tree_map(_memory, args), tree_map(_memory, kwargs)
        return self._submit(lambda: [getattr(gloo, name)(*args, **kwargs)], tensors)

    def _each(self, name: str, targets: Sequence[Any], sources: Sequence[Any], options: Any = None) -> dist.Work:
        """A collective call for each of several pairs. In order, so the last stands for all on a device."""
        more = [] if options is None else [options]
        works = [self._collective(name, *pair, *more) for pair in zip(targets, sources, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def allgather_into_tensor_coalesced(self, targets: Any, sources: Any, options: Any = None) -> dist.Work:
        """As torch's functional collectives call it, also for a single tensor."""
        return self._each("_allgather_base", targets, sources, options)

    def reduce_scatter_tensor_coalesced(self, targets: Any, sources: Any, options: Any = None) -> dist.Work:
        """As torch's functional collectives call it, also for a single tensor."""
        return self._each("_reduce_scatter_base", targets, sources, options)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """The next message to a peer, whatever its tag."""
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """The next message from a peer, whatever its tag."""
        return self._message("recv", tensors, peer, tag)

    def _message(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        kind = self._kind(tensors)
        gloo, back = self._gloo[kind], "recv" if name == "send" else "send"
        if kind == "cpu":
            found: dist.Work = getattr(gloo, name)(tensors, peer, tag)
            return found
        number, memory, taken = self._order[name, peer], [_memory(x) for x in tensors], torch.zeros(1, device="cpu")
        self._order[name, peer] += 1

        def post() -> list[dist.Work]:
            """The message, and a word that it was taken."""
            return [getattr(gloo, name)(memory, peer, 2 * number), getattr(gloo, back)([taken], peer, 2 * number + 1)]

        return self._submit(post, tensors)

    def _kind(self, tensors: Sequence[torch.Tensor]) -> str:
        kinds = {x.device.type for x in tensors} or {next(reversed(self._gloo))}
        if len(kinds) > 1:
            raise RuntimeError(f"a call needs tensors on one device, not on {' and '.join(sorted(kinds))}")
        (kind,) = kinds
        self._get_backend(torch.device(kind))
        return kind

    # --- order -------------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        posts, self._batch = self._batch or [], None
        return self._submit(lambda: [work for post in posts for work in post()], [])

    def _submit(self, post: Post, tensors: Sequence[torch.Tensor]) -> dist.Work:
        future = Future[None]()
        if tensors:
            count_call()
        post = partial(_post, post, tensors)
        if self._batch is None:
            self._calls.put((post, future))
        else:
            self._batch.append(post)
            future.set_result(None)  # nobody waits for it: the work of the batch stands for all
        return OrderedWork(future, tensors)


def _post(post: Post, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
    """Tensors of the device live until it is done: their memory goes with them."""
    return post()


def _serve(calls: SimpleQueue[tuple[Post, Future[None]]]) -> None:
    """One call after the other."""
    while True:
        post, future = calls.get()
        try:
            for work in post():
                work.wait()
            future.set_result(None)
        except Exception as error:
            future.set_exception(RuntimeError(str(error)))
        del post, future


def _memory(x: Any) -> Any:
    return on_host(x) if isinstance(x, torch.Tensor) and x.device.type == DEVICE else x


def _collective(name: str) -> Callable[..., dist.Work]:
    def call(group: OrderedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return group._collective(name, *args, **kwargs)

    return call


for _name, _of_gloo in COLLECTIVES.items():
    setattr(OrderedGroup, _name, _collective(_of_gloo))
