"""The main job in a few seconds: a whole model planned, and a real tensor moved between real processes."""

from rich.console import Console

from shardwise.demo.live import move_tensor
from shardwise.demo.model import plan_model

__all__ = ["run"]


def run(console: Console) -> None:
    """Both, one after the other."""
    plan_model(console)
    console.print()
    move_tensor(console)
