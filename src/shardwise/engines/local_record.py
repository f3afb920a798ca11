"""Record an engine's loader on this rank: which boxes of the checkpoint it puts into which parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from shardwise.containers.dtensor import is_dtensor
from shardwise.containers.memory import storage_of
from shardwise.engines.deliveries import in_any_layer, together
from shardwise.engines.memory import (
    FromCheckpoint,
    FromLoader,
    Memory,
    Origin,
    Overwrite,
    Untraceable,
    turned,
    window_of,
)
from shardwise.engines.recorder import Looks, NeedsValuesError, Recorder
from shardwise.engines.time_limit import time_limit
from shardwise.errors import EngineError
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box, StridedPair, strided_boxes

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Weights], object]
Parameters = Mapping[str, torch.Tensor]


class TensorShape(NamedTuple):
    """The shape and dtype of a tensor of the checkpoint: all that a recording needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Destination(NamedTuple):
    """Cells of a parameter: a strided view of it, counted from its first element."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, parameters: Parameters) -> torch.Tensor:
        """These cells of the parameter, where it is now."""
        whole = parameters[self.parameter].detach()
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


class FilledBox(NamedTuple):
    """A box of a tensor of the checkpoint, and where the loader puts it."""

    box: Box
    destination: Destination


class Constant(NamedTuple):
    """Values that the loader writes and that are not in the checkpoint, such as padding."""

    destination: Destination
    values: torch.Tensor


@dataclass
class LocalRecord:
    """What a loader does on this rank."""

    boxes: dict[str, list[FilledBox]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the parameters that a name goes to
    constants: list[Constant] = field(default_factory=list)
    untraceable: list[Untraceable] = field(default_factory=list)  # names that only the loader itself can load
    overwrites: list[tuple[str, Overwrite]] = field(default_factory=list)  # by parameter
    unfilled: dict[str, tuple[Box, ...]] = field(default_factory=dict)  # cells of parameters that get nothing
    tied: dict[str, str] = field(default_factory=dict)  # parameters that are another one, by name

    def views(self, name: str, parameters: Parameters) -> Tensors:
        """The cells of parameters that a name goes to, box by box."""
        return [one.destination.view(parameters) for one in self.boxes.get(name, ())]


def record_here(
    load: Loader, shapes: Mapping[str, TensorShape], module: torch.nn.Module | None, seconds: float
) -> tuple[LocalRecord, Parameters]:
    """Run the loader on tensors without values. Where it looks at values, run it again without these names.

    Also returns the parameters by name. Tensors that the loader fills, but the module does not have, get numbers.
    """
    needed = dict[str, Untraceable]()

    def alone(names: Iterable[str]) -> Recorder:
        with _restored(module) as parameters:
            return _run(load, {name: shapes[name] for name in names}, parameters.values())

    with time_limit(seconds, f"the loader did not finish within {seconds:g} s while it was recorded"):
        while True:
            given = {name: one for name, one in shapes.items() if name not in needed}
            try:
                with _restored(module) as parameters:
                    recorder = _run(load, given, parameters.values())
                    lost = [*needed.values(), *recorder.kept_by(module.modules() if module is not None else ())]
                    summary = _summary(recorder, shapes, lost, parameters, parameters_of(module))
                summary[0].untraceable += together(recorder, summary[0].untraceable, given, alone)
                return summary
            except NeedsValuesError as error:
                needed |= _alike(error, given)


def _alike(error: NeedsValuesError, names: Iterable[str]) -> dict[str, Untraceable]:
    """The names whose values a loader needs: those of the error, and the same ones of other layers."""
    patterns = set(map(in_any_layer, error.names))
    alike = tuple(name for name in names if in_any_layer(name) in patterns)
    if not alike:
        raise EngineError(f"the loader cannot be recorded: {error}") from error
    return dict.fromkeys(alike, Untraceable(alike, str(error)))


def _run(load: Loader, shapes: Mapping[str, TensorShape], parameters: Iterable[torch.Tensor]) -> Recorder:
    recorder, current = Recorder(parameters), ""
    sources = {name: recorder.source(name, shape, dtype) for name, (shape, dtype) in shapes.items()}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current in sources:
            yield current, sources[current]

    try:
        with torch.no_grad(), recorder, Looks(recorder):
            load(weights())
    except (NeedsValuesError, EngineError):
        raise
    except Exception as error:
        raise recorder.needs_values or _failure(error, current, shapes) from error
    if recorder.needs_values is not None:
        raise recorder.needs_values
    return recorder


def _failure(error: Exception, current: str, shapes: Mapping[str, TensorShape]) -> Exception:
    """What the error of a loader means, which it raised at the current name."""
    if current and isinstance(error, RuntimeError | TypeError) and re.search("meta|unallocated", str(error)):
        return NeedsValuesError([current], "the loader looks at its values")
    where = f" at {current!r} of shape {list(shapes[current].shape)}" if current else ""
    return EngineError(f"the loader failed{where}: {type(error).__name__}: {error}")


@contextmanager
def _restored(module: torch.nn.Module | None) -> Iterator[dict[str, torch.Tensor]]:
    """The parameters and buffers of a module. They are put back at the end, in case the loader replaced them."""
    modules = [] if module is None else list(module.modules())
    tables = [table for one in modules for table in (one._parameters, one._buffers)]
    before = [dict(table) for table in tables]
    memory = {id(t): (t, t.data) for table in before for t in table.values() if t is not None}
    attributes = [dict(vars(one)) for one in modules]
    try:
        yield {name: tensor.data for name, tensor in parameters_of(module).items()}
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()  # of what the loader added
            table.update(entries)  # type: ignore[arg-type]
        for one, values in zip(modules, attributes, strict=True):
            _restore_tensors(vars(one), values)
        for tensor, data in memory.values():
            if cells_of(tensor) != cells_of(data):
                tensor.data = data


def _restore_tensors(attributes: dict[str, object], before: Mapping[str, object]) -> None:
    """Put back tensors that the loader replaced, and drop those that it added."""
    for key in [key for key, value in attributes.items() if isinstance(value, torch.Tensor)]:
        if key not in before:
            del attributes[key]
        elif attributes[key] is not before[key]:
            attributes[key] = before[key]


def cells_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same cells in the same order."""
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def parameters_of(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    if module is None:
        return {}
    tensors: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise EngineError(f"{name!r} of the engine is a DTensor, whose layout is known: give it as a target itself")
    return tensors


def _summary(
    recorder: Recorder,
    shapes: Mapping[str, TensorShape],
    untraceable: list[Untraceable],
    before: Parameters,
    after: Parameters,
) -> tuple[LocalRecord, Parameters]:
    """`before` and `after` the loader ran: it may give parameters other memory, but not another shape."""
    _check_shapes(before, after)
    record, known = LocalRecord(untraceable=list(untraceable)), set(map(storage_of, after.values()))
    others = [memory.whole() for memory in recorder.engine_memories() if storage_of(memory.tensor) not in known]
    numbered = {f"tensor {number}": tensor for number, tensor in enumerate(others)}
    parameters = {**before, **numbered}
    record.tied = _tied(parameters, {**after, **numbered})
    once = {name: tensor for name, tensor in {**after, **numbered}.items() if name not in record.tied}
    for name, tensor in once.items():
        memory = recorder.memories.get(storage_of(tensor))
        if memory is not None:
            _add(record, memory, Parameter(name, tensor, parameters[name].stride()), shapes)
    for memory in recorder.engine_memories():
        _check_beside(memory, [tensor for tensor in after.values() if storage_of(tensor) == storage_of(memory.tensor)])
    record.unfilled = {} if untraceable else _unfilled(recorder, once)  # names that were left out may fill them
    return record, parameters


def _tied(before: Parameters, after: Parameters) -> dict[str, str]:
    """The parameters that are another one, by name, before the loader ran. They have to stay one."""
    first = {cells_of(tensor): name for name, tensor in reversed(list(before.items()))}
    tied = {name: one for name in after if (one := first[cells_of(before[name])]) != name}
    for name, one in tied.items():
        if cells_of(after[name]) != cells_of(after[one]):
            raise EngineError(f"the loader makes two tensors of {one!r} and {name!r}, which are one in the engine")
    return tied


def _check_beside(memory: Memory, tensors: Tensors) -> None:
    """Refuse values of the checkpoint in memory that parameters share with something else, which has no name."""
    if not tensors or any(t.numel() == prod(memory.shape) or t.dtype != memory.dtype for t in tensors):
        return
    named = [cells.box for tensor in tensors for cells in strided_boxes(window_of(tensor), memory.shape)]
    for write in memory.writes():
        left = [write.box]
        for box in named:
            left = [rest for part in left for rest in part.minus(box)]
        if left and write.origin.names:
            raise EngineError(
                f"{write.origin.names[0]!r} goes to cells beside the parameters, in memory that they share with a "
                f"tensor that is no parameter or buffer of the module: register it as a buffer"
            )


def _check_shapes(before: Parameters, after: Parameters) -> None:
    for name, tensor in after.items():
        if name not in before or tensor.shape != before[name].shape:
            raise EngineError(f"the loader replaces parameter {name!r} by one of shape {list(tensor.shape)}")


class Parameter(NamedTuple):
    """A parameter after the loader ran, and the strides that it has for the engine."""

    name: str
    tensor: torch.Tensor
    strides: tuple[int, ...]

    def constant(self, pair: StridedPair, values: torch.Tensor) -> Constant:
        """Cells of it (`there`) that hold flat values (`here`)."""
        sizes = tuple(step.size for step in pair.steps)
        own = values.as_strided(sizes, [step.here for step in pair.steps], pair.here)
        destination = Destination(self.name, pair.there, sizes, tuple(step.there for step in pair.steps))
        return Constant(destination, own if values.numel() == 1 else own.clone())

    def filled_boxes(self, pair: StridedPair, shape: tuple[int, ...]) -> Iterator[FilledBox]:
        """Cells of it (`there`) that hold those of a tensor of the checkpoint (`here`), of that shape."""
        for box, offset, strides in strided_boxes(pair, shape):
            yield FilledBox(box, Destination(self.name, offset, box.shape, strides))


def _add(record: LocalRecord, memory: Memory, parameter: Parameter, shapes: Mapping[str, TensorShape]) -> None:
    """Note what the cells of a parameter hold."""
    for pair, found in memory.read(window_of(parameter.tensor, 0, parameter.strides)):
        if found is memory.initial:
            continue
        origin = _checked(record, found, memory.dtype)
        if isinstance(origin, FromCheckpoint):
            record.boxes.setdefault(origin.name, []).extend(parameter.filled_boxes(pair, shapes[origin.name].shape))
        elif isinstance(origin, FromLoader):
            record.constants.append(parameter.constant(pair, origin.values))
        elif origin.names:
            record.untraceable.append(origin)
        else:
            what = f"parameter {parameter.name!r} gets values that are not in the checkpoint"
            raise EngineError(f"the loader cannot be recorded: {what}: {origin.reason}")
    record.overwrites += [(parameter.name, one) for one in memory.overwrites]


def _checked(record: LocalRecord, origin: Origin, dtype: torch.dtype) -> Origin:
    """The origin of values that a parameter keeps; untraceable where no single cast to one dtype gives them."""
    if not isinstance(origin, FromCheckpoint):
        return origin
    if origin.rounded not in (None, dtype):
        return Untraceable(origin.names, f"it is rounded to {origin.rounded}, but kept as {dtype}")
    if record.dtypes.setdefault(origin.name, dtype) != dtype:
        return Untraceable(origin.names, "it goes to parameters of different dtypes")
    return origin


def _unfilled(recorder: Recorder, tensors: Parameters) -> dict[str, tuple[Box, ...]]:
    """The cells of parameters (not of buffers) that nothing fills."""
    parameters = {name: one for name, one in tensors.items() if isinstance(one, torch.nn.Parameter) and one.numel()}
    gaps = {name: _gaps(one, recorder.memories.get(storage_of(one))) for name, one in parameters.items()}
    return {name: boxes for name, boxes in gaps.items() if boxes}


def _gaps(parameter: torch.Tensor, memory: Memory | None) -> tuple[Box, ...]:
    """The cells of a parameter that were not written to; none where its memory is followed as another dtype."""
    if memory is None:
        return (Box((0,) * parameter.dim(), tuple(parameter.shape)),)
    if parameter.dtype != memory.dtype:
        return ()
    left = [turned(pair) for pair, origin in memory.read(window_of(parameter)) if origin is memory.initial]
    return tuple(cells.box for pair in left for cells in strided_boxes(pair, tuple(parameter.shape)))
