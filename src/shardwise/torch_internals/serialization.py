"""The private names in torch's checkpoint formats: pickles of torch.save and of DCP metadata refer to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch._utils import _rebuild_tensor_v3 as rebuild_typed_tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["OLD_SHARD_MODULE", "REBUILD_MODULE", "TENSOR_MODULE", "rebuild_tensor", "rebuild_typed_tensor"]

# modules whose functions and classes are named in files
REBUILD_MODULE, TENSOR_MODULE = "torch._utils", "torch._tensor"
OLD_SHARD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # of DCP metadata up to torch 2.2


def storage_info(file: str, start: int, size: int) -> StorageInfo:
    """The bytes of a file, as DCP metadata describe them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import

    return _StorageInfo(file, start, size)
