"""A state dict as it is to be saved: its tensors renamed, joined, split and rearranged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.containers.description import is_tensor, memory_of
from shardwise.job.agree import Callers
from shardwise.job.names import Rename, matched, rename_patterns, renamed
from shardwise.job.remap import Link, Remap, links, shapes_after
from shardwise.job.subtensor import Subtensor
from shardwise.layout import Layout
from shardwise.state.reshard import reshard_state_dict
from shardwise.state.traverse import StateDict, flatten_state_dict


def remap_state_dict(state_dict: StateDict, callers: Callers, rename: Rename, remap: Sequence[Remap]) -> StateDict:
    """The tensors under their new names; other values as they are. Without `remap`, they are the same tensors."""
    result = _checked_names(state_dict, callers, rename, same_tensors=not remap)
    if not remap:
        return result
    if callers.alone:
        return _alone(state_dict, rename, remap)

    def spread(shape: tuple[int, ...]) -> Layout:
        longest = max(range(len(shape)), key=shape.__getitem__, default=None)
        owners = callers.owners
        return Layout.replicated(shape, owners[:1]) if longest is None else Layout.chunk(shape, longest, owners)

    return reshard_state_dict(state_dict, [("*", spread)], group=callers.group, rename=rename, remap=remap)


def _checked_names(state_dict: StateDict, callers: Callers, rename: Rename, *, same_tensors: bool) -> StateDict:
    """With new names if the tensors stay the same. Refused is a pattern that matches nothing on any rank."""

    def say() -> tuple[StateDict, frozenset[str]]:
        result = _renamed(state_dict, rename) if same_tensors else state_dict
        flat, _ = flatten_state_dict(state_dict)
        return result, frozenset(p for p in rename_patterns(rename) if not any(matched(p, n) is not None for n in flat))

    result, unused = callers.tell(say)
    nowhere = sorted(frozenset.intersection(*unused.values()))
    if nowhere:
        with callers.refusals():
            raise ValueError(f"rename= has {nowhere[0]!r}, which matches no name of the state dict")
    return result


def _renamed(state_dict: StateDict, rename: Rename) -> StateDict:
    flat, _ = flatten_state_dict(state_dict)
    result = dict[str, object]()
    for name, value in flat.items():
        for new in renamed(name, rename, flat) if is_tensor(value) or value is None else [name]:
            if new in result:
                raise ValueError(f"two leaves of the state dict would both be {new!r}: give them different names")
            result[new] = value
    return result


def _alone(state_dict: StateDict, rename: Rename, remap: Sequence[Remap]) -> StateDict:
    """In one process: views of the same memory where a tensor comes from one other, new memory where from several."""
    flat, _ = flatten_state_dict(state_dict)
    tensors = {name: memory_of(value)[0] for name, value in flat.items() if is_tensor(value)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    targets = shapes_after(shapes, rename=rename, remap=remap)
    made = {name: list[Link]() for name in targets}
    for link in links(shapes, targets, rename=rename, remap=remap, empty=True):
        made[link.target].append(link)
    others = {name: value for name, value in flat.items() if name not in tensors}
    return {**others, **{name: _joined(shape, made[name], tensors) for name, shape in targets.items()}}


def _joined(shape: tuple[int, ...], parts: Sequence[Link], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 and parts[0].target_view.is_whole(shape):
        return _view(tensors[parts[0].source], parts[0].source_view)
    stored = [(link, tensors[link.source]) for link in parts if not link.zeros]
    dtypes = {tensor.dtype for _, tensor in stored}
    if len(dtypes) > 1:
        raise ValueError(f"{parts[0].target!r} is put together from {', '.join(map(str, dtypes))}: make them alike")
    whole = torch.zeros(shape, dtype=dtypes.pop(), device=stored[0][1].device)
    for link, tensor in stored:
        if 0 not in link.target_view.shape:
            _view(whole, link.target_view).copy_(_view(tensor, link.source_view))
    return whole


def _view(tensor: torch.Tensor, part: Subtensor) -> torch.Tensor:
    offset = tensor.storage_offset() + sum(at * stride for at, stride in zip(part.start, tensor.stride(), strict=True))
    return tensor.as_strided(part.shape, [tensor.stride(dim.of) * dim.step for dim in part.dims], offset)
