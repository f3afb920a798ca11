"""Archives as torch.save writes them: a zip file with a pickle that describes everything, and a member per storage.

Only the directory at the end of a zip file has the sizes: torch writes archives in one pass, so the header before a
member does not have them. The header tells where the data begin. Many archives are read at once, as a checkpoint of
torch.distributed has one per shard. `read_archives` finds the members, `Archive.root` runs the pickle with stubs,
`ArchiveTemplates` finds the elements of many similar archives by comparing bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.entry import Positions
from shardwise.checkpoint.files import WORDS, ByteRange, Bytes, FileLabel, Files
from shardwise.checkpoint.pickles import UnknownNames, check_tree, unpickle
from shardwise.checkpoint.unpickle_stubs import MAX_SIZE, TensorStub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, ints, row_major

MAX_EXPANSION = 64  # how often a storage may be repeated by strides of 0; small ones up to so many MiB
END, END64, LOCATOR = Struct("<I6xHIIH"), Struct("<I28xQQQ"), Struct("<I4xQ4x")
RECORD, HEADER = Struct("<I4xHH8xIIHHH8xI"), Struct("<I22xHH")
CHECKSUM = 16  # the byte of a record at which it is
BEGIN = b"PK\x03\x04"
SIGNATURES = {"end": 0x06054B50, "end64": 0x06064B50, "locator": 0x07064B50, "record": 0x02014B50}
TAIL = 4096  # bytes at the end of an archive that are fetched first: enough for the directory of a shard
FULL = 0xFFFFFFFF  # instead of a number of 64 bits, which is elsewhere
UNCOMPRESSED = 0
ENCRYPTED = 0x2041  # flags

ZipDirectory = dict[str, "ZipMember"]


class ZipMember(NamedTuple):
    """A member of an archive: its header is at byte `header` of the file; it ends before byte `stop`."""

    file: str
    name: bytes
    header: int
    size: int
    stop: int
    plain: bool  # neither compressed nor encrypted


class _DirectoryRange(NamedTuple):
    """Where the directory of an archive is in its file, and how many members it should have."""

    start: int
    stop: int
    members: int


class DamageError(Exception):
    """What is wrong with an archive."""


def directories(files: Files, archives: Sequence[ByteRange]) -> list[ZipDirectory]:
    """The members of every archive, by name."""
    ends = [ByteRange(a.file, max(a.start, a.stop - TAIL), a.stop) for a in archives]
    tails = [tail.tobytes() for tail in files.fetch(ends)]
    return [_directory(files, *parts) for parts in zip(archives, ends, tails, strict=True)]


def contents(files: Files, members: Sequence[ZipMember]) -> list[bytes]:
    """The bytes of some members, copied."""
    most = HEADER.size + 2 * 65535  # of a header, its name and what torch pads it with
    parts = files.fetch([ByteRange(m.file, m.header, min(m.stop, m.header + most + m.size)) for m in members])
    data = list[bytes]()
    for member, part in zip(members, parts, strict=True):
        text = part.tobytes()
        at = _start(files, member, text) - member.header
        data.append(text[at : at + member.size])
    return data


def data_starts(files: Files, members: Sequence[ZipMember]) -> list[int]:
    """The byte of the file at which each member begins."""
    heads = [ByteRange(m.file, m.header, m.header + HEADER.size + len(m.name)) for m in members]
    return [_start(files, member, head.tobytes()) for member, head in zip(members, files.fetch(heads), strict=True)]


def _start(files: Files, member: ZipMember, head: bytes) -> int:
    if not member.plain:
        raise CheckpointError(
            f"{files.label(member.file)}, bytes {member.header} to {member.stop}: "
            f"{member.name.decode(errors='replace')!r} is compressed or encrypted, and cannot be read in parts"
        )
    _, length, extra = HEADER.unpack_from(head)
    start = member.header + HEADER.size + length + extra
    name = head[HEADER.size : HEADER.size + length]
    if head[:4] != BEGIN or name != member.name or start + member.size > member.stop:
        raise CheckpointError(
            f"{files.label(member.file)}, bytes {member.header} to {member.stop}: expected "
            f"{member.name.decode(errors='replace')!r} ({member.size} bytes): the file is damaged"
        )
    return start


def _directory(files: Files, archive: ByteRange, end: ByteRange, tail: bytes) -> ZipDirectory:
    try:
        place = _directory_range(archive, end, tail)
        if place.start < end.start:  # it is long
            tail, end = files.read(archive.file, place.start, archive.stop), end._replace(start=place.start)
        return _members(archive, place, tail[place.start - end.start : place.stop - end.start])
    except DamageError as damage:
        raise CheckpointError(
            f"{files.range_label(archive)}: {damage}: not a complete zip archive, the file is truncated or damaged"
        ) from damage


def _directory_range(archive: ByteRange, end: ByteRange, tail: bytes) -> _DirectoryRange:
    """By the record at the very end; if it has too few bits, by the one before it."""
    at = len(tail) - END.size
    if at < 0 or tail[at : at + 4] != SIGNATURES["end"].to_bytes(4, "little"):
        raise DamageError("the end is not that of a zip archive")
    _, count, size, start, _ = END.unpack_from(tail, at)
    stop = end.start + at
    if at >= LOCATOR.size and tail[at - LOCATOR.size :][:4] == SIGNATURES["locator"].to_bytes(4, "little"):
        stop = archive.start + LOCATOR.unpack_from(tail, at - LOCATOR.size)[1]
        count, size, start = _in_64_bits(tail, stop - end.start)
    if not archive.start <= archive.start + start <= archive.start + start + size == stop:
        raise DamageError(f"its directory of {size} bytes cannot begin at byte {start}")
    return _DirectoryRange(archive.start + start, stop, count)


def _in_64_bits(tail: bytes, at: int) -> tuple[int, int, int]:
    mark, count, size, start = END64.unpack_from(tail, at) if 0 <= at <= len(tail) - END64.size else (0, 0, 0, 0)
    if mark != SIGNATURES["end64"]:
        raise DamageError("its last record is not where it should be")
    return count, size, start


def without_checksums(tail: Bytes) -> Bytes:
    """A mask of a directory and what follows it, without the checksums of members."""
    mask, text, at = np.full_like(tail, 255), tail.tobytes(), 0
    while text[at : at + 4] == SIGNATURES["record"].to_bytes(4, "little"):
        mask[at + CHECKSUM : at + CHECKSUM + 4] = 0
        *_, length, extra, comment, _ = RECORD.unpack_from(text, at)
        at += RECORD.size + length + extra + comment
    return mask


def _members(archive: ByteRange, place: _DirectoryRange, text: bytes) -> ZipDirectory:
    records, at, least = list[tuple[bytes, int, int, bool]](), 0, RECORD.size
    while at + least <= len(text):
        mark, flags, method, packed, size, length, extra, comment, offset = RECORD.unpack_from(text, at)
        name, after = text[at + least : at + least + length], at + least + length
        if mark != SIGNATURES["record"] or after + extra + comment > len(text):
            raise DamageError(f"record {len(records)} of its directory is invalid")
        if FULL in (packed, size, offset):
            size, packed, offset = _wide(text[after : after + extra], [size, packed, offset])
        plain = method == UNCOMPRESSED and not flags & ENCRYPTED and packed == size
        records.append((name, archive.start + offset, packed, plain))
        at = after + extra + comment
    if at != len(text) or len(records) != place.members:
        raise DamageError(f"its directory has {len(records)} members instead of {place.members}")
    return _between(archive, place, records)


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers that did not fit into 32 bits, from the extra field that lists them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            words = [int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) - 7, 8)]
            if len(words) < numbers.count(FULL):
                break
            left = iter(words)
            return [next(left) if number == FULL else number for number in numbers]
        at += 4 + length
    raise DamageError("a 64-bit member has no 64-bit offset")


def _between(archive: ByteRange, place: _DirectoryRange, records: list[tuple[bytes, int, int, bool]]) -> ZipDirectory:
    """A member ends where the next one begins, the last one where the directory begins."""
    records.sort(key=lambda member: member[1])
    stops = [header for _, header, _, _ in records[1:]] + [place.start]
    members = ZipDirectory()
    for (name, header, size, plain), stop in zip(records, stops, strict=True):
        if header < archive.start or header + HEADER.size + len(name) + size > stop:
            raise DamageError(
                f"{name.decode(errors='replace')!r} ({size} bytes at byte {header}) does not end by byte {stop}"
            )
        members[name.decode(errors="replace")] = ZipMember(archive.file, name, header, size, stop, plain)
    if len(members) < len(records):
        raise DamageError("two members have the same name")
    return members


# --- what torch.save puts into a zip file -----------------------------------------------------------------------------


class Archive(NamedTuple):
    """What torch.save wrote into some bytes of a file: the pickle, and the other members."""

    location: ByteRange
    where: FileLabel
    pickle: bytes
    members: ZipDirectory
    folder: str

    def root(self) -> object:
        """What was saved, with stubs for its tensors."""
        value = unpickle(self.pickle, self.where, UnknownNames())
        check_tree(value, self.where, 8 * len(self.pickle) + 1000)
        return value

    def is_described_before(self, storage: ZipMember) -> bool:
        """True if the members that describe a storage are before it."""
        describing = (self.members.get(f"{self.folder}{name}") for name in ("data.pkl", "byteorder"))
        return all(member is None or member.stop <= storage.header for member in describing)

    def storage(self, tensor: TensorStub, name: str, what: str = "") -> ZipMember:
        """The member with the elements of a tensor; refused if it has too few."""
        member = self.members.get(f"{self.folder}data/{tensor.storage.key}")
        if member is None:
            raise CheckpointError(f"{self.where} has no storage {tensor.storage.key!r}, which {what}{name!r} is in")
        needed, size = tensor.elements * tensor.dtype.itemsize, tensor.dtype.itemsize
        if not needed <= tensor.storage.bytes == member.size or prod(tensor.shape) * size >= MAX_SIZE:
            raise CheckpointError(
                f"{self.where}: {what}{name!r} (shape {tensor.shape}, strides {tensor.strides}) needs {needed} bytes "
                f"of storage {tensor.storage.key!r}, which should have {tensor.storage.bytes} and has {member.size}"
            )
        if prod(tensor.shape) * size > MAX_EXPANSION * (member.size + 2**20):
            raise CheckpointError(
                f"{self.where}: {what}{name!r} (shape {tensor.shape}, strides {tensor.strides}) repeats {member.size} "
                f"bytes of its storage to {prod(tensor.shape) * size}. Remedy: clone() it before saving"
            )
        return member


def read_archives(files: Files, archives: Sequence[ByteRange]) -> list[Archive]:
    """What torch.save wrote into these bytes; the pickles are not run yet."""
    members = directories(files, archives)
    where = list(map(files.range_label, archives))
    folders = list(map(_folder, where, members))
    pickles = [directory[f"{folder}data.pkl"] for directory, folder in zip(members, folders, strict=True)]
    orders = [(at, f"{folder}byteorder") for at, folder in enumerate(folders) if f"{folder}byteorder" in members[at]]
    data = contents(files, pickles + [members[at][name] for at, name in orders])
    for (at, _), order in zip(orders, data[len(archives) :], strict=True):
        if order != b"little":
            raise CheckpointError(f"{where[at]}: its byte order is {order[:16]!r}; only 'little' can be read")
    return list(map(Archive, archives, where, data, members, folders))


def _folder(where: FileLabel, members: ZipDirectory) -> str:
    """The folder of all members of an archive."""
    folder = next(
        (name[: -len("data.pkl")] for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), ""
    )
    if not folder:
        raise CheckpointError(f"{where}: this archive has no data.pkl: it was not written by torch.save")
    if f"{folder}constants.pkl" in members:
        raise CheckpointError(
            f"{where}: a TorchScript program is not a checkpoint. Remedy: load it with torch.jit.load, and save its "
            f"state_dict() with torch.save"
        )
    return folder


def tensor_reader(files: Files, archive: Archive, name: str) -> Callable[[TensorStub], torch.Tensor]:
    """Makes real tensors of the stubs in a value. Tensors that share a storage still do."""
    storages = dict[str, torch.Tensor]()

    def read(tensor: TensorStub) -> torch.Tensor:
        member, key = archive.storage(tensor, name, "a tensor in "), tensor.storage.key
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if key not in storages:
            storages[key] = torch.frombuffer(bytearray(contents(files, [member])[0]), dtype=torch.uint8)
        size, whole = tensor.dtype.itemsize, storages[key]
        words = whole[: whole.numel() // size * size].view(WORDS[size])
        return words.as_strided(tensor.shape, tensor.strides, tensor.offset).view(tensor.dtype)

    return read


TemplateKey = tuple[int, tuple[int, ...], torch.dtype]  # the bytes of an archive, and the shape and dtype of its tensor


class TensorArchive(NamedTuple):
    """An archive of one tensor: the member with the elements, and the byte at which its data begins."""

    archive: Archive
    tensor: TensorStub
    storage: ZipMember
    begins: int

    @property
    def start(self) -> int:
        """The byte of the first element, from the start of the archive."""
        return self.begins - self.archive.location.start + self.tensor.offset * self.tensor.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the tensor, in elements."""
        return self.tensor.strides


class ArchiveTemplate(NamedTuple):
    """What similar archives have in common: all bytes before the elements, and the directory without its checksums.

    `start`: the byte of the first element, `directory`: that of the directory, from the start of the archive.
    """

    start: int
    strides: tuple[int, ...]
    head: bytes
    tail: Bytes
    mask: Bytes
    directory: int

    def ranges(self, archive: ByteRange) -> list[ByteRange]:
        """The bytes of an archive to compare."""
        first, second = archive.start + len(self.head), archive.start + self.directory
        return [ByteRange(archive.file, archive.start, first), ByteRange(archive.file, second, archive.stop)]

    def fits(self, head: Bytes, tail: Bytes) -> bool:
        """True if an archive with these bytes is like the template."""
        return head.tobytes() == self.head and not ((tail ^ self.tail) & self.mask).any()


class ArchiveTemplates:
    """The templates of a checkpoint: of many similar archives only the first is parsed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known = dict[TemplateKey, ArchiveTemplate | None]()  # None if the elements are not described before them

    def locate(self, archives: Sequence[ByteRange], boxes: Boxes, name: str, dtype: torch.dtype) -> Positions:
        """The elements of boxes of a tensor, each in an archive of its own."""
        shapes = list(map(tuple, (boxes.hi - boxes.lo).tolist()))
        keys = [(one.stop - one.start, shape, dtype) for one, shape in zip(archives, shapes, strict=True)]

        def read(rows: Sequence[int]) -> list[TensorArchive]:
            return self._read([archives[at] for at in rows], [boxes.box(at) for at in rows], name, dtype)

        new = {key: at for at, key in enumerate(keys) if key not in self._known}
        self._known |= zip(new, map(self._template, read(list(new.values()))), strict=True)
        known = list(self._matching(archives, [self._known[key] for key in keys]))
        others = [at for at, one in enumerate(known) if one is None]
        read_now = dict(zip(others, read(others), strict=True))
        places = [(one.start, one.strides) for one in (one or read_now[at] for at, one in enumerate(known))]
        plain = all(strides == row_major(shape) for (_, strides), shape in zip(places, shapes, strict=True))
        strides = None if plain else ints([strides for _, strides in places]).reshape(boxes.lo.shape)
        return Positions(ints([one.start + start for one, (start, _) in zip(archives, places, strict=True)]), strides)

    def _matching(
        self, archives: Sequence[ByteRange], templates: Sequence[ArchiveTemplate | None]
    ) -> Iterator[ArchiveTemplate | None]:
        """The template of every archive that is like it."""
        pairs = zip(archives, templates, strict=True)
        parts = iter(self._files.fetch([part for one, template in pairs if template for part in template.ranges(one)]))
        for template in templates:
            yield template if template and template.fits(next(parts), next(parts)) else None

    def _read(
        self, archives: Sequence[ByteRange], boxes: Sequence[Box], name: str, dtype: torch.dtype
    ) -> list[TensorArchive]:
        """Parse them."""
        if not archives:
            return []
        read = read_archives(self._files, archives)
        tensors = [_only_tensor(archive, box, name, dtype) for archive, box in zip(read, boxes, strict=True)]
        members = [archive.storage(tensor, name) for archive, tensor in zip(read, tensors, strict=True)]
        return list(map(TensorArchive, read, tensors, members, data_starts(self._files, members)))

    def _template(self, read: TensorArchive) -> ArchiveTemplate | None:
        file, first, stop = read.archive.location
        if not read.archive.is_described_before(read.storage):
            return None
        directory = max(member.stop for member in read.archive.members.values())
        head, tail = self._files.fetch([ByteRange(file, first, read.begins), ByteRange(file, directory, stop)])
        mask = without_checksums(tail)
        return ArchiveTemplate(read.start, read.strides, head.tobytes(), tail.copy(), mask, directory - first)


def _only_tensor(archive: Archive, box: Box, name: str, dtype: torch.dtype) -> TensorStub:
    tensor = archive.root()
    if isinstance(tensor, TensorStub) and (tensor.dtype, tensor.shape) == (dtype, box.shape):
        return tensor
    actual = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, TensorStub) else "not a tensor"
    raise CheckpointError(f"{archive.where}: {box} of {name!r} should be {dtype} of shape {box.shape}, but is {actual}")
