"""isinstance over torch's own objects, for code that changed its imports: `isinstance(v, ShardedTensor)` and the like.

Metaclasses, so that torch's modules need not be imported: torch's classes are known by their names. Only isinstance is
wider: issubclass, and what is made here, are not.
"""

from __future__ import annotations

from abc import ABCMeta
from functools import lru_cache
from typing import Any

import torch

OURS, TORCHS = "shardwise.sharded_tensor", "torch.distributed._shard"


class KnowsTorchs(type):
    """Instances of the class of torch that has the same name count as well."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or _is_torchs(cls.__mro__, type(instance).__mro__)


class Familiar(KnowsTorchs, ABCMeta):
    """The metaclass of specs, metadata and shards."""


class FamiliarTensor(KnowsTorchs, torch._C._TensorMeta):
    """The metaclass of tensors."""


@lru_cache(maxsize=1024)
def _is_torchs(ours: tuple[type, ...], theirs: tuple[type, ...]) -> bool:
    """True for the classes of an instance of torch's, by those of ours that is asked for."""
    return ours[0].__module__.startswith(OURS) and any(
        kind.__module__.startswith(TORCHS) and kind.__name__ == ours[0].__name__ for kind in theirs
    )
