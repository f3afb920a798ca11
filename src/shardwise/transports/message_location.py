"""Where the bytes of a message lie: what a sender writes to a receiver of its host, instead of the bytes themselves."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.exchange.messages import Tensors
from shardwise.geometry import Ints, Strides
from shardwise.transports.segments import SegmentPlace, SharedSegment

IN_SEGMENT, IN_TENSORS, IN_GROUP_MESSAGE = range(3)  # kinds of locations: the first word of the payload


class MessageLocation(NamedTuple):
    """The payload of a packet, and the segments that it names, which have to be sent first."""

    payload: bytes
    segments: Sequence[SharedSegment] = ()


def in_segment(segment: SharedSegment, start: int, round_number: int = 0) -> MessageLocation:
    """The message is in a segment, from this byte on. If it was packed for a round, its reader marks that there."""
    return MessageLocation(_words(IN_SEGMENT, segment.number, segment.size, start, round_number), [segment])


def in_group_message() -> MessageLocation:
    """The message comes over the process group."""
    return MessageLocation(_words(IN_GROUP_MESSAGE))


def in_tensors(tensors: Sequence[torch.Tensor], places: Sequence[SegmentPlace]) -> MessageLocation:
    """The cells are in these tensors, which lie at these places; or, without places, in the memory of this process."""
    words = [IN_TENSORS, bool(places), len(tensors)]
    for at, tensor in enumerate(tensors):
        if places:
            words += (places[at].segment.number, places[at].segment.size, places[at].start)
        else:
            words += (0, 0, tensor.data_ptr())
        words += (tensor.dim(), *tensor.stride())
    return MessageLocation(_words(*words), [place.segment for place in places])


def _words(*words: int) -> bytes:
    return struct.pack(f"{len(words)}q", *words)


def words_of(payload: bytes) -> tuple[int, ...]:
    """The words of a location."""
    return struct.unpack(f"{len(payload) // 8}q", payload)


class LocatedTensors:
    """Tensors of a peer that are read in place. `segment` maps one of its segments, `read` copies from its memory."""

    def __init__(
        self, payload: bytes, segment: Callable[[int, int], torch.Tensor], read: Callable[[Ints, Ints, Ints], None]
    ) -> None:
        self.key, self._segment, self._read = payload, segment, read
        self._words = np.frombuffer(payload, np.int64)
        self.mapped = bool(self._words[1])
        self._fields: tuple[list[Strides], Tensors, Ints] | None = None

    def _parse(self) -> tuple[list[Strides], Tensors, Ints]:
        """Strides, bytes and starts of each. Only at first use: a repeated exchange keeps its views by the payload."""
        if self._fields is None:
            words, at = self._words.tolist(), 3
            strides, data, starts = list[Strides](), list[torch.Tensor](), list[int]()
            for _ in range(words[2]):
                number, size, start, dims = words[at : at + 4]
                strides.append(tuple(words[at + 4 : at + 4 + dims]))
                starts.append(start)
                if self.mapped:
                    data.append(self._segment(number, size)[start:])
                at += 4 + dims
            self._fields = strides, data, np.array(starts, np.int64)
        return self._fields

    @property
    def strides(self) -> Sequence[Strides]:
        """The strides of each tensor."""
        return self._parse()[0]

    def bytes_of_each(self) -> Tensors:
        """The bytes of each tensor from its first element on. Only where they are mapped."""
        return self._parse()[1]

    def read(self, here: Ints, tensor: Ints, offset: Ints, sizes: Ints) -> None:
        """Copy ranges of bytes from offsets of tensors to addresses of this process."""
        self._read(here, self._parse()[2][tensor] + offset, sizes)
