"""The main job in half a minute: a model planned, a real tensor moved, and a model synced between real processes."""

from rich.console import Console

from shardwise.demo.live import move_tensor
from shardwise.demo.model import plan_model
from shardwise.demo.sync import sync_model

__all__ = ["run"]


def run(console: Console) -> None:
    """One after the other."""
    plan_model(console)
    console.print()
    move_tensor(console)
    console.print()
    sync_model(console)
