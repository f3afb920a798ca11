"""Blocks of files that a load reads, checked against the checksums beside the files while they are in the cache.

All that reads for a load shows what it has read to the `BlockCheck` of the load, which is a context variable: entries
that are computed from others read those, too. Nothing raises where ranks exchange: what is wrong is kept until
the end, and then raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_64_digest

from shardwise.checkpoint.files import Bytes, Files
from shardwise.errors import CheckpointError
from shardwise.exchange.buffers import bytes_at
from shardwise.geometry import Window
from shardwise.planning import size
from shardwise.storage.sums import BLOCK, EDGE, BlockSums, blocks_of, mark_of, sums_name

Check = bool | Literal["all"]
MOST_SUMS = 2**26  # bytes of checksums: those of a file of 4 TiB
GAP = 2**16  # bytes that were not needed, but are read to check a block
AT_ONCE, THREADS = 16, 4  # blocks that are read at a time where whole files are checked, and threads that do
_current: ContextVar[BlockCheck | None] = ContextVar("check", default=None)


@dataclass(frozen=True)
class LoadReport:
    """What a load read on this rank: bytes of tensors, bytes that were checked, and files without checksums.

    >>> LoadReport(read=4096, checked=1024, without_sums=())
    LoadReport(4.00 KiB read, 1.00 KiB checked)
    >>> LoadReport(read=4096, checked=0, without_sums=("model.safetensors",))
    LoadReport(4.00 KiB read, 0 B checked, no checksums beside model.safetensors)
    """

    read: int
    checked: int
    without_sums: tuple[str, ...]

    def __repr__(self) -> str:
        first, more = "".join(self.without_sums[:1]), len(self.without_sums) - 1
        without = f", no checksums beside {first}{f' and {more} more' if more > 0 else ''}" if first else ""
        return f"LoadReport({size(self.read)} read, {size(self.checked)} checked{without})"


class DamagedBlock(NamedTuple):
    """Bytes of a file that do not have their checksum."""

    file: str
    start: int
    stop: int


def check_option(check: object) -> None:
    """Refuse an invalid check= option."""
    if check is not True and check is not False and check != "all":
        raise ValueError(f"check= must be True, False or 'all', not {check!r}")


def read_sums(files: Files, name: str, *, required: bool) -> BlockSums | None:
    """The checksums of a file; None if there are none. `required`: its index says that there are.

    Otherwise another program may have replaced the file: then those beside it are of other data, and are not believed.
    """
    beside = sums_name(name)
    if not files.has(beside):
        if required:
            raise CheckpointError(
                f"{files.label(beside)} is missing: it was written with {files.label(name)}. Remedy: restore it from a "
                f"copy, or load with check=False"
            )
        return None
    sums = sums_beside(files, name)
    if files.size(name) == sums.size and (required or _mark(files, name) == sums.mark):
        return sums
    if required:
        raise CheckpointError(
            f"{files.label(name)} has {files.size(name)} bytes, but its checksums are of a file of {sums.size}: it is "
            f"truncated, or belongs to another checkpoint"
        )
    return None


def sums_beside(files: Files, name: str) -> BlockSums:
    """The checksums that lie beside a file."""
    beside = sums_name(name)
    if files.size(beside) > MOST_SUMS:
        raise CheckpointError(
            f"{files.label(beside)} has {files.size(beside)} bytes: checksums have at most {MOST_SUMS}. Remedy: load "
            f"with check=False, which reads the data unchecked"
        )
    return BlockSums.read(files.read(beside), files.label(beside))


def _mark(files: Files, name: str) -> str:
    stop = files.size(name)
    return mark_of(files.read(name, 0, min(EDGE, stop)), files.read(name, max(0, stop - EDGE), stop))


class FileCheck:
    """Which blocks of a file are checked, and which are damaged.

    `read` fetches bytes of the file. With it, blocks count as read if only `GAP` bytes before, between or after what
    was read are missing: headers, for instance. They are then read for the check alone.
    """

    def __init__(self, sums: BlockSums, read: Callable[[int, int], bytes] | None = None) -> None:
        self.sums, self.damaged, self._read = sums, list[int](), read
        self._gap = 0 if read is None else GAP
        self._checked = np.zeros(sums.count, np.bool_)
        self._seen = list[tuple[int, int]]()
        self._open, self._at = xxh3_64(), -1  # of a block that has been read up to this byte

    @property
    def checked_bytes(self) -> int:
        """Of all blocks that are checked."""
        short = self.sums.count * BLOCK - self.sums.size
        return int(self._checked.sum()) * BLOCK - (short if self._checked[-1:].any() else 0)

    def see(self, start: int, data: memoryview) -> None:
        """Bytes that were read. Blocks of several parts are checked where the parts come one after the other."""
        self._seen.append((start, start + len(data)))
        for before in self._at, start - start % BLOCK:
            if self._read is not None and 0 < start - before <= GAP and before >= 0 and start != self._at:
                self._take(before, memoryview(self._read(before, start)))
        self._take(start, data)

    def _take(self, start: int, data: memoryview) -> None:
        for part in blocks_of(data, start):
            block, stop = start // BLOCK, start + len(part)
            lo, hi = self.sums.span(block)
            if (start, stop) == (lo, hi):
                self.settle(block, part)
            elif start == lo or start == self._at:
                self._continue(block, part, first=start == lo, last=stop == hi)
                self._at = stop
            start = stop

    def _continue(self, block: int, part: memoryview, *, first: bool, last: bool) -> None:
        if first:
            self._open.reset()
        self._open.update(part)
        if last:
            self._settle(block, self._open.digest())

    def has(self, block: int) -> bool:
        """True if a block is checked."""
        return bool(self._checked[block])

    def settle(self, block: int, data: bytes | memoryview) -> None:
        """The bytes of a whole block."""
        self._settle(block, xxh3_64_digest(data))

    def _settle(self, block: int, sum: bytes) -> None:
        if not self._checked[block] and not self.sums.has(block, sum):
            self.damaged.append(block)
        self._checked[block] = True

    def left(self) -> list[int]:
        """The blocks that were read, as far as they need to be, but are not checked yet."""
        found = list[int]()
        for start, stop in _merged(self._seen, self._gap):
            end = self.sums.count if self.sums.size - stop <= self._gap else (stop + self._gap) // BLOCK
            found += [block for block in range(-(-(start - self._gap) // BLOCK), end) if not self._checked[block]]
        return found


def _merged(spans: Iterable[tuple[int, int]], gap: int) -> Iterator[tuple[int, int]]:
    """Spans in order, joined where at most so many bytes lie between them.

    >>> list(_merged([(8, 9), (0, 4), (5, 6)], 1))
    [(0, 6), (8, 9)]
    """
    before: tuple[int, int] | None = None
    for start, stop in sorted(spans):
        if before is not None and start - before[1] <= gap:
            before = before[0], max(before[1], stop)
            continue
        if before is not None:
            yield before
        before = start, stop
    if before is not None:
        yield before


class BlockCheck:
    """What a load has read of the files of a checkpoint, and which of it is checked.

    `required`: its index says that all its files have checksums. `damaged`: the blocks that any rank has found.
    """

    def __init__(self, files: Files, check: Check, *, required: bool) -> None:
        self.files, self.check, self._required = files, check, required
        self._tables, self._read = dict[str, FileCheck | None](), 0
        self._error: CheckpointError | None = None
        self.damaged = set[DamagedBlock]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All that is read inside is shown to it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def read_into(self, files: Files, name: str, start: int, memory: Bytes) -> None:
        """Fill memory with bytes of a file, a block at a time: it is checked while it is in the cache."""
        self._read += len(memory)
        table = self._table(name) if self.check is True and files is self.files else None
        if table is None:
            files.read_into(name, start, memory)
            return
        at, view = 0, memory.data
        while at < len(memory):
            stop = min(len(memory), at + BLOCK - (start + at) % BLOCK)
            files.read_into(name, start + at, memory[at:stop])
            table.see(start + at, view[at:stop])
            at = stop

    def see(self, files: Files, windows: Sequence[tuple[str, Window]], views: Sequence[torch.Tensor]) -> None:
        """Windows of files, and their elements as they were read. It raises nothing: see `finish`."""
        if files is not self.files:
            return
        self._read += sum(view.nbytes for view in views)
        for (name, window), view in zip(windows, views, strict=True) if self.check is True else ():
            table = self._table(name) if window.contiguous and view.is_contiguous() and view.nbytes else None
            if table is not None:
                table.see(window.offset, bytes_at(view.data_ptr(), view.nbytes).data)

    def _table(self, name: str) -> FileCheck | None:
        """The blocks of a file; None where it has no checksums."""
        if name not in self._tables:
            self._tables[name] = None
            try:
                sums = read_sums(self.files, name, required=self._required)
                self._tables[name] = None if sums is None else FileCheck(sums, self._reader(name))
            except CheckpointError as error:
                self._error = self._error or error
        return self._tables[name]

    def _reader(self, name: str) -> Callable[[int, int], bytes] | None:
        return partial(self.files.read, name) if self.files.near else None  # elsewhere each takes a request

    def check_whole(self, names: Iterable[str], part: int = 0, parts: int = 1) -> None:
        """Check one of several equal parts of all blocks of files."""
        tables = [(name, table) for name in names if (table := self._table(name)) is not None]
        blocks = [(name, table, block) for name, table in tables for block in range(table.sums.count)]
        mine = blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]
        check_blocks(self.files, [one for one in mine if not one[1].has(one[2])])

    def finish(self) -> list[DamagedBlock]:
        """Check what is left, and return the damaged blocks. Raises what is wrong with checksums."""
        if self._error is not None:
            raise self._error
        tables = [(name, table) for name, table in self._tables.items() if table is not None]
        check_blocks(self.files, [(name, table, block) for name, table in tables for block in table.left()])
        return [DamagedBlock(name, *table.sums.span(block)) for name, table in tables for block in table.damaged]

    def report(self) -> LoadReport:
        """For the caller of `load`."""
        checked = sum(table.checked_bytes for table in self._tables.values() if table is not None)
        return LoadReport(self._read, checked, tuple(name for name, one in self._tables.items() if one is None))


def check_blocks(
    files: Files,
    blocks: Sequence[tuple[str, FileCheck, int]],
    jobs: int = THREADS,
    done: Callable[[int], None] | None = None,
) -> None:
    """Read blocks of files and check them, in several threads. `done` hears of the bytes that are checked."""

    def work(some: Sequence[tuple[str, FileCheck, int]]) -> None:
        room = np.empty(BLOCK, np.uint8)
        for name, table, block in some:
            start, stop = table.sums.span(block)
            files.read_into(name, start, room[: stop - start])
            table.settle(block, room[: stop - start].data)
            if done is not None:
                done(stop - start)
        files.check_unchanged({name for name, *_ in some})

    runs = [blocks[at : at + AT_ONCE] for at in range(0, len(blocks), AT_ONCE)]
    if len(runs) < 2 or jobs < 2:
        work(blocks)
        return
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, runs))


def current_check() -> BlockCheck | None:
    """That of the load that is reading now."""
    return _current.get()
