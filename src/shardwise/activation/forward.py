"""input_reshard: a module whose inputs are the same on all ranks keeps only this rank's part of them for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, zip_longest
from threading import local
from typing import Any, Literal, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.activation.account import account_of
from shardwise.activation.digest import difference
from shardwise.activation.forward_scope import ForwardScope, SavePolicy
from shardwise.activation.saved import PackedTensor, UnshardedTensor
from shardwise.activation.sharded_activation import ActivationStore
from shardwise.containers.dtensor import is_mesh
from shardwise.containers.torch_private import argument_leaves, backward_task, saved_tensors_hooks_on, transforming
from shardwise.errors import LayoutError
from shardwise.job.agree import together
from shardwise.job.session import group_transport

Forward = Callable[..., Any]


class ScopeStack(local):
    """The scopes of this thread, the innermost last: as torch's own hooks for saved tensors."""

    def __init__(self) -> None:
        self.scopes = list[ForwardScope]()


_stack = ScopeStack()
_numbers = count()  # tell modules of one type apart


def input_reshard(
    module: torch.nn.Module,
    tp_device_mesh: DeviceMesh,
    input_reshard_dim: int | None = None,
    *,
    what: Literal["inputs", "all"] = "inputs",
    check: bool | None = None,
    least: int = SavePolicy.least,
    name: str | None = None,
) -> torch.nn.Module:
    """Keep only this rank's part of tensors that the module saves for backward, if all ranks of the mesh have the same.

    These are the module's input tensors, and DTensors that are replicated on the mesh. Backward restores the whole,
    bit-for-bit. `input_reshard_dim` is torch's: None leaves the module as it is; all numbers mean the same here. On a
    mesh of several dims the first one counts, as in torch: pass `mesh["tp"]` to use another.

    `what="all"`: everything that the module saves is known to be the same. `check=True`: compare all values in forward;
    False: compare nothing; None: compare a sample of the values before backward uses them. `least`: tensors of fewer
    bytes stay whole. `name`: the module's name in errors and measures.
    """
    if input_reshard_dim is None:
        return module
    if what not in ("inputs", "all"):
        raise ValueError(f"what= must be 'inputs' or 'all', not {what!r}")
    if not is_mesh(tp_device_mesh):
        raise LayoutError(f"input_reshard needs a DeviceMesh, such as mesh['tp'], not {tp_device_mesh!r}")
    previous = input_reshard_handle(module)
    if previous is not None:
        previous.remove()
    label = name or f"{type(module).__name__} {next(_numbers)}"
    module.forward = Resharding(module, tp_device_mesh, label, SavePolicy(what == "all", check, least))
    return module


def input_reshard_handle(module: torch.nn.Module) -> Resharding | None:
    """The handle of a module under `input_reshard`, to `remove()` it; None for other modules."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Resharding) else None


class Resharding:
    """Replaces the forward of a module, and watches what autograd saves.

    Hooks of the module would stay on after an interrupt.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh, name: str, policy: SavePolicy) -> None:
        self.module, self.mesh, self.name, self.policy = module, mesh, name, policy
        self._before = vars(module).get("forward")
        self._on = True

    def remove(self) -> None:
        """Leave the module as it was."""
        self._on = False  # in case another wrapper has replaced it since
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before

    @property
    def __wrapped__(self) -> Forward:
        """The forward that it replaces; inspect.signature finds it here, too."""
        return self._before or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._needed():
            return self.__wrapped__(*args, **kwargs)
        scope = self._scope(args, kwargs)
        with self._watch(scope):
            output = self.__wrapped__(*args, **kwargs)
        if scope.compare:
            mine = [(activation.label, activation.digest) for activation in scope.activations.values()]
            self._compare(lambda: mine)
        return output

    def _needed(self) -> bool:
        """False where nothing is saved, or where other hooks take all that is saved: checkpoints, offloads.

        Also in backward: what is computed again there is used at once.
        """
        return (
            self._on
            and torch.is_grad_enabled()
            and self.mesh.size(0) > 1
            and self.mesh.get_coordinate() is not None
            and backward_task() is None
            and not transforming()
            and saved_tensors_hooks_on() in (None, _pack)
        )

    def _scope(self, args: tuple[object, ...], kwargs: dict[str, object]) -> ForwardScope:
        store = ActivationStore.of(group_transport(self.mesh.get_group(0)))
        scope = ForwardScope(store, self.mesh, self.module, self.name, self.policy, account_of(self.name))
        scope.outermost = next((outer for outer in _stack.scopes if outer.store is store), None)
        if self.policy.check:
            (scope.outermost or scope).compare = True
        return scope.take_inputs((f"input{path}", leaf) for path, leaf in argument_leaves(args, kwargs))

    @contextmanager
    def _watch(self, scope: ForwardScope) -> Iterator[None]:
        _stack.scopes.append(scope)
        try:
            with _hooks():
                yield
        except BaseException as error:
            if scope.compare:
                self._tell(error)
            raise
        finally:
            _stack.scopes.pop()

    def _tell(self, error: BaseException) -> None:
        """Tell the ranks that compare that this one failed."""
        if isinstance(error, Exception):
            with suppress(Exception):
                self._compare(partial(_raise, error))

    def _compare(self, say: Callable[[], list[tuple[str, int]]]) -> None:
        """Raise on every rank where any of them has other values."""
        together("input_reshard", say, _check_same, group=self.mesh.get_group(0))


def _raise(error: Exception) -> NoReturn:
    raise error


def _check_same(digests: dict[int, list[tuple[str, int]]]) -> None:
    for saved in zip_longest(*digests.values()):
        if len(set(saved)) > 1:
            label = next(one[0] for one in saved if one is not None)
            raise ValueError(difference(label, dict(zip(digests, saved, strict=True))))


@contextmanager
def _hooks() -> Iterator[None]:
    """torch's hooks for saved tensors; nothing where they are on already."""
    if saved_tensors_hooks_on() is _pack:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield


def _pack(tensor: torch.Tensor) -> PackedTensor | UnshardedTensor:
    for scope in reversed(_stack.scopes):
        saved = scope.save(tensor)
        if saved is not None:
            return saved
    return UnshardedTensor.of(tensor)


def _unpack(saved: PackedTensor | UnshardedTensor) -> torch.Tensor:
    return saved.restore()
