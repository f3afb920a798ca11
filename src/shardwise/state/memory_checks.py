"""Whether the memory of both sides of a sync is what its plan needs, on this rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwise.containers.memory import check_written, shared
from shardwise.exchange.messages import Tensors
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.side import LiveSide

Infos = dict[str, TensorInfo]


def check_memory(
    plan: ModelPlan, source: LiveSide, target: LiveSide, infos: tuple[Infos, Infos], me: int, *, apart: bool
) -> None:
    """Refuse memory that does not match the layouts, cannot be written, or (with `apart`) is on both sides."""
    targets = checked_target(plan, target, infos[1], me)
    sources = source.checked("source", {**infos[0], **plan.sources}, me)
    check_apart(targets, sources if apart else {}, plan.kept)  # verified values are written once all are read


def checked_target(plan: ModelPlan, target: LiveSide, infos: Infos, me: int) -> dict[str, Tensors]:
    """The memory of the target; refused if it does not match the layouts or cannot be written."""
    targets = target.checked("target", {**infos, **plan.targets}, me)
    for name, memory in targets.items():
        for tensor in memory:
            check_written(tensor, f"{name!r} of the target")
    return targets


def check_apart(
    targets: Mapping[str, Tensors], sources: Mapping[str, Tensors], kept: Collection[tuple[str, str]] = ()
) -> None:
    """Refuse memory that would be written twice, or read after it was written.

    Tied targets may share all of their memory. What is `kept` does not change: it may be both source and target.
    """
    written = [("target", name, tensor) for name, memory in targets.items() for tensor in memory]
    read = [("source", name, tensor) for name, memory in sources.items() for tensor in memory]
    both = [*written, *read]
    for a, b in shared([tensor for *_, tensor in written], [tensor for *_, tensor in read]):
        (_, name, ours), (side, other, theirs) = both[a], both[b]
        same = ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
        if not same or (side == "source" and (other, name) not in kept):
            raise ValueError(f"{name!r} of the target shares memory with {other!r} of the {side}: give it its own")


def check_unshared(targets: Mapping[str, Tensors], sources: Mapping[str, Tensors]) -> None:
    """Refuse memory of an asynchronous run that is on both sides: older values would be written over newer ones."""
    written = [(name, tensor) for name, memory in targets.items() for tensor in memory]
    read = [(name, tensor) for name, memory in sources.items() for tensor in memory]
    for a, b in shared([tensor for _, tensor in written], [tensor for _, tensor in read]):
        if b >= len(written):
            raise ValueError(
                f"{written[a][0]!r} of the target shares memory with {read[b - len(written)][0]!r} of the source: an "
                f"asynchronous run would write older values over newer ones. Give it its own, or run without async_op"
            )
