"""What all ranks have of a state that is saved. They tell each other, and check that it fits together."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import NamedTuple

import torch

from shardwise.checkpoint.assignment import assign_writers
from shardwise.checkpoint.known_states import KnownState, KnownStates, StateDescription
from shardwise.checkpoint.random_state import with_random_states
from shardwise.checkpoint.replica_samples import differing_replicas, sample_sums
from shardwise.checkpoint.save_options import SaveOptions
from shardwise.checkpoint.values import encode, refuse_modules
from shardwise.containers.description import describe_all, is_tensor
from shardwise.containers.ties import tied, ties_of
from shardwise.job.agree import Callers
from shardwise.job.plan import TensorInfo
from shardwise.job.session import check_owners
from shardwise.job.side import combine_descriptions, refuse_several_jobs
from shardwise.layout import Layout
from shardwise.state.traverse import FLATTEN_MAPPING, StateDict, flatten_state_dict, is_step


class _Here(NamedTuple):
    """What a rank has, and an equal state that is known."""

    flat: dict[str, object]
    paths: FLATTEN_MAPPING
    here: StateDescription
    sums: dict[str, int]  # of plain tensors
    state: KnownState | None


class _Told(NamedTuple):
    """What a rank tells the others: the number of an equal state that is known, or what it has and a digest of that.

    `sums`: a digest of the checksums of its plain tensors. Most ranks tell the same, which is then kept once.
    """

    known: bytes | None
    here: StateDescription | None
    digest: bytes
    sums: bytes

    @staticmethod
    def of(here: StateDescription, sums: Mapping[str, int], state: KnownState | None) -> _Told:
        """Of a state, where an equal one may be known."""
        digest = blake2b(repr(sums).encode()).digest()
        if state is not None:
            return _Told(state.number, None, b"", digest)
        return _Told(None, here, blake2b(pickle.dumps(here)).digest(), digest)


def describe_state(
    callers: Callers, state_dict: StateDict, options: SaveOptions
) -> tuple[dict[str, object], KnownState]:
    """This rank's flat state dict, and what all ranks have together."""
    known = KnownStates.of(callers)

    def say() -> tuple[_Here, _Told]:
        options.check()
        flat, paths = _flatten(callers, state_dict)
        others = [name for name, value in flat.items() if value is not None and not is_tensor(value)]
        for name in others:
            encode(flat[name], name)  # refused before anything is written
        marked = {} if callers.alone else sample_sums(flat)
        here = StateDescription(describe_all(flat, callers.transport), others, ties_of(flat, callers.transport))
        state = known.find(here, paths)
        return _Here(flat, paths, here, marked, state), _Told.of(here, marked, state)

    mine, told = callers.tell(say, asdict(options))
    state = mine.state
    if state is None or {one.known for one in told.values()} != {state.number}:
        state = _together(callers, told, mine)
    same = len({one.sums for one in told.values()}) == 1  # then no plain tensor differs between ranks
    differing = [] if same else differing_replicas(state.tensors, mine.sums, callers.highest)
    return mine.flat, known.add(state if differing == state.differing else _with_writers(state, differing))


def _flatten(callers: Callers, state_dict: StateDict) -> tuple[dict[str, object], FLATTEN_MAPPING]:
    """A flat state dict that can be saved, and the paths of its leaves."""
    flat, paths = flatten_state_dict(state_dict)
    flat = with_random_states(flat, callers)
    refuse_modules(flat)
    for name, steps in paths.items():
        if not all(map(is_step, steps)):
            raise TypeError(f"{name!r} has a key that is neither a string nor an integer in its path {steps}")
    return flat, paths


def _together(callers: Callers, told: Mapping[int, _Told], mine: _Here) -> KnownState:
    """What all ranks have."""
    if any(one.here is None for one in told.values()):  # some know it, others do not
        _, told = callers.tell(lambda: (None, _Told.of(mine.here, mine.sums, None)))
    by_rank = {rank: one.here for rank, one in told.items() if one.here is not None}
    with callers.refusals():
        tensors = _all_tensors(callers, by_rank)
    ties = tied({rank: one.ties for rank, one in by_rank.items()})
    number = blake2b(b"".join(one.digest for one in told.values())).digest()
    return _with_writers(KnownState(number, mine.here, mine.paths, tensors, ties, [], {}), [])


def _with_writers(state: KnownState, differing: Sequence[str]) -> KnownState:
    """With the writers of all tensors, where these names differ between ranks."""
    layouts = _layouts(state.tensors, differing)
    layouts |= {name: layouts[one] for name, one in state.ties.items()}
    return replace(state, differing=differing, layouts=layouts, made={}, known_cuts={})


def _all_tensors(callers: Callers, by_rank: Mapping[int, StateDescription]) -> dict[str, TensorInfo]:
    """The tensors of all ranks, which must have the same other values."""
    (first, one), *others = by_rank.items()
    for rank, other in others:
        if other.others != one.others:
            strange = sorted(set(one.others) ^ set(other.others)) or one.others
            raise ValueError(f"ranks {first} and {rank} have different values that are not tensors: {strange[:5]}")
    descriptions = {rank: one.tensors for rank, one in by_rank.items()}
    refuse_several_jobs(descriptions, callers.transport)
    tensors = combine_descriptions(descriptions, "state dict")
    check_owners(callers.owners, {f"{name!r} of the state dict,": one.layout for name, one in tensors.items()})
    _check_whole(tensors)
    return tensors


def _check_whole(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors with cells that no rank holds: each rank may only know its own chunks."""
    for layout in {tensor.layout for tensor in tensors.values()}:
        try:
            layout.validate()
        except ValueError as error:
            name = next(name for name, tensor in tensors.items() if tensor.layout == layout)
            raise ValueError(f"{name!r} of the state dict: {error}") from error


def _layouts(tensors: Mapping[str, TensorInfo], differing: Sequence[str]) -> dict[str, tuple[torch.dtype, Layout]]:
    """The dtype of every tensor and its writers. The first rank writes tensors that differ between ranks."""
    sources = {name: tensor.layout for name, tensor in tensors.items()}
    sources |= {name: of_first_rank(tensors[name]) for name in differing}
    return {
        name: (tensor.dtype, assign_writers(name, sources[name], tensor.dtype.itemsize, turn))
        for turn, (name, tensor) in enumerate(tensors.items())
    }


def of_first_rank(tensor: TensorInfo) -> Layout:
    """A plain tensor as the first rank that has it holds it."""
    return Layout.replicated(tensor.shape, tensor.layout.owners()[:1])
