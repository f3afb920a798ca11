"""load: fill tensors of any sharding in place, reading only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.comparing import compare_streams, names_there
from shardwise.checkpoint.entry import Checkpoint, Entry, Reading, read_into
from shardwise.checkpoint.files import PathLike
from shardwise.checkpoint.matching import Local, match
from shardwise.checkpoint.opaque import Opaque, opaque_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.read_once import Prepared, load_once
from shardwise.checkpoint.rules import RulesSource
from shardwise.checkpoint.streaming import Stream
from shardwise.checkpoint.values import refuse_modules
from shardwise.containers.memory import check_written
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.exchange.overflow import Losses, Lost, Overflow, check_overflow, refusal
from shardwise.job.casts import Cast, Change, TargetCasts, check_changes
from shardwise.job.names import Rename, missing
from shardwise.job.plan import TensorInfo
from shardwise.job.progress import Count, Progress, check_progress, shown
from shardwise.job.remap import Link, Remap, links
from shardwise.job.side import Descriptions, LiveSide, combine_descriptions, describe_all, is_tensor
from shardwise.job.ties import Ties, tied, ties_of
from shardwise.state.traverse import FLATTEN_MAPPING, StateDict, flatten_state_dict, set_element
from shardwise.torch_internals.memory import is_meta, local_of, storage_of, with_memory

T = TypeVar("T")
Read = Literal["each", "once"]


def load(
    path: PathLike | Checkpoint,
    into: dict[Any, Any],
    *,
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    cast: bool | Cast = True,
    overflow: Overflow = "refuse",
    strict: bool = True,
    read: Read | None = None,
    rules: RulesSource | None = None,
    max_bytes: int | None = None,
    progress: Progress = None,
) -> None:
    """Fill the tensors of a state dict from a checkpoint, in place, for any shardings. Other values are replaced.

    Tensors on the meta device have no memory: they are replaced in the state dict, as torch's dcp.load does. Objects
    that list their chunks for DCP (a DTensor of LocalShardsWrapper) are filled as well.

    `path`: a path or URL, as for `open`, or an open checkpoint. `rename`, `remap`: as in `Resharder`, from the names of
    the checkpoint. `cast`: float64, float32, float16 and bfloat16 are cast to the target's dtype; other dtypes, such as
    those of quantised codes, only by rules [(name, dtype), ...] with the full name of the target; False refuses all
    casts. `overflow="refuse"`: raise if a value is out of range for its target; "allow" casts it. `strict=False`: keep
    the values that the checkpoint lacks. Tied tensors, which share all of their memory, are filled if the checkpoint
    has one of them; if it has several that differ, they are refused. `read="each"`: every rank reads what it needs;
    "once": each byte is read by one rank and sent to all that need it, which is better for remote files (the default
    with `group=`). All ranks of the group call. None returns before all have read, so the files may be deleted then.
    Without a group, each rank loads on its own.
    """
    callers = Callers("load", group, alone=group is None and read != "once")
    once = not callers.alone and read != "each"

    def opened() -> Checkpoint:
        check_progress(progress)
        check_overflow(overflow)
        if read not in (None, "each", "once"):
            raise ValueError(f"read= must be 'each' or 'once', not {read!r}")
        return path if isinstance(path, Checkpoint) else open(path, rules=rules)

    # a rank that reads for all must read the same files as the others
    same = {"read": "once" if once else "each", "path": str(getattr(path, "path", path)) if once else ""}
    same |= {"cast": str(cast), "overflow": str(overflow)}
    checkpoint, state, targets, ties = _described(callers, opened, into, same, once=once)

    def prepare() -> Prepared:
        others = _others(checkpoint, state.flat, strict)
        linked_entries = _links(checkpoint, targets, ties, rename, remap, TargetCasts.of(cast), strict)
        linked = {link.target for link, _, _ in linked_entries}
        return Prepared(_once(checkpoint, linked_entries, ties, check=callers.first), linked, others)

    def each() -> tuple[Prepared, Losses]:
        prepared, losses = prepare(), Losses()
        _load_each(prepared.links, state.flat, callers, progress, losses if count_losses else None)
        return prepared, losses

    count_losses, shared = overflow == "refuse", None
    with torch.no_grad():
        if once:
            how = max_bytes, progress
            shared = load_once(callers, targets, state.flat, prepare, *how, count_losses=count_losses)

        def finish() -> tuple[tuple[Prepared, dict[str, object]], list[Lost]]:
            prepared, losses = shared or each()
            return (prepared, {name: checkpoint.objects[name] for name in prepared.others}), losses.listed()

        # no rank returns while another still reads: the caller may delete the files
        (prepared, values), losses_by_rank = callers.tell(finish)
        with callers.refusals():
            _refuse_losses(losses_by_rank, disjoint=once)
    for name, value in {**values, **_filled(state.replaced, prepared.linked)}.items():
        set_element(into, state.paths[name], value)


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


def _links(
    checkpoint: Checkpoint,
    targets: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    rename: Rename,
    remap: Iterable[Remap],
    cast: TargetCasts,
    strict: bool,
) -> list[tuple[Link, Entry, TensorInfo]]:
    """Which entry fills which tensor."""
    wanted = {name: tensor.shape for name, tensor in targets.items()}
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
    linked_entries = [(link, checkpoint[link.source], targets[link.target]) for link in planned]
    for link, _, tensor in linked_entries:
        if tensor.layout.op is not None:
            raise CheckpointError(f"{link.target!r} is partial: values can be loaded only into what holds values")
    changes = [Change(link.source, link.target, entry.dtype, tensor.dtype) for link, entry, tensor in linked_entries]
    try:
        check_changes(changes, lambda change: cast.check(change, checkpoint, targets))
    except ValueError as error:
        raise RefusedCastError(f"{checkpoint.path}: {error}") from error
    return linked_entries


def _untied(wanted: Mapping[str, T], ties: Mapping[str, str], reached: Container[str]) -> dict[str, T]:
    """Without the names that are filled through a tied name."""
    filled = {ties.get(name, name) for name in wanted if name in reached}
    return {name: one for name, one in wanted.items() if name in reached or ties.get(name, name) not in filled}


def _once(
    checkpoint: Checkpoint,
    linked_entries: Sequence[tuple[Link, Entry, TensorInfo]],
    ties: Mapping[str, str],
    *,
    check: bool,
) -> list[tuple[Link, Entry, TensorInfo]]:
    """Of tied targets only the first. Where the checkpoint has several, they must be equal: `check` compares them."""
    streams = dict[str, Stream]()
    for link, entry, tensor in linked_entries if ties else ():
        before = streams[link.target].sources if link.target in streams else ()
        streams[link.target] = Stream(link.target, tensor.shape, tensor.dtype, (*before, (link, entry)))
    first = dict[str, str]()
    again = {name: one for name in streams if (one := first.setdefault(ties.get(name, name), name)) != name}
    for name, one in again.items() if check else ():
        differences = (
            compare_streams({name: (streams[one], streams[name])}) if not streams[one].same_bytes(streams[name]) else []
        )
        if differences:
            raise CheckpointError(
                f"{one!r} and {name!r} share their memory in the state dict, but differ in {checkpoint.path} "
                f"({differences[0].what}): give each its own memory, or leave one of them out"
            )
    return [one for one in linked_entries if one[0].target not in again]


def _load_each(
    linked_entries: Sequence[tuple[Link, Entry, TensorInfo]],
    flat: Mapping[str, object],
    callers: Callers,
    progress: Progress,
    losses: Losses | None,
) -> None:
    """Load this rank's part. All locations are found before the first read, so that errors come early.

    Losses of casts are counted in the same pass.
    """
    infos = {link.target: tensor for link, _, tensor in linked_entries}
    target = LiveSide(flat, infos)
    for name, memory in target.checked("state dict", infos, callers.me).items():
        for one in memory:
            check_written(one, repr(name))

    def readings(links: Iterable[tuple[Link, Entry, TensorInfo]]) -> Iterator[Reading]:
        for link, entry, tensor in links:
            memory = target.memory(link.target)
            copies = match(link, entry, Local(tensor.layout, callers.me, tuple(t.stride() for t in memory)))
            look = losses.looking(repr(link.target), entry.dtype, tensor.dtype) if losses is not None else None
            cuts = [cut.of(memory) for cut in copies.there]
            yield Reading(entry, copies.sources(entry, link.source_view), cuts, look)

    todo = list(readings(one for one in linked_entries if not one[2].delivered))
    delivered = [one for one in linked_entries if one[2].delivered]
    total = sum(reading.bytes for reading in todo) + sum(prod(t.shape) * t.dtype.itemsize for _, _, t in delivered)
    with shown(progress, total, "load", here=callers.first) as tell:
        count = Count(tell, total)
        read_into(todo, count.add)
        for names in target.deliveries():  # one after the other: each needs memory
            read_into(list(readings(one for one in delivered if one[0].target in names)), count.add)
            target.filled(names)


def _refuse_losses(by_rank: Mapping[int, Sequence[Lost]], *, disjoint: bool) -> None:
    """Refuse the losses of casts on any rank. Ranks that read the same values are not added up: the worst counts."""
    losses = Losses()
    for lost in (one for several in by_rank.values() for one in several):
        losses.add(lost) if disjoint else losses.keep_worst(lost)
    if losses.listed():
        raise RefusedCastError(refusal(losses.listed(), "All tensors of the target were written"))


def _others(checkpoint: Checkpoint, flat: Mapping[str, object], strict: bool) -> list[str]:
    """The names of values other than tensors that are to be set."""
    names = [name for name, value in flat.items() if not is_tensor(value)]
    tensors = [name for name in names if name in checkpoint and flat[name] is not None]
    if tensors:
        here = type(flat[tensors[0]]).__name__
        raise CheckpointError(
            f"{tensors[0]!r} is a tensor in {checkpoint.path}, but {here} here: give a tensor to fill"
        )
    names = [name for name in names if name not in checkpoint]
    empty = [name for name in names if isinstance(flat[name], dict) and not flat[name]]
    below = [name for name in empty if any(other.startswith(f"{name}.") for other in checkpoint)]
    if below and strict:
        raise CheckpointError(
            f"{below[0]!r} is empty here, but {checkpoint.path} has tensors below it: give tensors to fill (for an "
            f"optimizer what torch's get_optimizer_state_dict(model, optimizer) returns); strict=False leaves it empty"
        )
    lacking = [name for name in names if name not in checkpoint.objects and not _is_empty(flat[name])]
    if lacking and strict:
        reason = missing(f"{checkpoint.path} has no", lacking, checkpoint.objects)
        raise CheckpointError(f"{reason}; strict=False leaves them as they are")
    stored = [name for name in names if name in checkpoint.objects]
    opaque = {name: one for name in stored if (one := opaque_in(checkpoint.objects[name])) is not None}
    if opaque and strict:
        name, one = next(iter(opaque.items()))
        raise CheckpointError(
            f"{name!r} in {checkpoint.path} is {one!r}: its class is not known here, and nothing of it was run. "
            f"Remedy: leave {name!r} out{_where(checkpoint.objects[name], name)}, allow the class with "
            f"torch.serialization.add_safe_globals, or strict=False, which leaves it as it is"
        )
    return [name for name in stored if name not in opaque]


def _where(value: object, name: str) -> str:
    """Where the parts of an object of an unknown class are."""
    if not isinstance(value, Opaque) or not value.filled:
        return ""
    return f" (what it holds is in .{' and .'.join(value.filled)} of checkpoint.open(path).objects[{name!r}])"


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)
