"""How acts speak: a heading with a number, and lines below it that stand a little to the right."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

INDENT = 3


def heading(console: Console, number: int, title: str) -> None:
    """Of an act."""
    console.print(Text(f"{number}  {title}", style="bold cyan"))


def say(console: Console, *lines: RenderableType) -> None:
    """Lines of an act; text is taken as it is, brackets and all."""
    for line in lines:
        shown = Text(line) if isinstance(line, str) else line
        console.print(Padding(shown, (0, 0, 0, INDENT)), highlight=False)


def seconds(time: float) -> str:
    """Short.

    >>> seconds(0.01234), seconds(2.345)
    ('12.3 ms', '2.35 s')
    """
    return f"{time:.2f} s" if time >= 1 else f"{1e3 * time:.0f} ms" if time >= 0.1 else f"{1e3 * time:.1f} ms"
