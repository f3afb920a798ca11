"""What autograd does at the moment: hooks, backward passes, random states."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pack = Callable[[torch.Tensor], object]


def saved_tensors_hooks_on() -> Pack | None:
    """The innermost hook that packs saved tensors, if there is any."""
    hooks: tuple[Pack, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


def backward_task() -> int | None:
    """The number of the backward pass that this thread is in."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def random_state(device: str) -> torch.Tensor:
    """That of the generator from which random numbers on this kind of device are drawn."""
    state: torch.Tensor = torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()
    return state


def transforming() -> bool:
    """True inside torch.func's transforms, whose tensors have no memory of their own."""
    return bool(torch._C._are_functorch_transforms_active())


def after_backward(call: Callable[[], None]) -> None:
    """Call it when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
