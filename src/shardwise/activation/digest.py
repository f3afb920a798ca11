"""Short digests of what ranks have saved, to see that it is the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from typing import Any

import torch

from shardwise.exchange import in_words
from shardwise.exchange.host_memory import bytes_at

BLOCKS, BLOCK = 64, 64  # of bytes, out of which a sample is made


def digest(whole: torch.Tensor, *, sample: bool) -> int:
    """61 bits of these bytes, or of a sample of them.

    >>> few = torch.zeros(8, dtype=torch.uint8)
    >>> digest(few, sample=True) == digest(few, sample=False)
    True
    """
    if sample and len(whole) > BLOCKS * BLOCK:
        whole = whole[: len(whole) // BLOCKS * BLOCKS].view(BLOCKS, -1)[:, :BLOCK]
    data = whole.cpu().contiguous()
    found: Any = bytes_at(data.data_ptr(), data.nbytes)
    return int.from_bytes(blake2b(found, digest_size=8).digest(), "big") >> 3


def difference(what: str, told: Mapping[int, Hashable]) -> str:
    """Who has what others have not, in words that are the same on every rank.

    >>> difference("input[0] of MLP 0", {0: "a", 1: "a", 2: "b"}).partition(". ")[0]
    'input[0] of MLP 0 is not the same on all ranks of the mesh: other values on ranks 0, 1 than on rank 2'
    """
    groups = defaultdict[Hashable, list[int]](list)
    for owner in sorted(told):
        groups[told[owner]].append(owner)
    who = "other values on " + " than on ".join(in_words(owners) for owners in groups.values())
    return (
        f"{what} is not the same on all ranks of the mesh: {who}. What differs cannot be kept in parts: is this input "
        f"sharded, did a rank run another program, or is tensor parallelism not the first dim of the mesh "
        f"(then give mesh['tp'])? (input_reshard(..., check=True) compares all values in forward)"
    )
