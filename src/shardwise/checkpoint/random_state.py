"""The states of random generators, saved for every rank: a leaf of a state dict that `save` and `load` know.

In a checkpoint it is one tensor of bytes, with a row for each rank. A row has JSON, and blanks after it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.values import decode, encode
from shardwise.containers.sharded import ShardedTensor
from shardwise.errors import CheckpointError
from shardwise.geometry import Box
from shardwise.job.agree import Callers
from shardwise.layout import Layout
from shardwise.transports.members import has_default_group

ROW = 2**15  # bytes: the states of Python, numpy, the CPU and a GPU take 20,000
DEVICES = ("cuda", "xpu")
Ranks = Literal["each", "first"]


class RandomState:
    """The random generators of this rank, as a leaf of a state dict. See `random_state`."""

    def __init__(self, rng: Ranks) -> None:
        self.rng = rng

    def __repr__(self) -> str:
        return f"random_state(rng={self.rng!r})"


def random_state(*, rng: Ranks = "each") -> RandomState:
    """The random generators of every rank, to put into a state dict: `save` stores their states, `load` restores them.

    These are the generators of Python's `random`, of `numpy.random`, and torch's default ones: of the CPU, and of the
    current CUDA or XPU device if it was used. The states are those at the moment of the save.

    >>> from shardwise import checkpoint
    >>> checkpoint.save({"step": 3, "random": checkpoint.random_state()}, "memory://random")
    >>> drawn = torch.rand(2)
    >>> _ = checkpoint.load("memory://random", into={"step": 0, "random": checkpoint.random_state()})
    >>> torch.equal(torch.rand(2), drawn)
    True

    `rng="each"`: every rank gets its own states back, which takes as many ranks as were saved; another number is
    refused. `rng="first"`: all ranks get the states of the first rank, and draw the same numbers from then on, also
    where they drew different ones before. Then reseed what must differ between ranks.
    """
    if rng not in ("each", "first"):
        raise ValueError(f"rng= must be 'each' or 'first', not {rng!r}")
    return RandomState(rng)


# --- saving -----------------------------------------------------------------------------------------------------------


def with_random_states(flat: dict[str, object], callers: Callers) -> dict[str, object]:
    """Every RandomState of a flat state dict as a tensor: a row for each of the callers."""
    return {name: _stored(callers) if isinstance(value, RandomState) else value for name, value in flat.items()}


def _stored(callers: Callers) -> ShardedTensor:
    text = json.dumps(encode(_current_states(), "random state")).encode()
    if len(text) > ROW:
        raise CheckpointError(f"the states of the random generators take {len(text)} bytes: at most {ROW} are stored")
    row = torch.frombuffer(bytearray(text.ljust(ROW)), dtype=torch.uint8).view(1, ROW)
    return ShardedTensor(row, Layout.chunk((len(callers.owners), ROW), 0, callers.owners))


class Generator(NamedTuple):
    """Gets and sets the state of a generator."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def _current_states() -> dict[str, object]:
    return {name: one.get() for name, one in _generators().items()}


def _generators() -> dict[str, Generator]:
    """The generators of this process, by name."""
    devices = {name: _of_torch(module) for name, module in _used_devices()}
    numpy = Generator(np.random.get_state, np.random.set_state)
    return {"python": Generator(random.getstate, random.setstate), "numpy": numpy, "cpu": _of_torch(torch), **devices}


def _used_devices() -> Iterator[tuple[str, Any]]:
    modules = {name: getattr(torch, name, None) for name in DEVICES}
    return ((name, module) for name, module in modules.items() if module is not None and module.is_initialized())


def _of_torch(module: Any) -> Generator:
    """The state as bytes: of the default generator of the CPU, or of the current device."""

    def restore(state: bytes) -> None:
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Generator(lambda: module.get_rng_state().numpy().tobytes(), restore)


# --- loading ----------------------------------------------------------------------------------------------------------


def read_random_states(
    leaves: Mapping[str, object], checkpoint: Checkpoint, callers: Callers, *, strict: bool
) -> list[Mapping[str, object]]:
    """The states that this rank is to restore, for every RandomState of a flat state dict."""
    wanted = {name: value for name, value in leaves.items() if isinstance(value, RandomState)}
    lacking = [name for name in wanted if name not in checkpoint]
    if lacking and strict:
        raise CheckpointError(
            f"{checkpoint.path} has no random state {lacking[0]!r}: leave it out, or strict=False keeps the generators"
        )
    return [_read(checkpoint, name, value, callers) for name, value in wanted.items() if name in checkpoint]


def _read(checkpoint: Checkpoint, name: str, wanted: RandomState, callers: Callers) -> Mapping[str, object]:
    entry, (rank, ranks) = checkpoint[name], _rank_of(callers)
    if len(entry.shape) != 2 or entry.shape[1] != ROW or entry.dtype != torch.uint8:
        raise CheckpointError(f"{name!r} in {checkpoint.path} is not a random state: its shape is {entry.shape}")
    if wanted.rng == "each" and entry.shape[0] != ranks:
        raise CheckpointError(
            f"{name!r} in {checkpoint.path} has the random states of {entry.shape[0]} ranks, but {ranks} load it: "
            f"random_state(rng='first') gives all ranks those of the first one, or leave {name!r} out"
        )
    row = rank if wanted.rng == "each" else 0
    text = entry.read(Box((row, 0), (row + 1, ROW))).numpy().tobytes()
    try:
        states = decode(json.loads(text))
    except ValueError as error:
        raise CheckpointError(f"{name!r} in {checkpoint.path} is damaged: row {row} is not JSON") from error
    if not isinstance(states, dict):
        raise CheckpointError(f"{name!r} in {checkpoint.path} is damaged: row {row} has no states")
    return states


def _rank_of(callers: Callers) -> tuple[int, int]:
    """This rank's number among those that load, and how many they are: all of the job, if each loads on its own."""
    if callers.alone and has_default_group():
        return dist.get_rank(), dist.get_world_size()
    return callers.owners.index(callers.me), len(callers.owners)


def restore_random_states(several: Sequence[Mapping[str, object]]) -> None:
    """Set the generators of this rank; those that it has not used keep their state."""
    for states in several:
        for name, one in _generators().items():
            if name in states:
                _restore(name, one, states[name])


def _restore(name: str, generator: Generator, state: object) -> None:
    try:
        generator.set(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the saved state of the random generator {name!r} does not fit: {error}") from error
