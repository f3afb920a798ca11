"""Checksums of the blocks of a file, in a small file beside it: `w.safetensors` has `w.safetensors.sums.json`.

A block is 1 MiB of the file, counted from byte 0; the last one is shorter. JSON that ends with a digest of itself tells
a flipped bit in the checksums from one in the data. Nothing here defends against who changes both on purpose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_hexdigest

from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHM, BLOCK, WIDTH = "xxh3_64", 2**20, 8  # WIDTH: bytes of a checksum
ENDING = ".sums.json"
EDGE = 2**12  # bytes at each end of a file that go into its mark
LONGEST_NAME = 240  # bytes of a name that can become longer: systems allow 255
TRAILER = b"shardwise xxh3_64 "
Parts = Mapping[str, Mapping[str, str]]


def sums_name(name: str) -> str:
    """The file with the checksums of another one.

    >>> sums_name("model.safetensors")
    'model.safetensors.sums.json'
    """
    folder, slash, own = name.rpartition("/")
    if len(os.fsencode(own)) <= LONGEST_NAME:
        return name + ENDING
    return folder + slash + blake2b(os.fsencode(own), digest_size=16).hexdigest() + ENDING


def data_name(name: str) -> str:
    """The file that checksums belong to; other names as they are.

    >>> data_name("model.safetensors.sums.json"), data_name("model.safetensors")
    ('model.safetensors', 'model.safetensors')
    """
    return name.removesuffix(ENDING)


@dataclass(frozen=True, slots=True)
class BlockSums:
    """The checksums of a file of `size` bytes, 8 bytes for each block. `mark` is a digest of its first and last bytes.

    >>> sums = Summing.of(b"ten bytes.")
    >>> sums.count, sums.span(0), sums.fits(0, b"ten bytes."), sums.fits(0, b"ten bytes?")
    (1, (0, 10), True, False)
    >>> BlockSums.read(sums.to_json(), "here") == sums
    True
    """

    size: int
    sums: bytes
    mark: str
    parts: Parts | None = None  # of a file whose save can be compared with a later one: see `increments.py`

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.sums) // WIDTH

    def span(self, block: int) -> tuple[int, int]:
        """The first byte of a block, and the one after its last."""
        return block * BLOCK, min((block + 1) * BLOCK, self.size)

    def fits(self, block: int, data: Buffer) -> bool:
        """True if these are the bytes of a block."""
        return self.has(block, xxh3_64_digest(data))

    def has(self, block: int, sum: bytes) -> bool:
        """True if this is the checksum of a block."""
        return self.sums[block * WIDTH : (block + 1) * WIDTH] == sum

    def to_json(self) -> bytes:
        """As it is kept beside the file."""
        fields: dict[str, object] = {
            "algorithm": ALGORITHM,
            "block": BLOCK,
            "size": self.size,
            "mark": self.mark,
            "sums": self.sums.hex(),
        }
        if self.parts is not None:
            fields["parts"] = self.parts
        return with_digest(json.dumps(fields).encode())

    @staticmethod
    def read(text: bytes, where: object) -> BlockSums:
        """From what `to_json` returned; refused if a bit of it has changed."""
        if not has_digest(text):
            raise damaged(
                where, "; the data may be whole. Remedy: restore this file from a copy, or load with check=False"
            )
        try:
            fields = json.loads(text)
            kind, size, mark = (fields["algorithm"], fields["block"]), fields["size"], fields["mark"]
            sums = bytes.fromhex(fields["sums"])
            whole = type(size) is int and type(mark) is str and len(sums) == -(-size // BLOCK) * WIDTH
        except (ValueError, TypeError, LookupError, RecursionError):
            kind, whole = None, False
        if kind != (ALGORITHM, BLOCK) or not whole:
            raise CheckpointError(
                f"{where} does not have checksums that are known here: expected {ALGORITHM} of blocks of {BLOCK} "
                f"bytes. Remedy: load with check=False, which reads the data unchecked"
            )
        return BlockSums(size, sums, mark, fields.get("parts"))


class Summing:
    """Makes the checksums of a file from its bytes as they pass.

    >>> summing = Summing()
    >>> summing.update(b"ten ")
    >>> summing.update(b"bytes.")
    >>> summing.finish() == Summing.of(b"ten bytes.")
    True
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self.size, self._sums, self._open, self._parts = 0, bytearray(), xxh3_64(), parts
        self._start, self._end = b"", b""

    @staticmethod
    def of(data: Buffer) -> BlockSums:
        """The checksums of a file with these bytes."""
        summing = Summing()
        summing.update(data)
        return summing.finish()

    def update(self, data: Buffer) -> None:
        """The next bytes of the file."""
        view = memoryview(data).cast("B")
        if len(self._start) < EDGE:
            self._start += bytes(view[: EDGE - len(self._start)])
        self._end = (self._end + bytes(view[-EDGE:]))[-EDGE:]
        for part in blocks_of(view, self.size):
            self._open.update(part)
            self.size += len(part)
            if self.size % BLOCK == 0:
                self._close()

    def _close(self) -> None:
        self._sums += self._open.digest()
        self._open.reset()

    def finish(self) -> BlockSums:
        """The checksums of all bytes so far."""
        if self.size % BLOCK:
            self._close()
        return BlockSums(self.size, bytes(self._sums), mark_of(self._start, self._end), self._parts)


def blocks_of(view: memoryview, start: int) -> Iterator[memoryview]:
    """Bytes that begin at byte `start` of a file, cut at the edges of blocks."""
    at = 0
    while at < len(view):
        stop = min(len(view), at + BLOCK - (start + at) % BLOCK)
        yield view[at:stop]
        at = stop


def mark_of(start: bytes, end: bytes) -> str:
    """A digest of the first and the last bytes of a file: another file under the same name hardly has the same."""
    return xxh3_64_hexdigest(start + end)


# --- files that end with a digest of themselves -----------------------------------------------------------------------


def with_digest(text: bytes) -> bytes:
    """A JSON object with a last field, `digest`, of all bytes before it.

    >>> with_digest(b'{"a": 1}')
    b'{"a": 1,\\n "digest": "735f46eb212f58af"\\n}'
    """
    return _closed(text[: text.rindex(b"}")].rstrip())


def with_field(text: bytes, name: str, value: object) -> bytes:
    """A JSON object that ends with a digest of itself, with one more field before that.

    >>> with_field(with_digest(b'{"a": 1}'), "b", 2) == with_digest(b'{"a": 1,\\n "b": 2\\n}')
    True
    """
    start = text[: -len(_end(b""))]
    return with_digest(start + f",\n {json.dumps(name)}: {json.dumps(value)}\n}}".encode())


def has_digest(text: bytes) -> bool:
    """True if JSON ends with a digest of itself that is right."""
    return text == _closed(text[: -len(_end(b""))])


def _closed(start: bytes) -> bytes:
    return start + _end(start)


def _end(start: bytes) -> bytes:
    return b',\n "digest": "%s"\n}' % xxh3_64_hexdigest(start).encode()


def damaged(where: object, remedy: str = ". Remedy: restore it from a copy") -> CheckpointError:
    """The error for a file whose digest of itself is wrong or missing."""
    return CheckpointError(f"{where} is damaged: it does not match its own digest{remedy}")


def with_trailer(data: bytes) -> bytes:
    """Bytes with a digest of them at the end."""
    return data + TRAILER + xxh3_64_hexdigest(data).encode()


def without_trailer(data: bytes) -> tuple[bytes, bool | None]:
    """The bytes before the digest, and whether it is right; None if there is none.

    >>> without_trailer(with_trailer(b"data")), without_trailer(b"data")
    ((b'data', True), (b'data', None))
    """
    start = data[: -len(TRAILER) - 2 * WIDTH]
    if not data[len(start) :].startswith(TRAILER):
        return data, None
    return start, data == with_trailer(start)
