"""The zeros of padding as an entry: files in which every byte is 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwise.checkpoint.entry import Entry, whole_entry
from shardwise.checkpoint.files import ByteRange, Bytes, Files
from shardwise.geometry import Window


class ZeroFiles(Files):
    """One file of zeros, as long as it is read."""

    root = "zeros"

    def names(self, *, recursive: bool = False) -> list[str]:
        """The one file."""
        return [self.root]

    def has(self, name: str) -> bool:
        """True for the one file."""
        return name == self.root

    def size(self, name: str) -> int:
        """Endless."""
        return 2**62

    def stamp(self, name: str) -> str:
        """It never changes."""
        return ""

    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """Zeros."""
        return [np.zeros(one.stop - one.start, np.uint8) for one in ranges]

    def elements(self, windows: Sequence[tuple[str, Window]], dtype: torch.dtype) -> list[torch.Tensor]:
        """One zero in memory for all elements."""
        return [torch.zeros((), dtype=dtype, device="cpu").expand(window.shape) for _, window in windows]


ZERO_FILES = ZeroFiles()


def zeros_entry(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    """A tensor of zeros."""
    return whole_entry(name, shape, dtype, 0, 0, [ZeroFiles.root], ZERO_FILES)
