"""Tensors that every rank has whole should be the same on all: where a sample differs, those of one are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch

from shardwise.containers.container import is_sharded
from shardwise.exchange.buffers import bytes_at
from shardwise.job.side import is_tensor, lists_chunks

SAMPLE = 1024  # elements that are compared, of every tensor
NOTHING = -(2**63)  # lower than every mark


def marks(flat: Mapping[str, Any]) -> dict[str, int]:
    """Something of the values of every plain tensor, by name: of small ones all."""
    return {name: _mark(value) for name, value in flat.items() if is_tensor(value) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if is_sharded(value) or lists_chunks(value) or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    return not (value.is_conj() or value.is_neg())


def _mark(tensor: torch.Tensor) -> int:
    count = tensor.numel()
    if not count or not tensor.ndim:
        some = tensor.detach().reshape(-1)
    else:  # by their numbers, so that nothing else is copied
        at = torch.arange(0, count, max(1, count // SAMPLE), device=tensor.device)
        some = tensor.detach()[torch.unravel_index(at, tensor.shape)]
    data = some.contiguous().cpu()
    return int.from_bytes(blake2b(bytes_at(data.data_ptr(), data.nbytes).data, digest_size=7).digest(), "little")


def unlike(
    names: Iterable[str], marked: Mapping[str, int], highest: Callable[[torch.Tensor], torch.Tensor]
) -> list[str]:
    """The names of which ranks have other marks: their highest is not their lowest."""
    listed = list(names)
    mine = [(marked[name], -marked[name]) if name in marked else (NOTHING, NOTHING) for name in listed]
    most, least = highest(torch.tensor(mine, dtype=torch.int64, device="cpu").reshape(-1, 2)).T.tolist()
    return [name for name, high, low in zip(listed, most, least, strict=True) if high != NOTHING and high != -low]
