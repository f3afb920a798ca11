"""What a rank brings to a call, and what it knows by that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.containers.container import Kind, kind_of, on_transport
from shardwise.layout import Layout
from shardwise.transports import GroupTransport


@dataclass(frozen=True)
class SourceFacts:
    """What the source is. A rank that holds nothing of it cannot know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    device: str  # the kind of device: messages travel there
    gradient: bool  # followed by autograd


FACTS = tuple(SourceFacts.__dataclass_fields__)


@dataclass(frozen=True)
class Held:
    """How the source lies, and this rank's tensors of it. None is what it does not know."""

    kind: Kind | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    dtype: torch.dtype | None = None
    gradient: bool | None = None
    error: Exception | None = None
    stand_in: torch.Tensor | None = None  # for backward through an earlier reshard, of which this rank got nothing

    @staticmethod
    def of(x: Any) -> Held:
        """From a sharded tensor, or from None."""
        return Held.made(lambda: x)

    @staticmethod
    def made(make: Callable[[], Any]) -> Held:
        """From what is made here. What goes wrong is told to all."""
        try:
            x = make()
            if x is None:
                return Held.by(None, (), None)
            kind = kind_of(x)
            _ = kind.layout  # here, where what it refuses is told to all
            held = Held.by(kind, tuple(kind.taken(x)), getattr(x, "dtype", None))
            return replace(held, stand_in=getattr(x, "_stand_in", None))
        except Exception as error:  # the others have to hear of it first
            return Held(error=error)

    @staticmethod
    def by(kind: Kind | None, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> Held:
        """From tensors of a kind."""
        gradient = any(t.requires_grad for t in tensors) if tensors else None
        return Held(
            kind, tensors, tensors[0].dtype if tensors else dtype, gradient if torch.is_grad_enabled() else False
        )

    def on(self, transport: GroupTransport) -> Held:
        """With the owners of a transport. What goes wrong is told to all."""
        try:
            kind = self.kind and on_transport(self.kind, transport)
            return self if kind is self.kind else replace(self, kind=kind)
        except Exception as error:
            return Held(error=error)

    def known(self) -> dict[str, Any]:
        """The facts that it knows, by name."""
        layout = self.kind and self.kind.layout
        device = self.tensors[0].device.type if self.tensors else None
        facts = (layout and layout.shape, self.dtype, layout, device, self.gradient)
        return {name: fact for name, fact in zip(FACTS, facts, strict=True) if fact is not None}
