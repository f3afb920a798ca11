"""save: every rank writes its own part; the index is written last."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from math import inf
from secrets import token_hex
from typing import Literal, NamedTuple, Protocol, TypeGuard, cast, overload

import torch
import torch.distributed as dist

from shardwise.checkpoint.assignment import assign_writers
from shardwise.checkpoint.async_saves import RunningSaves, SaveHandle, SaveReport
from shardwise.checkpoint.formats import dcp_writing, sharded
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer
from shardwise.checkpoint.host_copies import HostCopies
from shardwise.checkpoint.increments import location_in
from shardwise.checkpoint.known_states import Cuts, KnownState, KnownStates, StateDescription
from shardwise.checkpoint.random_state import with_random_states
from shardwise.checkpoint.remapping import remap_state_dict
from shardwise.checkpoint.segments import Segment, write_tensor
from shardwise.checkpoint.staging import SaveMemory, StagedFile, StagedFolder, stage
from shardwise.checkpoint.values import encode, refuse_modules
from shardwise.containers.description import describe_all, is_tensor, lists_chunks, memory_of
from shardwise.containers.sharded import is_sharded
from shardwise.containers.ties import tied, ties_of
from shardwise.exchange import view_of
from shardwise.exchange.buffers import bytes_at
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box, Boxes, Strides, Window
from shardwise.job.agree import Callers
from shardwise.job.names import Rename
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Remap
from shardwise.job.session import check_owners
from shardwise.job.side import check_side, combine_descriptions, refuse_several_jobs
from shardwise.layout import Layout, places_of
from shardwise.quantized.moves import split_rules
from shardwise.quoting import printable
from shardwise.state.traverse import FLATTEN_MAPPING, StateDict, flatten_state_dict, is_step
from shardwise.storage.appending import OutputFile
from shardwise.storage.folders import OutputFolder
from shardwise.storage.locks import WriteClaim, claim_folder
from shardwise.storage.orders import Commit, WriteOrder
from shardwise.storage.paths import PathLike, absolute

SAMPLE = 1024  # elements of every replica that are compared
PATIENCE = 1800.0  # seconds to wait for the files of other ranks
NO_SUM = -(2**63)  # lower than every checksum
REMOVING = 8  # files of an earlier checkpoint that are removed at a time
WRITERS: dict[str, type[Writer]] = {"safetensors": sharded.ShardedWriter, "dcp": dcp_writing.DcpWriter}


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


def as_text(incremental: bool | PathLike) -> bool | str:
    return incremental if isinstance(incremental, bool) else str(incremental)


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
        flat, state = _describe(callers, state_dict, options)
        others = {name: value for name, value in flat.items() if name not in state.tensors and not is_tensor(value)}
        contents = Contents(state.layouts, others, state.paths, state.ties, state.made)
        sources = {**state.tensors}
        for name in state.differing:
            sources[name] = replace(sources[name], layout=_of_first(sources[name]))
        return Saved(contents, partial(_parts, state, flat, callers.me), state.differing, flat, sources)

    def stage(self, callers: Callers, writer: Writer, memory: SaveMemory) -> tuple[StagedFile, object]:
        """This rank's file, in memory; and what the index needs of it."""
        described, result = describe_file(writer, callers.me, self.parts(), self.contents)
        return stage(*described, memory), result

    def warn(self, callers: Callers) -> None:
        """Of tensors that differ between ranks."""
        if self.differing and callers.first:
            warnings.warn(printable(_unlike(self.differing)), stacklevel=3)


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
class SaveOptions:
    """How to save: what must be the same on all ranks."""

    format: str
    path: str
    sums: bool
    async_op: bool
    in_flight: int
    patience: float
    incremental: bool | str = False

    @property
    def staged(self) -> bool:
        """True if this rank's file is put together in memory first."""
        return self.async_op or self.incremental is not False

    def check(self) -> None:
        """Refuse invalid ones."""
        if self.format not in WRITERS:
            raise ValueError(f"format= must be one of {', '.join(map(repr, WRITERS))}, not {self.format!r}")
        in_flight, patience = cast("tuple[object, object]", (self.in_flight, self.patience))
        if type(in_flight) is not int or in_flight < 1:
            raise ValueError(f"in_flight={in_flight!r}: give the number of saves that may run at a time, at least 1")
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience < inf:
            raise ValueError(f"patience={patience!r}: give a finite number of seconds, more than 0")
        if self.incremental is not False and (self.format != "safetensors" or not self.sums):
            raise ValueError(
                f"incremental={self.incremental!r} with format={self.format!r}, sums={self.sums}: only checkpoints "
                f"with format='safetensors' and sums=True can be incremental. Remedy: save with these, or without "
                f"incremental="
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


class _Here(NamedTuple):
    """What a rank has, and an equal state that is known."""

    flat: dict[str, object]
    paths: FLATTEN_MAPPING
    here: StateDescription
    sums: dict[str, int]  # of plain tensors
    state: KnownState | None


class _Told(NamedTuple):
    """What a rank tells the others: the number of an equal state that is known, or what it has and a digest of that.

    `sums`: a digest of the checksums of its plain tensors. Most ranks tell the same, which is then kept once.
    """

    known: bytes | None
    here: StateDescription | None
    digest: bytes
    sums: bytes

    @staticmethod
    def of(here: StateDescription, sums: Mapping[str, int], state: KnownState | None) -> _Told:
        """Of a state, where an equal one may be known."""
        digest = blake2b(repr(sums).encode()).digest()
        if state is not None:
            return _Told(state.number, None, b"", digest)
        return _Told(None, here, blake2b(pickle.dumps(here)).digest(), digest)


def _describe(callers: Callers, state_dict: StateDict, options: SaveOptions) -> tuple[dict[str, object], KnownState]:
    """This rank's flat state dict, and what all ranks have together."""
    known = KnownStates.of(callers)

    def say() -> tuple[_Here, _Told]:
        options.check()
        flat, paths = _flatten(callers, state_dict)
        others = [name for name, value in flat.items() if value is not None and not is_tensor(value)]
        for name in others:
            encode(flat[name], name)  # refused before anything is written
        marked = {} if callers.alone else _sample_sums(flat)
        here = StateDescription(describe_all(flat, callers.transport), others, ties_of(flat, callers.transport))
        state = known.find(here, paths)
        return _Here(flat, paths, here, marked, state), _Told.of(here, marked, state)

    mine, told = callers.tell(say, asdict(options))
    state = mine.state
    if state is None or {one.known for one in told.values()} != {state.number}:
        state = _together(callers, told, mine)
    same = len({one.sums for one in told.values()}) == 1  # then no plain tensor differs between ranks
    differing = [] if same else _differing_replicas(state.tensors, mine.sums, callers.highest)
    return mine.flat, known.add(state if differing == state.differing else _with_writers(state, differing))


def _flatten(callers: Callers, state_dict: StateDict) -> tuple[dict[str, object], FLATTEN_MAPPING]:
    """A flat state dict that can be saved, and the paths of its leaves."""
    flat, paths = flatten_state_dict(state_dict)
    flat = with_random_states(flat, callers)
    refuse_modules(flat)
    for name, steps in paths.items():
        if not all(map(is_step, steps)):
            raise TypeError(f"{name!r} has a key that is neither a string nor an integer in its path {steps}")
    return flat, paths


def _together(callers: Callers, told: Mapping[int, _Told], mine: _Here) -> KnownState:
    """What all ranks have."""
    if any(one.here is None for one in told.values()):  # some know it, others do not
        _, told = callers.tell(lambda: (None, _Told.of(mine.here, mine.sums, None)))
    by_rank = {rank: one.here for rank, one in told.items() if one.here is not None}
    with callers.refusals():
        tensors = _all_tensors(callers, by_rank)
    ties = tied({rank: one.ties for rank, one in by_rank.items()})
    number = blake2b(b"".join(one.digest for one in told.values())).digest()
    return _with_writers(KnownState(number, mine.here, mine.paths, tensors, ties, [], {}), [])


def _with_writers(state: KnownState, differing: Sequence[str]) -> KnownState:
    """With the writers of all tensors, where these names differ between ranks."""
    layouts = _layouts(state.tensors, differing)
    layouts |= {name: layouts[one] for name, one in state.ties.items()}
    return replace(state, differing=differing, layouts=layouts, made={}, known_cuts={})


def _all_tensors(callers: Callers, by_rank: Mapping[int, StateDescription]) -> dict[str, TensorInfo]:
    """The tensors of all ranks, which must have the same other values."""
    (first, one), *others = by_rank.items()
    for rank, other in others:
        if other.others != one.others:
            strange = sorted(set(one.others) ^ set(other.others)) or one.others
            raise ValueError(f"ranks {first} and {rank} have different values that are not tensors: {strange[:5]}")
    descriptions = {rank: one.tensors for rank, one in by_rank.items()}
    refuse_several_jobs(descriptions, callers.transport)
    tensors = combine_descriptions(descriptions, "state dict")
    check_owners(callers.owners, {f"{name!r} of the state dict,": one.layout for name, one in tensors.items()})
    _check_whole(tensors)
    return tensors


def _check_whole(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors with cells that no rank holds: each rank may only know its own chunks."""
    for layout in {tensor.layout for tensor in tensors.values()}:
        try:
            layout.validate()
        except ValueError as error:
            name = next(name for name, tensor in tensors.items() if tensor.layout == layout)
            raise ValueError(f"{name!r} of the state dict: {error}") from error


def _layouts(tensors: Mapping[str, TensorInfo], differing: Sequence[str]) -> dict[str, tuple[torch.dtype, Layout]]:
    """The dtype of every tensor and its writers. The first rank writes tensors that differ between ranks."""
    sources = {name: tensor.layout for name, tensor in tensors.items()}
    sources |= {name: _of_first(tensors[name]) for name in differing}
    return {
        name: (tensor.dtype, assign_writers(name, sources[name], tensor.dtype.itemsize, turn))
        for turn, (name, tensor) in enumerate(tensors.items())
    }


def _of_first(tensor: TensorInfo) -> Layout:
    """A plain tensor as the first rank that has it holds it."""
    return Layout.replicated(tensor.shape, tensor.layout.owners()[:1])


def _unlike(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4])) + (" ..." if len(names) > 4 else "")
    return (
        f"save: {shown} differ{'s' * (len(names) == 1)} between ranks, though plain tensors are the same on all: "
        f"those of the first rank that has them are saved. What every rank has of its own needs a name of its own"
    )


def _parts(state: KnownState, flat: Mapping[str, object], me: int) -> list[TensorPart]:
    """The boxes that this rank writes, of all tensors: views of its memory, or copies where that is on a device."""
    boxes = [
        (name, tensor.dtype, box, view)
        for name, tensor in state.tensors.items()
        if name not in state.ties
        for box, view in _boxes(name, state, memory_of(flat.get(name), apart=False), me)
    ]
    copies = HostCopies([view for *_, view in boxes])
    return [
        TensorPart(name, box, dtype, partial(_write, copies, number))
        for number, (name, dtype, box, _) in enumerate(boxes)
    ]


def _write(copies: HostCopies, number: int, file: OutputFile) -> None:
    write_tensor(copies.take(number), file)


def _boxes(name: str, state: KnownState, memory: Tensors, me: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor that this rank writes, and where they are in its memory."""

    def cuts() -> Cuts:
        tensor, (_, layout) = state.tensors[name], state.layouts[name]
        check_side("state dict", {name: memory}, {name: tensor}, me)
        if me not in layout or not memory:
            return []
        places = _places(tensor.layout, layout, me, tuple(t.stride() for t in memory))
        return [(box, None if _is_whole(cut, memory) else cut) for box, cut in places]

    found = state.cuts(name, memory, cuts)
    return [(box, memory[0] if cut is None else view_of(cut, memory)) for box, cut in found]


def _is_whole(cut: Window, memory: Tensors) -> bool:
    """True for all of the only tensor, as it lies there: no view has to be made."""
    return len(memory) == 1 and not cut.offset and (cut.shape, cut.strides) == (memory[0].shape, memory[0].stride())


@lru_cache(maxsize=4096)
def _places(source: Layout, target: Layout, me: int, strides: tuple[Strides, ...]) -> list[tuple[Box, Window]]:
    """The boxes to write, and where they are. Cached: many tensors share a layout."""
    boxes = Boxes.of([piece.box for piece in target.pieces(me)], target.ndim)
    _, places = places_of(source, me, strides).once(boxes)
    return [(places.boxes.box(at), cut) for at, cut in enumerate(places.windows())]


# --- replicas on several ranks ----------------------------------------------------------------------------------------


def _sample_sums(flat: Mapping[str, object]) -> dict[str, int]:
    """Checksums of a sample of every plain tensor, by name."""
    samples = {name: _sample(value) for name, value in flat.items() if is_tensor(value) and _is_plain(value)}
    copies = HostCopies(list(samples.values()))
    return {name: _checksum(copies.take(number)) for number, name in enumerate(samples)}


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    if (
        not isinstance(value, torch.Tensor)
        or is_sharded(value)
        or lists_chunks(value)
        or value.layout != torch.strided
        or value.is_meta
    ):
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    if not count or not tensor.ndim:
        return tensor.detach().reshape(-1)
    at = torch.arange(0, count, max(1, count // SAMPLE), device=tensor.device)
    return tensor.detach()[torch.unravel_index(at, tensor.shape)]  # by index, so that nothing else is copied


def _checksum(some: torch.Tensor) -> int:
    data = some.contiguous()
    return int.from_bytes(blake2b(bytes_at(data.data_ptr(), data.nbytes).data, digest_size=7).digest(), "little")


def _differing_replicas(
    names: Iterable[str], sums: Mapping[str, int], highest: Callable[[torch.Tensor], torch.Tensor]
) -> list[str]:
    """The names whose checksums differ between ranks: the highest is not the lowest."""
    in_order = list(names)
    mine = [(sums[name], -sums[name]) if name in sums else (NO_SUM, NO_SUM) for name in in_order]
    most, least = highest(torch.tensor(mine, dtype=torch.int64, device="cpu").reshape(-1, 2)).T.tolist()
    return [name for name, high, low in zip(in_order, most, least, strict=True) if high != NO_SUM and high != -low]
