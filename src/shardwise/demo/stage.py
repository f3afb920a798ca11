"""How acts print: a numbered heading, and indented lines below it."""

from __future__ import annotations

from textwrap import indent

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

MARGIN = " " * 3


def heading(console: Console, number: int, title: str) -> None:
    """Print the heading of an act."""
    console.print(Text(f"{number}  {title}", style="bold cyan"))


def say(console: Console, *lines: str) -> None:
    """Print lines of an act. The terminal wraps long ones, so that paths can be copied."""
    for line in lines:
        console.print(Text(indent(line, MARGIN)), soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Print a table of an act, and a blank line."""
    console.print(Padding(table, (0, 0, 0, len(MARGIN)), expand=False))
    console.print()
