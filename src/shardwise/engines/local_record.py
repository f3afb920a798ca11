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
from shardwise.engines.memory import Lost, Memory, Overwrite, Own, window_of
from shardwise.engines.recorder import NeedsValuesError, Recorder
from shardwise.engines.time_limit import time_limit
from shardwise.errors import EngineError
from shardwise.geometry import Box, StridedPair, strided_boxes
from shardwise.layout import Layout

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Weights], object]
Parameters = Mapping[str, torch.Tensor]


class TensorShape(NamedTuple):
    """What a loader has to know of a tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Destination(NamedTuple):
    """Cells of a parameter: a strided view of it, counted from its first element."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, parameters: Parameters) -> torch.Tensor:
        """Of the parameter as it is now."""
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
    lost: list[Lost] = field(default_factory=list)  # names that only the loader itself can load
    overwrites: list[tuple[str, Overwrite]] = field(default_factory=list)  # by parameter
    unfilled: dict[str, tuple[Box, ...]] = field(default_factory=dict)  # cells of parameters that get nothing


def record_here(
    load: Loader, shapes: Mapping[str, TensorShape], module: torch.nn.Module | None, seconds: float
) -> tuple[LocalRecord, Parameters]:
    """Run the loader without values. Names whose values it looks at are left out, and it is run again.

    Also returns the parameters by name. Tensors that the loader fills and that the module does not have are numbered.
    """
    needed = dict[str, Lost]()
    with time_limit(seconds, f"the loader did not finish within {seconds:g} s while it was recorded"):
        while True:
            given = {name: one for name, one in shapes.items() if name not in needed}
            try:
                with _restored(module) as parameters:
                    recorder = _run(load, given, parameters.values())
                    return _summary(recorder, shapes, list(needed.values()), parameters, parameters_of(module))
            except NeedsValuesError as error:
                patterns = {_pattern(name) for name in error.names if name not in needed}
                if not patterns:
                    raise EngineError(f"the loader cannot be recorded: {error}") from error
                kinds = [name for name in given if _pattern(name) in patterns]
                needed |= dict.fromkeys(kinds, Lost(tuple(kinds), str(error)))


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
        if (
            recorder.needs_values is None and current and re.search("meta|unallocated", str(error))
        ):  # by tolist(), numpy()
            recorder.needs_values = NeedsValuesError([current], "the loader looks at its values")
        if recorder.needs_values is None:
            where = f" at {current!r} of shape {list(shapes[current].shape)}" if current else ""
            raise EngineError(f"the loader failed{where}: {type(error).__name__}: {error}") from error
    if recorder.needs_values is not None:
        raise recorder.needs_values
    return recorder


@contextmanager
def _restored(module: torch.nn.Module | None) -> Iterator[dict[str, torch.Tensor]]:
    """The parameters and buffers of a module, which are put back if the loader replaces them."""
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
    lost: list[Lost],
    before: Parameters,
    after: Parameters,
) -> tuple[LocalRecord, Parameters]:
    """`before` and `after` the loader ran: it may give parameters other memory, but not another shape."""
    for name, tensor in after.items():
        if name not in before or tensor.shape != before[name].shape:
            raise EngineError(f"the loader replaces parameter {name!r} by one of shape {list(tensor.shape)}")
    record, done = LocalRecord(lost=list(lost)), set[tuple[object, ...]]()
    known = set(map(storage_of, after.values()))
    others = [memory.tensor for memory in recorder.engine_memories() if storage_of(memory.tensor) not in known]
    numbered = {f"tensor {number}": tensor for number, tensor in enumerate(others)}
    for name, tensor in {**after, **numbered}.items():
        memory = recorder.memories.get(storage_of(tensor))
        view = storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        if memory is not None and view not in done:  # tied parameters are one
            done.add(view)
            _add(record, memory, Parameter(name, tensor, {**before, **numbered}[name].stride()), shapes)
    record.unfilled = {} if lost else _unfilled(recorder, after)  # names that were left out may fill them
    return record, {**before, **numbered}


class Parameter(NamedTuple):
    """A parameter after the loader ran, and the strides that it has for the engine."""

    name: str
    tensor: torch.Tensor
    strides: tuple[int, ...]

    def destination(self, pair: StridedPair) -> Destination:
        """Cells of it: the other memory of a window."""
        sizes, strides = tuple(step.size for step in pair.steps), tuple(step.there for step in pair.steps)
        return Destination(self.name, pair.there, sizes, strides)


def _add(record: LocalRecord, memory: Memory, parameter: Parameter, shapes: Mapping[str, TensorShape]) -> None:
    """Note what the cells of a parameter hold."""
    for pair, origin in memory.read(window_of(parameter.tensor, 0, parameter.strides)):
        if origin is memory.initial:
            continue
        if isinstance(origin, Lost):
            record.lost.append(origin)
        elif isinstance(origin, Own):
            values = origin.values.as_strided([s.size for s in pair.steps], [s.here for s in pair.steps], pair.here)
            own = values if origin.values.numel() == 1 else values.clone()
            record.constants.append(Constant(parameter.destination(pair), own))
        elif origin.rounded not in (None, memory.dtype):
            record.lost.append(Lost((origin.name,), f"it is rounded to {origin.rounded}, but kept as {memory.dtype}"))
        elif record.dtypes.setdefault(origin.name, memory.dtype) != memory.dtype:
            record.lost.append(Lost((origin.name,), "it goes to parameters of different dtypes"))
        else:
            for box, offset, strides in strided_boxes(pair, shapes[origin.name].shape):
                place = Destination(parameter.name, offset, box.shape, strides)
                record.boxes.setdefault(origin.name, []).append(FilledBox(box, place))
    record.overwrites += [(parameter.name, one) for one in memory.overwrites]


def _unfilled(recorder: Recorder, parameters: Parameters) -> dict[str, tuple[Box, ...]]:
    """The cells of parameters (not of buffers) that nothing fills."""
    unfilled = dict[str, tuple[Box, ...]]()
    for name, parameter in parameters.items():
        memory = recorder.memories.get(storage_of(parameter))
        if not isinstance(parameter, torch.nn.Parameter) or parameter.numel() == 0:
            continue
        boxes = [(0, piece.cells.box.lo, piece.cells.box.hi) for piece in memory.pieces()] if memory else []
        if memory is None or not boxes:
            unfilled[name] = (Box((0,) * parameter.dim(), tuple(parameter.shape)),)
        elif parameter.numel() == prod(memory.shape):  # otherwise its memory has other tensors, too
            gaps = Layout.boxes(memory.shape, boxes, overlap="replicas").diagnosis.gaps
            unfilled |= {name: gaps} if gaps else {}
    return unfilled
