"""save: every rank writes its own part; the index is written last."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Literal, NamedTuple, Protocol, overload

import torch.distributed as dist

from shardwise.checkpoint.async_saves import RunningSaves, SaveHandle, SaveReport
from shardwise.checkpoint.earlier_save import location_in
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer
from shardwise.checkpoint.remapping import remap_state_dict
from shardwise.checkpoint.replica_samples import warning_of
from shardwise.checkpoint.save_options import PATIENCE, WRITERS, SaveOptions, as_text
from shardwise.checkpoint.saved_parts import parts_of
from shardwise.checkpoint.segments import Segment
from shardwise.checkpoint.staging import SaveMemory, StagedFile, StagedFolder, stage
from shardwise.checkpoint.state_descriptions import describe_state, of_first_rank
from shardwise.containers.description import is_tensor
from shardwise.job.agree import Callers
from shardwise.job.names import Rename
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Remap
from shardwise.quantized.moves import split_rules
from shardwise.quoting import printable
from shardwise.state.traverse import StateDict
from shardwise.storage.folders import OutputFolder
from shardwise.storage.locks import WriteClaim, claim_folder
from shardwise.storage.orders import Commit, WriteOrder
from shardwise.storage.paths import PathLike, absolute

REMOVING = 8  # files of an earlier checkpoint that are removed at a time


@overload
def save(
    state_dict: StateDict,
    path: PathLike,
    *,
    format: str = ...,
    group: dist.ProcessGroup | None = ...,
    rename: Rename = ...,
    remap: Iterable[Remap] = ...,
    durable: bool = ...,
    sums: bool = ...,
    async_op: Literal[False] = ...,
    in_flight: int = ...,
    patience: float = ...,
    incremental: bool | PathLike = ...,
) -> SaveReport | None: ...


@overload
def save(
    state_dict: StateDict,
    path: PathLike,
    *,
    format: str = ...,
    group: dist.ProcessGroup | None = ...,
    rename: Rename = ...,
    remap: Iterable[Remap] = ...,
    durable: bool = ...,
    sums: bool = ...,
    async_op: Literal[True],
    in_flight: int = ...,
    patience: float = ...,
    incremental: bool | PathLike = ...,
) -> SaveHandle: ...


def save(
    state_dict: StateDict,
    path: PathLike,
    *,
    format: str = "safetensors",
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    durable: bool = True,
    sums: bool = True,
    async_op: bool = False,
    in_flight: int = 1,
    patience: float = PATIENCE,
    incremental: bool | PathLike = False,
) -> SaveHandle | SaveReport | None:
    """Write a state dict to a directory. Every rank of the group calls; without a group, this process alone.

    `format`: "safetensors", a file for every rank and our index, or "dcp", which torch.distributed.checkpoint loads.
    Replicas are written once, in equal shares; so are tied tensors, which share all of their memory. An earlier
    checkpoint at the path is removed once the new one is complete. Concurrent saves and conversions to one path are
    refused. Values other than tensors are taken from the first rank; so are plain tensors that differ between ranks,
    with a warning. `rename` and `remap`: rename, join, split or rearrange tensors on the way, as in `Resharder`; with
    `remap` this rank's share of the result is in memory meanwhile. `durable`: wait until the data is on disk.
    `sums`: write checksums of every file beside it, which `load` and `verify` check.

    `async_op=True`: return a `SaveHandle` as soon as this rank's part is copied to memory of its own, and the state may
    be changed again. A process beside this one writes it. An error is raised on all ranks by `wait`, or by the next
    save. At most `in_flight` saves run at a time: the next one waits for the oldest. `patience`: seconds after which a
    save is given up if a rank has not written its file.

    `incremental`: an earlier checkpoint in the same directory. Tensors that have the same bytes there on this rank are
    not written again, and the new checkpoint needs the earlier one from then on. True for the first one: it is written
    whole, and can be compared with. Returns a `SaveReport` of the bytes that were written and that were not. The
    state is copied to memory first, as with `async_op=True`.
    """
    options = SaveOptions(format, str(path), sums, async_op, in_flight, patience, as_text(incremental))
    return save_state(state_dict, path, options, group=group, rename=rename, remap=remap, durable=durable)


def save_state(
    state_dict: StateDict,
    path: PathLike,
    options: SaveOptions,
    *,
    group: dist.ProcessGroup | None,
    rename: Rename,
    remap: Iterable[Remap],
    durable: bool,
    keep: Keep | None = None,
) -> SaveHandle | SaveReport | None:
    """As `save`. `keep`: the files are kept in memory, too, before they are written."""
    begin, callers = time.monotonic(), Callers("save", group)
    format, sums, async_op = options.format, options.sums, options.async_op
    saved, staged = Saved.of(callers, state_dict, options, rename, remap), options.staged or keep is not None
    waited = RunningSaves.of(callers).make_room(options.in_flight if async_op else 1)
    earlier = location_in(callers, path, options.incremental)
    with ExitStack() as stack:
        fits = partial(WRITERS[format].fits, saved.contents)
        path = absolute(path) if staged else path  # its writer has a working directory of its own
        folder = OutputFolder(path, durable=durable and not staged, run=token_hex(8))  # its writer waits for the disk
        token, claim = _claim(callers, folder, fits, stack)
        handle = None
        if staged:
            into = StagedFolder(path, durable=durable, run=token, sums=sums)
            handle = _start(callers, into, saved, options, claim, earlier, keep)
            handle.stalled(time.monotonic() - begin, waited)
        else:
            writer = WRITERS[format](OutputFolder(path, durable=durable, run=token, sums=sums), callers.owners, token)
            _Save(callers, writer, saved.contents, claim).run(saved.parts)
    saved.warn(callers)
    return handle if handle is None or async_op else _waited_for(handle)


def _waited_for(handle: SaveHandle) -> SaveReport | None:
    handle.wait()
    return handle.report


def prepare(
    state_dict: StateDict,
    *,
    format: str = "safetensors",
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
) -> None:
    """Prepare for `save(..., async_op=True)` of this state: allocate memory, and start the process that writes.

    Otherwise the first save does that, and takes several times as long as the next ones. Every rank of the group calls.

    >>> import shardwise as sw
    >>> import torch
    >>> sw.checkpoint.prepare({"w": torch.ones(4)})
    >>> sw.checkpoint.save({"w": torch.ones(4)}, "memory://first", async_op=True).wait()
    """
    callers = Callers("prepare", group)
    saved = Saved.of(
        callers,
        state_dict,
        SaveOptions(format, "", sums=True, async_op=True, in_flight=1, patience=PATIENCE),
        rename,
        remap,
    )
    saves = RunningSaves.of(callers)

    def work() -> None:
        file, _ = saved.stage(callers, WRITERS[format](StagedFolder("."), callers.owners, token_hex(8)), saves.memory)
        saves.memory.give_back(file.memory)
        saves.process()

    callers.all_do(work)


class Saved(NamedTuple):
    """What is saved: the contents of the checkpoint, the parts that this rank writes, and names that differ.

    `flat` has this rank's tensors, `sources` the ranks whose values count.
    """

    contents: Contents
    parts: Callable[[], Sequence[TensorPart]]
    differing: Sequence[str]
    flat: Mapping[str, object]
    sources: Mapping[str, TensorInfo]

    @staticmethod
    def of(
        callers: Callers, state_dict: StateDict, options: SaveOptions, rename: Rename, remap: Iterable[Remap]
    ) -> Saved:
        """All ranks tell each other what they have."""
        quantized, rules = split_rules(remap)
        if quantized:
            raise TypeError(
                f"save cannot quantize, but remap= has {quantized[0]}: save without it, then `convert` with it"
            )
        if rename is not None or rules:
            state_dict = remap_state_dict(state_dict, callers, rename, rules)
        flat, state = describe_state(callers, state_dict, options)
        others = {name: value for name, value in flat.items() if name not in state.tensors and not is_tensor(value)}
        contents = Contents(state.layouts, others, state.paths, state.ties, state.made)
        sources = {**state.tensors}
        for name in state.differing:
            sources[name] = replace(sources[name], layout=of_first_rank(sources[name]))
        return Saved(contents, partial(parts_of, state, flat, callers.me), state.differing, flat, sources)

    def stage(self, callers: Callers, writer: Writer, memory: SaveMemory) -> tuple[StagedFile, object]:
        """This rank's file, in memory; and what the index needs of it."""
        described, result = describe_file(writer, callers.me, self.parts(), self.contents)
        return stage(*described, memory), result

    def warn(self, callers: Callers) -> None:
        """Of tensors that differ between ranks."""
        if self.differing and callers.first:
            warnings.warn(printable(warning_of(self.differing)), stacklevel=3)


class Keep(Protocol):
    """Keeps the files of a save in memory."""

    def keep(
        self, callers: Callers, saved: Saved, writer: Writer, check: Callable[[], None]
    ) -> tuple[StagedFile, bytes]:
        """This rank's file, which stays in memory, and the index. All ranks call, and `check` first."""
        ...


def describe_file(
    writer: Writer, owner: int, parts: Sequence[TensorPart], contents: Contents
) -> tuple[tuple[str, list[Segment]], object]:
    """The name and contents of an owner's file, and what the index needs of it. `writer` has a StagedFolder."""
    result = writer.write(owner, parts, contents)
    assert isinstance(writer.folder, StagedFolder), "it only takes what is to be written"
    return (writer.folder.name, writer.folder.segments), result


def _start(
    callers: Callers,
    folder: StagedFolder,
    saved: Saved,
    options: SaveOptions,
    claim: WriteClaim,
    earlier: str | None,
    keep: Keep | None,
) -> SaveHandle:
    """Copy the parts of this rank to memory, and let another process do the rest."""
    saves, writer = RunningSaves.of(callers), WRITERS[options.format](folder, callers.owners, folder.run)

    def check() -> None:
        if callers.first:
            writer.check(saved.contents)

    def copy() -> tuple[StagedFile, object]:
        check()
        return saved.stage(callers, writer, saves.memory)

    if keep is None:
        file, results = callers.tell(copy)
        index = writer.index(results, saved.contents) if callers.first else b""
    else:
        file, index = keep.keep(callers, saved, writer, check)
    order = _order(callers, folder, writer, file, options, earlier)
    return saves.submit(callers, order, file, index, claim.give_away())


def _order(
    callers: Callers,
    folder: StagedFolder,
    writer: Writer,
    file: StagedFile,
    options: SaveOptions,
    earlier: str | None,
) -> WriteOrder:
    """What the process that writes does for this rank."""
    return WriteOrder(
        folder=folder.path,
        token=writer.token,
        durable=folder.durable,
        sums=folder.sums,
        name=file.name,
        size=file.size,
        checksums=file.checksums,
        number=writer.numbers[callers.me],
        count=len(callers.owners),
        patience=options.patience,
        commit=Commit(writer.main, tuple(writer.files)) if callers.first else None,
        earlier=earlier,
    )


@dataclass(frozen=True)
class _Save:
    """Writes the files of all ranks, then the index. A failed save leaves what was there before."""

    callers: Callers
    writer: Writer
    contents: Contents
    claim: WriteClaim

    def run(self, parts: Callable[[], Sequence[TensorPart]]) -> None:
        """Write the parts of this rank; the first rank writes the index, and removes files of an earlier checkpoint."""
        old = self._finish(self._write(parts))
        if self.callers.first and old:  # the rank with the lock, so that files it leaves if it dies are on record
            with ThreadPoolExecutor(REMOVING) as pool:
                list(pool.map(self.writer.folder.remove, old))

    def _write(self, parts: Callable[[], Sequence[TensorPart]]) -> dict[int, object]:
        def write() -> tuple[None, object]:
            if self.callers.first:
                self.writer.check(self.contents)
            return None, self.writer.write(self.callers.me, parts(), self.contents)

        try:
            return self.callers.tell(write)[1]
        except BaseException as error:
            # an error that all ranks know ends the save; otherwise others may continue, and their index names our files
            if self.callers.alone or (isinstance(error, Exception) and not self.callers.broken):
                self._undo()
            raise

    def _finish(self, files: Mapping[int, object]) -> list[str]:
        first, tell = self.callers.first, self.callers.from_first
        try:
            return tell(lambda: self.writer.finish(files, self.contents) if first else [])
        except Exception:
            # what the index names must stay; who wrote it says so for all, as others may see the directory as it was
            if not self.callers.broken and not tell(lambda: first and self.writer.names_token()):
                self._undo()
            raise

    def _undo(self) -> None:
        self.writer.undo(self.callers.me)
        self.claim.unfinished = False


def _claim(
    callers: Callers, folder: OutputFolder, fits: Callable[[], None], stack: ExitStack
) -> tuple[str, WriteClaim]:
    """The token of this save, and the right to write there, which the first rank has for all until the stack ends.

    What the format cannot hold is refused before anything is written.
    """

    def claim() -> tuple[WriteClaim, str]:
        fits()
        mine = stack.enter_context(claim_folder(folder, folder.run)) if callers.first else WriteClaim()
        return mine, folder.run

    mine, tokens = callers.tell(claim)
    return next(iter(tokens.values())), mine
