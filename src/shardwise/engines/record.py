"""record: an engine's parameters as targets under the checkpoint's names, found by running its own loader once."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint import open as open_checkpoint
from shardwise.containers.container import layout_of
from shardwise.containers.delivered import DeliveredTensor, Delivery
from shardwise.containers.description import is_tensor
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.engines.deliveries import Guard, merged
from shardwise.engines.explain import Explanation, RecordedName
from shardwise.engines.local_record import (
    Loader,
    LocalRecord,
    Parameters,
    TensorShape,
    cells_of,
    parameters_of,
    record_here,
)
from shardwise.engines.memory import Untraceable
from shardwise.engines.recorder import as_meta
from shardwise.errors import EngineError
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box
from shardwise.job.agree import Callers
from shardwise.layout import Layout
from shardwise.state.traverse import StateDict, flatten_state_dict

Shapes = Mapping[str, TensorShape]
Like = StateDict | Checkpoint | str | os.PathLike[str]
SHOWN = 5  # names or boxes in a message


class RankRecord(NamedTuple):
    """What one rank tells all others of its recording."""

    digest: str  # of the names, shapes and dtypes of the checkpoint
    boxes: dict[str, tuple[Box, ...]]
    dtypes: dict[str, torch.dtype]
    untraceable: list[Untraceable]
    problems: list[str]


class Recorded(dict[str, ShardedTensor]):
    """A state dict with the checkpoint's names. Its memory is that of an engine's parameters.

    It is a target like any other: of `Resharder`, `checkpoint.load` and `reshard_state_dict`. Names that only the
    engine's own loader can load are handed to it, whole, once they are filled.
    """

    def __init__(
        self,
        targets: Mapping[str, ShardedTensor],
        local: LocalRecord,
        module: torch.nn.Module | None,
        parameters: Parameters,
        explanation: Explanation,
    ) -> None:
        super().__init__(targets)
        self.explanation = explanation
        self._local, self._module = local, module
        named = parameters_of(module)
        self._numbered = {name: tensor for name, tensor in parameters.items() if name not in named}
        self._described = {name: as_meta(tensor) for name, tensor in parameters.items()}
        self._seen = {name: _seen(t) for name, t in parameters.items()}
        used = {name: len(local.boxes.get(name, ())) for name in targets}
        self._spare = {name: target.shards[used[name] :] for name, target in targets.items()}  # for unneeded cells

    def __setitem__(self, name: str, value: ShardedTensor) -> None:
        """Refused: the engine would not see another tensor."""
        raise EngineError(
            f"{name!r} of a recorded engine cannot be replaced: the engine would not see it. If its parameters are on "
            f"the meta device, give them memory (module.to_empty), and call resolve() before they are filled"
        )

    def resolve(self) -> None:
        """Look up the engine's parameters again, after they were allocated anew, and write the recorded constants."""
        current = {**self._numbered, **parameters_of(self._module)}
        self._check(current)
        with torch.no_grad():
            for destination, values in self._local.constants:
                destination.view(current).copy_(values)
        for name, target in self.items():
            if not isinstance(target, DeliveredTensor):
                target.set_shards([*self._local.views(name, current), *self._spare[name]])

    def release(self) -> None:
        """Drop the references to the engine's memory. `resolve` looks it up again."""
        for name, target in self.items():
            if not isinstance(target, DeliveredTensor):
                target.set_shards([*self._local.views(name, self._described), *self._spare[name]])

    def hand_over(self, load: Loader, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give tensors to the engine's loader, which must leave the cells of all other names alone."""
        others = {name: one.shards for name, one in self.items() if not isinstance(one, DeliveredTensor)}
        with torch.no_grad(), Guard([name for name, _ in weights], others):
            load(weights)

    def _check(self, current: Parameters) -> None:
        """Refuse parameters that are not those that were recorded."""
        used = {one.destination.parameter for boxes in self._local.boxes.values() for one in boxes}
        for name in sorted(used | {one.destination.parameter for one in self._local.constants}):
            now, before = _seen(current[name]), self._seen[name]
            if now != before:
                raise EngineError(
                    f"parameter {name!r} of the engine has {now} now, but had {before} "
                    f"when its loader was recorded: make it loadable first, by the engine's adapter, or record again"
                )
            if current[name].is_meta:
                raise EngineError(f"parameter {name!r} of the engine is on the meta device: give it memory first")
        for name, first in self._local.tied.items():
            if cells_of(current[name]) != cells_of(current[first]):
                raise EngineError(
                    f"parameters {first!r} and {name!r} of the engine were one tensor when its loader was recorded, "
                    f"and are two now: tie them again (to_empty unties them), or record again"
                )


def _seen(tensor: torch.Tensor) -> str:
    """What places in it depend on; strides only of dims that have several cells."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return f"shape {list(tensor.shape)}, strides {strides} and {tensor.dtype}"


def record(
    load: Loader,
    like: Like,
    *,
    module: torch.nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = 120,
    strict: bool = True,
) -> Recorded:
    """The parameters of an engine as targets with the checkpoint's names. Every rank of the engine calls.

    `load` takes an iterable of (name, tensor), as `model.load_weights` of vLLM does. It is run on tensors without
    values that record what is done to them. No parameter is changed, apart from constants such as padding.

    `like`: names, shapes and dtypes of the checkpoint: a path, an open checkpoint, a state dict, or a mapping from
    names to (shape, dtype). Give the dtypes that you will send. `module`: whose parameters are filled; by default the
    object that `load` is a method of. `group`: the ranks of the engine; by default the default group, or this process
    alone. `timeout`: for the recording, in seconds. `strict=False`: accept parameters that nothing fills, and cells
    that two names fill (the last one wins).

    >>> model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(4, 12, bias=False)})
    >>> def load(weights):
    ...     for name, tensor in weights:
    ...         model["qkv"].weight.data["qkv".index(name) * 4 :][:4].copy_(tensor)
    >>> target = record(load, {name: ((4, 4), torch.float32) for name in "qkv"}, module=model)
    >>> target["k"]
    ShardedTensor(4x4/R@1, torch.float32, rank 0 holds [0:4, 0:4])
    """
    callers = Callers("record", group)
    owner = module if module is not None else getattr(load, "__self__", None)
    engine = owner if isinstance(owner, torch.nn.Module) else None

    def say() -> tuple[tuple[Shapes, LocalRecord, Parameters], RankRecord]:
        shapes = shapes_of(like)
        local, parameters = record_here(load, shapes, engine, timeout)
        return (shapes, local, parameters), _shared(shapes, local, callers.me)

    (shapes, local, parameters), by_rank = callers.tell(say)
    if len({one.digest for one in by_rank.values()}) > 1:
        raise EngineError("record: `like` differs between the ranks: give all of them the same checkpoint")
    explanation = _explained(shapes, by_rank)
    if explanation.problems and strict:
        raise _incomplete(explanation.problems)

    def take(weights: Mapping[str, Sequence[torch.Tensor]]) -> None:
        recorded.hand_over(load, [(name, tensors[0]) for name, tensors in weights.items()])

    deliveries = {name: Delivery(one.names, take) for one in _through_loader(by_rank) for name in one.names}
    targets = _targets(explanation, deliveries, local, parameters, callers)
    recorded = Recorded(targets, local, engine, parameters, explanation)
    if not any(tensor.is_meta for tensor in parameters.values()):
        recorded.resolve()
    return recorded


def explain(recorded: Recorded) -> Explanation:
    """How each name gets into the engine: direct, with its boxes, or through the loader, with the reason.

    >>> weight = torch.zeros(8, 4)
    >>> def load(weights):
    ...     for name, tensor in weights:
    ...         weight[:4].copy_(tensor) if name == "a" else weight[4:].copy_(-tensor)
    >>> print(explain(record(load, {"a": ((4, 4), torch.float32), "b": ((4, 4), torch.float32)})))
    names: 1 direct, 1 through the loader, 0 unused; bytes to all ranks: 128 (whole tensors: 128)
    a  4x4 float32  direct: rank 0 [0:4, 0:4]
    b  4x4 float32  through the loader: it goes through aten.neg
    """
    return recorded.explanation


def _targets(
    explanation: Explanation,
    deliveries: Mapping[str, Delivery],
    local: LocalRecord,
    parameters: Parameters,
    callers: Callers,
) -> dict[str, ShardedTensor]:
    """A target for each name that the engine uses."""
    device = next((tensor.device for tensor in parameters.values()), None)
    targets = dict[str, ShardedTensor]()
    for one in explanation.names:
        if one.way == "loader":
            layout, delivery = Layout.replicated(one.shape, callers.owners), deliveries[one.name]
            targets[one.name] = DeliveredTensor(delivery, layout, one.dtype, device=device, group=callers.group)
        elif one.way == "direct":
            targets[one.name] = _direct_target(one, local.views(one.name, parameters), callers)
    return targets


def _direct_target(one: RecordedName, views: Tensors, callers: Callers) -> ShardedTensor:
    """A ShardedTensor of this rank's views. Cells that no rank needs get memory of their own on one rank."""
    layout, spare = _layout(one.shape, tuple((rank, tuple(boxes)) for rank, boxes in one.boxes.items()))
    unneeded = spare if callers.me == next(iter(one.boxes)) else ()
    views += [torch.empty(box.shape, dtype=one.dtype, device=views[0].device) for box in unneeded]
    return ShardedTensor(views, layout, callers.group)


@lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], by_rank: tuple[tuple[int, tuple[Box, ...]], ...]) -> tuple[Layout, tuple[Box, ...]]:
    """The layout of the boxes of all ranks; and the boxes that none of them has, which the first one gets as well."""
    pieces = [(rank, box.lo, box.hi) for rank, boxes in by_rank for box in boxes]
    layout = Layout.boxes(shape, pieces, overlap="replicas")
    gaps = layout.diagnosis.gaps
    if not gaps:
        return _simplest(layout), ()
    return Layout.boxes(shape, [*pieces, *((by_rank[0][0], gap.lo, gap.hi) for gap in gaps)], overlap="replicas"), gaps


def _simplest(layout: Layout) -> Layout:
    """The same layout in its shortest notation."""
    replicated = Layout.replicated(layout.shape, layout.owners())
    return replicated if replicated == layout else layout.shortest()


def _explained(shapes: Shapes, by_rank: Mapping[int, RankRecord]) -> Explanation:
    """The same on all ranks."""
    reasons = {name: one.reason for one in _through_loader(by_rank) for name in one.names}
    names = [_explained_name(name, shape, reasons.get(name), by_rank) for name, shape in shapes.items()]
    problems = dict.fromkeys(problem for one in by_rank.values() for problem in one.problems)
    return Explanation(tuple(names), tuple(by_rank), tuple(problems))


def _explained_name(
    name: str, tensor: TensorShape, reason: str | None, by_rank: Mapping[int, RankRecord]
) -> RecordedName:
    if reason is not None:
        return RecordedName(name, *tensor, "loader", reason=reason)
    boxes = {rank: one.boxes[name] for rank, one in by_rank.items() if name in one.boxes}
    if not boxes:
        return RecordedName(name, *tensor, "unused")
    becomes = by_rank[next(iter(boxes))].dtypes[name]
    return RecordedName(name, tensor.shape, becomes, "direct", boxes)


def _through_loader(by_rank: Mapping[int, RankRecord]) -> list[Untraceable]:
    """The names that only the loader can load, on any rank; those that it needs together are one."""
    return merged([*(found for one in by_rank.values() for found in one.untraceable), *_different_dtypes(by_rank)])


def _different_dtypes(by_rank: Mapping[int, RankRecord]) -> list[Untraceable]:
    dtypes = defaultdict[str, set[torch.dtype]](set)
    for one in by_rank.values():
        for name, dtype in one.dtypes.items():
            dtypes[name].add(dtype)
    return [Untraceable((name,), "ranks keep it in different dtypes") for name in dtypes if len(dtypes[name]) > 1]


def _incomplete(problems: Sequence[str]) -> EngineError:
    listed = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
    more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return EngineError(f"record: the loader leaves the engine incomplete:{listed}{more}\nstrict=False accepts that.")


def shapes_of(like: Like) -> dict[str, TensorShape]:
    """The names, shapes and dtypes of a checkpoint."""
    if isinstance(like, str | os.PathLike):
        like = open_checkpoint(like)
    if isinstance(like, Checkpoint):
        return {name: TensorShape(tuple(entry.shape), entry.dtype) for name, entry in like.items()}
    if not isinstance(like, Mapping):
        raise TypeError(f"like= must be a checkpoint, its path, a state dict or {{name: (shape, dtype)}}, not {like!r}")
    given = {str(name): _given_shape(value) for name, value in like.items()}
    shapes = {name: shape for name, shape in given.items() if shape is not None}
    if len(shapes) == len(given):
        return shapes
    flat, _ = flatten_state_dict(like)
    return {name: _shape_of(value) for name, value in flat.items() if is_tensor(value)}


def _given_shape(value: object) -> TensorShape | None:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
        return TensorShape(tuple(value[0]), value[1])
    return None


def _shape_of(tensor: torch.Tensor) -> TensorShape:
    return TensorShape(tuple(layout_of(tensor).shape if is_sharded(tensor) else tensor.shape), tensor.dtype)


def _digest(shapes: Mapping[str, TensorShape]) -> str:
    return blake2b(repr(list(shapes.items())).encode(), digest_size=16).hexdigest()


def _shared(shapes: Shapes, local: LocalRecord, me: int) -> RankRecord:
    boxes = {name: tuple(one.box for one in several) for name, several in local.boxes.items()}
    return RankRecord(_digest(shapes), boxes, local.dtypes, local.untraceable, list(_problems(local, me)))


def _problems(local: LocalRecord, me: int) -> Iterator[str]:
    """Cells of this rank's parameters that nothing fills, or that two names fill."""
    for parameter, (name, by, box) in local.overwrites:
        yield f"rank {me}: {box} of parameter {parameter!r} is filled by {name!r}, and then by {by!r}"
    for parameter, gaps in local.unfilled.items():
        shown = ", ".join(map(str, gaps[:SHOWN])) + (" ..." if len(gaps) > SHOWN else "")
        yield f"rank {me}: nothing fills {shown} of parameter {parameter!r}"
