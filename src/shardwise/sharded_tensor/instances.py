"""isinstance(v, ShardedTensor) and the like are True for torch's own objects, for code that changed its imports.

Done by metaclasses that compare names of classes, so that torch's modules need not be imported. Only isinstance is
wider; issubclass is not.
"""

from __future__ import annotations

from abc import ABCMeta
from functools import lru_cache

from shardwise.containers.torch_sharded import PACKAGE, TensorMetaclass

OURS = "shardwise.sharded_tensor"


class AcceptsTorchs(type):
    """Instances of torch's class of the same name count as well."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or _is_torchs(cls.__mro__, type(instance).__mro__)


class TorchNamed(AcceptsTorchs, ABCMeta):
    """The metaclass of specs, metadata and shards."""


class TorchNamedTensor(AcceptsTorchs, TensorMetaclass):
    """The metaclass of tensors."""


@lru_cache(maxsize=1024)
def _is_torchs(ours: tuple[type, ...], theirs: tuple[type, ...]) -> bool:
    """True where one of these classes is torch's class with the name of ours."""
    return ours[0].__module__.startswith(OURS) and any(
        kind.__module__.startswith(PACKAGE) and kind.__name__ == ours[0].__name__ for kind in theirs
    )
