"""The private names in torch's checkpoint formats: pickles of torch.save and of DCP metadata refer to them."""

from __future__ import annotations

from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch._utils import _rebuild_tensor_v3 as rebuild_typed_tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "rebuild_tensor", "rebuild_typed_tensor"]
