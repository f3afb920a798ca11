"""Short digests of what ranks have saved, to check that it is the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from hashlib import blake2b

import torch

from shardwise.exchange import in_words
from shardwise.exchange.buffers import bytes_at

BLOCKS, BLOCK = 64, 64  # a sample has so many blocks of so many bytes


def digest(whole: torch.Tensor, *, sample: bool) -> int:
    """61 bits of these bytes, or of a sample of them.

    >>> few = torch.zeros(8, dtype=torch.uint8)
    >>> digest(few, sample=True) == digest(few, sample=False)
    True
    """
    if sample and len(whole) > BLOCKS * BLOCK:
        whole = whole[: len(whole) // BLOCKS * BLOCKS].view(BLOCKS, -1)[:, :BLOCK]
    data = whole.cpu().contiguous()
    return int.from_bytes(blake2b(bytes_at(data.data_ptr(), data.nbytes).data, digest_size=8).digest(), "big") >> 3


def difference(what: str, values: Mapping[int, Hashable]) -> str:
    """Which ranks have other values, in words that are the same on every rank.

    >>> difference("input[0] of MLP 0", {0: "a", 1: "a", 2: "b"}).partition(". ")[0]
    'input[0] of MLP 0 is not the same on all ranks of the mesh: other values on ranks 0, 1 than on rank 2'
    """
    groups = defaultdict[Hashable, list[int]](list)
    for owner in sorted(values):
        groups[values[owner]].append(owner)
    who = "other values on " + " than on ".join(in_words(owners) for owners in groups.values())
    return (
        f"{what} is not the same on all ranks of the mesh: {who}. What differs cannot be saved as shards: is "
        f"this input sharded, did a rank run another program, or is tensor parallelism not the first dim of the mesh "
        f"(then give mesh['tp'])? (input_reshard(..., check=True) compares all values in forward)"
    )
