"""What a checkpoint has, in rows: tensors that are alike in one, or each in its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.name_groups import grouped
from shardwise.checkpoint.opaque import Opaque, tensors_in
from shardwise.checkpoint.selection import Select, Selection
from shardwise.checkpoint.streams import duplicates
from shardwise.errors import CheckpointError
from shardwise.job.names import missing
from shardwise.planning import size
from shardwise.quoting import brief, in_line

RIGHT = {"tensors", "shards", "size"}  # columns of numbers


class Row(NamedTuple):
    """A line of the listing: one tensor, several that are alike, or another value."""

    name: str
    tensors: str
    dtype: str
    shape: str
    shards: str
    layout: str
    size: str


def rows(checkpoint: Checkpoint, *, every: bool = False, only: Select = None) -> Iterator[Row]:
    """Tensors, then other values. `every`: each tensor by itself. `only`: those whose names match."""
    wanted, ties = _chosen(checkpoint, only), tied(checkpoint)
    kinds = {
        name: (dtype_name(entry), shape_text(entry.shape), entry.shards, ties.get(name) or _layout(entry), name in ties)
        for name, entry in checkpoint.items()
        if wanted(name)
    }
    groups = [(name, [name]) for name in kinds] if every else grouped(kinds)
    for name, alike in groups:
        dtype, shape, shards, layout, shared = kinds[alike[0]]
        where, amount = f"tied to {layout}" if shared else layout, sum(checkpoint[one].bytes for one in alike)
        count = f"{len(alike):,}" if len(alike) > 1 else ""
        yield Row(name, count, dtype, shape, str(shards), where, "" if shared else size(amount))
    for name, value in checkpoint.objects.items():
        if wanted(name):
            yield Row(name, "", kind(value), short(value), "", inside(value), "")


def _chosen(checkpoint: Checkpoint, only: Select) -> Callable[[str], bool]:
    """Refuse patterns where none matches."""
    wanted = Selection(only).of(checkpoint)
    if not any(map(wanted, [*checkpoint, *checkpoint.objects])) and only:
        raise CheckpointError(missing(f"{checkpoint.path}: no name matches", list(only), [*checkpoint]))
    return wanted


def table(listed: Sequence[Row]) -> Table:
    """For a terminal: columns are folded to its width."""
    made = Table(*Row._fields, box=None, header_style="bold", pad_edge=False)
    for column, title in zip(made.columns, Row._fields, strict=True):
        column.justify = "right" if title in RIGHT else "left"
    for row in listed:
        made.add_row(*(Text(in_line(cell)) for cell in row))
    return made


def columns(listed: Sequence[Row]) -> Iterator[str]:
    """For other programs: lines of any length, in which nothing is cut."""
    cells = [Row._fields, *(tuple(map(in_line, row)) for row in listed)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [str.rjust if title in RIGHT else str.ljust for title in Row._fields]
    for row in cells:
        padded = (align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def tied(checkpoint: Checkpoint) -> dict[str, str]:
    """The names whose tensors share the bytes of an earlier name, with that name."""
    shared = {name: entry for name, entry in checkpoint.items() if entry.shared is not None and entry.bytes}
    return duplicates({name: (entry.shared, entry.shape, entry.dtype) for name, entry in shared.items()})


# --- cells ------------------------------------------------------------------------------------------------------------


def dtype_name(entry: Entry) -> str:
    """As torch calls it, without its module."""
    return str(entry.dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    """
    >>> shape_text((4, 6)), shape_text(())
    ('4 x 6', 'scalar')
    """
    return " x ".join(map(str, shape)) or "scalar"


def _layout(entry: Entry) -> str:
    if entry.shards <= 1:
        return "whole"
    return entry.layout.brief(width=40).partition("/")[2] if entry.shards <= 4096 else "many boxes"


def kind(value: object) -> str:
    """The type of a value; the class of an object that is not rebuilt."""
    return value.name if isinstance(value, Opaque) else type(value).__name__


def inside(value: object) -> str:
    """How many tensors a value has inside."""
    count = tensors_in(value)
    return f"with {several(count, 'tensor')} inside" if count else ""


def short(value: object) -> str:
    """In at most 60 characters."""
    text = brief(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def several(count: int, what: str) -> str:
    """
    >>> several(1, "file"), several(2, "file")
    ('1 file', '2 files')
    """
    return f"{count} {what}{'s' * (count != 1)}"
