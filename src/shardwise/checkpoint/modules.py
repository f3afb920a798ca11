"""Load into a module: its parameters and buffers, with memory or on the meta device, under any sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.transformers_names import conversion, is_pretrained, tie
from shardwise.containers.memory import is_meta, local_of, storage_of, with_memory
from shardwise.containers.modules import (
    buffers_of,
    copy_without_parameters,
    meta_attributes,
    put_buffers,
    unsaved_meta_buffers,
    with_parents,
)
from shardwise.errors import CheckpointError
from shardwise.job.names import Names, Rename, renamed
from shardwise.job.remap import Remap
from shardwise.quoting import brief

Buffers = dict[str, torch.Tensor]
OWN_CODE = ("reset_parameters", "reset_buffers", "rope_init")  # methods that fill a module's buffers, by convention


@dataclass
class ModuleTarget:
    """A module as the target of a load: the state dict to fill, and the names and rules to fill it by."""

    module: torch.nn.Module
    checkpoint: Checkpoint
    state: dict[str, Any]
    rename: Rename
    remap: list[Remap]
    buffers: list[tuple[torch.nn.Module, Buffers]]

    @staticmethod
    def of(module: torch.nn.Module, checkpoint: Checkpoint, rename: Rename, remap: Iterable[Remap]) -> ModuleTarget:
        """No tensor of the module is replaced before `finish`; those with memory are filled in place."""
        buffers = _rebuilt(module)
        if is_pretrained(module):
            tie(module)
        state, rules = dict(module.state_dict()), list(remap)
        if is_pretrained(module):
            rename, more = _converted(module, checkpoint, state, rename)
            rules += more
        return ModuleTarget(module, checkpoint, state, rename, rules, buffers)

    def finish(self) -> None:
        """Give the module what it does not have yet: tensors that were on the meta device, and other values."""
        self._check_filled()
        before = self.module.state_dict(keep_vars=True)
        fresh = {name: value for name, value in self.state.items() if is_meta(before[name])}
        _put(self.module, _parameters(fresh, before), assign=True)
        own = {storage_of(local_of(t)[0]) for t in (*self.module.parameters(), *self.module.buffers())}
        others = {name: value for name, value in self.state.items() if name not in fresh and not _is_in(value, own)}
        _put(self.module, others, assign=False)
        for module, buffers in self.buffers:
            put_buffers(module, buffers)

    def _check_filled(self) -> None:
        empty = [name for name, value in self.state.items() if is_meta(value)]
        if empty:
            raise CheckpointError(
                f"{self.checkpoint.path} has no values for {_listed(empty)}, which the module has on the meta device, "
                f"without values of its own: give it memory (to_empty) and values first, or load another checkpoint"
            )


def _is_in(value: object, memory: set[int]) -> bool:
    """True for a tensor that is filled in place: the module sees it at once."""
    return isinstance(value, torch.Tensor) and storage_of(local_of(value)[0]) in memory


def _put(module: torch.nn.Module, values: Mapping[str, Any], *, assign: bool) -> None:
    unexpected = module.load_state_dict(values, strict=False, assign=assign).unexpected_keys if values else []
    if unexpected:
        raise CheckpointError(
            f"{type(module).__name__} does not take {_listed(unexpected)}, which its state_dict() has"
        )


def _parameters(values: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters instead of those on the meta device: tied ones stay one, and attributes are kept."""
    made = dict[int, torch.Tensor]()
    for name, value in values.items():
        old = before[name]
        if isinstance(old, torch.nn.Parameter) and id(old) not in made:
            made[id(old)] = torch.nn.Parameter(value, requires_grad=old.requires_grad)
            attributes = vars(made[id(old)])
            attributes |= {**vars(old), **attributes}
    return {name: made.get(id(before[name]), value) for name, value in values.items()}


def _converted(
    module: torch.nn.Module, checkpoint: Checkpoint, state: Mapping[str, Any], rename: Rename
) -> tuple[Callable[[str], Names], list[Remap]]:
    """As transformers converts checkpoints of this model, after `rename`."""
    given = {name: renamed(name, rename, checkpoint) for name in checkpoint}
    stored = {new: checkpoint[name].shape for name, news in given.items() for new in news}
    wanted = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    found = conversion(module, stored, wanted)
    becomes = {name: [found.names[new] for new in news] for name, news in given.items()}
    return becomes.__getitem__, found.rules


# --- buffers that are in no checkpoint -------------------------------------------------------------------------------


def _rebuilt(module: torch.nn.Module) -> list[tuple[torch.nn.Module, Buffers]]:
    """Non-persistent buffers on the meta device, filled by the module's own code; refused where it does not."""
    rebuilt, empty = list[tuple[torch.nn.Module, Buffers]](), list[str]()
    for name, one, around in with_parents(module):
        missing = unsaved_meta_buffers(one)
        buffers = _refilled(one, missing, _own_code(one, around)) if missing else {}
        rebuilt += [(one, buffers)] if buffers else []
        empty += [f"{name}.{other}".lstrip(".") for other in (*missing, *meta_attributes(one)) if other not in buffers]
    if empty:
        raise CheckpointError(
            f"{_listed(empty)} of the module are on the meta device and in no checkpoint (persistent=False), and no "
            f"method of the module fills them ({', '.join(OWN_CODE)}; _init_weights of transformers): create them "
            f"outside torch.device('meta'), or fill them before load"
        )
    return rebuilt


def _own_code(module: torch.nn.Module, around: Iterable[torch.nn.Module]) -> list[Callable[[torch.nn.Module], object]]:
    """Methods that may fill the buffers of a module: its own, or those of a model around it."""
    own = [_caller(method) for method in OWN_CODE if callable(getattr(module, method, None))]
    models = [getattr(one, "_init_weights", None) for one in (module, *around)]
    return [*own, *(method for method in models if callable(method))]


def _caller(method: str) -> Callable[[torch.nn.Module], object]:
    return lambda module: getattr(module, method)()


def _refilled(
    module: torch.nn.Module, names: list[str], methods: Iterable[Callable[[torch.nn.Module], object]]
) -> Buffers:
    """The buffers, filled by the first method that gives the same cells whatever was in memory before."""
    for fill in methods:
        zeros, ones = (_filled_once(module, names, fill, byte) for byte in (0x00, 0xFF))
        filled = {name: made for name, made in zeros.items() if name in ones and _same_bits(made, ones[name])}
        if filled.keys() == set(names):
            return filled
    return {}


def _filled_once(
    module: torch.nn.Module, names: list[str], fill: Callable[[torch.nn.Module], object], byte: int
) -> Buffers:
    """In a copy of the module without parameters, so that nothing else can change. Empty where its code fails."""
    copied = copy_without_parameters(module)
    for name in names:
        fresh = with_memory(buffers_of(module)[name])  # type: ignore[arg-type]  # it is on the meta device
        fresh.view(-1).view(torch.uint8).fill_(byte)
        put_buffers(copied, {name: fresh})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fill(copied)
    except Exception:  # the code of another library: whatever it raises, the buffers are not filled
        return {}
    made = {name: buffers_of(copied).get(name) for name in names}
    return {name: one for name, one in made.items() if one is not None and _fits(one, buffers_of(module)[name])}


def _fits(made: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    return wanted is not None and not made.is_meta and (made.shape, made.dtype) == (wanted.shape, wanted.dtype)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def _listed(names: Iterable[str]) -> str:
    return brief(list(names))
