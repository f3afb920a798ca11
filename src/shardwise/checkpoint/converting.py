"""convert: a checkpoint to another format, sharding and naming; in one process, in chunks."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from hashlib import blake2b
from math import prod
from operator import itemgetter
from pathlib import PurePath
from typing import IO

from shardwise.checkpoint.adapters import with_adapter
from shardwise.checkpoint.assignment import assign_writers
from shardwise.checkpoint.comparing import compare_streams
from shardwise.checkpoint.config_files import copies_of, write_copies
from shardwise.checkpoint.coupled_rules import CoupledRules
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.formats.dcp_writing import DcpWriter
from shardwise.checkpoint.formats.deepspeed_writing import UniversalWriter
from shardwise.checkpoint.formats.megatron_dist import MegatronDistWriter
from shardwise.checkpoint.formats.safetensors import SafetensorsWriter
from shardwise.checkpoint.formats.sharded import ShardedWriter
from shardwise.checkpoint.formats.torch_save import TorchSaveWriter, torch_save_bytes
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.opaque import Objects, check_objects, opaque_in, tensors_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.optimizer_names import Parameters, with_names
from shardwise.checkpoint.rules import RulesSource, rules_for
from shardwise.checkpoint.selection import Select, Selection
from shardwise.checkpoint.streams import (
    CHUNK,
    Stream,
    check_jobs,
    check_losses,
    duplicates,
    map_in_order,
    stream_of,
    streams_of,
)
from shardwise.checkpoint.values import has_known_types
from shardwise.errors import CheckpointError
from shardwise.exchange.overflow import Overflow
from shardwise.geometry import Box
from shardwise.job.casts import Cast
from shardwise.job.names import Rename, missing
from shardwise.job.progress import Count, Progress, check_progress, reporter
from shardwise.layout import Layout
from shardwise.planning import size, size_in_bytes
from shardwise.quantized.moves import Rule
from shardwise.quoting import brief
from shardwise.storage.folders import OutputFolder, token_of
from shardwise.storage.locks import WriteClaim, claim_folder
from shardwise.storage.paths import PathLike, same_location

WRITERS: dict[str, type[Writer]] = {
    "safetensors": SafetensorsWriter,
    "sharded": ShardedWriter,
    "dcp": DcpWriter,
    "megatron-dist": MegatronDistWriter,
    "torch.save": TorchSaveWriter,
    "deepspeed-universal": UniversalWriter,
}
SHARDED = "megatron-dist", "sharded", "dcp"  # formats of several ranks
ONE_RANK = "mesh = {tp = 1}", "rule = [{name = '*', placements = 'R'}]"
LIMITED = {  # the formats that cannot hold all objects
    "safetensors": "safetensors files hold tensors only",
    "sharded": "the sharded format holds no tensors inside objects",
}


def convert(
    source: PathLike | Checkpoint,
    out: PathLike,
    *,
    format: str | None = None,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    select: Select = None,
    exclude: Select = None,
    merge: PathLike | None = None,
    parameters: Parameters | None = None,
    with_config: PathLike | bool = False,
    cast: Cast = None,
    overflow: Overflow = "refuse",
    max_shard_size: int | str | None = None,
    rules: RulesSource | None = None,
    source_rules: RulesSource | None = None,
    max_bytes: int = 2**28,
    jobs: int = 1,
    verify: bool = True,
    durable: bool = True,
    sums: bool = True,
    progress: Progress = None,
    objects: Objects | None = None,
) -> Checkpoint:
    """Write a checkpoint in another format, and return it opened. It needs no process group, and little memory.

    `format`: "safetensors" (one file, or several of at most `max_shard_size` with an index, as Hugging Face has them),
    "sharded" (a safetensors file for every rank of the mesh in `rules`), "dcp" (with `rules` by rank), "megatron-dist"
    (Megatron's torch_dist), "deepspeed-universal", "torch.save"; by default by the suffix of `out`. `rename`,
    `remap`: as in `Resharder`; Concat and Stack join tensors or split them, and Quantized turns codes and scales
    into values, or values into these. `select`, `exclude`: patterns of source names to take or to leave out, also
    of values that are not tensors. `merge`: the folder of a LoRA adapter of peft, which is added to the weights, by
    source names. `parameters`: the names of the parameters of an optimizer, in the order of its groups, or a text
    file with a name in each line: they take the place of the numbers in its states.
    `with_config`: also copy config, tokenizer and generation files, of the source (True) or of another folder. `cast`:
    a dtype for all floating point tensors, or rules [(pattern, dtype), ...] by the new names, optionally with a dtype
    for the rest. A dtype or a pattern only casts between float64, float32, float16 and bfloat16: to cast quantized
    codes, their scales, integers or bool, a rule must have the full name of the tensor. `overflow="refuse"`: write
    nothing if a value is out of range for its new dtype; "allow" casts it, and `lost` of the result lists such
    tensors. Rules that match nothing are refused. `max_bytes`: the memory limit for values, shared by `jobs` threads.
    `objects`: "carry" also writes objects of unknown classes, unchanged, and is refused if `format` cannot hold them;
    "drop" leaves them out; by default those without tensors are left out, and others refused. An interrupted
    conversion resumes: complete files are not written again, and `reused` of the result lists them. Concurrent saves
    and conversions to `out` are refused. `verify`: read it back and compare every cell. `sums`: write checksums of
    every file beside it, which `load` and `verify` check.
    """
    check_progress(progress)
    opened, chosen = _opened(source, source_rules, parameters, merge), Selection(select, exclude)
    given = None if rules is None else rules_for(rules, opened.files)
    streams = streams_of(opened, rename=rename, remap=remap, selection=chosen, cast=cast)
    streams = {key: stream for key, stream in streams.items() if given is None or not given.skips(key)}
    sharding = None if given is None else CoupledRules.of(given, streams)
    if sharding is not None:
        sharding.check(streams, whole=chosen.everything)
    chunk = _chunk(max_bytes, jobs)
    format, folder, name = _place(out, format, durable=durable, sums=sums)
    layouts = _layouts(streams, format, None if name is None else PurePath(name), max_shard_size, sharding)
    ties, values = _ties(streams, sharding), _values_to_write(opened, chosen, objects, format)
    if format == "safetensors":  # which has neither
        _warn_of(ties, streams)
        ties, values = {}, {}
    contents = _contents(opened, streams, layouts, values, ties)
    owners = sorted({owner for _, layout in contents.tensors.values() for owner in layout.owners()}) or [0]
    token = _token(opened, streams, contents, format)
    writer = WRITERS[format](folder, owners, token, name)
    _check_apart(opened, folder, name)
    writer.fits(contents)
    copies = _copies(with_config, opened, streams, folder)
    lost = check_losses(streams, overflow, "Nothing was written", jobs=jobs, chunk=chunk)
    with claim_folder(folder, token, name) as claim, _resumable(claim, folder, token, owners):
        writer.check(contents)
        files = _write_files(writer, owners, streams, contents, chunk, jobs, progress)
        write_copies(copies, folder)
        for old in writer.finish(files, contents):
            writer.folder.remove(old)
        made = open(folder.path_of(writer.main))
        made.reused, made.lost = tuple(folder.reused), lost
        if verify:
            _verify(streams, contents, made, chunk, jobs, progress)
    return made


def _opened(
    source: PathLike | Checkpoint, rules: RulesSource | None, parameters: Parameters | None, merge: PathLike | None
) -> Checkpoint:
    """The source, with names in place of an optimizer's numbers, and an adapter merged."""
    opened = source if isinstance(source, Checkpoint) else open(source, rules=rules)
    opened = opened if parameters is None else with_names(opened, parameters)
    return opened if merge is None else with_adapter(opened, merge)


def _copies(
    wanted: PathLike | bool, opened: Checkpoint, streams: Mapping[str, Stream], folder: OutputFolder
) -> dict[str, bytes]:
    """The config files to write beside the weights."""
    if wanted is False:
        return {}
    return copies_of(opened.files if wanted is True else files_at(wanted)[0], streams, folder)


def _contents(
    opened: Checkpoint,
    streams: Mapping[str, Stream],
    layouts: Mapping[str, Layout],
    values: Mapping[str, object],
    ties: Mapping[str, str],
) -> Contents:
    """The contents to write. Tied tensors have the layout of the one that they are tied to."""
    twice = [key for key in values if key in streams]
    if twice:
        raise CheckpointError(f"{twice[0]!r} would be both a tensor and another value: rename= gives it another name")
    return Contents(
        {key: (stream.dtype, layouts[ties.get(key, key)]) for key, stream in streams.items()},
        values,
        {key: path for key, path in opened.paths.items() if key in streams or key in values},
        ties,
    )


@contextmanager
def _resumable(claim: WriteClaim, folder: OutputFolder, token: str, owners: Sequence[int]) -> Iterator[None]:
    """A failed conversion leaves its complete files to resume from, and marks the folder as unfinished."""
    try:
        yield
    except BaseException as error:
        if len(owners) > 1:  # a single file cannot be resumed
            error.add_note("run the same conversion again to continue: files that are whole are reused")
        with suppress(CheckpointError):
            claim.unfinished = any(token_of(name) == token for name in folder.names())
        raise


def _values_to_write(
    opened: Checkpoint, selection: Selection, objects: Objects | None, format: str
) -> dict[str, object]:
    """The selected values other than tensors, without those of unknown classes unless objects='carry'."""
    check_objects(objects)
    values = {key: opened.objects[key] for key in filter(selection.of(opened), opened.objects)}
    lost = [key for key, value in values.items() if objects != "drop" and _is_lost(value, objects, format)]
    if lost:
        raise CheckpointError(f"{lost[0]!r} in {opened.path} is {_loss(values[lost[0]], format)}")
    return values if objects == "carry" else {key: value for key, value in values.items() if has_known_types(value)}


def _is_lost(value: object, objects: Objects | None, format: str) -> bool:
    """True for a value that would be lost, although it has tensors inside or was to be carried."""
    inside, opaque = tensors_in(value) > 0, opaque_in(value) is not None
    if objects == "carry":
        return (inside or opaque) if format == "safetensors" else inside and opaque and format in LIMITED
    return inside and (format == "safetensors" or not has_known_types(value))


def _loss(value: object, format: str) -> str:
    """What would be lost, why, and what to do."""
    what = "its tensors" if tensors_in(value) else "it"
    lost, drop = f"{brief(opaque_in(value) or value)}: {what} would be lost", "objects='drop' leaves it out"
    if format not in LIMITED:
        return f"{lost}. Remedy: objects='carry' writes it as it is, {drop}"
    other = "convert to dcp or torch.save with objects='carry'"
    return f"{lost}, as {LIMITED[format]}. Remedy: {other}; {drop}"


def _write_files(
    writer: Writer,
    owners: Sequence[int],
    streams: Mapping[str, Stream],
    contents: Contents,
    chunk: int,
    jobs: int,
    progress: Progress,
) -> dict[int, object]:
    """Write all files. Returns what the writer reports of each."""
    total = sum(stream.size for name, stream in streams.items() if name not in contents.tied)
    with reporter(progress, total, "convert", here=True) as tell:
        count = Count(tell, total)
        parts = _parts(streams, contents, chunk, count)

        def write(owner: int) -> object:
            file = writer.write(owner, parts[owner], contents)
            if writer.file(owner) in writer.folder.reused:
                count.add(sum(part.bytes for part in parts[owner]))
            return file

        return dict(map_in_order(owners, write, jobs))


def _chunk(max_bytes: int, jobs: int) -> int:
    check_jobs(jobs)
    if max_bytes < 4096 * jobs:
        raise ValueError(f"max_bytes={max_bytes!r} is too little: give at least 4096 for each of {jobs} jobs")
    return min(CHUNK, max_bytes // jobs // 2)  # comparing takes two of them


ENDINGS = {".safetensors": "safetensors", ".pt": "torch.save", ".pth": "torch.save", ".bin": "torch.save"}
NEARLY_AN_ENDING = re.compile(r"\.[A-Za-z]\w{0,11}")  # others are parts of names: step.100, v1.5


def _place(out: PathLike, format: str | None, *, durable: bool, sums: bool) -> tuple[str, OutputFolder, str | None]:
    """The format, the directory, and the file name if the output is one file."""
    path = str(out)
    ending = PurePath(path).suffix
    if format is None and ending not in ENDINGS and NEARLY_AN_ENDING.fullmatch(ending):
        raise ValueError(
            f"{path} ends with {ending}, which is the ending of no format: end it with one of {', '.join(ENDINGS)}, "
            f"or give format=, for a directory of that name"
        )
    chosen_format = format or ENDINGS.get(ending, "safetensors")
    if chosen_format not in WRITERS:
        raise ValueError(f"format= must be one of {', '.join(map(repr, WRITERS))}, not {format!r}")
    scheme, separator, rest = path.rpartition("://")
    folder, _, name = rest.rpartition("/")
    if ENDINGS.get(ending) == chosen_format and name:
        here = folder or ("/" if path.startswith("/") else "" if separator else ".")
        return chosen_format, OutputFolder(f"{scheme}{separator}{here}", durable=durable, sums=sums), name
    return chosen_format, OutputFolder(path, durable=durable, sums=sums), None


def _layouts(
    streams: Mapping[str, Stream],
    format: str,
    file: PurePath | None,
    max_shard_size: int | str | None,
    rules: CoupledRules | None,
) -> dict[str, Layout]:
    """The file of every tensor: whole tensors in order, or parts by rules."""
    limit = size_in_bytes(max_shard_size) if max_shard_size is not None else None
    if limit is not None and (format != "safetensors" or file is not None):
        what = f"format={format!r}" if file is None else f"the one file {file}"
        raise ValueError(f"max_shard_size= makes several safetensors files in a directory, but the target is {what}")
    if rules is not None:
        if format not in SHARDED:
            known = f"{', '.join(map(repr, SHARDED[:-1]))} and {SHARDED[-1]!r}"
            raise ValueError(f"rules= shard a checkpoint, which format={format!r} cannot hold: {known} can")
        return {
            name: assign_writers(name, rules.layout(name, stream.shape), stream.dtype.itemsize, turn)
            for turn, (name, stream) in enumerate(streams.items())
        }
    if format == "sharded":
        raise ValueError(
            "format='sharded' needs rules=: which part of a tensor each rank has. Remedy: for one rank that has all, a "
            f"TOML file with the two lines {' and '.join(ONE_RANK)}"
        )
    layouts, number, room = dict[str, Layout](), 0, 0
    for name, stream in streams.items():
        if limit is not None and room and room + stream.size > limit:
            number, room = number + 1, 0
        layouts[name] = _whole(stream.shape, number)
        room += stream.size
    return layouts


def _ties(streams: Mapping[str, Stream], rules: CoupledRules | None) -> dict[str, str]:
    """Tied names, each with the earlier name of the same bytes and layout."""
    shared = {name: stream for name, stream in streams.items() if stream.origin is not None and stream.size}
    layouts = {name: rules and rules.layout(name, stream.shape) for name, stream in shared.items()}
    return duplicates({name: (stream.origin, layouts[name]) for name, stream in shared.items()})


def _warn_of(ties: Mapping[str, str], streams: Mapping[str, Stream]) -> None:
    """Warn that tied tensors are written again."""
    if ties:
        name, one = next(iter(ties.items()))
        more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
        warnings.warn(
            f"{name!r} is tied to {one!r}: safetensors cannot share bytes, so it is written again{more} "
            f"({size(sum(streams[key].size for key in ties))} in all); select= leaves it out",
            stacklevel=3,
        )


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...], file: int) -> Layout:
    """A whole tensor in a file. Cached: a model has many tensors of few shapes."""
    return Layout.replicated(shape, [file])


def _parts(
    streams: Mapping[str, Stream], contents: Contents, chunk: int, done: Count
) -> Mapping[int, list[TensorPart]]:
    """The parts of every file."""
    parts = defaultdict[int, list[TensorPart]](list)
    for name, stream in ((name, stream) for name, stream in streams.items() if name not in contents.tied):
        empty = [] if prod(stream.shape) else [Box.whole(stream.shape)]
        _, layout = contents.tensors[name]
        for owner in layout.owners():
            for box in [piece.box for piece in layout.pieces(owner)] or empty:
                parts[owner].append(TensorPart(name, box, stream.dtype, partial(_write, stream, box, chunk, done)))
    return parts


def _write(stream: Stream, box: Box, chunk: int, done: Count, file: IO[bytes]) -> None:
    stream.write(box, file, chunk)
    done.add(box.volume * stream.dtype.itemsize)


def _check_apart(opened: Checkpoint, folder: OutputFolder, name: str | None) -> None:
    """Refuse to overwrite the source."""
    tables = {id(entry.paths): entry for entry in opened.values()}
    used = {path for entry in tables.values() for path in entry.paths}
    places = {entry.files.path(path) for entry in tables.values() for path in entry.paths}
    beside = {path.rpartition("/")[0] for path in used if path.startswith("../")}  # of an incremental save
    onto = any(same_location(root, folder.path) for root in (opened.files.root, *map(opened.files.path, beside)))
    if name is not None:
        onto = any(same_location(path, folder.path_of(name)) for path in places)
    if onto:
        raise CheckpointError(
            f"{folder.path if name is None else folder.path_of(name)} is the source: give another path"
        )


def _token(opened: Checkpoint, streams: Mapping[str, Stream], contents: Contents, format: str) -> str:
    """A hash of the conversion: its source files, values, options and target."""
    entries = [entry for stream in streams.values() for _, entry in stream.sources]
    files = sorted({path: entry.files for entry in entries for path in entry.used()}.items(), key=itemgetter(0))
    facts: list[object] = [
        format,
        opened.path,
        sorted(opened.metadata.items()),
        [(path, where.stamp(path)) for path, where in files],
    ]
    facts += [(name, str(dtype), layout.shape, str(layout)) for name, (dtype, layout) in contents.tensors.items()]
    if format in ("dcp", "megatron-dist"):  # whose files have values; elsewhere they are written anew
        facts += [
            (name, blake2b(torch_save_bytes(value), digest_size=8).digest()) for name, value in contents.values.items()
        ]
    facts += sorted(contents.tied.items())
    links = [f"{link}{entry.made_by}" for stream in streams.values() for link, entry in stream.sources]
    return blake2b(repr((facts, links)).encode(), digest_size=8).hexdigest()


def _verify(
    streams: Mapping[str, Stream], contents: Contents, made: Checkpoint, chunk: int, jobs: int, progress: Progress
) -> None:
    """Read it back and compare. Files without names are matched by path: names come from paths when they are opened."""
    there = {path: name for name, path in made.paths.items()}
    paths = {name: contents.path_of(name) for name in streams}
    names = {name: name if made.paths.get(name) == path else there.get(path, name) for name, path in paths.items()}
    lacking = [name for name in names.values() if name not in made]
    if lacking:
        raise CheckpointError(missing(f"{made.path} has no", lacking, made))
    pairs = {name: (stream, stream_of(made[names[name]])) for name, stream in streams.items()}
    differences = compare_streams(pairs, jobs=jobs, chunk=chunk, progress=progress)
    if differences:
        raise CheckpointError(
            f"{made.path} does not match the source: {differences[0]} (and {len(differences) - 1} more)"
        )
