"""Run a loader on tensors without values, and follow which cells of the checkpoint it puts where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.containers.dispatch import (
    OpOverload,
    TorchDispatchMode,
    is_view,
    tensors_in,
    with_tensors,
    written_tensors,
)
from shardwise.containers.memory import storage_of
from shardwise.engines.memory import Lost, Memory, Own, Stored, memory_shape, window_of
from shardwise.errors import LayoutError
from shardwise.geometry import StridedPair

aten = torch.ops.aten
WRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
CONSTANTS = {aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones_like.default: 1, aten.new_ones.default: 1}
UNFILLED = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
MOST_RUNS = 4096  # of consecutive indices: beyond that, an index is not followed

Scalar = int | float | bool | complex


class NeedsValuesError(Exception):
    """The loader looks at values of tensors, which have none while it is recorded."""

    def __init__(self, names: Iterable[str], reason: str) -> None:
        super().__init__(reason)
        self.names = tuple(names)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows copies, constants and casts from tensors of the checkpoint to memory of the engine.

    Tensors of the checkpoint are on the meta device, and so is all that is computed from them. What a loader writes to
    memory of the engine is noted and not carried out. The result of an operation that is not followed is `Lost`: the
    names of the checkpoint that went in are noted with it, and nothing is ignored.
    """

    def __init__(self, engine: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories = dict[int, Memory]()
        self.needs_values: NeedsValuesError | None = None  # a loader may catch the error and go on
        self._made = dict[int, torch.Tensor]()  # memory that was allocated while recording
        for tensor in engine:
            self._track(tensor)

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the checkpoint, without values."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._made[storage_of(tensor)] = tensor
        self._track(tensor).write(window_of(tensor), Stored(name, dtype))
        return tensor

    def engine_memories(self) -> list[Memory]:
        """Memory that was there before the recording, and was written to."""
        return [memory for key, memory in self.memories.items() if memory and key not in self._made]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation while recording."""
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func in WRITES:
            return self._write(func, *args)
        if is_view(func) or not any(map(self._memory_with_values, tensors)):
            return self._carry_out(func, tensors, args, kwargs)
        if func in COPIES:
            return self._copy(func, args[0], args[1:], kwargs)
        if func in CONSTANTS or func in UNFILLED or func is aten.full_like.default:
            return self._make(func, args, kwargs)
        if func is aten.cat.default or func is aten.stack.default:
            return self._join(func, *args, **kwargs)
        if func is aten.constant_pad_nd.default:
            return self._pad(*args, **kwargs)
        if func is aten.index_select.default and not self._memory_with_values(args[2]):
            return self._select(*args)
        if func is aten.index.Tensor and (index := _only_index(args[1])) and not self._memory_with_values(index[1]):
            return self._select(args[0], *index)
        return self._lose(func, tensors, args, kwargs)

    # --- what is followed ---------------------------------------------------------------------------------------------

    def _carry_out(self, func: OpOverload, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """A view, or an operation that has nothing to do with the checkpoint."""
        for target in written_tensors(func, args, kwargs):
            if not self._is_made(target):  # memory of the engine is not changed by a recording
                return self._lose(func, tensors, args, kwargs)
        result = func(*args, **kwargs)
        before = set(map(storage_of, tensors))
        self._made |= {storage_of(one): one for one in tensors_in(result) if storage_of(one) not in before}
        return result

    def _write(self, func: OpOverload, target: torch.Tensor, source: Any = 0, *_: Any) -> torch.Tensor:
        """copy_, fill_ and zero_."""
        value = source if isinstance(source, torch.Tensor) else torch.tensor(source, dtype=target.dtype, device="cpu")
        plain = not self._memory_with_values(value) and not value.is_meta
        if plain and self._is_made(target) and not target.is_meta and not self._memory_with_values(target):
            func(target, *(() if func is aten.zero_.default else (source,)))
        elif plain and value.numel() == 1 and target.dtype == self._memory(target).dtype:
            constant = Own(value.detach().reshape(1)).cast(target.dtype)
            self._memory(target).write(window_of(target, 0, (0,) * target.dim()), constant)
        else:
            self._move(target, value.expand(target.shape))
        return target

    def _copy(self, func: OpOverload, source: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """A new tensor with the same values, perhaps of another dtype."""
        result = self._virtual(func(_as_meta(source), *args, **_on_meta(kwargs)))
        self._move(result, source)
        return result

    def _make(self, func: OpOverload, args: Any, kwargs: Any) -> torch.Tensor:
        """A new tensor of the shape of another, or beside it: constant, or not filled yet."""
        result = self._virtual(func(*with_tensors(_as_meta, args), **{**kwargs, "device": "meta"}))
        if func not in UNFILLED:
            self._write(aten.fill_.Scalar, result, CONSTANTS.get(func, args[-1]))
        return result

    def _join(self, func: OpOverload, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """cat and stack."""
        result, start = self._virtual(func([_as_meta(one) for one in parts], dim)), 0
        for number, part in enumerate(parts):
            if func is aten.stack.default:
                self._move(result.select(dim, number), part)
            elif part.dim() == result.dim():  # torch ignores empty parts of one dim
                self._move(result.narrow(dim, start, part.shape[dim]), part)
                start += part.shape[dim]
        return result

    def _pad(self, source: torch.Tensor, pad: Sequence[int], value: Scalar = 0) -> torch.Tensor:
        """Constants around a tensor; negative padding leaves cells out."""
        result = self._virtual(aten.constant_pad_nd.default(_as_meta(source), pad, value))
        self._write(aten.fill_.Scalar, result, value)
        inner = result
        for number in range(len(pad) // 2):
            dim, before, after = source.dim() - 1 - number, pad[2 * number], pad[2 * number + 1]
            source = source.narrow(dim, max(0, -before), source.shape[dim] - max(0, -before) - max(0, -after))
            inner = inner.narrow(dim, max(0, before), source.shape[dim])
        self._move(inner, source)
        return result

    def _select(self, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Rows by number, in any order: consecutive ones are one box."""
        result = self._virtual(aten.index_select.default(_as_meta(source), dim, _as_meta(index)))
        runs = _runs([number % max(source.shape[dim], 1) for number in index.tolist()])
        if len(runs) > MOST_RUNS:
            self._lose_all(result, self._names([source]), f"an index of it has over {MOST_RUNS} parts")
            return result
        at = 0
        for start, count in runs:
            self._move(result.narrow(dim, at, count), source.narrow(dim, start, count))
            at += count
        return result

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The cells of one view come from those of another, of the same shape."""
        into, known = self._memory(target), self._memory(source)
        if target.dtype != into.dtype or source.dtype != known.dtype:
            self._lose_all(target, self._names([source, target]), "its bits are read as another dtype")
            return
        try:
            moves = list(known.read(window_of(source, int(target.storage_offset()), target.stride())))
            for pair, origin in moves:
                into.write(_turned(pair), origin.cast(known.dtype).cast(into.dtype))
        except LayoutError as error:  # too many boxes
            self._lose_all(target, self._names([source, target]), str(error))

    # --- what is not followed -----------------------------------------------------------------------------------------

    def _lose(self, func: OpOverload, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """An operation that is not followed: its results, and what it changes in place, are lost from here on."""
        names, written = self._names(tensors), list(written_tensors(func, args, kwargs))
        try:
            given, options = with_tensors(_as_meta, (args, kwargs))
            result = func(*given, **_on_meta(options))
        except Exception as error:  # the result depends on values
            raise self._looked(names, func) from error
        made = tensors_in(result)
        if result is not None and not made:
            raise self._looked(names, func)
        reason = self._lost_before(tensors) or f"it goes through {_name(func)}"
        for one in written:
            self._lose_all(one, names, reason)
        if written:
            return written[0] if isinstance(result, torch.Tensor) else result
        for one in made:
            self._lose_all(self._virtual(one), names, reason)
        return result

    def _lose_all(self, tensor: torch.Tensor, names: Sequence[str], reason: str) -> None:
        memory = self._memory(tensor)
        window = window_of(tensor if tensor.dtype == memory.dtype else memory.tensor)
        try:
            memory.lose(window, Lost(tuple(names), reason))
        except LayoutError:  # too many boxes: all of it
            memory.lose(window_of(memory.tensor), Lost(tuple(names), reason))

    def _looked(self, names: Sequence[str], func: OpOverload) -> NeedsValuesError:
        self.needs_values = NeedsValuesError(names, f"the loader looks at its values, by {_name(func)}")
        return self.needs_values

    def _lost_before(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """Why values could not be followed at first."""
        memories = (self.memories.get(storage_of(one)) for one in tensors)
        pieces = (piece for memory in memories if memory is not None for piece in memory.pieces())
        return next((one.origin.reason for one in pieces if isinstance(one.origin, Lost) and one.origin.names), None)

    def _names(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        memories = (self.memories.get(storage_of(one)) for one in tensors)
        return list(dict.fromkeys(name for memory in memories if memory is not None for name in memory.names()))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _memory_with_values(self, tensor: torch.Tensor) -> bool:
        """True if something was noted about its memory."""
        return bool(self.memories.get(storage_of(tensor)))

    def _memory(self, tensor: torch.Tensor) -> Memory:
        return self.memories.get(storage_of(tensor)) or self._track(tensor)

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._made

    def _virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor without values."""
        self._made[storage_of(tensor)] = tensor
        self._track(tensor)
        return tensor

    def _track(self, tensor: torch.Tensor) -> Memory:
        known = self.memories.get(storage_of(tensor))
        if known is not None:
            return known
        whole = tensor.detach() if tensor._base is None else tensor._base.detach()
        shape = memory_shape(whole)
        elements = whole.untyped_storage().nbytes() // whole.element_size()
        unknown = Lost((), "it holds what was there before the recording")
        initial = unknown if whole.is_meta else Own(whole.as_strided((elements,), (1,), 0))
        memory = self.memories[storage_of(tensor)] = Memory(shape, whole.dtype, whole, initial)
        return memory


def _name(operation: OpOverload) -> str:
    return operation._schema.name.replace("::", ".")


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in without values for a tensor that has some."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": "meta"} if options.get("device") is not None else options


def _only_index(indices: Sequence[torch.Tensor | None]) -> tuple[int, torch.Tensor] | None:
    """The dim and its index, where only one dim has an index, of whole numbers in one row, with values."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dim, index = given[0]
    followed = len(given) == 1 and index.dim() == 1 and index.dtype == torch.int64 and not index.is_meta
    return (dim, index) if followed else None


def _turned(pair: StridedPair) -> StridedPair:
    steps = tuple(step._replace(here=step.there, there=step.here) for step in pair.steps)
    return StridedPair(pair.there, pair.here, steps)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers, as (first, count).

    >>> _runs([4, 5, 6, 0, 1])
    [(4, 3), (0, 2)]
    """
    runs = list[tuple[int, int]]()
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
