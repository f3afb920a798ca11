"""Plain tensors that should be the same on all ranks: a sample of each is compared, by checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeGuard

import torch

from shardwise.checkpoint.host_copies import HostCopies
from shardwise.containers.description import is_tensor, lists_chunks
from shardwise.containers.sharded import is_sharded
from shardwise.exchange.buffers import bytes_at

SAMPLE = 1024  # elements of every replica that are compared
NO_SUM = -(2**63)  # lower than every checksum


def sample_sums(flat: Mapping[str, object]) -> dict[str, int]:
    """Checksums of a sample of every plain tensor, by name."""
    samples = {name: _sample(value) for name, value in flat.items() if is_tensor(value) and _is_plain(value)}
    copies = HostCopies(list(samples.values()))
    return {name: _checksum(copies.take(number)) for number, name in enumerate(samples)}


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    if (
        not isinstance(value, torch.Tensor)
        or is_sharded(value)
        or lists_chunks(value)
        or value.layout != torch.strided
        or value.is_meta
    ):
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    if not count or not tensor.ndim:
        return tensor.detach().reshape(-1)
    at = torch.arange(0, count, max(1, count // SAMPLE), device=tensor.device)
    return tensor.detach()[torch.unravel_index(at, tensor.shape)]  # by index, so that nothing else is copied


def _checksum(some: torch.Tensor) -> int:
    data = some.contiguous()
    return int.from_bytes(blake2b(bytes_at(data.data_ptr(), data.nbytes).data, digest_size=7).digest(), "little")


def differing_replicas(
    names: Iterable[str], sums: Mapping[str, int], highest: Callable[[torch.Tensor], torch.Tensor]
) -> list[str]:
    """The names whose checksums differ between ranks: the highest is not the lowest."""
    in_order = list(names)
    mine = [(sums[name], -sums[name]) if name in sums else (NO_SUM, NO_SUM) for name in in_order]
    most, least = highest(torch.tensor(mine, dtype=torch.int64, device="cpu").reshape(-1, 2)).T.tolist()
    return [name for name, high, low in zip(in_order, most, least, strict=True) if high != NO_SUM and high != -low]


def warning_of(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4])) + (" ..." if len(names) > 4 else "")
    return (
        f"save: {shown} differ{'s' * (len(names) == 1)} between ranks, though plain tensors are the same on all: "
        f"those of the first rank that has them are saved. What every rank has of its own needs a name of its own"
    )
