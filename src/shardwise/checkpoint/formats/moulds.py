"""Where the elements of shards lie in their archives. Those of one kind differ in their data: one tells of all."""

from __future__ import annotations

from collections.abc import Sequence
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


class Mould(NamedTuple):
    """What archives of a kind have in common: all bytes before the elements, and the directory but for its checksums.

    `start` is the byte of the first element, `directory` that of the directory, from the start of the archive.
    """

    head: bytes
    tail: Bytes
    mask: Bytes | None  # of the tail, without its checksums; None where more than the head tells of the elements
    start: int
    directory: int
    strides: tuple[int, ...]

    def spans(self, archive: Span) -> list[Span]:
        """What is to be looked at."""
        first, second = archive.start + len(self.head), archive.start + self.directory
        return [Span(archive.file, archive.start, first), Span(archive.file, second, archive.stop)]

    def fits(self, head: Bytes, tail: Bytes) -> bool:
        """True for what these bytes begin and end."""
        if self.mask is None or head.tobytes() != self.head:
            return False
        return not (tail ^ self.tail).__iand__(self.mask).any()


class Moulds:
    """Those of a checkpoint. The archives that nothing is known of are read as any archive is."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known = dict[Kind, Mould]()

    def located(self, archives: Sequence[Span], boxes: Boxes, name: str, dtype: torch.dtype) -> Located:
        """The elements of boxes of a tensor, each in an archive of its own."""
        shapes = list(map(tuple, (boxes.hi - boxes.lo).tolist()))
        kinds = [(span.stop - span.start, shape, dtype) for span, shape in zip(archives, shapes, strict=True)]
        new = {kind: at for at, kind in enumerate(kinds) if kind not in self._known}
        read = self._read([archives[at] for at in new.values()], boxes.take(ints(list(new.values()))), name, dtype)
        self._known |= zip(new, read, strict=True)
        found = [self._known[kind] for kind in kinds]
        other = [at for at, fits in enumerate(self._fit(archives, found)) if not fits]
        for at, mould in zip(
            other, self._read([archives[at] for at in other], boxes.take(ints(other)), name, dtype), strict=True
        ):
            found[at] = mould
        plain = all(mould.strides == row_major(shape) for mould, shape in zip(found, shapes, strict=True))
        strides = None if plain else ints([mould.strides for mould in found]).reshape(boxes.lo.shape)
        return Located(ints([span.start + mould.start for span, mould in zip(archives, found, strict=True)]), strides)

    def _fit(self, archives: Sequence[Span], moulds: Sequence[Mould]) -> list[bool]:
        spans = [span for archive, mould in zip(archives, moulds, strict=True) for span in mould.spans(archive)]
        parts = iter(self._files.fetch(spans))
        return [mould.fits(head, tail) for mould, head, tail in zip(moulds, parts, parts, strict=True)]

    def _read(self, archives: Sequence[Span], boxes: Boxes, name: str, dtype: torch.dtype) -> list[Mould]:
        """By what they say themselves."""
        if not archives:
            return []
        read = read_archives(self._files, archives)
        tensors = [_checked(archive, boxes.box(at), name, dtype) for at, archive in enumerate(read)]
        members = [archive.storage(tensor, repr(name)) for archive, tensor in zip(read, tensors, strict=True)]
        begins = starts(self._files, members)
        return list(map(self._mould, read, tensors, members, begins))

    def _mould(self, archive: Archive, tensor: SavedTensor, storage: Member, begins: int) -> Mould:
        file, first, stop = archive.span
        directory = max(member.stop for member in archive.members.values())
        head, tail = self._files.fetch([Span(file, first, begins), Span(file, directory, stop)])
        start = begins - first + tensor.offset * tensor.dtype.itemsize
        mask = unchecked(tail) if archive.told_before(storage) else None
        return Mould(head.tobytes(), tail.copy(), mask, start, directory - first, tensor.strides)


def _checked(archive: Archive, box: Box, name: str, dtype: torch.dtype) -> SavedTensor:
    tensor = archive.root()
    if isinstance(tensor, SavedTensor) and (tensor.dtype, tensor.shape) == (dtype, box.shape):
        return tensor
    found = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, SavedTensor) else "no tensor"
    raise CheckpointError(f"{archive.where}: {box} of {name!r} should be {dtype} of shape {box.shape}, but is {found}")
