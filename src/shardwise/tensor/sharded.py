"""ShardedTensor: this rank's tensors, and the layout that says which cells they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise import report
from shardwise.errors import LayoutError
from shardwise.layout import Layout, parse
from shardwise.wires.members import owner_here

if TYPE_CHECKING:
    from shardwise.tensor.kinds import Kind

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Own:
    """How a ShardedTensor of ours lies: the kind that every layout can have."""

    layout: Layout
    group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device | None:
        """Any."""
        return None

    def taken(self, x: ShardedTensor) -> list[torch.Tensor]:
        """Its shards."""
        return list(x.shards)

    def local(self, tensors: Tensors) -> list[torch.Tensor]:
        """They are plain tensors."""
        return [t.detach() for t in tensors]

    def dressed(self, local: Tensors) -> list[torch.Tensor]:
        """They are plain tensors."""
        return list(local)

    def closed(self, tensors: Tensors) -> ShardedTensor | None:
        """A ShardedTensor, on the ranks that the layout knows."""
        return ShardedTensor(tensors, self.layout, self.group) if owner_here(self.group) in self.layout else None

    def gradient(self) -> Own:
        """Whole where the value was partial: every term has the gradient of the value."""
        return replace(self, layout=self.layout.whole())

    def gradient_of(self, grads: Tensors) -> Own:
        """As they are to lie."""
        return self.gradient()


class ShardedTensor:
    """This rank's part of a tensor: one local tensor for every buffer that the layout gives it. A plain container.

    >>> x = ShardedTensor(torch.arange(12).reshape(2, 6), "2x6/S0@1")
    >>> x
    ShardedTensor(2x6/S0@1, torch.int64, rank 0 holds [0:2, 0:6])
    >>> x.local_tensor().shape
    torch.Size([2, 6])

    Owners of the layout are global ranks; in a group that joins several jobs, or that torch's registry does not know,
    they are ranks of the group. `group` is the process group whose ranks call together; the default group unless given.
    Shards may be views, of any strides; nothing is copied.
    """

    def __init__(
        self, shards: torch.Tensor | Tensors, layout: Layout | str, group: dist.ProcessGroup | None = None
    ) -> None:
        if isinstance(layout, str):
            layout = parse(layout)
        if not isinstance(layout, Layout):
            raise LayoutError(f"a ShardedTensor needs a Layout or its notation, not {layout!r}")
        self._shards = (shards,) if isinstance(shards, torch.Tensor | ShardedTensor) else tuple(shards)
        self._kind: Kind = Own(layout, group)
        _check(self.shards, layout, owner_here(group))

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This rank's tensors."""
        return self._shards

    @property
    def kind(self) -> Kind:
        """How it lies, with its group."""
        return self._kind

    @property
    def layout(self) -> Layout:
        """Where every cell of the whole tensor lives."""
        return self._kind.layout

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks call together; None for the default group."""
        return self._kind.group

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.layout.shape)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return self.layout.ndim

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the shards; None on a rank that has none."""
        return self.shards[0].dtype if self.shards else None

    @property
    def device(self) -> torch.device | None:
        """Of the shards; None on a rank that has none."""
        return self.shards[0].device if self.shards else None

    @property
    def requires_grad(self) -> bool:
        """True where autograd follows any of the shards."""
        return any(shard.requires_grad for shard in self.shards)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Let autograd follow the shards, in place."""
        for shard in self.shards:
            shard.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> ShardedTensor | None:
        """The gradients of the shards, laid out as gradients are; None where there are none yet."""
        grads = [shard.grad for shard in self.shards]
        found = [grad for grad in grads if grad is not None]
        if not found or len(found) < len(grads):
            return None
        grad: ShardedTensor = self._kind.gradient().closed(found)
        return grad

    def local_tensor(self) -> torch.Tensor:
        """This rank's only shard."""
        if len(self.shards) != 1:
            raise LayoutError(f"this rank has {len(self.shards)} shards of {self.layout!r}: look at .shards")
        return self.shards[0]

    def gather(
        self, dst: int | None = 0, out: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """The whole tensor on (global) rank `dst`, None on others; on every rank where `dst` is None.

        With `out`, given on that rank alone, it is written there, whatever dtype that has. All ranks of the group call.
        """
        from shardwise.tensor.resharding import gather  # which makes ShardedTensors

        return gather(self, dst, out, dtype)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """The same with shards on another device or of another dtype, as Tensor.to."""
        return self._each(lambda shard: shard.to(*args, **kwargs))

    def cpu(self) -> ShardedTensor:
        """The same with shards on the CPU."""
        return self._each(torch.Tensor.cpu)

    def cuda(self, device: Any = None) -> ShardedTensor:
        """The same with shards on a GPU, the current one unless told."""
        return self._each(lambda shard: shard.cuda(device))

    def detach(self) -> ShardedTensor:
        """The same values, apart from autograd."""
        return self._each(torch.Tensor.detach)

    def clone(self) -> ShardedTensor:
        """A copy."""
        return self._each(torch.Tensor.clone)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
        return ShardedTensor([change(shard) for shard in self.shards], self.layout, self.group)

    @property
    def _is_param(self) -> bool:
        """Never: torch.nn.Parameter would take it, and modules would not know it."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise TypeError(
            "a ShardedTensor is no parameter: keep it as an attribute of the module "
            "(sharded_tensor.state_dict_hook brings it into the state dict), or compute with a DTensor"
        )

    def __copy__(self) -> ShardedTensor:
        """The same shards, in the same group."""
        return self._each(lambda shard: shard)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """Copied shards, in the same group."""
        return self._each(lambda shard: deepcopy(shard, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without its group: what is loaded lives in the default group, on a rank with the same part."""
        return ShardedTensor, (self.shards, self.layout)

    def __repr__(self) -> str:
        me = owner_here(self.group)
        boxes = [str(piece.box) for piece in self.layout.pieces(me)] if me in self.layout else []
        shown = ", ".join(boxes[:4]) + f" and {len(boxes) - 4} more" * (len(boxes) > 4)
        dtype = self.dtype or "no shards"
        return f"ShardedTensor({self.layout.brief()}, {dtype}, rank {me} holds {shown or 'nothing'})"

    def _repr_html_(self) -> str:
        """Who holds what, in notebooks; no value is read."""
        return report.glance(self.layout, repr(self))


def _check(shards: tuple[Any, ...], layout: Layout, me: int) -> None:
    """Refuse shards that are not what the layout gives this rank."""
    expected = list(layout.local_shapes(me)) if me in layout else []
    strange = [shard for shard in shards if not isinstance(shard, torch.Tensor | ShardedTensor)]
    if strange:
        raise LayoutError(f"a shard must be a tensor, not {strange[0]!r}")
    found = [tuple(shard.shape) for shard in shards]
    if found != expected:
        raise LayoutError(f"{layout!r} gives rank {me} tensors of shapes {expected}, but it brought {found}")
    if len({(shard.dtype, shard.device) for shard in shards}) > 1:
        kinds = sorted({f"{shard.dtype} on {shard.device}" for shard in shards})
        raise LayoutError(f"the shards of a rank must have one dtype and device, not {', '.join(kinds)}")
