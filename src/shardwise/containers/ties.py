"""Tied weights: tensors with several names that share all of their memory."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch

from shardwise.containers.description import describe, is_tensor, memory_of
from shardwise.containers.memory import plain_memory
from shardwise.transports import GroupTransport

Ties = Mapping[str, tuple[str, bool]]  # the first name of the same memory on a rank, and whether there is any

PLAIN = (torch.Tensor, torch.nn.Parameter)


def ties_of(flat: Mapping[str, object], transport: GroupTransport | None = None) -> dict[str, tuple[str, bool]]:
    """The tied names of a flat state dict on this rank. Names without memory here may be tied on other ranks.

    >>> w = torch.ones(3)
    >>> ties_of({"a": w, "b": w.view(3), "part": w[1:], "c": w.clone()})
    {'a': ('a', True), 'b': ('a', True)}
    """
    tensors = {name: value for name, value in flat.items() if value is None or is_tensor(value)}
    if _all_apart(tensors.values()):
        return {}
    near = _grouped({name: _addresses(value) for name, value in tensors.items()})
    groups = [names for some in near for names in _grouped(_memories({name: flat[name] for name in some}, transport))]
    return {name: (names[0], _has_cells(flat[names[0]])) for names in groups for name in names}


def _all_apart(values: Collection[object]) -> bool:
    """A first test, quicker still: every tensor is in one piece, at an address of its own. False if that is unclear."""
    pieces = [plain_memory(value) for value in values]
    try:
        places = {tensors[0].data_ptr() for tensors in pieces if tensors}
    except RuntimeError:  # of tensors without storage
        return False
    return len(places) == len(pieces) and 0 not in places


def _grouped(keys: Mapping[str, Hashable]) -> list[list[str]]:
    """Groups of names with equal keys, of at least two names."""
    groups = dict[Hashable, list[str]]()
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _addresses(value: object) -> Hashable:
    """A quick first test: most tensors share no address with others. Empty if there are no cells."""
    if isinstance(value, torch.Tensor) and type(value) in PLAIN and value.layout == torch.strided:
        address = value.data_ptr()
        return (address,) if address else ()
    return tuple(tensor.data_ptr() for tensor in memory_of(value, apart=False) if tensor.numel() and _is_plain(tensor))


def tied(by_rank: Mapping[int, Ties]) -> dict[str, str]:
    """Tied names, each with the earlier name whose memory it shares on every rank that has any of it.

    >>> tied({0: {"a": ("a", True), "b": ("a", True)}, 1: {"a": ("a", False), "b": ("a", False), "c": ("a", False)}})
    {'b': 'a'}
    """
    first, ties_to = dict[Hashable, str](), dict[str, str]()
    for name in dict.fromkeys(name for ties in by_rank.values() for name in ties):
        places = [ties.get(name, (name, True)) for ties in by_rank.values()]
        known = first.setdefault(tuple(where for where, _ in places), name)
        if known != name and any(cells for _, cells in places):
            ties_to[name] = known
    return ties_to


def _has_cells(value: object) -> bool:
    return any(tensor.numel() for tensor in memory_of(value))


def _memories(values: Mapping[str, object], transport: GroupTransport | None) -> dict[str, Hashable]:
    """A key per name: equal for the same memory in the same shape, and for tensors without memory here."""
    # keep all tensors alive: a new one at the address of a freed one must not look tied
    parts = {name: [t for t in memory_of(value) if t.numel()] for name, value in values.items()}
    return {
        name: (describe(value, transport), tuple(map(_place, parts[name]))) if is_tensor(value) else None
        for name, value in values.items()
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _place(tensor: torch.Tensor) -> Hashable:
    if not _is_plain(tensor):
        return id(tensor)
    strides = tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype, str(tensor.device), flags
