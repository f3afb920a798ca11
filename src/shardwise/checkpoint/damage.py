"""Damaged blocks of files: which tensors lie in them; and all files of a checkpoint checked against their checksums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardwise.checkpoint.checking import THREADS, DamagedBlock, FileCheck, check_blocks, sums_beside
from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.files import ByteRange, Files
from shardwise.checkpoint.formats import dcp, sharded
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.quantized import ComputedEntry
from shardwise.checkpoint.rules import RulesSource
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, cut, ints
from shardwise.job.progress import Count, Progress, reporter
from shardwise.quoting import in_line
from shardwise.storage.folders import INDEXES
from shardwise.storage.paths import PathLike
from shardwise.storage.sums import BLOCK, ENDING, data_name, has_digest, sums_name, without_trailer

SHOWN = 4  # tensors of a block, and blocks of a load, that a message lists
WRONG_SUM, UNCHECKED = "does not match its checksum", "has no checksums, and was not checked"


class DamagedBlocksError(CheckpointError):
    """Blocks of files do not match their checksums."""


@dataclass(frozen=True)
class Damage:
    """Damaged bytes of a file: the cause, and the tensors in them, with a box around their cells.

    >>> print(Damage("w.safetensors", 0, 96, WRONG_SUM, (("w", Box((0, 0), (2, 6))),)))
    w.safetensors, bytes 0 to 96: does not match its checksum: w in [0:2, 0:6]
    """

    file: str
    start: int
    stop: int
    what: str
    tensors: tuple[tuple[str, Box], ...] = ()

    def __str__(self) -> str:
        return f"{in_line(self.file)}, bytes {self.start} to {self.stop}: {self.what}: {self._contents()}"

    def _contents(self) -> str:
        if not self.tensors:
            return _role(self.file)
        shown = ", ".join(f"{in_line(name)} in {box}" for name, box in self.tensors[:SHOWN])
        more = len(self.tensors) - SHOWN
        return f"{shown} and {more} more tensors" if more > 0 else shown


def _role(file: str) -> str:
    """What a file has where it has no tensors."""
    if file.endswith(ENDING):
        return "checksums"
    return "the index" if file in INDEXES else "a header, or values that are not tensors"


def located(checkpoint: Checkpoint, block: DamagedBlock) -> Damage:
    """A damaged block, with the tensors in it."""
    entries = [one for entry in checkpoint.values() for one in _stored(entry)]
    spans = [(one.name, box) for one in entries for box in _boxes_in(one, block)]
    return Damage(*block, WRONG_SUM, tuple(dict.fromkeys(spans)))


def _stored(entry: Entry) -> Iterator[Entry]:
    """The entries in files that an entry is read from."""
    if not isinstance(entry, ComputedEntry):
        yield entry
        return
    for origin in entry.origins:
        yield from _stored(origin)


def _boxes_in(entry: Entry, block: DamagedBlock) -> Iterator[Box]:
    """The cells of a tensor that have bytes in a block: a box around them, for each stored box."""
    here = [row for row, number in enumerate(entry.file.tolist()) if entry.paths[number] == block.file]
    try:
        places = entry.places(ints(here))
    except CheckpointError:  # a header is damaged that says where it is
        return
    for at, window in enumerate(entry.windows(places)):
        box, span = places.boxes.box(at), ByteRange.of(block.file, window, entry.dtype.itemsize)
        lo, hi = max(span.start, block.start), min(span.stop, block.stop)
        if lo < hi:
            size = entry.dtype.itemsize
            first, stop = (lo - span.start) // size, -((span.start - hi) // size)
            yield _around(box, first, stop) if window.contiguous else box


def _around(box: Box, first: int, stop: int) -> Box:
    """The smallest box around the cells `first:stop` of a box, counted row-major."""
    _, parts = cut(Boxes.of([box], len(box.lo)), ints([first]), ints([stop]))
    return Box(tuple(parts.lo.min(axis=0).tolist()), tuple(parts.hi.max(axis=0).tolist()))


def refuse_damaged(checkpoint: Checkpoint, blocks: Sequence[DamagedBlock]) -> None:
    """Raise the error for damaged blocks, if there are any."""
    if blocks:
        shown = "; ".join(str(located(checkpoint, block)) for block in blocks[:SHOWN])
        more = f"; and {len(blocks) - SHOWN} more" if len(blocks) > SHOWN else ""
        raise DamagedBlocksError(
            f"{checkpoint.path} is damaged, and was not loaded: {shown}{more}. Remedy: restore the files from a copy"
        )


# --- all files of a checkpoint ----------------------------------------------------------------------------------------


def verify_sums(
    path: PathLike | Checkpoint, *, rules: RulesSource | None = None, jobs: int = 1, progress: Progress = None
) -> list[Damage]:
    """Check every block of every file of a checkpoint, and its index, against their checksums."""
    files, name = _place(path)
    damaged, checkpoint, error = _index_damage(files) if name is None else [], None, None
    tables, unchecked = dict[str, FileCheck](), list[Damage]()
    try:
        checkpoint = path if isinstance(path, Checkpoint) else open(path, rules=rules)
    except CheckpointError as problem:  # a damaged header, say, which its checksums name
        error = problem
    for one in _names(files, checkpoint) if name is None else [name]:
        found = _table(files, one)
        if isinstance(found, FileCheck):
            tables[one] = found
        else:
            (unchecked if found.what == UNCHECKED else damaged).append(found)
    if unchecked and not tables and not damaged:
        raise CheckpointError(
            f"{files.label(unchecked[0].file)} has no checksums: nothing can be checked. Remedy: compare it with "
            f"another copy, or convert it, which writes them"
        )
    needed = {} if checkpoint is None else _needed_of_earlier(checkpoint)
    blocks = _check(files, tables, needed, jobs, progress)
    damaged += [Damage(*one, WRONG_SUM) if checkpoint is None else located(checkpoint, one) for one in blocks]
    if error is not None and not damaged:
        raise error
    return damaged + unchecked


def _place(path: PathLike | Checkpoint) -> tuple[Files, str | None]:
    """The files of a checkpoint, and its name if it is one file."""
    if not isinstance(path, Checkpoint):
        files, name = files_at(path)
        return files, None if name in INDEXES else name
    single = path.path != path.files.root
    return path.files, path.path.rpartition("/")[2] if single else None


def _index_damage(files: Files) -> list[Damage]:
    """The index, if it is ours and does not match its digest."""
    checks = {sharded.INDEX: _index_is_whole, dcp.METADATA: _metadata_is_whole}
    there = {name: files.read(name) for name in checks if files.has(name)}
    wrong = [(name, data) for name, data in there.items() if not checks[name](data)]
    return [Damage(name, 0, len(data), "does not match its own digest") for name, data in wrong]


def _index_is_whole(text: bytes) -> bool:
    return has_digest(text) or (b'"sums"' not in text and b'"digest"' not in text)


def _metadata_is_whole(data: bytes) -> bool:
    _, whole = without_trailer(data)
    return whole is True or (whole is None and dcp.SUMS.encode() not in data)


def _names(files: Files, checkpoint: Checkpoint | None) -> list[str]:
    """The files of a checkpoint that it has its tensors in, and those with checksums."""
    there = set(files.names())
    found = {data_name(name) for name in there if name != data_name(name)} & there
    tables = {id(entry.paths): entry for entry in checkpoint.values()} if checkpoint is not None else {}
    used = {name for entry in tables.values() if checkpoint and entry.files is checkpoint.files for name in entry.paths}
    return sorted(found | used)


def _table(files: Files, name: str) -> FileCheck | Damage:
    """The checksums of a file, or what is wrong with them."""
    beside = sums_name(name)
    if not files.has(name):
        return Damage(name, 0, 0, "is missing")
    if not files.has(beside):
        return Damage(name, 0, files.size(name), UNCHECKED)
    try:
        sums = sums_beside(files, name)
    except CheckpointError:
        return Damage(
            beside, 0, files.size(beside), "is damaged, or has checksums of another kind; the data was not checked"
        )
    if files.size(name) == sums.size:
        return FileCheck(sums)
    what = f"has {files.size(name)} bytes, but its checksums are of {sums.size}"
    return Damage(name, min(sums.size, files.size(name)), max(sums.size, files.size(name)), what)


def _needed_of_earlier(checkpoint: Checkpoint) -> dict[str, list[tuple[int, int]]]:
    """The bytes of files of earlier checkpoints that this one needs: headers, and some tensors. By their names."""
    found = defaultdict[str, list[tuple[int, int]]](list)
    stored = (one for entry in checkpoint.values() for one in _stored(entry))
    for entry in (one for one in stored if any(name.startswith("../") for name in one.used())):
        with suppress(CheckpointError):  # a file is missing or damaged: that is found anyway
            for _, bytes in entry.ranges():
                found[bytes.file].append((bytes.start, bytes.stop))
    earlier = {name: spans for name, spans in found.items() if name.startswith("../")}
    return {name: [(0, _header_end(checkpoint.files, name)), *spans] for name, spans in earlier.items()}


def _header_end(files: Files, name: str) -> int:
    return min(8 + int.from_bytes(files.read(name, 0, 8), "little"), files.size(name))


def _blocks(table: FileCheck, spans: Sequence[tuple[int, int]] | None) -> list[int]:
    """The blocks that have some of these bytes; all without them."""
    if spans is None:
        return list(range(table.sums.count))
    return sorted({block for start, stop in spans for block in range(start // BLOCK, -(-stop // BLOCK))})


def _check(
    files: Files,
    tables: Mapping[str, FileCheck],
    needed: Mapping[str, Sequence[tuple[int, int]]],
    jobs: int,
    progress: Progress,
) -> list[DamagedBlock]:
    """Check all blocks that are needed, in several threads."""
    todo = [(name, table, block) for name, table in tables.items() for block in _blocks(table, needed.get(name))]
    spans = [table.sums.span(block) for _, table, block in todo]
    total = sum(stop - start for start, stop in spans)
    with reporter(progress, total, "verify", here=True) as tell:
        check_blocks(files, todo, jobs=max(jobs, THREADS), done=Count(tell, total).add)
    return [
        DamagedBlock(name, *table.sums.span(block)) for name, table in tables.items() for block in sorted(table.damaged)
    ]
