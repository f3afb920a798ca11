"""The results of the short benchmark as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

from rich.table import Table

from shardwise.bench.short import MoveTimes
from shardwise.planning import size as in_words

WAYS = {
    "ours": "shardwise",
    "shared": "  source shared",
    "group": "  over the group",
    "sharded_tensor": "torch ShardedTensor",
    "redistribute": "torch redistribute",
    "limit": "limit",
}
LEGEND = """\
A float32 tensor of {size} on {ranks} processes of this machine, one thread each.
Medians, from when the first process starts until the last one is done.
shardwise: reshard(x, to, out=y)   source shared: x made by empty(shared=True)
over the group: transport="group"       limit: a plain memory copy of the same cells,
within each process, without messages"""


def seconds(value: float) -> str:
    """Three digits with a unit.

    >>> [seconds(s) for s in (7.836, 0.0123, 3.4e-5, 7.44e-8)]
    ['7.84 s', '12.3 ms', '34 us', '74.4 ns']
    """
    scale, unit = next(
        (s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")) if value >= s or u == "ns"
    )
    return f"{float(f'{value / scale:.3g}'):g} {unit}"


def table(moves: Sequence[MoveTimes]) -> Table:
    """A column for every move."""
    made = Table("", *(move.move for move in moves))
    for column in made.columns[1:]:
        column.justify = "right"
    for field, name in WAYS.items():
        times = (getattr(move, field) for move in moves)
        made.add_row(name, *("-" if time is None else seconds(time) for time in times))
    made.add_section()
    made.add_row("faster than torch", *(f"{move.ratio:.1f}x" for move in moves))
    made.add_row("of the limit", *(f"{move.of_the_limit:.0%}" for move in moves))
    made.add_row("bytes moved", *(in_words(move.bytes_moved) for move in moves))
    made.add_row("the fewest possible", *(in_words(move.lower_bound) for move in moves))
    return made


def as_json(moves: Sequence[MoveTimes], ranks: int, size: int, device: str = "cpu") -> str:
    """Everything, for tools."""
    setup = {"machine": machine(), "device": device, "ranks": ranks, "size": size}
    return json.dumps(setup | {"moves": [move.to_json() for move in moves]}, indent=2)


def machine() -> dict[str, str | int]:
    """The machine and the versions that the times depend on."""
    versions = {name: version(name).partition("+")[0] for name in ("numpy", "torch")}
    cores = os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    return {"cores": cores, "system": system, "python": platform.python_version(), **versions}
