"""Small collectives in one round: everybody writes to everybody. Between hosts a round costs more than its messages.

Only for groups in which that is few messages; and owners of one host among themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.exchange.transport import PostedMessages, ReduceOp

if TYPE_CHECKING:
    from shardwise.transports.endpoint import Endpoint

MOST = 16  # owners; larger groups take rounds of few messages each
SHORT = 2**11 - 8  # bytes of a value that fits into one round; and of numbers


def all_to_all(over: Endpoint, rows: torch.Tensor, tag: int) -> tuple[torch.Tensor, PostedMessages]:
    """Send row i to `owners[i]`: the rows of all owners, once the messages have arrived."""
    mine, result = over.rows[over.me], rows.new_empty(rows.shape)
    result[mine] = rows[mine]
    others = [(row, owner) for row, owner in enumerate(over.owners) if row != mine]
    receives = [(owner, result[row]) for row, owner in others]
    return result, over.post_small(receives, [(owner, rows[row]) for row, owner in others], tag)


def all_reduce(over: Endpoint, numbers: torch.Tensor, op: ReduceOp, tag: int) -> torch.Tensor | None:
    """Everybody's numbers, element by element. None where that would be much to send."""
    if len(over.owners) > MOST or numbers.nbytes > SHORT:
        return None
    if not numbers.numel():
        return numbers
    flat = _everybody(over, numbers.reshape(-1).view(torch.uint8), tag).view(numbers.dtype)
    return (flat.amax(dim=0) if op == "max" else flat.sum(dim=0)).view(numbers.shape)


def all_gather(over: Endpoint, text: bytes, tag: int, device: torch.device) -> list[bytes] | None:
    """Everybody's text. None, on all, where one of them is long."""
    if len(over.owners) > MOST:
        return None
    told = np.int64(len(text)).tobytes() + text[:SHORT].ljust(SHORT)
    rows = _everybody(over, torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device), tag).cpu().numpy()
    sizes = np.ascontiguousarray(rows[:, :8]).view(np.int64).ravel().tolist()
    if max(sizes) > SHORT:
        return None
    return [row[8 : 8 + size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _everybody(over: Endpoint, row: torch.Tensor, tag: int) -> torch.Tensor:
    """The same row for all: the rows of all owners."""
    result, posted = all_to_all(over, row.expand(len(over.owners), -1), tag)
    for _ in posted.arrivals():
        pass
    return result
