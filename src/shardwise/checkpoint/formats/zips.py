"""Zip archives as torch.save writes them: members are stored as they are, and begin at aligned bytes.

They are described as segments. The sizes of members are known, but their checksums only when they have been written:
each follows its member, and is repeated in the directory at the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from struct import pack
from typing import NamedTuple

from shardwise.checkpoint.segments import Checksum, Data, Segment, size_of

ALIGN = 64  # bytes: torch.save pads the header of each member, so that its data begins at a multiple
LARGE = 2**31 - 1  # bytes from which on numbers are written with 64 bits
MANY = 2**16 - 1  # members from which on their number is
NO_DATE = 0x21 << 16  # the first of January 1980, 0:00
PLAIN, WITH_64_BITS = 20, 45  # versions of the format
CHECKSUM_FOLLOWS = 8  # a flag
READABLE = 0o600 << 16  # permissions of extracted files
UNIX = 3


class _Member(NamedTuple):
    name: bytes
    size: int
    header: int  # where it begins
    padding: bytes
    checksum: Segment  # four bytes

    @property
    def large(self) -> bool:
        return self.size >= LARGE


def archive_segments(members: Iterable[tuple[str, bytes | Data]]) -> list[Segment]:
    """An archive of these members, by name."""
    segments, directory, at = list[Segment](), list[_Member](), 0
    for name, data in members:
        size = size_of([data])
        checksum = Checksum(data) if isinstance(data, Data) else zlib.crc32(data).to_bytes(4, "little")
        member = _Member(name.encode("ascii"), size, at, _padding(name, size, at), checksum)
        added = [_header(member), data, b"PK\x07\x08", checksum, pack("<QQ" if member.large else "<LL", size, size)]
        segments += added
        directory.append(member)
        at += size_of(added)
    records = [part for member in directory for part in _record(member)]
    return _joined([*segments, *records, _end(len(directory), at, size_of(records))])


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    """The same, with bytes that follow each other as one segment."""
    joined, run = list[Segment](), list[bytes]()
    for one in segments:
        if isinstance(one, bytes):
            run.append(one)
        else:
            joined += [b"".join(run), one]
            run = []
    return [*joined, b"".join(run)]


def _padding(name: str, size: int, at: int) -> bytes:
    count = -(at + 30 + len(name) + 4 + (20 if size >= LARGE else 0)) % ALIGN
    return b"FB" + pack("<H", count) + b"Z" * count


def _header(member: _Member) -> bytes:
    sizes, extra = (0xFFFFFFFF, pack("<HHQQ", 1, 16, 0, 0)) if member.large else (0, b"")
    version = WITH_64_BITS if member.large else PLAIN
    lengths = len(member.name), len(member.padding + extra)
    numbers = pack("<4sHHHLLLLHH", b"PK\3\4", version, CHECKSUM_FOLLOWS, 0, NO_DATE, 0, sizes, sizes, *lengths)
    return numbers + member.name + member.padding + extra


def _record(member: _Member) -> list[Segment]:
    """A member in the directory."""
    wide = [number for number in (member.size, member.size, member.header) if number > LARGE]
    extra = (pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b"") + member.padding
    version = WITH_64_BITS if wide or member.large else PLAIN
    begin = pack("<4sBBHHHL", b"PK\1\2", version, UNIX, version, CHECKSUM_FOLLOWS, 0, NO_DATE)
    size, header = _narrow(member.size), _narrow(member.header)
    rest = pack("<LLHHHHHLL", size, size, len(member.name), len(extra), 0, 0, 0, READABLE, header)
    return [begin, member.checksum, rest + member.name + extra]


def _narrow(number: int) -> int:
    return 0xFFFFFFFF if number > LARGE else number


def _end(count: int, start: int, size: int) -> bytes:
    wide = b""
    if count > MANY or start > LARGE or size > LARGE:
        versions = WITH_64_BITS, WITH_64_BITS
        wide = pack("<4sQHHLLQQQQ", b"PK\6\6", 44, *versions, 0, 0, count, count, size, start)
        wide += pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    count, size, start = min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(start, 0xFFFFFFFF)
    return wide + pack("<4sHHHHLLH", b"PK\5\6", 0, 0, count, count, size, start, 0)
