"""Zip archives with uncompressed members: where the bytes of each member are in the file.

Only the directory at the end of an archive has the sizes: torch writes archives in one pass, so the header before a
member does not have them. The header tells where the data begin. Many archives are read at once, as a checkpoint of
torch.distributed has one per shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.files import ByteRange, Bytes, Files
from shardwise.errors import CheckpointError

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
    listed, at, least = list[tuple[bytes, int, int, bool]](), 0, RECORD.size
    while at + least <= len(text):
        mark, flags, method, packed, size, length, extra, comment, offset = RECORD.unpack_from(text, at)
        name, after = text[at + least : at + least + length], at + least + length
        if mark != SIGNATURES["record"] or after + extra + comment > len(text):
            raise DamageError(f"record {len(listed)} of its directory is invalid")
        if FULL in (packed, size, offset):
            size, packed, offset = _wide(text[after : after + extra], [size, packed, offset])
        plain = method == UNCOMPRESSED and not flags & ENCRYPTED and packed == size
        listed.append((name, archive.start + offset, packed, plain))
        at = after + extra + comment
    if at != len(text) or len(listed) != place.members:
        raise DamageError(f"its directory has {len(listed)} members instead of {place.members}")
    return _between(archive, place, listed)


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


def _between(archive: ByteRange, place: _DirectoryRange, listed: list[tuple[bytes, int, int, bool]]) -> ZipDirectory:
    """A member ends where the next one begins, the last one where the directory begins."""
    listed.sort(key=lambda member: member[1])
    stops = [header for _, header, _, _ in listed[1:]] + [place.start]
    members = ZipDirectory()
    for (name, header, size, plain), stop in zip(listed, stops, strict=True):
        if header < archive.start or header + HEADER.size + len(name) + size > stop:
            raise DamageError(
                f"{name.decode(errors='replace')!r} ({size} bytes at byte {header}) does not end by byte {stop}"
            )
        members[name.decode(errors="replace")] = ZipMember(archive.file, name, header, size, stop, plain)
    if len(members) < len(listed):
        raise DamageError("two members have the same name")
    return members
