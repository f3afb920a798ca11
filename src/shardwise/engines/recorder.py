"""Follow what a loader does to tensors without values: which cells of the checkpoint it puts where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from shardwise.containers.dispatch import (
    OpOverload,
    TorchDispatchMode,
    TorchFunctionMode,
    is_view,
    tensors_in,
    with_tensors,
    written_tensors,
)
from shardwise.containers.memory import storage_of
from shardwise.engines.memory import FromCheckpoint, FromLoader, Memory, Untraceable, memory_shape, turned, window_of
from shardwise.errors import LayoutError

aten = torch.ops.aten
Scalar = int | float | bool | complex
WRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
CONSTANTS = {aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones_like.default: 1, aten.new_ones.default: 1}
FACTORIES: dict[OpOverload, Scalar] = {aten.zeros.default: 0, aten.ones.default: 1}
UNFILLED = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
LOOKS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}  # not dispatched
MOST_RUNS = 4096  # of consecutive indices: beyond that, an index is not followed


class NeedsValuesError(Exception):
    """The loader looks at values of tensors, which have none while it is recorded."""

    def __init__(self, names: Iterable[str], reason: str) -> None:
        super().__init__(reason)
        self.names = tuple(names)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows copies, constants and casts from tensors of the checkpoint to memory of the engine.

    Tensors of the checkpoint are on the meta device, and so is all that is computed from them. What a loader writes to
    memory of the engine is noted and not carried out. The result of an operation that is not followed is `Untraceable`:
    the names of the checkpoint that went in are noted with it, and nothing is ignored.
    """

    def __init__(self, engine: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories = dict[int, Memory]()
        self.needs_values: NeedsValuesError | None = None  # a loader may catch the error and go on
        self._made = dict[int, torch.Tensor]()  # memory that was allocated while recording
        for tensor in engine:
            self._memory(tensor)

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the checkpoint, without values."""
        tensor = self._virtual(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self._memory(tensor).write(window_of(tensor), FromCheckpoint(name, dtype))
        return tensor

    def kept_by(self, modules: Iterable[torch.nn.Module]) -> Iterator[Untraceable]:
        """The names of tensors that the loader made and that modules now have as attributes."""
        for module in modules:
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and self._is_made(value) and self._names([value]):
                    yield Untraceable(tuple(self._names([value])), f"the loader keeps it as attribute {key!r}")

    def engine_memories(self) -> list[Memory]:
        """Memory that was there before the recording, and was written to."""
        return [memory for key, memory in self.memories.items() if memory.written and key not in self._made]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Called by torch for every operation while recording."""
        options, tensors = dict(kwargs or {}), tensors_in((args, kwargs))
        if func in WRITES:
            return self._write(func, *args)
        if is_view(func) or not any(map(self._was_written, tensors)):
            return self._carry_out(func, tensors, args, options)
        follow: Callable[..., object] = FOLLOWED.get(func, Recorder._give_up)
        return follow(self, func, *args, **options)

    # --- what is followed ---------------------------------------------------------------------------------------------

    def _carry_out(
        self, func: OpOverload, tensors: Sequence[torch.Tensor], args: Sequence[object], options: dict[str, object]
    ) -> object:
        """A view, or an operation that has nothing to do with the checkpoint."""
        if not all(map(self._is_made, written_tensors(func, args, options))):
            return self._give_up(func, *args, **options)  # memory of the engine is not changed by a recording
        result = func(*args, **options)
        if func in FACTORIES or func is aten.full.default:
            return self._filled(result, FACTORIES[func] if func in FACTORIES else cast(Scalar, args[1]))
        before = set(map(storage_of, tensors))
        self._made |= {storage_of(one): one for one in tensors_in(result) if storage_of(one) not in before}
        return result

    def _write(self, func: OpOverload, target: torch.Tensor, source: torch.Tensor | Scalar = 0, *_: object) -> object:
        """copy_, fill_ and zero_."""
        value = source if isinstance(source, torch.Tensor) else torch.tensor(source, dtype=target.dtype, device="cpu")
        plain = not self._was_written(value) and not value.is_meta
        if plain and self._is_made(target) and not target.is_meta and not self._was_written(target):
            func(target, *(() if func is aten.zero_.default else (source,)))
        elif plain and value.numel() == 1 and _holds_plainly(self._memory(target), target):
            constant = _kept(value).cast(target.dtype)
            self._memory(target).write(window_of(target, 0, (0,) * target.dim()), constant)
        else:
            self._move(target, value.expand(target.shape))
        return target

    def _copy(self, func: OpOverload, source: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        """A new tensor with the same values, perhaps of another dtype."""
        result = self._virtual(func(as_meta(source), *args, **_on_meta(options)))
        self._move(result, source)
        return result

    def _empty(self, func: OpOverload, *args: object, **options: object) -> torch.Tensor:
        """A new tensor of the shape of another, or beside it, not filled yet."""
        return self._virtual(func(*with_tensors(as_meta, args), **{**options, "device": "meta"}))

    def _constant(self, func: OpOverload, *args: object, **options: object) -> torch.Tensor:
        """zeros_like, new_ones and so on."""
        return self._fill(self._empty(func, *args, **options), CONSTANTS[func])

    def _full_like(self, func: OpOverload, like: torch.Tensor, value: Scalar, **options: object) -> torch.Tensor:
        return self._fill(self._empty(func, like, value, **options), value)

    def _filled(self, result: torch.Tensor, value: Scalar) -> torch.Tensor:
        """A new tensor of constants. On the meta device, where the checkpoint's are, it has no values."""
        self._made[storage_of(result)] = result
        return self._fill(self._virtual(result), value) if result.is_meta else result

    def _fill(self, target: torch.Tensor, value: Scalar) -> torch.Tensor:
        self._write(aten.fill_.Scalar, target, value)
        return target

    def _stack(self, func: OpOverload, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        result = self._virtual(func([as_meta(one) for one in parts], dim))
        for number, part in enumerate(parts):
            self._move(result.select(dim, number), part)
        return result

    def _cat(self, func: OpOverload, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        result, start = self._virtual(func([as_meta(one) for one in parts], dim)), 0
        for part in parts:
            if part.dim() == result.dim():  # torch ignores empty parts of one dim
                self._move(result.narrow(dim, start, part.shape[dim]), part)
                start += part.shape[dim]
        return result

    def _pad(self, func: OpOverload, source: torch.Tensor, pad: Sequence[int], value: Scalar = 0) -> torch.Tensor:
        """Constants around a tensor; negative padding leaves cells out."""
        result = self._fill(self._virtual(func(as_meta(source), pad, value)), value)
        inner = result
        for number in range(len(pad) // 2):
            dim, before, after = source.dim() - 1 - number, pad[2 * number], pad[2 * number + 1]
            source = source.narrow(dim, max(0, -before), source.shape[dim] - max(0, -before) - max(0, -after))
            inner = inner.narrow(dim, max(0, before), source.shape[dim])
        self._move(inner, source)
        return result

    def _index(self, func: OpOverload, source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> object:
        """As index_select, where only one dim has an index, of whole numbers in one row, with values."""
        (dim, index), *others = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if others or index.dim() != 1 or index.dtype != torch.int64 or index.is_meta or self._was_written(index):
            return self._give_up(func, source, indices)
        return self._index_select(aten.index_select.default, source, dim, index)

    def _index_select(self, func: OpOverload, source: torch.Tensor, dim: int, index: torch.Tensor) -> object:
        """Rows by number, in any order: consecutive ones are one box."""
        if self._was_written(index):
            return self._give_up(func, source, dim, index)
        result, at, size = self._virtual(func(as_meta(source), dim, as_meta(index))), 0, source.shape[dim]
        numbers = index.tolist()
        if any(not -size <= number < size for number in numbers):
            raise IndexError(f"index {numbers} is out of range for dim {dim} of size {size}")
        runs = _runs([number % size for number in numbers])
        if len(runs) > MOST_RUNS:
            self._mark_untraceable(result, self._names([source]), f"an index of it has over {MOST_RUNS} parts")
            return result
        for start, count in runs:
            self._move(result.narrow(dim, at, count), source.narrow(dim, start, count))
            at += count
        return result

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The cells of one view come from those of another, of the same shape."""
        into, known = self._memory(target), self._memory(source)
        if not _holds_plainly(into, target) or not _holds_plainly(known, source):
            reason = "its bits are read as another dtype, or conjugated"
            self._mark_untraceable(target, self._names([source, target]), reason)
            return
        into.history |= known.history  # constants, too, may have taken the place of values
        try:
            if self._is_made(source) and not source.is_meta and not known.written:
                into.write(window_of(target), _kept(source).cast(into.dtype))
                return
            moves = list(known.read(window_of(source, int(target.storage_offset()), target.stride())))
            for pair, origin in moves:
                into.write(turned(pair), origin.cast(known.dtype).cast(into.dtype))
        except LayoutError as error:  # too many boxes
            self._mark_untraceable(target, self._names([source, target]), str(error))

    # --- what is not followed -----------------------------------------------------------------------------------------

    def _give_up(self, func: OpOverload, *args: object, **options: object) -> object:
        """Mark what an operation returns or changes in place as untraceable."""
        tensors, written = tensors_in((args, options)), list(written_tensors(func, args, options))
        names = self._names(tensors)
        result = self._result_on_meta(func, names, args, options)
        reason = self._first_reason(tensors) or f"it goes through {_name(func)}"
        for one in written or map(self._virtual, tensors_in(result)):
            self._mark_untraceable(one, names, reason)
        return written[0] if written and isinstance(result, torch.Tensor) else result

    def _result_on_meta(
        self, func: OpOverload, names: Sequence[str], args: Sequence[object], options: dict[str, object]
    ) -> object:
        """The result without values; refused where it depends on values, or is one."""
        try:
            given, others = with_tensors(as_meta, (args, options))
            result: object = func(*given, **_on_meta(others))
        except Exception as error:
            raise self._looked(names, func) from error
        if result is not None and not tensors_in(result):
            raise self._looked(names, func)
        return result

    def _mark_untraceable(self, tensor: torch.Tensor, names: Sequence[str], reason: str) -> None:
        memory, origin = self._memory(tensor), Untraceable(tuple(names), reason)
        try:
            memory.write_untraceable(window_of(tensor if tensor.dtype == memory.dtype else memory.tensor), origin)
        except LayoutError:  # too many boxes: all of it
            memory.write_untraceable(window_of(memory.tensor), origin)

    def look(self, tensor: torch.Tensor, how: str) -> None:
        """Refuse to show values of the checkpoint."""
        if self._was_written(tensor):
            raise self._needs(self._names([tensor]), how)

    def _looked(self, names: Sequence[str], func: OpOverload) -> NeedsValuesError:
        return self._needs(names, _name(func))

    def _needs(self, names: Sequence[str], how: str) -> NeedsValuesError:
        self.needs_values = NeedsValuesError(names, f"the loader looks at its values, by {how}")
        return self.needs_values

    def _first_reason(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """Why values became untraceable at first."""
        origins = (write.origin for memory in self._known(tensors) for write in memory.writes())
        return next((one.reason for one in origins if isinstance(one, Untraceable) and one.names), None)

    def _names(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        return list(dict.fromkeys(name for memory in self._known(tensors) for name in memory.history))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _known(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        """The memory of those tensors that the recorder has seen before."""
        return [self.memories[key] for key in map(storage_of, tensors) if key in self.memories]

    def _was_written(self, tensor: torch.Tensor) -> bool:
        """True if a write to its memory was noted."""
        memory = self.memories.get(storage_of(tensor))
        return memory is not None and memory.written

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._made

    def _virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor without values."""
        self._made[storage_of(tensor)] = tensor
        self._memory(tensor)
        return tensor

    def _memory(self, tensor: torch.Tensor) -> Memory:
        """The memory of a tensor, which is followed from now on."""
        key = storage_of(tensor)
        if key not in self.memories:
            self.memories[key] = _untouched(tensor.detach() if tensor._base is None else tensor._base.detach())
        return self.memories[key]


FOLLOWED: dict[OpOverload, Callable[..., object]] = {
    **dict.fromkeys(COPIES, Recorder._copy),
    **dict.fromkeys(UNFILLED, Recorder._empty),
    **dict.fromkeys(CONSTANTS, Recorder._constant),
    aten.full_like.default: Recorder._full_like,
    aten.stack.default: Recorder._stack,
    aten.cat.default: Recorder._cat,
    aten.constant_pad_nd.default: Recorder._pad,
    aten.index.Tensor: Recorder._index,
    aten.index_select.default: Recorder._index_select,
}


class Looks(TorchFunctionMode):
    """Notices that a loader looks at values by ways that are not dispatched, also where it catches the error."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function and method of torch that is called from Python."""
        if func in LOOKS:
            self._recorder.look(args[0], func.__name__)
        return func(*args, **(kwargs or {}))


def _holds_plainly(memory: Memory, view: torch.Tensor) -> bool:
    """True for a view whose elements are those of the memory: not of another dtype, conjugated or negated."""
    return view.dtype == memory.dtype and not view.is_conj() and not view.is_neg()


def _kept(values: torch.Tensor) -> FromLoader:
    """A copy of values of the loader, which may change them in place later on."""
    return FromLoader(values.detach().clone(memory_format=torch.contiguous_format).view(-1))


def _untouched(whole: torch.Tensor) -> Memory:
    """The memory of a tensor as it was before the recording."""
    elements = whole.untyped_storage().nbytes() // whole.element_size()
    unknown = Untraceable((), "it holds what was there before the recording")
    initial = unknown if whole.is_meta else FromLoader(whole.as_strided((elements,), (1,), 0))
    return Memory(memory_shape(whole), whole.dtype, whole, initial)


def _name(operation: OpOverload) -> str:
    return operation._schema.name.replace("::", ".")


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in without values for a tensor that has some."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(options: dict[str, object]) -> dict[str, object]:
    return {**options, "device": "meta"} if options.get("device") is not None else options


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
