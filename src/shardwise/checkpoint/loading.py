"""load: fill tensors of any sharding in place, reading only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.coded_targets import Loading, loading
from shardwise.checkpoint.comparing import compare_streams, names_there
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import PathLike
from shardwise.checkpoint.filling import Prepared, fill_each, fill_once
from shardwise.checkpoint.modules import ModuleTarget
from shardwise.checkpoint.opaque import Opaque, opaque_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.quantised import quantised_in, with_values
from shardwise.checkpoint.rules import RulesSource
from shardwise.checkpoint.streams import Stream, by_target, check_casts, repeated
from shardwise.checkpoint.values import refuse_modules
from shardwise.containers.description import Descriptions, describe_all, is_tensor
from shardwise.containers.memory import is_meta, local_of, storage_of, with_memory
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.exchange.overflow import Losses, Lost, Overflow, check_overflow, refusal
from shardwise.job.casts import Cast, TargetCasts
from shardwise.job.names import Rename, missing
from shardwise.job.plan import TensorInfo
from shardwise.job.progress import Progress, check_progress
from shardwise.job.remap import Remap, links
from shardwise.job.side import combine_descriptions
from shardwise.job.ties import Ties, tied, ties_of
from shardwise.quantised.moves import Rule, check_used, folded, separated
from shardwise.quantised.recognition import QuantisedTensor, recognise
from shardwise.state.traverse import FLATTEN_MAPPING, StateDict, flatten_state_dict, set_element

T = TypeVar("T")
Read = Literal["each", "once"]


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
) -> None:
    """Fill the tensors of a state dict or module from a checkpoint, in place, under any sharding; replace other values.

    `into` may be a module: its parameters and persistent buffers are filled, those on the meta device are made. Other
    buffers on the meta device are filled by the module's own code, or named in an error. For a model of transformers,
    names and parts are converted as its `from_pretrained` does.

    Tensors on the meta device have no memory: they are replaced in the state dict, as torch's dcp.load does. Objects
    that list their chunks for DCP (a DTensor of LocalShardsWrapper) are filled as well.

    `path`: a path or URL, as for `open`, or an open checkpoint. `rename`, `remap`: as in `Resharder`, from the names of
    the checkpoint; Quantised() dequantises, if the target has values. `cast`: float64, float32, float16 and
    bfloat16 are cast to the target's dtype; other dtypes, such as those of quantized codes, only by rules [(name,
    dtype), ...] with the full name of the target; False refuses all casts. `overflow="refuse"`: raise if a value is
    out of range for its target; "allow" casts it. `strict=False`: keep the values that the checkpoint lacks. Tied
    tensors, which share all of their memory, are filled if the checkpoint has one of them; if it has several that
    differ, they are refused. `read="each"`: every rank reads what it needs; "once": each byte is read by one rank
    and sent to all that need it, which is better for remote files (the default with `group=`). All ranks of the
    group call. None returns before all have read, so the files may be deleted then. Without a group, each rank
    loads on its own.
    """
    quantised, regrouped = separated(remap)
    callers = Callers("load", group, alone=group is None and read != "once")
    once = not callers.alone and read != "each"

    def opened() -> Checkpoint:
        check_progress(progress)
        check_overflow(overflow)
        if read not in (None, "each", "once"):
            raise ValueError(f"read= must be 'each' or 'once', not {read!r}")
        return with_values(path if isinstance(path, Checkpoint) else open(path, rules=rules), quantised)

    module: ModuleTarget | None = None
    if isinstance(into, torch.nn.Module):
        target, _ = callers.tell(lambda: (ModuleTarget.of(into, opened(), rename, regrouped), None))
        path, state_dict, rename, regrouped = target.checkpoint, target.state, target.rename, target.remap
        module = target
    else:
        state_dict = into
    # a rank that reads for all must read the same files as the others
    same = {"read": "once" if once else "each", "path": str(getattr(path, "path", path)) if once else ""}
    same |= {"cast": str(cast), "overflow": str(overflow)}
    checkpoint, state, targets, ties = _described(callers, opened, state_dict, same, once=once)

    def prepare() -> Prepared:
        others = _others(checkpoint, state.flat, strict)
        coded = recognise(targets, quantised)
        streams, values = _streams(checkpoint, targets, coded, ties, rename, regrouped, TargetCasts.of(cast), strict)
        check_used(quantised, coded, quantised_in(checkpoint) if quantised else ())
        first = Loading(_first_of_tied(checkpoint, streams, ties, check=callers.first), values)
        losses = Losses()
        buffers = first.buffers(state.flat, callers.me, group, losses if overflow == "refuse" else None)
        return Prepared(first.streams, first.infos(targets), {*streams, *first.values}, others, buffers, losses)

    how = partial(fill_once, max_bytes=max_bytes) if once else fill_each
    fill = partial(how, callers, state.flat, prepare, progress, count_losses=overflow == "refuse")
    with torch.no_grad():
        filled = fill() if once else None  # a job of all ranks: it raises on all what goes wrong on one

        def finish() -> tuple[tuple[Prepared, dict[str, object]], list[Lost]]:
            prepared, losses = filled or fill()
            lost = [*losses.listed(), *prepared.losses.listed()]
            return (prepared, {name: checkpoint.objects[name] for name in prepared.others}), lost

        # no rank returns while another still reads: the caller may delete the files
        (prepared, values), losses_by_rank = callers.tell(finish)
        with callers.refusals():
            _refuse_losses(losses_by_rank, disjoint=once)
    for name, value in {**values, **_filled(state.replaced, prepared.linked)}.items():
        set_element(state_dict, state.paths[name], value)
    if module is not None:
        module.finish()


class State(NamedTuple):
    """The state dict of a rank: its leaves, their paths, and the replacements of tensors on the meta device."""

    flat: dict[str, object]
    paths: FLATTEN_MAPPING
    replaced: dict[str, torch.Tensor]


def _described(
    callers: Callers, opened: Callable[[], Checkpoint], into: StateDict, same: Mapping[str, str], *, once: bool
) -> tuple[Checkpoint, State, dict[str, TensorInfo], dict[str, str]]:
    """The checkpoint and this rank's state dict; the infos of all tensors, and the tied names."""

    def say() -> tuple[tuple[Checkpoint, State], tuple[Descriptions, Ties]]:
        checkpoint, (leaves, nested) = opened(), flatten_state_dict(into)
        refuse_modules(leaves)
        names = names_there(nested, checkpoint)
        flat = {names.get(name, name): leaf for name, leaf in leaves.items()}
        paths = {names.get(name, name): path for name, path in nested.items()}
        replaced = _replacements(flat)
        flat |= replaced
        state = State(flat, paths, replaced)
        return (checkpoint, state), (describe_all(flat, callers.transport), ties_of(flat, callers.transport))

    (checkpoint, state), by_rank = callers.tell(say, same)
    with callers.refusals():
        targets = combine_descriptions({rank: known for rank, (known, _) in by_rank.items()}, "state dict")
        if once:
            callers.check(targets)
    return checkpoint, state, targets, tied({rank: ties for rank, (_, ties) in by_rank.items()})


def _replacements(flat: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Tensors with memory that replace those on the meta device, by name. Tied names get one tensor."""
    made, replaced = dict[Hashable, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and is_meta(value):
            local, spec = local_of(value)
            key = storage_of(local), local.storage_offset(), local.shape, local.stride(), local.dtype, spec
            replaced[name] = made[key] if key in made else made.setdefault(key, with_memory(value))
    return replaced


def _filled(replaced: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The replacements that have values after these names were filled, with those that are tied to them."""
    memory = {id(replaced[name]) for name in names if name in replaced}
    return {name: tensor for name, tensor in replaced.items() if id(tensor) in memory}


def _streams(
    checkpoint: Checkpoint,
    targets: Mapping[str, TensorInfo],
    coded: Mapping[str, QuantisedTensor],
    ties: Mapping[str, str],
    rename: Rename,
    remap: Iterable[Remap],
    cast: TargetCasts,
    strict: bool,
) -> Loading:
    """The tensors that are filled, with the entries that fill them. `coded`: targets of codes and scales, as values."""
    wanted = folded(targets, coded)
    lacking = [name for name in wanted if name not in checkpoint]
    # otherwise only the wanted entries are looked up: there may be very many
    several = lacking or rename is not None or remap
    have = {name: checkpoint[name].shape for name in (checkpoint if several else wanted)}
    try:
        if ties and several:
            reached = links(have, wanted, rename=rename, remap=remap, strict=False, whole=False, empty=True)
            wanted = _untied(wanted, ties, {link.target for link in reached})
        planned = links(have, wanted, rename=rename, remap=remap, strict=False, whole=strict)
        cast.check_used(targets)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    made = loading(by_target(planned, checkpoint), targets, coded, ties)
    filled = {name: stream.sources for name, stream in made.streams.items() if name in targets}
    for name in (*filled, *made.values):
        if targets[name].layout.op is not None:
            raise CheckpointError(f"{name!r} is partial: values can be loaded only into what holds values")
    check_casts(checkpoint, filled, targets, lambda change: cast.check(change, checkpoint, targets))
    return made


def _untied(wanted: Mapping[str, T], ties: Mapping[str, str], reached: Container[str]) -> dict[str, T]:
    """Without the names that are filled through a tied name."""
    filled = {ties.get(name, name) for name in wanted if name in reached}
    return {name: one for name, one in wanted.items() if name in reached or ties.get(name, name) not in filled}


def _first_of_tied(
    checkpoint: Checkpoint, streams: Mapping[str, Stream], ties: Mapping[str, str], *, check: bool
) -> dict[str, Stream]:
    """Of tied targets only the first. Where the checkpoint has several, they must be equal: `check` compares them."""
    again = repeated({name: ties.get(name, name) for name in streams})
    for name, one in again.items() if check else ():
        same = streams[one].same_bytes(streams[name])
        differences = compare_streams({name: (streams[one], streams[name])}) if not same else []
        if differences:
            raise CheckpointError(
                f"{one!r} and {name!r} share their memory in the state dict, but differ in {checkpoint.path} "
                f"({differences[0].what}): give each its own memory, or leave one of them out"
            )
    return {name: stream for name, stream in streams.items() if name not in again}


def _refuse_losses(by_rank: Mapping[int, Sequence[Lost]], *, disjoint: bool) -> None:
    """Refuse the losses of casts on any rank. Ranks that read the same values are not added up: the worst counts."""
    losses = Losses()
    for lost in (one for several in by_rank.values() for one in several):
        losses.add(lost) if disjoint else losses.keep_worst(lost)
    if losses.listed():
        raise RefusedCastError(refusal(losses.listed(), "All tensors of the target were written"))


# --- values other than tensors ----------------------------------------------------------------------------------------


def _others(checkpoint: Checkpoint, flat: Mapping[str, object], strict: bool) -> list[str]:
    """The names of values other than tensors that are to be set."""
    values = {name: value for name, value in flat.items() if not is_tensor(value)}
    for problem in chain(_tensors_there(checkpoint, values), _not_settable(checkpoint, values) if strict else ()):
        raise CheckpointError(problem)
    stored = [name for name in values if name not in checkpoint and name in checkpoint.objects]
    return [name for name in stored if opaque_in(checkpoint.objects[name]) is None]


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
