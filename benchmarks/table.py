"""Rows as a table: on a terminal, in markdown, and as the page that documents them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Row

COLUMNS = ("case", "shardwise", "compared with", "ratio", "target", "reached")
NUMBERS = {"shardwise", "compared with", "ratio", "target"}


@dataclass(frozen=True, slots=True)
class Section:
    """A subject's rows under its title, with what has to be said about them."""

    title: str
    about: str
    rows: Sequence[Row]


def seconds(value: float) -> str:
    """Three digits with a unit.

    >>> [seconds(s) for s in (7.836, 0.0123, 3.4e-5, 7.44e-8)]
    ['7.84 s', '12.3 ms', '34 us', '74.4 ns']
    """
    scale, unit = next(
        (s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")) if value >= s or u == "ns"
    )
    return f"{float(f'{value / scale:.3g}'):g} {unit}"


def size(value: int) -> str:
    """Bytes, to be read by people.

    >>> size(123_456_789), size(3_210)
    ('123 MB', '3.21 kB')
    """
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if value >= s or u == "B")
    return f"{float(f'{value / scale:.3g}'):g} {unit}"


def fields(row: Row) -> tuple[str, ...]:
    """What stands in each column."""
    peer = "" if row.peer is None else f"{seconds(row.peer)} ({row.against})"
    ratio = "" if row.ratio is None else f"{float(f'{row.ratio:.3g}'):g}x"
    reached = {True: "yes", False: "no", None: ""}[row.reached]
    return row.case, seconds(row.ours), peer, ratio, str(row.target or ""), reached


def show(section: Section) -> None:
    """On the terminal, the notes below the table."""
    table = Table(title=section.title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in section.rows:
        table.add_row(*fields(row), style="red" if row.reached is False else None)
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for note in _notes(section.rows):
        console.print(note, style="dim", highlight=False, markup=False)


def markdown(rows: Sequence[Row]) -> str:
    """The table and its notes."""
    rule = ("---:" if name in NUMBERS else "---" for name in COLUMNS)
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, rule, *map(fields, rows))]
    return "\n".join([*lines, "", *_notes(rows)])


def _notes(rows: Sequence[Row]) -> list[str]:
    return [f"- {row.case}: {row.note}" for row in rows if row.note]


def page(sections: Sequence[Section], command: str) -> str:
    """All sections as a page that says how it was made."""
    return "\n".join([_HEAD.format(command=command, machine=_machine()), *map(_written, sections)])


def updated(text: str, sections: Sequence[Section]) -> str:
    """A page with some of its sections measured anew."""
    head, *parts = text.split("\n## ")
    by_title = {part.partition("\n")[0]: f"## {part}" for part in parts}
    by_title |= {section.title: _written(section) for section in sections}
    return "\n".join([head, *by_title.values()])


def _written(section: Section) -> str:
    return f"## {section.title}\n\n{section.about.strip()}\n\n{markdown(section.rows)}\n"


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("numpy", "torch"))
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    load = f"load average {os.getloadavg()[0]:.1f} at the end (the benchmark makes 1 to 4 of it)"
    return f"{os.cpu_count()} cores, {system}, {packages}; {load}"


_HEAD = """\
# Performance

This page is written by the benchmark itself; do not edit it:

```sh
{command}
```

Machine: {machine}.

How to read it:

- Sections may have been measured at different times; what is compared was measured together.
- Every number is the median of several runs. The sides of a comparison take turns in one run, so that a busy moment
  meets all of them; peers that take seconds run less often than the rest. Absolute times belong to this machine, and
  even ratios move by a quarter from run to run, more on a busy machine: a verdict close to its target can turn over.
- The ratio says how many times cheaper shardwise is than what it is compared with. Where the target is an upper bound
  ("at most"), it says how many times as much shardwise takes.
- The garbage collector rests while the clock runs, for everybody.
- Nothing is remembered from one repeat to the next, layouts and plans are made anew for every repeat, unless a section
  says otherwise.
"""
