"""Where the elements of shards lie in their archives. Those of one kind differ in their data: one tells of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.entry import Located
from shardwise.checkpoint.files import Bytes, Files, Span
from shardwise.checkpoint.formats.torch_save import Archive, read_archives
from shardwise.checkpoint.standins import SavedTensor
from shardwise.checkpoint.zips import Member, starts, unchecked
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, ints, row_major

Kind = tuple[int, tuple[int, ...], torch.dtype]  # how long the archive is; the shape and the dtype in it


class Read(NamedTuple):
    """An archive that was read: its tensor, the member that holds the elements, and the byte at which that begins."""

    archive: Archive
    tensor: SavedTensor
    storage: Member
    begins: int

    @property
    def start(self) -> int:
        """The byte of the first element, from the start of the archive."""
        return self.begins - self.archive.span.start + self.tensor.offset * self.tensor.dtype.itemsize


class Mould(NamedTuple):
    """What archives of a kind have in common: all bytes before the elements, and the directory but for its checksums.

    `start` is the byte of the first element, `directory` that of the directory, from the start of the archive.
    """

    start: int
    strides: tuple[int, ...]
    head: bytes
    tail: Bytes
    mask: Bytes
    directory: int

    def spans(self, archive: Span) -> list[Span]:
        """What is to be looked at."""
        first, second = archive.start + len(self.head), archive.start + self.directory
        return [Span(archive.file, archive.start, first), Span(archive.file, second, archive.stop)]

    def fits(self, head: Bytes, tail: Bytes) -> bool:
        """True for what these bytes begin and end."""
        return head.tobytes() == self.head and not ((tail ^ self.tail) & self.mask).any()


class Moulds:
    """Those of a checkpoint. The archives that nothing is known of are read as any archive is."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known = dict[Kind, Mould | None]()  # None where more than what lies before the elements tells of them

    def located(self, archives: Sequence[Span], boxes: Boxes, name: str, dtype: torch.dtype) -> Located:
        """The elements of boxes of a tensor, each in an archive of its own."""
        shapes = list(map(tuple, (boxes.hi - boxes.lo).tolist()))
        kinds = [(span.stop - span.start, shape, dtype) for span, shape in zip(archives, shapes, strict=True)]

        def read(rows: Sequence[int]) -> list[Read]:
            return self._read([archives[at] for at in rows], [boxes.box(at) for at in rows], name, dtype)

        new = {kind: at for at, kind in enumerate(kinds) if kind not in self._known}
        self._known |= zip(new, map(self._mould, read(list(new.values()))), strict=True)
        found: list[Mould | Read | None] = list(self._fitting(archives, [self._known[kind] for kind in kinds]))
        others = [at for at, one in enumerate(found) if one is None]
        for at, one in zip(others, read(others), strict=True):
            found[at] = one
        places = [(one.start, one.strides if isinstance(one, Mould) else one.tensor.strides) for one in found if one]
        plain = all(strides == row_major(shape) for (_, strides), shape in zip(places, shapes, strict=True))
        strides = None if plain else ints([strides for _, strides in places]).reshape(boxes.lo.shape)
        return Located(ints([span.start + start for span, (start, _) in zip(archives, places, strict=True)]), strides)

    def _fitting(self, archives: Sequence[Span], moulds: Sequence[Mould | None]) -> Iterator[Mould | None]:
        """The mould of every archive that fits it."""
        looked = zip(archives, moulds, strict=True)
        parts = iter(self._files.fetch([span for archive, mould in looked if mould for span in mould.spans(archive)]))
        for mould in moulds:
            yield mould if mould and mould.fits(next(parts), next(parts)) else None

    def _read(self, archives: Sequence[Span], boxes: Sequence[Box], name: str, dtype: torch.dtype) -> list[Read]:
        """By what they say themselves."""
        if not archives:
            return []
        read = read_archives(self._files, archives)
        tensors = [_checked(archive, box, name, dtype) for archive, box in zip(read, boxes, strict=True)]
        members = [archive.storage(tensor, repr(name)) for archive, tensor in zip(read, tensors, strict=True)]
        return list(map(Read, read, tensors, members, starts(self._files, members)))

    def _mould(self, read: Read) -> Mould | None:
        file, first, stop = read.archive.span
        if not read.archive.told_before(read.storage):
            return None
        directory = max(member.stop for member in read.archive.members.values())
        head, tail = self._files.fetch([Span(file, first, read.begins), Span(file, directory, stop)])
        mask = unchecked(tail)
        return Mould(read.start, read.tensor.strides, head.tobytes(), tail.copy(), mask, directory - first)


def _checked(archive: Archive, box: Box, name: str, dtype: torch.dtype) -> SavedTensor:
    tensor = archive.root()
    if isinstance(tensor, SavedTensor) and (tensor.dtype, tensor.shape) == (dtype, box.shape):
        return tensor
    found = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, SavedTensor) else "no tensor"
    raise CheckpointError(f"{archive.where}: {box} of {name!r} should be {dtype} of shape {box.shape}, but is {found}")
