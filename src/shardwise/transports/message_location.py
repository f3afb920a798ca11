"""What letters say: where the bytes of a message lie, packed or as the tensors that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.geometry import Ints, Strides
from shardwise.transports.segments import Place, Segment

STAGED, TENSORS, BY_GROUP = range(3)  # kinds of letters, which their first word says


class MessageLocation(NamedTuple):
    """Its words, and the segments that it names."""

    text: bytes
    segments: Sequence[Segment] = ()


def staged(segment: Segment, start: int) -> MessageLocation:
    """The message lies in a segment, from this byte on."""
    return MessageLocation(_words(STAGED, segment.number, segment.size, start), [segment])


def by_group() -> MessageLocation:
    """The message comes over the process group."""
    return MessageLocation(_words(BY_GROUP))


def of_tensors(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> MessageLocation:
    """The cells are in these tensors, which lie at these places; or, without places, in the memory of this process."""
    words = [TENSORS, not places, len(tensors)]
    for at, tensor in enumerate(tensors):
        if places:
            words += (places[at].segment.number, places[at].segment.size, places[at].start)
        else:
            words += (0, 0, tensor.data_ptr())
        words += (tensor.dim(), *tensor.stride())
    return MessageLocation(_words(*words), [place.segment for place in places])


def _words(*words: int) -> bytes:
    return np.array(words, np.int64).tobytes()


class LocatedTensors:
    """Tensors of another process."""

    def __init__(
        self,
        key: bytes,
        segment: Callable[[int, int], torch.Tensor],
        read: Callable[[Ints, Ints, Ints], None],
    ) -> None:
        self.key, self._segment, self._read = key, segment, read
        self._words = np.frombuffer(key, np.int64)
        self.attached = bool(self._words[1])
        self._parsed: tuple[list[Strides], list[torch.Tensor], Ints] | None = None

    def _parse(self) -> tuple[list[Strides], list[torch.Tensor], Ints]:
        if self._parsed is None:
            words, at = self._words.tolist(), 3
            strides, data, starts = list[Strides](), list[torch.Tensor](), list[int]()
            for _ in range(words[2]):
                number, size, start, dims = words[at : at + 4]
                strides.append(tuple(words[at + 4 : at + 4 + dims]))
                starts.append(start)
                if not self.attached:
                    data.append(self._segment(number, size)[start:])
                at += 4 + dims
            self._parsed = strides, data, np.array(starts, np.int64)
        return self._parsed

    @property
    def strides(self) -> Sequence[Strides]:
        """Of each."""
        return self._parse()[0]

    def mapped(self) -> list[torch.Tensor]:
        """Their bytes from the first element on."""
        return self._parse()[1]

    def read(self, here: Ints, tensor: Ints, offset: Ints, sizes: Ints) -> None:
        """Copy ranges of bytes from offsets of tensors to addresses here."""
        self._read(here, self._parse()[2][tensor] + offset, sizes)
