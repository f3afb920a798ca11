"""A tour in one minute: a trainer's checkpoint becomes a server's, on disk and live, compared with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.demo.folder import DemoFolder

if TYPE_CHECKING:
    from shardwise.demo.model import Llama

__all__ = ["run"]

WIDTH = 100  # what is wider is hard to read


def run(console: Console, out: str | Path = "demo", *, model: Llama | None = None) -> None:
    """Run all acts; their files stay in the directory `out`.

    A directory that is not from an earlier demo is refused. `model`: a model of another size.
    """
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    folder = DemoFolder.claim(Path(out))
    console.print("[bold]shardwise demo[/]: a model moves from 4 trainers to 2 servers, on disk and live\n")
    from shardwise.demo.model import Llama  # with torch, which takes seconds: the first words are there before it
    from shardwise.demo.story import tell

    tell(console, folder, model or Llama())
