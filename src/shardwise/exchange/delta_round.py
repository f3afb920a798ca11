"""A round in which messages go as deltas: only the cells that changed since the last time.

Only the sender knows how long a delta is, and gloo ends the process where a message has another length than was
expected. So every length is told before what it is of. For each message the sender first tells whether it goes as a
delta at all: one in which most cells changed goes as an ordinary message. The others are cut into segments. In wave
number k, all ranks post the length of segment k and the bytes of segment k - AHEAD, so that several segments are on
the link while the next one is encoded, and those that have arrived are decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.buffers import bytes_at
from shardwise.exchange.delta_blocks import Block, BlockMemory, Masks, most_segment_bytes, segments_of
from shardwise.exchange.deltas import changes, encode
from shardwise.exchange.messages import Message, Tensors
from shardwise.exchange.transport import (
    PeerBuffer,
    PeerTensors,
    PostedMessages,
    PostedRound,
    Receive,
    Send,
    Transport,
)

AHEAD = 3  # waves on the link at a time
SMALLEST = 2**16  # bytes of a message that is worth more than one message
SAMPLE = 8  # blocks of a message that are looked at before it is encoded
DENSE, DELTA = 1, 2  # what the sender tells of a message first
PAYS = 0.8  # of the bytes of all cells: with more, a delta is not worth the work
VERSIONS = "do all ranks run one version of shardwise?"
Lengths = torch.Tensor


class DeltaReceive(NamedTuple):
    """A message that may come as a delta: its number among the receives, and its tensors."""

    number: int
    message: Message
    targets: Sequence[Tensors]


class DeltaSend(NamedTuple):
    """A message that may go as a delta: its number among the sends, where its cells and their masks lie.

    `masked` is the message that the masks would go in: the same cells, in tensors with strides of their own.
    """

    number: int
    message: Message
    sources: Sequence[Tensors]
    masked: Message
    masks: Masks


class DeltaTraffic(NamedTuple):
    """Bytes that this rank has sent in messages that may be deltas, and those of all their cells."""

    sent: int = 0
    dense: int = 0

    def __add__(self, other: object) -> DeltaTraffic:
        assert isinstance(other, DeltaTraffic), "bytes are added to bytes"
        return DeltaTraffic(self.sent + other.sent, self.dense + other.dense)


class DeltaRound:
    """The messages of a round in flight, some of them as deltas. `post` posts the others, all at once."""

    def __init__(
        self,
        transport: Transport,
        post: Callable[[Sequence[Receive], Sequence[Send]], PostedRound],
        receives: tuple[Sequence[Receive], Sequence[DeltaReceive]],
        sends: tuple[Sequence[Send], Sequence[DeltaSend]],
        tag: int,
        device: torch.device,
    ) -> None:
        self._transport, self._device = transport, device
        self._tag = crc32(b"delta", tag) >> 1  # apart from ordinary messages between the same ranks
        self._same = {one.number: sends[0][one.number].same for one in sends[1]}
        self._memory, self._room = self._scratch(receives[1], sends[1])
        self._receives, self._sends = self._split(receives[1], sends[1])
        deltas = {one.number for one in self._receives}, {one.number for one in self._sends}
        self._dense = [at for at in range(len(receives[0])) if at not in deltas[0]]
        others = [one for at, one in enumerate(sends[0]) if at not in deltas[1]]
        self._posted = post([receives[0][at] for at in self._dense], others) if self._dense or others else None
        sent = sum(one.message.bytes for one in sends[1] if one.number not in deltas[1])
        self.traffic = DeltaTraffic(sent, sum(one.message.bytes for one in sends[1]))

    def _scratch(
        self, receives: Sequence[DeltaReceive], sends: Sequence[DeltaSend]
    ) -> tuple[BlockMemory, torch.Tensor]:
        """Memory for the cells of one block, and for one encoded segment."""
        messages = [one.message for one in receives] + [one.message for one in sends]
        segments = [segment for message in messages for segment in segments_of(message)]
        tensors = [t for one in receives for part in one.message.parts for t in one.targets[part.move]]
        sizes = BlockMemory.scratch(chain(*segments), max((tensor.itemsize for tensor in tensors), default=1))
        sizes.append(max(map(most_segment_bytes, segments), default=0))
        cells, mask, room = self._transport.staging.take(sizes, torch.device("cpu"), align=64, use="deltas")
        return BlockMemory(cells, mask), room

    # --- which messages go as deltas ---------------------------------------------------------------------------------

    def _split(
        self, receives: Sequence[DeltaReceive], sends: Sequence[DeltaSend]
    ) -> tuple[list[DeltaReceive], list[DeltaSend]]:
        """Those that go as deltas. Every sender tells what it has decided."""
        rooms = [self._number(0) for _ in receives]
        told = dict[int, int]()
        for send in sends:
            if self._same[send.number] not in told:
                told[self._same[send.number]] = DELTA if self._pays(send) else DENSE
        words = [(one.message.peer, self._number(told[self._same[one.number]])) for one in sends]
        posted = self._transport.post_stream(
            [(one.message.peer, room) for one, room in zip(receives, rooms, strict=True)], words, self._tag
        )
        for _ in posted.arrivals():
            pass
        heard = [int(room.view(torch.int64)) for room in rooms]
        for one, word in zip(receives, heard, strict=True):
            if word not in (DENSE, DELTA):
                raise ExchangeError(f"rank {one.message.peer} announced a message of unknown kind {word}: {VERSIONS}")
        return (
            [one for one, word in zip(receives, heard, strict=True) if word == DELTA],
            [one for one in sends if told[self._same[one.number]] == DELTA],
        )

    def _pays(self, one: DeltaSend) -> bool:
        """By a sample of the masks: about so many bytes would be sent."""
        blocks = [block for segment in segments_of(one.masked) for block in segment]
        sample = blocks[:: max(1, len(blocks) // SAMPLE)]
        expected = 0.0
        for block in sample:
            changed = int(np.count_nonzero(self._memory.changed(block, one.masks)))
            expected += changed * block.itemsize + min(changed, block.cells / 8)
        return expected < PAYS * sum(block.bytes for block in sample)

    def _number(self, value: int) -> Lengths:
        return torch.tensor([value], dtype=torch.int64, device="cpu").view(torch.uint8).to(self._device)

    # --- waves -------------------------------------------------------------------------------------------------------

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """Deltas are written to their final place; ordinary messages are yielded as they arrive."""
        for at in self._waves():
            yield at, None
        for at, arrived in self._posted.arrivals() if self._posted else ():
            yield self._dense[at], arrived

    def finish(self) -> None:
        """As of the ordinary messages: all deltas were sent when the last one had arrived."""
        if self._posted is not None:
            self._posted.finish()

    def _waves(self) -> Iterator[int]:
        messages = [one.message for one in self._receives] + [one.message for one in self._sends]
        count = max((len(segments_of(message)) for message in messages), default=0)
        encoded, lengths, in_flight = Encoded(), dict[tuple[int, int], Lengths](), deque[Wave]()
        for number in range(count + AHEAD if count else 0):
            if len(in_flight) == AHEAD:
                yield from self._complete(in_flight.popleft())
            in_flight.append(self._post(number, encoded, lengths))
        for wave in in_flight:
            yield from self._complete(wave)

    def _post(self, number: int, encoded: Encoded, lengths: dict[tuple[int, int], Lengths]) -> Wave:
        """The lengths of segments of this number, and the bytes of those before, whose lengths have arrived."""
        before, rooms = number - AHEAD, list[PeerBuffer]()
        arriving = list[tuple[DeltaReceive, torch.Tensor]]()
        for one in self._receives:
            count, peer = len(segments_of(one.message)), one.message.peer
            if number < count:
                lengths[one.number, number] = self._number(0)
                rooms.append((peer, lengths[one.number, number]))
            if 0 <= before < count:
                room = self._room_for(one, before, lengths.pop((one.number, before)))
                arriving.append((one, room))
                rooms.append((peer, room))
        sent = list[PeerBuffer]()

        def sends() -> Iterator[PeerBuffer]:
            for one in self._buffers(number, encoded):
                sent.append(one)
                yield one

        return Wave(before, self._transport.post_stream(rooms, sends(), self._tag), arriving, sent)

    def _room_for(self, one: DeltaReceive, segment: int, told: Lengths) -> torch.Tensor:
        length, most = int(told.view(torch.int64)), most_segment_bytes(segments_of(one.message)[segment])
        if not 0 < length <= most:
            raise ExchangeError(
                f"rank {one.message.peer} announced {length} bytes of a delta that has at most {most}: {VERSIONS}"
            )
        return torch.empty(length, dtype=torch.uint8, device=self._device)

    def _buffers(self, number: int, encoded: Encoded) -> Iterator[PeerBuffer]:
        """What this rank sends in a wave. Messages with the same cells are encoded once."""
        before = number - AHEAD
        for one in self._sends:
            count, peer, same = len(segments_of(one.message)), one.message.peer, self._same[one.number]
            if number < count:
                if (same, number) not in encoded:
                    encoded[same, number] = self._encode(one, number)
                length = len(encoded[same, number])
                self.traffic += DeltaTraffic(length + 8)
                yield peer, self._number(length)
            if 0 <= before < count:
                yield peer, encoded[same, before]
        for key in [key for key in encoded if key[1] == before]:
            del encoded[key]

    def _encode(self, one: DeltaSend, number: int) -> torch.Tensor:
        room, length = bytes_at(self._room.data_ptr(), self._room.numel()), 0
        blocks = segments_of(one.message)[number], segments_of(one.masked)[number]
        for block, masked in zip(*blocks, strict=True):
            changed = self._memory.changed(masked, one.masks)
            read = partial(self._memory.read, block, one.sources)
            length += encode(changed, read, block.itemsize, room[length:])
        return self._room[:length].to(self._device, copy=True)

    def _complete(self, wave: Wave) -> Iterator[int]:
        """Decode what has arrived; the numbers of the messages that are complete."""
        for _ in wave.posted.arrivals():
            pass
        for one, room in wave.arriving:
            segments = segments_of(one.message)
            self._decode(one, segments[wave.segment], room.cpu())
            if wave.segment == len(segments) - 1:
                yield one.number

    def _decode(self, one: DeltaReceive, blocks: Sequence[Block], room: torch.Tensor) -> None:
        encoded, start = bytes_at(room.data_ptr(), room.numel()), 0
        for block in blocks:
            found = changes(encoded[start:], block.cells, block.itemsize)
            self._memory.write(block, found, one.targets)
            start += found.bytes
        if start != len(encoded):
            raise ExchangeError(
                f"a delta of rank {one.message.peer} has {len(encoded) - start} bytes too many: {VERSIONS}"
            )


Encoded = dict[tuple[int, int], torch.Tensor]  # segments by the message's number and theirs, until they are posted


class Wave(NamedTuple):
    """Lengths and bytes in flight: `arriving` has the room for segment number `segment` of messages."""

    segment: int
    posted: PostedMessages
    arriving: Sequence[tuple[DeltaReceive, torch.Tensor]]
    sent: Sequence[PeerBuffer]  # kept until it is taken
