"""ShardedTensor: this rank's tensors, and the layout that says which cells they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, TypeGuard

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from shardwise import report
from shardwise.containers import chunks
from shardwise.containers.chunks import check_shards
from shardwise.containers.dtensor import is_dtensor
from shardwise.containers.operations import OF_SHARDS, OF_THE_WRAPPER, OWN, call_on_wrapper, name_of, refuse
from shardwise.containers.own_container import OwnContainer
from shardwise.containers.torch_sharded import is_torch_sharded
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.exchange.overflow import Overflow
from shardwise.geometry import Box
from shardwise.layout import Layout, local_boxes, parse
from shardwise.transports.members import of_job, owner_here

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.containers.container import Container


class ShardedTensor(torch.Tensor):
    """This rank's part of a tensor: one local tensor for every buffer that the layout gives it.

    >>> x = ShardedTensor(torch.arange(12).reshape(2, 6), "2x6/S0@1")
    >>> x
    ShardedTensor(2x6/S0@1, torch.int64, rank 0 holds [0:2, 0:6])
    >>> x.local_tensor().shape
    torch.Size([2, 6])

    Owners of the layout are global ranks; in a group that joins several jobs, or that torch's registry does not know,
    they are ranks of the group. `group` is the process group whose ranks call together; by default the default group.
    Shards may be views, of any strides; nothing is copied.

    It is a torch.Tensor of the whole shape, without memory: modules and torch's checkpoints (DCP) take it. It
    has no arithmetic: compute with the shards, or with a DTensor.
    """

    _shards: tuple[torch.Tensor, ...]
    _container: Container
    _owner: int  # that this process was when it was made

    def __new__(
        cls, shards: torch.Tensor | Sequence[torch.Tensor], layout: Layout | str, group: dist.ProcessGroup | None = None
    ) -> Self:
        if isinstance(layout, str):
            layout = parse(layout)
        if not isinstance(layout, Layout):
            raise LayoutError(f"a ShardedTensor needs a Layout or its notation, not {layout!r}")
        local = (shards,) if isinstance(shards, torch.Tensor) else tuple(shards)
        owner = owner_here(group)
        check_shards(local, layout, owner)
        return cls._holding(local, OwnContainer(layout, group), owner)

    @classmethod
    def _holding(cls, local: tuple[torch.Tensor, ...], container: Container, owner: int) -> Self:
        """One of that container with these tensors of that owner."""
        wrapper = cls._wrapper(container.layout.shape, *((local[0].dtype, local[0].device) if local else (None, None)))
        wrapper._shards, wrapper._container, wrapper._owner = local, container, owner
        return wrapper

    @classmethod
    def _wrapper(cls, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> Self:
        """A tensor of that shape without memory. What it says of itself is only used where no property here differs."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or torch.get_default_dtype(), device=device or torch.device("cpu")
        )

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This rank's tensors."""
        return self._shards

    def set_shards(self, shards: Sequence[torch.Tensor]) -> None:
        """Hold other tensors of the same shapes, such as parameters that were allocated anew."""
        check_shards(shards, self.layout, self._owner)
        self._shards = tuple(shards)

    @property
    def placed(self) -> bool:
        """True where it holds what its layout gives this rank. (Under torch's names it may hold any shards.)"""
        return True

    @property
    def container(self) -> Container:
        """How it lies, with its group; refused where this process has become a rank with other cells since."""
        self._check_rank()
        return self._container

    def _check_rank(self) -> None:
        """Process groups may have been made anew, with another rank for this process."""
        me = owner_here(self.group)
        if me != self._owner and local_boxes(self.layout, me) != local_boxes(self.layout, self._owner):
            raise LayoutError(
                f"this part of a {self.layout!r} was made on rank {self._owner}, but this process is rank {me} now, "
                f"which holds other cells: make it again by a layout of the new ranks, ShardedTensor(x.shards, layout)"
            )

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Where every cell of the whole tensor lives."""
        return self._container.layout

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks call together; None for the default group."""
        return self._container.group

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the whole tensor."""
        return torch.Size(self.layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """How many dims."""
        return self.layout.ndim

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Of the shards; None on a rank that has none."""
        return self.shards[0].dtype if self.shards else None

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """Of the shards; None on a rank that has none."""
        return self.shards[0].device if self.shards else None

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """True where the shards are on the CPU."""
        return self.device is not None and self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True where the shards are on a GPU."""
        return self.device is not None and self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True where the shards have no memory."""
        return any(shard.is_meta for shard in self.shards)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True if all shards are leaves of autograd."""
        return all(shard.is_leaf for shard in self.shards)

    @property
    def grad_fn(self) -> Node | None:  # type: ignore[override]
        """The grad_fn of the first shard that has one; None for leaves."""
        return next((shard.grad_fn for shard in self.shards if shard.grad_fn is not None), None)

    @property
    def requires_grad(self) -> bool:
        """True where autograd follows any of the shards."""
        return any(shard.requires_grad for shard in self.shards)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let autograd follow the shards, in place."""
        for shard in self.shards:
            shard.requires_grad_(requires_grad)
        return self

    @property  # type: ignore[override]
    def grad(self) -> ShardedTensor | None:
        """The gradients of the shards, as a ShardedTensor; None before backward."""
        grads = [shard.grad for shard in self.shards]
        defined = [grad for grad in grads if grad is not None]
        if not defined or len(defined) < len(grads):
            return None
        grad = self._container.gradient().assemble(defined)
        assert isinstance(grad, ShardedTensor), "this rank has a part of it"
        return grad

    @grad.setter
    def grad(self, value: ShardedTensor | None) -> None:
        given = (
            [None] * len(self.shards)
            if value is None
            else self._alike(value, "grad", self._container.gradient()).shards
        )
        for shard, grad in zip(self.shards, given, strict=True):
            shard.grad = grad

    def local_tensor(self) -> torch.Tensor:
        """This rank's only shard."""
        if len(self.shards) != 1:
            raise LayoutError(f"this rank has {len(self.shards)} shards of {self.layout!r}: look at .shards")
        return self.shards[0]

    def gather(  # type: ignore[override]
        self,
        dst: int | None = 0,
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        overflow: Overflow = "refuse",
    ) -> torch.Tensor | None:
        """The whole tensor on (global) rank `dst`, None on others; on every rank where `dst` is None.

        With `out`, given on that rank alone, it is written there: of any plain floating point dtype, or of `dtype`. All
        ranks of the group call. `overflow`: as in `reshard`.
        """
        from shardwise.tensor.resharding import gather  # which makes ShardedTensors

        return gather(self, dst, out, dtype, overflow=overflow)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """The same with shards on another device or of another dtype, as Tensor.to."""
        return self._each(lambda shard: shard.to(*args, **kwargs))

    def cpu(self) -> ShardedTensor:  # type: ignore[override]
        """The same with shards on the CPU."""
        return self._each(torch.Tensor.cpu)

    def cuda(self, device: torch.device | str | int | None = None) -> ShardedTensor:  # type: ignore[override]
        """The same with shards on a GPU, by default the current one."""
        return self._each(lambda shard: shard.cuda(device))

    def type_as(self, other: torch.Tensor) -> ShardedTensor:
        """The same with shards of the dtype of another tensor."""
        return self.to(dtype=other.dtype)

    def detach(self) -> ShardedTensor:
        """The same values, apart from autograd."""
        return self._each(torch.Tensor.detach)

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> ShardedTensor:  # type: ignore[override]
        """A copy."""
        return self._each(lambda shard: shard.clone(memory_format=memory_format))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> ShardedTensor:
        """Itself where all shards are contiguous, otherwise the same with shards that are."""
        if self.is_contiguous(memory_format):
            return self
        return self._each(lambda shard: shard.contiguous(memory_format=memory_format))

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """True where all shards are contiguous."""
        return all(shard.is_contiguous(memory_format=memory_format) for shard in self.shards)

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> Self:
        """Copy the values of a ShardedTensor of the same layout, of any dtype and device."""
        for mine, theirs in zip(self.shards, self._alike(other, "copy_", self._container).shards, strict=True):
            mine.copy_(theirs, non_blocking)
        return self

    def new_empty(self, *size: Any, **how: Any) -> ShardedTensor:
        """An uninitialized tensor of the same layout. Other sizes are refused: they have no layout."""
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if shape != self.layout.shape:
            refuse(
                "new_empty", f" with size {shape}", f"Give its own size, {self.layout.shape}: only that has a layout"
            )
        return self._each(lambda shard: shard.new_empty(shard.shape, **how))

    def share_memory_(self) -> Self:
        """Move the shards to shared memory, in place."""
        for shard in self.shards:
            shard.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """True where all shards are in shared memory."""
        return all(shard.is_shared() for shard in self.shards)  # type: ignore[no-untyped-call]

    def equal(self, other: torch.Tensor) -> bool:
        """True if the other has the same layout and values. All ranks of the group call."""
        return self._compared("equal", other, torch.equal)

    def allclose(self, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """True if the other has the same layout and close values. All ranks of the group call."""
        return self._compared("allclose", other, lambda a, b: torch.allclose(a, b, rtol, atol, equal_nan))

    def _compared(self, what: str, other: object, same: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
        from shardwise.job.agree import together_or_alone  # which makes ShardedTensors

        def mine() -> bool:
            if not isinstance(other, ShardedTensor):
                raise TypeError(f"Both arguments to torch.{what} need to be of type ShardedTensor, not {type(other)}")
            if self.layout.op or other.layout.op:
                raise ValueError(f"torch.{what} cannot compare partial values ({self.layout!r}): reduce them first")
            return self._fits(other, self.layout) and all(map(same, self.shards, other.shards))

        return together_or_alone(f"torch.{what}", mine, lambda answers: all(answers.values()), group=self.group)

    def _fits(self, other: ShardedTensor, layout: Layout) -> bool:
        """True where the other has that layout, and the same cells here: groups may give this process other numbers."""
        return other.layout == layout and local_boxes(*other._part()) == local_boxes(*self._part())

    def _alike(self, other: object, what: str, container: Container) -> ShardedTensor:
        """The other tensor, if it has the container's layout."""
        if not isinstance(other, ShardedTensor):
            refuse(what, f" from a {type(other).__name__}", f"Give a ShardedTensor of the layout {container.layout!r}")
        if not self._fits(other, container.layout):
            raise UnsupportedError(
                f"{what}: inplace copy can only happen between two ShardedTensor with same metadata! This one is "
                f"{self!r}, and the other {other!r}: shardwise.reshard(other, out=x) moves between layouts"
            )
        return other

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
        return ShardedTensor._holding(tuple(change(shard) for shard in self.shards), self._container, self._owner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations that look at the whole or go shard by shard; all others are refused."""
        kwargs = dict(kwargs or {})
        args = args or tuple(kwargs.pop(name) for name in ("input",) if name in kwargs)
        x = args[0] if args else None
        if func in OF_THE_WRAPPER:
            return call_on_wrapper(func, args, kwargs)
        if isinstance(x, ShardedTensor):
            if func in OWN:
                return getattr(x, OWN[func])(*args[1:], **kwargs)
            if func in OF_SHARDS:
                return x._each(lambda shard: func(shard, *args[1:], **kwargs))
        elif func is torch.Tensor.copy_ and isinstance(x, torch.Tensor):
            return x.copy_(args[1]._whole(), *args[2:], **kwargs)
        elif OWN.get(func) in ("equal", "allclose") and len(args) > 1:
            return args[1]._compared(name_of(func), x, func)  # which tells all ranks that this is not one
        refuse(name_of(func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Only reached by code that bypasses __torch_function__."""
        refuse(func.__name__)

    def __bool__(self) -> bool:
        """Refused. To test whether this rank got a result, compare it with None."""
        refuse("__bool__", remedy="Ask `x is None`, or look at its values: .shards")

    def _fits_in_place(self, other: object) -> bool:
        """Never: a module that is converted gets new parameters."""
        return False

    def _whole(self) -> torch.Tensor:
        """This rank's only shard, where it is the whole tensor."""
        box = Box((0,) * self.ndim, self.layout.shape)
        if self.layout.op or not self.shards or local_boxes(*self._part()) != [box]:
            refuse("copy_", " into a plain tensor", f"This rank does not hold the whole of {self.layout!r}: gather it")
        return self.shards[0]

    # --- as torch's distributed checkpoints see it (torch.distributed.checkpoint) -------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """What this rank writes."""
        return chunks.write_items(fqn, self._container.disassemble(self), *self._part())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Which boxes this rank holds, to be read."""
        return chunks.chunk_list(*self._part())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one of those boxes."""
        return chunks.tensor_shard(index, self._container.disassemble(self), *self._part())

    def _part(self) -> tuple[Layout, int]:
        """The layout, and which of its owners this is."""
        return self.layout, self._owner

    # --- copies and strings -------------------------------------------------------------------------------------------

    def __copy__(self) -> ShardedTensor:
        """The same shards, in the same group."""
        return self._each(lambda shard: shard)

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedTensor:
        """Copied shards, in the same group. A parameter stays a parameter."""
        if isinstance(self, torch.nn.Parameter):
            return _parameter(self._deepcopied, (memo,))
        return self._deepcopied(memo)

    def _deepcopied(self, memo: dict[int, object]) -> ShardedTensor:
        return self._each(lambda shard: deepcopy(shard, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """torch.Tensor defines it, so `__reduce__` alone is not enough. A parameter stays a parameter."""
        return (_parameter, self.__reduce__()[:2]) if isinstance(self, torch.nn.Parameter) else self.__reduce__()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled without its group: it is loaded into the default group, on a rank with the same boxes."""
        if not of_job(self.group):
            raise UnsupportedError(
                f"{self!r} cannot be pickled: its owners are ranks of a group that is not pickled with it. Pickle its "
                f"shards and its layout, and make it again: ShardedTensor(shards, layout, group)"
            )
        return _unpickled, (self.shards, self.layout, self._owner)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = [str(box) for box in local_boxes(self.layout, self._owner)]
        shown = ", ".join(boxes[:4]) + f" and {len(boxes) - 4} more" * (len(boxes) > 4)
        dtype = self.dtype or "no shards"
        return f"ShardedTensor({self.layout.brief()}, {dtype}, rank {self._owner} holds {shown or 'nothing'})"

    def _repr_html_(self) -> str:
        """Who holds what, in notebooks; no value is read."""
        return report.glance(self.layout, repr(self))


def _unpickled(shards: Sequence[torch.Tensor], layout: Layout, owner: int) -> ShardedTensor:
    """A pickled ShardedTensor, on a rank with the same boxes. Equal shapes are not enough."""
    me = owner_here(None)
    if local_boxes(layout, owner) != local_boxes(layout, me):
        raise LayoutError(
            f"this part of a {layout!r} was pickled on rank {owner}, and cannot be loaded on rank {me}, which holds "
            f"other cells: load it on rank {owner}"
        )
    return ShardedTensor(shards, layout)


def _parameter(make: Callable[..., ShardedTensor], given: tuple[object, ...]) -> ShardedTensor:
    """A new ShardedTensor, marked as torch.nn.Parameter marks it."""
    parameter = make(*given)
    parameter._is_param = True
    return parameter


def is_sharded(x: object) -> TypeGuard[torch.Tensor]:
    """True for a sharded tensor of any kind."""
    if type(x) is torch.Tensor:  # called several times for every tensor of a model
        return False
    return isinstance(x, ShardedTensor) or is_dtensor(x) or is_torch_sharded(x)
