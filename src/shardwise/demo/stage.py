"""How acts speak: a heading with a number, and lines below it that stand a little to the right."""

from __future__ import annotations

from textwrap import indent

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

MARGIN = " " * 3


def heading(console: Console, number: int, title: str) -> None:
    """Of an act."""
    console.print(Text(f"{number}  {title}", style="bold cyan"))


def say(console: Console, *lines: str) -> None:
    """Lines of an act, as they are: long ones are left to the terminal, so that paths can be copied."""
    for line in lines:
        console.print(Text(indent(line, MARGIN)), soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """A table of an act, with a line free below."""
    console.print(Padding(table, (0, 0, 0, len(MARGIN)), expand=False))
    console.print()


def seconds(time: float) -> str:
    """Short.

    >>> seconds(0.01234), seconds(2.345)
    ('12.3 ms', '2.35 s')
    """
    return f"{time:.2f} s" if time >= 1 else f"{1e3 * time:.0f} ms" if time >= 0.1 else f"{1e3 * time:.1f} ms"
