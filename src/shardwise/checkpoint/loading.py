"""load: fill tensors of any sharding in place, reading only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.checking import BlockCheck, Check, LoadReport, check_option
from shardwise.checkpoint.choosing import Read, way
from shardwise.checkpoint.coded_targets import Loading, loading
from shardwise.checkpoint.comparing import compare_streams
from shardwise.checkpoint.damage import refuse_damaged
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.filling import Fill, FillOptions, Prepared
from shardwise.checkpoint.modules import ModuleTarget
from shardwise.checkpoint.opaque import Opaque, opaque_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.quantized import quantized_in, with_values
from shardwise.checkpoint.random_state import RandomState, read_random_states, restore_random_states
from shardwise.checkpoint.rules import RulesSource
from shardwise.checkpoint.streams import Sources, Stream, by_target, check_casts, duplicates
from shardwise.checkpoint.values import refuse_modules
from shardwise.containers.description import Descriptions, describe_all, is_tensor
from shardwise.containers.memory import is_meta, local_of, storage_of, with_memory
from shardwise.containers.ties import Ties, tied, ties_of
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.exchange.overflow import Losses, Overflow, check_overflow, refusal
from shardwise.job.agree import Callers
from shardwise.job.casts import Cast, TargetCasts
from shardwise.job.names import Rename, missing
from shardwise.job.plan import TensorInfo
from shardwise.job.progress import Progress, check_progress
from shardwise.job.remap import NoSourceError, Remap, check_kept, links
from shardwise.job.session import check_owners
from shardwise.job.side import combine_descriptions
from shardwise.quantized.moves import Rule, check_used, split_rules, value_shapes
from shardwise.quantized.recognition import Quantized, recognize
from shardwise.state.traverse import FLATTEN_MAPPING, OBJ_PATH, dotted, flatten_state_dict, set_element, spelled
from shardwise.storage.paths import PathLike

T = TypeVar("T")


def load(
    path: PathLike | Checkpoint,
    into: dict[Any, Any] | torch.nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    cast: bool | Cast = True,
    overflow: Overflow = "refuse",
    strict: bool = True,
    read: Read | None = None,
    rules: RulesSource | None = None,
    max_bytes: int | None = None,
    progress: Progress = None,
    check: Check = True,
) -> LoadReport:
    """Fill the tensors of a state dict or module from a checkpoint, in place, under any sharding; replace other values.

    `into` may be a module: its parameters and persistent buffers are filled, those on the meta device are made. Other
    buffers on the meta device are filled by the module's own code, or named in an error. For a model of transformers,
    names and parts are converted as its `from_pretrained` does.

    Tensors on the meta device have no memory: they are replaced in the state dict, as torch's dcp.load does. Objects
    that list their chunks for DCP (a DTensor of LocalShardsWrapper) are filled as well.

    `path`: a path or URL, as for `open`, or an open checkpoint. `rename`, `remap`: as in `Resharder`, from the names of
    the checkpoint; Quantized() dequantizes, if the target has values. `cast`: float64, float32, float16 and
    bfloat16 are cast to the target's dtype; other dtypes, such as those of quantized codes, only by rules [(name,
    dtype), ...] with the full name of the target; False refuses all casts. `overflow="refuse"`: raise if a value is
    out of range for its target; "allow" casts it. `strict=False`: keep the values that the checkpoint lacks. Tied
    tensors, which share all of their memory, are filled if the checkpoint has one of them; if it has several that
    differ, they are refused. `read="each"`: every rank reads what it needs; "once": each byte is read by one rank
    and sent to all that need it. By default, with `group=`: "each" for local files where all ranks are on one host,
    "once" for remote files; otherwise what is faster for the first tensors. All ranks of the group call. None returns
    before all have read, so the files may be deleted then. Without a group, each rank loads on its own.

    `check`: files that shardwise wrote have checksums for every MiB. True checks each MiB that lies wholly in what this
    rank reads, "all" also the rest of those files, False none. A damaged one is a CheckpointError on all ranks, which
    names file, bytes, tensors and boxes; as after any error while reading, some tensors of `into` may be written then,
    also with damaged values. Returns how much this rank has read and checked, and the files without checksums.
    """
    options = LoadOptions(rename, remap, cast, overflow, strict, read, max_bytes, progress, check)
    callers = Callers("load", group, alone=group is None and read != "once")
    make = partial(_target, callers, path, into, rules, options)
    target, infos, ties, fill = _describe(callers, make, options, path)
    prepare = partial(_prepare, callers, target, infos, ties, options)
    blocks = BlockCheck(target.checkpoint.files, check, required=target.checkpoint.sums)
    with torch.no_grad():
        prepared, losses = fill(callers, target.flat, prepare, options.filling(blocks))
    with callers.refusals():
        refuse_damaged(target.checkpoint, sorted(blocks.damaged))
        if losses.per_tensor():
            raise RefusedCastError(refusal(losses.per_tensor(), "All tensors of the target were written"))
    for name, value in {**prepared.others, **_filled(target.replacements, prepared.linked)}.items():
        set_element(target.state_dict, target.paths[name], value)
    if target.module is not None:
        target.module.finish()
    restore_random_states(target.random)
    return blocks.report()


@dataclass(frozen=True)
class LoadOptions:
    """How to load: keywords of `load`."""

    rename: Rename
    remap: Iterable[Rule]
    cast: bool | Cast
    overflow: Overflow
    strict: bool
    read: Read | None
    max_bytes: int | None
    progress: Progress
    blocks: Check

    def check(self) -> None:
        """Refuse invalid ones."""
        check_option(self.blocks)
        check_progress(self.progress)
        check_overflow(self.overflow)
        if self.read not in (None, "each", "once"):
            raise ValueError(f"read= must be 'each' or 'once', not {self.read!r}")

    def filling(self, blocks: BlockCheck) -> FillOptions:
        """Those that are about moving bytes."""
        return FillOptions(self.max_bytes, self.progress, self.overflow == "refuse", blocks)


class LoadTarget(NamedTuple):
    """What a rank fills, and from what: a checkpoint, the leaves of the state dict and their paths, names and rules.

    `replacements` has tensors with memory for those on the meta device.
    """

    checkpoint: Checkpoint
    state_dict: dict[Any, Any]
    module: ModuleTarget | None  # that the state dict is of
    flat: dict[str, object]
    paths: FLATTEN_MAPPING
    replacements: dict[str, torch.Tensor]
    rename: Rename
    remap: Iterable[Remap]
    quantized: Sequence[Quantized]
    random: Sequence[Mapping[str, object]]  # states of this rank's random generators, which are set in the end


def _target(
    callers: Callers,
    path: PathLike | Checkpoint,
    into: dict[Any, Any] | torch.nn.Module,
    rules: RulesSource | None,
    options: LoadOptions,
) -> LoadTarget:
    """Open the checkpoint, and take apart what is to be filled."""
    options.check()
    rename, (quantized, remap) = options.rename, split_rules(options.remap)
    checkpoint = with_values(path if isinstance(path, Checkpoint) else open(path, rules=rules), quantized)
    module: ModuleTarget | None = None
    if isinstance(into, torch.nn.Module):
        module = ModuleTarget.of(into, checkpoint, rename, remap)
        into, rename, remap = module.state, module.rename, module.remap
    leaves, nested = flatten_state_dict(into)
    refuse_modules(leaves)
    names = _names_there(nested, checkpoint)
    every = {names.get(name, name): leaf for name, leaf in leaves.items()}
    random = read_random_states(every, checkpoint, callers, strict=options.strict)
    flat = {name: leaf for name, leaf in every.items() if not isinstance(leaf, RandomState)}
    paths = {names.get(name, name): path for name, path in nested.items()}
    fresh = _replacements(flat)
    return LoadTarget(checkpoint, into, module, flat | fresh, paths, fresh, rename, remap, quantized, random)


def _names_there(paths: Mapping[str, OBJ_PATH], there: Checkpoint) -> dict[str, str]:
    """The names that a checkpoint has for the leaves of these paths, if several leaves have one dotted name.

    {"a.b": x, "a": {"b": y}} has two leaves called a.b. The name of one of them is its full path, which one depends on
    the order of the dict. So names do not help there, but paths do. Few state dicts have such leaves.
    """
    shared = _shared(paths) | _shared(there.paths)
    if not shared:
        return {}
    known = {_typed((name,)): name for name in shared if name not in there.paths}
    known |= {_typed(path): name for name, path in there.paths.items() if dotted(path) in shared}
    return {name: known.get(_typed(path), spelled(path)) for name, path in paths.items() if dotted(path) in shared}


def _shared(paths: Mapping[str, OBJ_PATH]) -> set[str]:
    """The dotted names of several leaves."""
    return {dotted(path) for name, path in paths.items() if ":" in name and dotted(path) != name}


def _typed(path: OBJ_PATH) -> tuple[tuple[type, object], ...]:
    return tuple((type(key), key) for key in path)


def _describe(
    callers: Callers,
    make: Callable[[], LoadTarget],
    options: LoadOptions,
    path: PathLike | Checkpoint,
) -> tuple[LoadTarget, dict[str, TensorInfo], dict[str, str], Fill]:
    """This rank's target; the infos of all tensors, the tied names, and how to fill."""
    once = not callers.alone and options.read != "each"  # or it may be

    def say() -> tuple[LoadTarget, tuple[Descriptions, Ties, bool]]:
        target = make()
        known = describe_all(target.flat, callers.transport), ties_of(target.flat, callers.transport)
        return target, (*known, target.checkpoint.files.near)

    # a rank that reads for all must read the same files as the others
    same = {"read": str(options.read), "path": str(getattr(path, "path", path)) if once else ""}
    same |= {"cast": str(options.cast), "overflow": str(options.overflow), "check": str(options.blocks)}
    target, by_rank = callers.tell(say, same)
    with callers.refusals():
        infos = combine_descriptions({rank: known for rank, (known, *_) in by_rank.items()}, "state dict")
        if once:
            check_owners(callers.owners, {f"{name!r} of the state dict,": one.layout for name, one in infos.items()})
    fill = way(callers, options.read, [near for *_, near in by_rank.values()])
    return target, infos, tied({rank: ties for rank, (_, ties, _) in by_rank.items()}), fill


def _prepare(
    callers: Callers,
    target: LoadTarget,
    infos: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    options: LoadOptions,
) -> Prepared:
    """What is filled from which entries, and all other values."""
    others = _others(target.checkpoint, target.flat, options.strict)
    every = _streams(target, infos, ties, TargetCasts.of(options.cast), options.strict)
    first = every._replace(streams=_first_of_tied(target.checkpoint, every.streams, ties, check=callers.first))
    losses, linked = Losses(), {*every.streams, *every.computed.names}
    counted = losses if options.overflow == "refuse" else None
    buffers = every.computed.buffers(target.flat, callers.me, callers.group, counted)
    return Prepared(first.streams, first.infos(infos), linked, others, buffers, losses)


def _replacements(flat: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Tensors with memory that replace those on the meta device, by name. Tied names get one tensor."""
    by_memory, replacements = dict[Hashable, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and is_meta(value):
            local, spec = local_of(value)
            key = storage_of(local), local.storage_offset(), local.shape, local.stride(), local.dtype, spec
            replacements[name] = by_memory[key] if key in by_memory else by_memory.setdefault(key, with_memory(value))
    return replacements


def _filled(replacements: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The replacements that have values after these names were filled, with those that are tied to them."""
    memory = {id(replacements[name]) for name in names if name in replacements}
    return {name: tensor for name, tensor in replacements.items() if id(tensor) in memory}


def _streams(
    target: LoadTarget, infos: Mapping[str, TensorInfo], ties: Mapping[str, str], cast: TargetCasts, strict: bool
) -> Loading:
    """The tensors that are filled, with the entries that fill them. Quantized ones are values on both sides."""
    checkpoint, rename, remap = target.checkpoint, target.rename, target.remap
    coded = recognize(infos, target.quantized)
    check_used(target.quantized, coded, quantized_in(checkpoint) if target.quantized else ())
    wanted = value_shapes(infos, coded)
    lacking = [name for name in wanted if name not in checkpoint]
    # otherwise only the wanted entries are looked up: there may be very many
    several = lacking or rename is not None or remap
    have = {name: checkpoint[name].shape for name in (checkpoint if several else wanted)}
    try:
        if ties and several:
            reached = links(have, wanted, rename=rename, remap=remap, strict=False, whole=False, empty=True)
            wanted = _untied(wanted, ties, {link.target for link in reached})
        planned = links(have, wanted, rename=rename, remap=remap, strict=False, whole=strict, empty=True)
        cast.check_used(infos)
        check_kept(planned, wanted, {*target.replacements, *(name for name, one in infos.items() if one.delivered)})
    except ValueError as error:
        remedy = "; rename= maps names, strict=False leaves such tensors as they are"
        raise CheckpointError(f"{checkpoint.path}: {error}{remedy * isinstance(error, NoSourceError)}") from error
    made = loading(_with_cells(by_target(planned, checkpoint)), infos, coded, ties)
    filled = {name: stream.sources for name, stream in made.streams.items() if name in infos}
    for name in (*filled, *made.computed.names):
        if infos[name].layout.op is not None:
            raise CheckpointError(f"{name!r} is partial: values can be loaded only into what holds values")
    check_casts(checkpoint, filled, infos, partial(cast.check, sources=checkpoint, targets=infos))
    return made


def _with_cells(sources: Mapping[str, Sources]) -> dict[str, Sources]:
    """Without links that have no cells, and targets that have no others."""
    found = {
        name: tuple(one for one in several if 0 not in one[0].target_view.shape) for name, several in sources.items()
    }
    return {name: several for name, several in found.items() if several}


def _untied(wanted: Mapping[str, T], ties: Mapping[str, str], reached: Container[str]) -> dict[str, T]:
    """Without the names that are filled through a tied name."""
    filled = {ties.get(name, name) for name in wanted if name in reached}
    return {name: one for name, one in wanted.items() if name in reached or ties.get(name, name) not in filled}


def _first_of_tied(
    checkpoint: Checkpoint, streams: Mapping[str, Stream], ties: Mapping[str, str], *, check: bool
) -> dict[str, Stream]:
    """Of tied targets only the first. Where the checkpoint has several, they must be equal: `check` compares them."""
    again = duplicates({name: ties.get(name, name) for name in streams})
    for name, one in again.items() if check else ():
        same = streams[one].same_bytes(streams[name])
        differences = compare_streams({name: (streams[one], streams[name])}) if not same else []
        if differences:
            raise CheckpointError(
                f"{one!r} and {name!r} share their memory in the state dict, but differ in {checkpoint.path} "
                f"({differences[0].what}): give each its own memory, or leave one of them out"
            )
    return {name: stream for name, stream in streams.items() if name not in again}


# --- values other than tensors ----------------------------------------------------------------------------------------


def _others(checkpoint: Checkpoint, flat: Mapping[str, object], strict: bool) -> dict[str, object]:
    """The values other than tensors that are to be set."""
    values = {name: value for name, value in flat.items() if not is_tensor(value)}
    for problem in chain(_tensors_there(checkpoint, values), _not_settable(checkpoint, values) if strict else ()):
        raise CheckpointError(problem)
    names = [name for name in values if name not in checkpoint and name in checkpoint.objects]
    stored = {name: checkpoint.objects[name] for name in names}
    return {name: value for name, value in stored.items() if opaque_in(value) is None}


def _tensors_there(checkpoint: Checkpoint, values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if name in checkpoint and value is not None:
            here = type(value).__name__
            yield f"{name!r} is a tensor in {checkpoint.path}, but {here} here: give a tensor to fill"


def _not_settable(checkpoint: Checkpoint, values: Mapping[str, object]) -> Iterator[str]:
    """Why some values cannot be set: there are only tensors below a name, nothing at all, or an unknown class."""
    path, stored = checkpoint.path, checkpoint.objects
    absent = {name: value for name, value in values.items() if name not in checkpoint}
    for name, value in absent.items():
        if isinstance(value, dict) and not value and any(other.startswith(f"{name}.") for other in checkpoint):
            yield (
                f"{name!r} is empty here, but {path} has tensors below it: give tensors to fill (for an optimizer what "
                f"torch's get_optimizer_state_dict(model, optimizer) returns); strict=False leaves it empty"
            )
    lacking = [name for name, value in absent.items() if name not in stored and not _is_empty(value)]
    if lacking:
        yield f"{missing(f'{path} has no', lacking, stored)}; strict=False leaves them as they are"
    for name in absent:
        if name in stored and (opaque := opaque_in(stored[name])) is not None:
            yield (
                f"{name!r} in {path} is {opaque!r}: its class is not known here, and nothing of it was run. "
                f"Remedy: leave {name!r} out{_where(stored[name], name)}, allow the class with "
                f"torch.serialization.add_safe_globals, or strict=False, which leaves it as it is"
            )


def _where(value: object, name: str) -> str:
    """Where the parts of an object of an unknown class are."""
    if not isinstance(value, Opaque) or not value.filled:
        return ""
    return f" (what it holds is in .{' and .'.join(value.filled)} of checkpoint.open(path).objects[{name!r}])"


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)
