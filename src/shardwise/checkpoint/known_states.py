"""What a save has found out about a state, for later saves of equal ones: the same tensors, with other values.

Ranks tell each other what they have. Where that is what an earlier save was told, on every rank, its number is told
instead: nothing is sent, combined, checked and assigned to writers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch

from shardwise.containers.description import Descriptions
from shardwise.containers.ties import Ties
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box, Window
from shardwise.job.agree import Callers
from shardwise.job.plan import TensorInfo
from shardwise.job.session import resource_of
from shardwise.layout import Layout
from shardwise.state.traverse import FLATTEN_MAPPING

MOST = 4  # states of a group that are known: each takes about as much memory as the index of its checkpoint

Cuts = Sequence[tuple[Box, Window | None]]  # boxes of a tensor, and where they are in its memory; None: all of it
MemorySpecs = tuple[object, ...]


class StateDescription(NamedTuple):
    """What a rank has: its tensors, the names of its other values, and which tensors share their memory."""

    tensors: Descriptions
    others: list[str]
    ties: Ties


@dataclass(frozen=True, eq=False)
class KnownState:
    """What a save has found out. `layouts`: of the writers. `differing`: names that differ between ranks.

    `number`: a digest of what all ranks have told, the same on all. `made`: what writers have made of it.
    """

    number: bytes
    here: StateDescription
    paths: FLATTEN_MAPPING
    tensors: Mapping[str, TensorInfo]
    ties: Mapping[str, str]
    differing: Sequence[str]
    layouts: Mapping[str, tuple[torch.dtype, Layout]]
    made: dict[str, tuple[object, Any]] = field(default_factory=dict)
    known_cuts: dict[str, tuple[MemorySpecs, Cuts]] = field(default_factory=dict)

    def is_of(self, here: StateDescription, paths: FLATTEN_MAPPING) -> bool:
        """True if a state of this rank is an equal one."""
        return here == self.here and list(here.tensors) == list(self.here.tensors) and _alike(paths, self.paths)

    def cuts(self, name: str, memory: Tensors, make: Callable[[], Cuts]) -> Cuts:
        """What `make` returned for this tensor while its memory had the same shapes and strides."""
        specs = tuple(map(_spec, memory))
        known = self.known_cuts.get(name)
        if known is None or known[0] != specs:
            known = self.known_cuts[name] = specs, make()
        return known[1]


def _spec(tensor: torch.Tensor) -> object:
    """All that decides whether and how its elements can be read: its storage may have been given back, for instance."""
    if tensor.layout != torch.strided:
        return object()  # equal to nothing
    whose = type(tensor), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
    return whose, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


def _alike(paths: FLATTEN_MAPPING, known: FLATTEN_MAPPING) -> bool:
    """Equal, and of the same kinds of keys: 1 is a place in a list, or a key of a dict."""
    return paths == known and all(
        [*map(type, path)] == [*map(type, known[name])] for name, path in paths.items() if len(path) > 1
    )


class KnownStates:
    """Those of a group, the last one at the end."""

    def __init__(self) -> None:
        self._states, self._lock = dict[bytes, KnownState](), Lock()

    @staticmethod
    def of(callers: Callers) -> KnownStates:
        """Those of the callers."""
        return resource_of(callers.transport, KnownStates, KnownStates)

    def find(self, here: StateDescription, paths: FLATTEN_MAPPING) -> KnownState | None:
        """The last one that is equal to a state of this rank."""
        with self._lock:
            known = list(self._states.values())
        return next((state for state in reversed(known) if state.is_of(here, paths)), None)

    def add(self, state: KnownState) -> KnownState:
        """One more, or one that was used again. The oldest is forgotten."""
        with self._lock:
            self._states.pop(state.number, None)
            self._states[state.number] = state
            while len(self._states) > MOST:
                del self._states[next(iter(self._states))]
        return state
