"""What is left to do of a save when its files are complete in memory: write them, and then the index.

Every rank's writer writes its own file, and a mark that it has. The first one waits for the marks of all, writes the
index, which makes the checkpoint valid, and removes the marks: so the others know. No process group is needed for that.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import CheckpointError
from shardwise.storage.folders import OutputFolder, indexed_files
from shardwise.storage.increments import References, Written, check_earlier, increment_of, index_with
from shardwise.storage.locks import WriteClaim
from shardwise.storage.sums import sums_name

FIRST_LOOK, LAST_LOOK, SELDOM = (
    0.01,
    0.5,
    2.0,
)  # seconds between two looks for marks; most writers look seldom in the end

READING = 8  # marks that are read at a time


class Crc(NamedTuple):
    """Bytes start to stop of a file have a CRC-32, which is written at these places, with four bytes."""

    start: int
    stop: int
    places: tuple[int, ...]


class Commit(NamedTuple):
    """What the first rank does in the end: it writes the index, and removes the files of an earlier checkpoint."""

    name: str  # of the index
    files: tuple[str, ...]  # of all ranks


@dataclass(frozen=True)
class WriteOrder:
    """The file of a rank, which is complete in memory but for its checksums. `number`: of its writer among `count`."""

    folder: str
    token: str
    durable: bool
    sums: bool
    name: str
    size: int
    checksums: tuple[Crc, ...]
    number: int
    count: int
    patience: float  # seconds to wait for the files of the others
    commit: Commit | None = None
    earlier: str | None = None  # the location of a file to compare with, "" if there is none; None: all is written

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str | bytes) -> WriteOrder:
        """From another process."""
        fields = json.loads(text)
        fields["checksums"] = tuple(Crc(start, stop, tuple(places)) for start, stop, places in fields["checksums"])
        if fields["commit"] is not None:
            name, files = fields["commit"]
            fields["commit"] = Commit(name, tuple(files))
        return WriteOrder(**fields)

    @property
    def out(self) -> OutputFolder:
        """Where it writes."""
        return OutputFolder(self.folder, durable=self.durable, run=self.token, sums=self.sums)

    def mark(self, what: str, why: str = "") -> None:
        """Tell the first writer. (A mark is needed for a moment only: it need not be on the disk.)"""
        with OutputFolder(self.folder, durable=False, run=self.token).write(
            mark_name(self.token, self.number, what)
        ) as file:
            file.write(why.encode())


def carry_out(order: WriteOrder, memory: memoryview, index: bytes, claim: WriteClaim) -> Written:
    """Write the file, and return how much when the save is complete, or given up by the first writer.

    If something fails here, the others are told by a mark, and what an earlier save has written is as it was.
    """
    try:
        report, references = _write(order, memory)
        if order.commit is not None:
            _commit(order, order.commit, index, references)
            claim.unfinished = False
        else:
            _wait_for_first(order)
    except BaseException as error:
        if abandon(order, str(error)) and order.commit is not None:
            claim.unfinished = False
        raise
    finally:
        claim.end()
    return report


def _write(order: WriteOrder, memory: memoryview) -> tuple[Written, References]:
    for crc in order.checksums:
        value = zlib.crc32(memory[crc.start : crc.stop]).to_bytes(4, "little")
        for place in crc.places:
            memory[place : place + 4] = value
    report, references = _write_file(order, memory)
    if order.commit is None:
        order.mark("done", json.dumps(references) if references else "")
    return report, references


def _write_file(order: WriteOrder, memory: memoryview) -> tuple[Written, References]:
    if order.earlier is None:
        order.out.write_memory(order.name, memory, order.size)
        return Written(order.size, 0), {}
    increment = increment_of(memory, order.size, order.out, order.earlier)
    if increment.whole:
        order.out.write_memory(order.name, memory, order.size, increment.locations)
    else:
        order.out.write_pieces(order.name, increment.pieces, increment.locations)
    return increment.report, increment.references


def _commit(order: WriteOrder, commit: Commit, index: bytes, mine: References) -> None:
    folder = order.out
    folder.sync_parents()
    _wait_for_all(order, folder)
    if order.earlier is not None:
        index = index_with(index, {order.number: mine, **_references(order, folder)})
    old = commit_index(folder, commit.name, index, commit.files)
    for number in range(1, order.count):
        folder.remove(mark_name(order.token, number, "done"))
    for name in old:
        folder.remove(name)


def _references(order: WriteOrder, folder: OutputFolder) -> dict[int, References]:
    """What the other ranks have in files of earlier checkpoints: their marks say so."""

    def read(number: int) -> References:
        references: References = json.loads(folder.read(mark_name(order.token, number, "done")) or "{}")
        return references

    others = range(1, order.count)
    with ThreadPoolExecutor(READING) as pool:
        return dict(zip(others, pool.map(read, others), strict=True))


def commit_index(folder: OutputFolder, name: str, index: bytes, files: Sequence[str]) -> list[str]:
    """Write the index, which makes the checkpoint valid. Returns the files that are not needed any more."""
    check_exist(folder, files)
    check_earlier(folder, index)
    old = indexed_files(folder, [name])
    with folder.write(name, sums=False) as file:  # it has a digest of itself
        file.write(index)
    check_exist(folder, files)
    check_earlier(folder, index)
    return sorted(old - set(files))


def check_exist(folder: OutputFolder, files: Sequence[str]) -> None:
    """Refuse to continue if files that were written do not exist any more."""
    missing = folder.missing([*files, *map(sums_name, files if folder.sums else ())])
    if missing:
        raise CheckpointError(
            f"{folder.path_of(missing[0])} was written, but does not exist any more: does something else "
            f"write to the same path? Give every checkpoint a separate path"
        )


def abandon(order: WriteOrder, why: str) -> bool:
    """Tell the first writer that this file will never be written; the first one removes what it can of all.

    By who carries out the order or, if that was killed, by who gave it. True if the save is given up with no file
    left. If the index is there already, it stays.
    """
    folder = order.out
    if order.commit is None:
        folder.remove(order.name)
        with suppress(CheckpointError):
            order.mark("failed", why)
        return False
    with suppress(CheckpointError):
        if order.token in _text(folder, order.commit.name):
            return False
    marks = {name for name in folder.names() if is_mark(name, order.token)}
    complete = len(marks) + 1 >= order.count
    if not complete:  # who writes its file later must know; the next save to the directory removes this mark
        with suppress(CheckpointError):
            order.mark("failed", why)
    for name in (*order.commit.files, *marks):
        folder.remove(name)
    return complete


def _text(folder: OutputFolder, name: str) -> str:
    return folder.read(name).decode(errors="replace") if name in folder.names() else ""


# --- marks ------------------------------------------------------------------------------------------------------------


def mark_name(token: str, number: int, what: str) -> str:
    """The name of a small file by which a writer tells what became of its file.

    >>> mark_name("0123456789abcdef", 3, "done")
    '.0123456789abcdef.3.done'
    """
    return f".{token}.{number}.{what}"


def is_mark(name: str, token: str) -> bool:
    """True for the marks of a save."""
    return name.startswith(f".{token}.") and name.endswith((".done", ".failed"))


def _wait_for_all(order: WriteOrder, folder: OutputFolder) -> None:
    """Return when the files of all ranks are complete; an error if one has failed, or takes too long."""
    wanted = {mark_name(order.token, number, "done") for number in range(1, order.count)}
    for _ in _looks(order.patience, LAST_LOOK):
        names = set(folder.names())
        failed = sorted(name for name in names if is_mark(name, order.token) and name.endswith(".failed"))
        if failed:
            raise CheckpointError(folder.read(failed[0]).decode(errors="replace"))
        if wanted <= names:
            return
    numbers = sorted(int(name.split(".")[2]) for name in wanted - names)
    raise CheckpointError(
        f"{folder.path}: after {order.patience:g} s the files of {len(numbers)} of {order.count} callers are not "
        f"written (first of all that of caller {numbers[0]}): the save is given up"
    )


def _wait_for_first(order: WriteOrder) -> None:
    """Return when the first writer has removed the mark of this one: the index is written, or the save was given up."""
    folder, name = order.out, mark_name(order.token, order.number, "done")
    for _ in _looks(order.patience, SELDOM):
        if not folder.exists(name):
            return
        if folder.exists(mark_name(order.token, 0, "failed")):
            folder.remove(order.name)
            folder.remove(name)
            return
    folder.remove(name)
    raise CheckpointError(
        f"{folder.path}: the first caller has not written the index after {order.patience:g} s: the save is given up"
    )


def _looks(seconds: float, longest: float) -> Iterator[None]:
    """Moments to look for something, ever more seldom, the last one after so many seconds."""
    end, pause = time.monotonic() + seconds, FIRST_LOOK
    while (left := end - time.monotonic()) > 0:
        yield
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, longest)
    yield


def claim_of(order: WriteOrder, path: str | None, file: int | None) -> WriteClaim:
    """The claim that came with an order."""
    return WriteClaim() if path is None or file is None else WriteClaim.taken_over(Path(path), file, order.token)
