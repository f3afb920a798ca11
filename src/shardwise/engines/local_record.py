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
from shardwise.engines.memory import FromCheckpoint, FromLoader, Memory, Origin, Overwrite, Untraceable, window_of
from shardwise.engines.recorder import NeedsValuesError, Recorder
from shardwise.engines.time_limit import time_limit
from shardwise.errors import EngineError
from shardwise.geometry import Box, StridedPair, strided_boxes
from shardwise.layout import Layout

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

    def views(self, name: str, parameters: Parameters) -> list[torch.Tensor]:
        """The cells of parameters that a name goes to, box by box."""
        return [one.destination.view(parameters) for one in self.boxes.get(name, ())]


def record_here(
    load: Loader, shapes: Mapping[str, TensorShape], module: torch.nn.Module | None, seconds: float
) -> tuple[LocalRecord, Parameters]:
    """Run the loader on tensors without values. Where it looks at values, run it again without these names.

    Also returns the parameters by name. Tensors that the loader fills, but the module does not have, get numbers.
    """
    needed = dict[str, Untraceable]()
    with time_limit(seconds, f"the loader did not finish within {seconds:g} s while it was recorded"):
        while True:
            given = {name: one for name, one in shapes.items() if name not in needed}
            try:
                with _restored(module) as parameters:
                    recorder = _run(load, given, parameters.values())
                    return _summary(recorder, shapes, list(needed.values()), parameters, parameters_of(module))
            except NeedsValuesError as error:
                needed |= _alike(error, given)


def _alike(error: NeedsValuesError, names: Iterable[str]) -> dict[str, Untraceable]:
    """The names whose values a loader needs: those of the error, and the same ones of other layers."""
    patterns = set(map(_pattern, error.names))
    alike = tuple(name for name in names if _pattern(name) in patterns)
    if not alike:
        raise EngineError(f"the loader cannot be recorded: {error}") from error
    return dict.fromkeys(alike, Untraceable(alike, str(error)))


def _pattern(name: str) -> str:
    """The same for all layers: what needs values in one of them needs them in all."""
    return re.sub(r"\d+", "*", name)


def _run(load: Loader, shapes: Mapping[str, TensorShape], parameters: Iterable[torch.Tensor]) -> Recorder:
    recorder, current = Recorder(parameters), ""
    sources = {name: recorder.source(name, shape, dtype) for name, (shape, dtype) in shapes.items()}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current in sources:
            yield current, sources[current]

    try:
        with torch.no_grad(), recorder:
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
    if current and re.search("meta|unallocated", str(error)):  # by tolist(), numpy()
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
    try:
        yield {name: tensor.data for name, tensor in parameters_of(module).items()}
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.update(entries)  # type: ignore[arg-type]
        for tensor, data in memory.values():
            if storage_of(tensor) != storage_of(data):
                tensor.data = data


def parameters_of(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones once."""
    if module is None:
        return {}
    tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
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
    others = [memory.tensor for memory in recorder.engine_memories() if storage_of(memory.tensor) not in known]
    numbered = {f"tensor {number}": tensor for number, tensor in enumerate(others)}
    parameters = {**before, **numbered}
    for name, tensor in _untied({**after, **numbered}):
        memory = recorder.memories.get(storage_of(tensor))
        if memory is not None:
            _add(record, memory, Parameter(name, tensor, parameters[name].stride()), shapes)
    record.unfilled = {} if untraceable else _unfilled(recorder, after)  # names that were left out may fill them
    return record, parameters


def _check_shapes(before: Parameters, after: Parameters) -> None:
    for name, tensor in after.items():
        if name not in before or tensor.shape != before[name].shape:
            raise EngineError(f"the loader replaces parameter {name!r} by one of shape {list(tensor.shape)}")


def _untied(tensors: Parameters) -> Iterable[tuple[str, torch.Tensor]]:
    """Each view of memory once, by its first name."""
    first = dict[tuple[object, ...], tuple[str, torch.Tensor]]()
    for name, tensor in tensors.items():
        view = storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        first.setdefault(view, (name, tensor))
    return first.values()


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
        else:
            record.untraceable.append(origin)
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
    if memory is None or not memory.written:
        return (Box((0,) * parameter.dim(), tuple(parameter.shape)),)
    if parameter.numel() != prod(memory.shape):  # its memory has other tensors, too
        return ()
    boxes = [(0, write.box.lo, write.box.hi) for write in memory.writes()]
    return Layout.boxes(memory.shape, boxes, overlap="replicas").diagnosis.gaps
