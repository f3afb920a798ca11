"""Tables: on a terminal, in markdown, and as the page that documents them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Row, Target
from shardwise.bench.table import machine, seconds

PERCENT = Target(1, percent=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what stands in it; one that is optional is left out where nothing does."""

    name: str
    of: Callable[[Row], str]
    number: bool = True
    optional: bool = False


def amount(row: Row, value: float) -> str:
    """What a row has measured, in its unit."""
    return size(round(value)) if row.unit == "bytes" else seconds(value)


COLUMNS = (
    Column("case", lambda row: row.case, number=False),
    Column("shardwise", lambda row: amount(row, row.ours)),
    Column("compared with", lambda row: "" if row.peer is None else f"{amount(row, row.peer)} ({row.against})"),
    Column("ratio", lambda row: "" if row.ratio is None else (row.target or Target(1)).written(row.ratio)),
    Column("target", lambda row: str(row.target or "")),
    Column("reached", lambda row: {True: "yes", False: "no", None: ""}[row.reached], number=False),
    Column(
        "of the limit",
        lambda row: "" if row.of_the_limit is None else PERCENT.written(row.of_the_limit),
        optional=True,
    ),
    Column("between ranks", lambda row: "" if row.moved is None else binary(row.moved), optional=True),
    Column(
        "memory (peer)",
        lambda row: "" if row.memory is None else f"{binary(row.memory[0])} ({binary(row.memory[1])})",
        optional=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Lines under the names of columns; of some, every line says a number. Lines that were missed stand out.

    `pictures` are drawn where the page is, by their paths there.
    """

    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: Sequence[bool]
    notes: Sequence[str] = ()
    missed: frozenset[int] = frozenset()
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


def compared(rows: Sequence[Row]) -> Sheet:
    """A line for every comparison."""
    columns = [column for column in COLUMNS if not column.optional or any(map(column.of, rows))]
    return Sheet(
        [column.name for column in columns],
        [[column.of(row) for column in columns] for row in rows],
        [column.number for column in columns],
        [f"{row.case}: {row.note}" for row in rows if row.note],
        frozenset(n for n, row in enumerate(rows) if row.reached is False),
    )


@dataclass(frozen=True, slots=True)
class Section:
    """A subject's table under its title, with what has to be said about it."""

    title: str
    about: str
    sheet: Sheet


def size(value: int) -> str:
    """Bytes, to be read by people.

    >>> size(123_456_789), size(3_210)
    ('123 MB', '3.21 kB')
    """
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if value >= s or u == "B")
    return f"{float(f'{value / scale:.3g}'):g} {unit}"


def binary(value: int) -> str:
    """The same, of what comes in powers of two.

    >>> binary(3 * 2**28), binary(3 * 2**10), binary(0)
    ('768 MiB', '3 KiB', '0 B')
    """
    scale, unit = next(
        (s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if value >= s or s == 1
    )
    return f"{float(f'{value / scale:.3g}'):g} {unit}"


def show(section: Section) -> None:
    """On the terminal, the notes below the table."""
    sheet = section.sheet
    table = Table(title=section.title, title_justify="left")
    for name, number in zip(sheet.columns, sheet.numbers, strict=True):
        table.add_column(name, justify="right" if number else "left")
    for n, line in enumerate(sheet.lines):
        table.add_row(*line, style="red" if n in sheet.missed else None)
    console = Console(width=max(Console().width, 160))
    console.print(table)
    for note in sheet.notes:
        console.print(f"- {note}", style="dim", highlight=False, markup=False)


def markdown(sheet: Sheet) -> str:
    """The table and its notes."""
    rule = ["---:" if number else "---" for number in sheet.numbers]
    lines = ["| " + " | ".join(cells) + " |" for cells in (sheet.columns, rule, *sheet.lines)]
    return "\n".join([*lines, "", *(f"- {note}" for note in sheet.notes)])


def page(sections: Sequence[Section], command: str) -> str:
    """All sections as a page that says how it was made."""
    return "\n".join([_HEAD.format(command=command, machine=_machine()), *map(_written, sections)])


def updated(text: str, sections: Sequence[Section]) -> str:
    """A page with some of its sections measured anew."""
    head, *parts = text.split("\n## ")
    by_title = {part.partition("\n")[0]: f"## {part}" for part in parts}
    by_title |= {section.title: _written(section) for section in sections}
    return "\n".join([head, *by_title.values()])


def draw(sections: Sequence[Section], folder: Path) -> None:
    """All pictures of the sections, for a page in this folder."""
    for section in sections:
        for path, picture in section.sheet.pictures.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            picture(folder / path)


def _written(section: Section) -> str:
    return f"## {section.title}\n\n{section.about.strip()}\n\n{markdown(section.sheet).rstrip()}\n"


def _machine() -> str:
    about = machine()
    system = f"{about['system']}, Python {about['python']}, numpy {about['numpy']}, torch {about['torch']}"
    load = f"load average {os.getloadavg()[0]:.1f} at the end (the benchmark makes 1 to 4 of it)"
    return f"{about['cores']} cores, {system}; {load}"


_HEAD = """\
# Performance

The benchmark writes this page; do not edit it:

```sh
{command}
```

Machine: {machine}.

On your own machine, `shardwise bench` times a few moves in half a minute: over each transport, with torch's functions,
and as plain memory copies. `--ranks` and `--size` choose the number of processes and the size of the tensor. `--json`
prints everything as JSON.

How to read it:

- Sections may have been measured at different times. The two sides of a comparison were measured together.
- Every number is the median of several runs. The sides of a comparison take turns in one run, so a busy moment
  affects all of them. Peers that take seconds run less often. Absolute times are those of this machine. Even ratios
  change by a quarter from run to run, and more on a busy machine: a result close to its target may change.
- The ratio says how many times faster, or smaller, shardwise is than its peer. If the target is an upper bound
  ("at most"), it says how many times as much shardwise takes.
- Targets were set before anything was built, and stay as they were. Where a peer is close to what the machine can do, a
  note says how far even plain memory copies would be ahead of it: nothing can reach more.
- The garbage collector is off while the clock runs, for all sides.
- No caches are kept from one repeat to the next: layouts and plans are made again for every repeat, unless a section
  says otherwise.
"""
