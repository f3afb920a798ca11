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
