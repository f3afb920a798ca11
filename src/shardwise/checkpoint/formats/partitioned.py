"""Files of one rank that look whole: those of DeepSpeed's ZeRO-3 name all weights, and have none of their cells."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError


def check_has_weights(root: object, where: object) -> None:
    """Refuse a file that lists the shapes of its weights, but has no cells of them."""
    groups, weights = (root.get("param_shapes"), root.get("module")) if isinstance(root, Mapping) else (None, None)
    if not isinstance(groups, list) or not isinstance(weights, Mapping):
        return
    for name, shape in (item for shapes in groups if isinstance(shapes, Mapping) for item in shapes.items()):
        held = weights.get(name)
        if isinstance(held, TensorStub) and not prod(held.shape) and isinstance(shape, torch.Size) and shape.numel():
            raise CheckpointError(
                f"{where} is the file of one rank of DeepSpeed's ZeRO-3: {name!r} has shape {tuple(shape)}, but no "
                f"cells here. The optim_states files of all ranks have them. Remedy: give the folder with all files"
            )
