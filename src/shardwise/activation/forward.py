"""input_reshard: a module whose inputs are the same on all ranks keeps only this rank's part of them for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, zip_longest
from threading import local
from typing import Any, Literal, NoReturn

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.activation.account import account_of
from shardwise.activation.digest import difference
from shardwise.activation.frame import Frame, Rule
from shardwise.activation.kept import Home
from shardwise.activation.saved import Saved, Untouched
from shardwise.errors import LayoutError
from shardwise.job.agree import together
from shardwise.job.session import group_transport
from shardwise.torch_internals import is_mesh
from shardwise.torch_internals.autograd import backward_task, saved_tensors_hooks_on, transforming


class Frames(local):
    """Those of this thread, the innermost last: as torch's own hooks for saved tensors."""

    def __init__(self) -> None:
        self.stack = list[Frame]()


_frames = Frames()
_numbers = count()  # of modules, to tell those of one type apart


def input_reshard(
    module: torch.nn.Module,
    tp_device_mesh: Any,
    input_reshard_dim: int | None = None,
    *,
    what: Literal["inputs", "all"] = "inputs",
    check: bool | None = None,
    least: int = Rule.least,
    name: str | None = None,
) -> torch.nn.Module:
    """Keep this rank's part of what the module saves for backward, where that is the same on all ranks of the mesh.

    That is: tensors that the module gets as inputs, and DTensors that are replicated on the mesh. Backward restores the
    whole, bit-for-bit. `input_reshard_dim` is torch's: None for nothing at all; any number means the same here. Of a
    mesh with several dims the first one counts, as in torch: give `mesh["tp"]` where that is another.

    `what="all"`: everything that is saved is known to be the same. `check=True`: compare all values in forward; False:
    compare nothing; else a sample of them before they are used. `least`: bytes of what is worth it. `name`: in errors
    and measures.
    """
    if input_reshard_dim is None:
        return module
    if what not in ("inputs", "all"):
        raise ValueError(f"what= must be 'inputs' or 'all', not {what!r}")
    if not is_mesh(tp_device_mesh):
        raise LayoutError(f"input_reshard needs a DeviceMesh, such as mesh['tp'], not {tp_device_mesh!r}")
    known = input_reshard_handle(module)
    if known is not None:
        known.remove()
    named = name or f"{type(module).__name__} {next(_numbers)}"
    module.forward = Resharding(module, tp_device_mesh, named, Rule(what == "all", check, least))
    return module


def input_reshard_handle(module: torch.nn.Module) -> Resharding | None:
    """What `input_reshard` put on a module, to `remove()` it; None where there is nothing."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Resharding) else None


class Resharding:
    """Stands in for the forward of a module, with an eye on what autograd saves.

    Not as hooks of the module: those are left on when somebody interrupts it.
    """

    def __init__(self, module: torch.nn.Module, mesh: Any, name: str, rule: Rule) -> None:
        self.module, self.mesh, self.name, self.rule = module, mesh, name, rule
        self._before = vars(module).get("forward")
        self._on = True

    def remove(self) -> None:
        """Leave the module as it was."""
        self._on = False  # in case something else has taken the place since
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that it stands for, also for who asks for its signature."""
        return self._before or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._needed():
            return self.__wrapped__(*args, **kwargs)
        frame = self._frame(args, kwargs)
        with self._watched(frame):
            found = self.__wrapped__(*args, **kwargs)
        if frame.compare:
            mine = [(kept.label, kept.digest) for kept in frame.kept.values()]
            self._compare(lambda: mine)
        return found

    def _needed(self) -> bool:
        """Not where nothing is saved, nor where somebody else has asked for all that is saved: checkpoints, offloads.

        What is computed again in backward is used at once.
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

    def _frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        home = Home.of(group_transport(self.mesh.get_group(0)))
        frame = Frame(home, self.mesh, self.module, self.name, self.rule, account_of(self.name))
        frame.outermost = next((outer for outer in _frames.stack if outer.home is home), None)
        if self.rule.check:
            (frame.outermost or frame).compare = True
        leaves, _ = tree_flatten_with_path((args, kwargs))
        return frame.take((f"input{keystr(path[1:])}", leaf) for path, leaf in leaves)

    @contextmanager
    def _watched(self, frame: Frame) -> Iterator[None]:
        _frames.stack.append(frame)
        try:
            with _hooks():
                yield
        except BaseException as error:
            if frame.compare:
                self._tell(error)
            raise
        finally:
            _frames.stack.pop()

    def _tell(self, error: BaseException) -> None:
        """Those who compare have to hear that this rank does not."""

        def failed() -> NoReturn:
            raise error

        if isinstance(error, Exception):
            with suppress(Exception):
                self._compare(failed)

    def _compare(self, say: Callable[[], list[tuple[str, int]]]) -> None:
        """Raise on every rank where any of them has other values."""
        together("input_reshard", say, _compared, group=self.mesh.get_group(0))


def _compared(told: dict[int, list[tuple[str, int]]]) -> None:
    for saved in zip_longest(*told.values()):
        if len(set(saved)) > 1:
            label = next(one[0] for one in saved if one is not None)
            raise ValueError(difference(label, dict(zip(told, saved, strict=True))))


@contextmanager
def _hooks() -> Iterator[None]:
    """torch's hooks for saved tensors, unless they are on."""
    if saved_tensors_hooks_on() is _pack:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield


def _pack(tensor: torch.Tensor) -> Saved | Untouched:
    for frame in reversed(_frames.stack):
        saved = frame.saved(tensor)
        if saved is not None:
            return saved
    return Untouched.of(tensor)


def _unpack(saved: Saved | Untouched) -> torch.Tensor:
    return saved.restored()
