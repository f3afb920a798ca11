"""Zip archives whose members are stored as they are: where the bytes of each lie in the file.

Only the directory at the end of an archive tells the sizes: torch writes archives in one pass, so that the headers
before the members do not. A header is looked at to find where its member begins. Many archives are looked into at once,
for a checkpoint of torch.distributed has one per shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.files import Bytes, Files, Span
from shardwise.errors import CheckpointError

END, END64, LOCATOR = Struct("<I6xHIIH"), Struct("<I28xQQQ"), Struct("<I4xQ4x")
RECORD, HEADER = Struct("<I4xHH8xIIHHH8xI"), Struct("<I22xHH")
CHECKSUM = 16  # the byte of a record at which it is
BEGIN = b"PK\x03\x04"
SIGNATURES = {"end": 0x06054B50, "end64": 0x06064B50, "locator": 0x07064B50, "record": 0x02014B50}
TAIL = 4096  # bytes at the end of an archive that are fetched first: those of a shard have their directory there
FULL = 0xFFFFFFFF  # stands for a number that has 64 bits, and is elsewhere
STORED = 0
ENCRYPTED = 0x2041  # flags

Directory = dict[str, "Member"]


class Member(NamedTuple):
    """A member of an archive: its header is at byte `header` of the file, and all of it ends before `stop`."""

    file: str
    name: bytes
    header: int
    size: int
    stop: int
    plain: bool  # neither compressed nor encrypted


class _Place(NamedTuple):
    """Where the directory of an archive lies in its file, and how many members it should have."""

    start: int
    stop: int
    members: int


class DamageError(Exception):
    """What is wrong with an archive."""


def directories(files: Files, archives: Sequence[Span]) -> list[Directory]:
    """The members of every archive, by name."""
    ends = [Span(a.file, max(a.start, a.stop - TAIL), a.stop) for a in archives]
    tails = [tail.tobytes() for tail in files.fetch(ends)]
    return [_directory(files, *parts) for parts in zip(archives, ends, tails, strict=True)]


def contents(files: Files, members: Sequence[Member]) -> list[bytes]:
    """The bytes of some members, copied."""
    most = HEADER.size + 2 * 65535  # of a header, its name and what torch pads it with
    found = files.fetch([Span(m.file, m.header, min(m.stop, m.header + most + m.size)) for m in members])
    data = list[bytes]()
    for member, part in zip(members, found, strict=True):
        text = part.tobytes()
        at = _start(files, member, text) - member.header
        data.append(text[at : at + member.size])
    return data


def starts(files: Files, members: Sequence[Member]) -> list[int]:
    """The byte of the file at which each member begins."""
    heads = [Span(m.file, m.header, m.header + HEADER.size + len(m.name)) for m in members]
    found = files.fetch(heads)
    return [_start(files, member, head.tobytes()) for member, head in zip(members, found, strict=True)]


def _start(files: Files, member: Member, head: bytes) -> int:
    if not member.plain:
        raise CheckpointError(
            f"{files.shown(member.file)}, bytes {member.header} to {member.stop}: "
            f"{member.name.decode(errors='replace')!r} is compressed or encrypted, and cannot be read in parts"
        )
    _, length, extra = HEADER.unpack_from(head)
    start = member.header + HEADER.size + length + extra
    name = head[HEADER.size : HEADER.size + length]
    if head[:4] != BEGIN or name != member.name or start + member.size > member.stop:
        raise CheckpointError(
            f"{files.shown(member.file)}, bytes {member.header} to {member.stop}: they should hold "
            f"{member.name.decode(errors='replace')!r} ({member.size} bytes), but do not: the file is damaged"
        )
    return start


def _directory(files: Files, archive: Span, end: Span, tail: bytes) -> Directory:
    try:
        place = _place(archive, end, tail)
        if place.start < end.start:  # longer than most
            tail, end = files.read(archive.file, place.start, archive.stop), end._replace(start=place.start)
        return _members(archive, place, tail[place.start - end.start : place.stop - end.start])
    except DamageError as damage:
        raise CheckpointError(
            f"{files.shown(archive.file)}, bytes {archive.start} to {archive.stop}: {damage}: "
            f"they should hold an archive, but are truncated or damaged"
        ) from damage


def _place(archive: Span, end: Span, tail: bytes) -> _Place:
    """By the record at the very end; where it has too few bits, by the one before it."""
    at = len(tail) - END.size
    if at < 0 or tail[at : at + 4] != SIGNATURES["end"].to_bytes(4, "little"):
        raise DamageError("they do not end as a zip archive does")
    _, count, size, start, _ = END.unpack_from(tail, at)
    stop = end.start + at
    if at >= LOCATOR.size and tail[at - LOCATOR.size :][:4] == SIGNATURES["locator"].to_bytes(4, "little"):
        stop = archive.start + LOCATOR.unpack_from(tail, at - LOCATOR.size)[1]
        count, size, start = _in_64_bits(tail, stop - end.start)
    if not archive.start <= archive.start + start <= archive.start + start + size == stop:
        raise DamageError(f"their directory should lie {size} bytes from byte {start} on")
    return _Place(archive.start + start, stop, count)


def _in_64_bits(tail: bytes, at: int) -> tuple[int, int, int]:
    mark, count, size, start = END64.unpack_from(tail, at) if 0 <= at <= len(tail) - END64.size else (0, 0, 0, 0)
    if mark != SIGNATURES["end64"]:
        raise DamageError("their last record is not where it should be")
    return count, size, start


def unchecked(tail: Bytes) -> Bytes:
    """A mask of a directory that was read, and of what follows it, without the checksums of members."""
    mask, text, at = np.full_like(tail, 255), tail.tobytes(), 0
    while text[at : at + 4] == SIGNATURES["record"].to_bytes(4, "little"):
        mask[at + CHECKSUM : at + CHECKSUM + 4] = 0
        *_, length, extra, comment, _ = RECORD.unpack_from(text, at)
        at += RECORD.size + length + extra + comment
    return mask


def _members(archive: Span, place: _Place, text: bytes) -> Directory:
    found, at, least = list[tuple[bytes, int, int, bool]](), 0, RECORD.size
    while at + least <= len(text):
        mark, flags, method, packed, size, length, extra, comment, offset = RECORD.unpack_from(text, at)
        name, after = text[at + least : at + least + length], at + least + length
        if mark != SIGNATURES["record"] or after + extra + comment > len(text):
            raise DamageError(f"record {len(found)} of their directory is not one")
        if FULL in (packed, size, offset):
            size, packed, offset = _wide(text[after : after + extra], [size, packed, offset])
        plain = method == STORED and not flags & ENCRYPTED and packed == size
        found.append((name, archive.start + offset, packed, plain))
        at = after + extra + comment
    if at != len(text) or len(found) != place.members:
        raise DamageError(f"their directory has {len(found)} members where {place.members} should be")
    return _between(archive, place, found)


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers that did not fit in 32 bits, from the field that has them in their order."""
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
    raise DamageError("a member of 64 bits has no field that says where it is")


def _between(archive: Span, place: _Place, found: list[tuple[bytes, int, int, bool]]) -> Directory:
    """Members end where the next one begins, the last of them where the directory does."""
    found.sort(key=lambda member: member[1])
    stops = [header for _, header, _, _ in found[1:]] + [place.start]
    members = Directory()
    for (name, header, size, plain), stop in zip(found, stops, strict=True):
        if header < archive.start or header + HEADER.size + len(name) + size > stop:
            raise DamageError(
                f"{name.decode(errors='replace')!r} ({size} bytes at byte {header}) does not end by byte {stop}"
            )
        members[name.decode(errors="replace")] = Member(archive.file, name, header, size, stop, plain)
    if len(members) < len(found):
        raise DamageError("two members have the same name")
    return members
