"""Commands that compare checkpoints: verify and diff."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shardwise.cli.options import (
    AllowOverflow,
    Bar,
    Casts,
    Concats,
    Excludes,
    Interleaves,
    Jobs,
    Merge,
    MeshSizes,
    Names,
    ObjectsOf,
    Pads,
    Path_,
    QuantizedTensors,
    Renames,
    Rotaries,
    RulesFile,
    Selects,
    Stacks,
    Transposes,
)
from shardwise.cli.printing import list_first, say
from shardwise.quoting import in_line

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoint, Rules
    from shardwise.cli.changes import Changes, Effort


def verify(
    a: Path_,
    b: Annotated[
        str | None, typer.Argument(help="Another checkpoint. Without it, A is checked alone.", show_default=False)
    ] = None,
    rules: RulesFile = None,
    mesh: MeshSizes = None,
    other_rules: Annotated[str | None, typer.Option(help="The same as --rules, for B.")] = None,
    other_mesh: Annotated[list[str] | None, typer.Option(help="The mesh of --other-rules.")] = None,
    rename: Renames = None,
    select: Selects = None,
    exclude: Excludes = None,
    merge: Merge = None,
    cast: Casts = None,
    allow_overflow: AllowOverflow = False,
    concat: Concats = None,
    interleave: Interleaves = None,
    stack: Stacks = None,
    transpose: Transposes = None,
    rotary: Rotaries = None,
    pad: Pads = None,
    quantized: QuantizedTensors = None,
    names: Names = None,
    objects: ObjectsOf = None,
    receipt: Annotated[str | None, typer.Option(help="Compare with this receipt, instead of B.")] = None,
    all: Annotated[bool, typer.Option("--all", help="List all differences, not only the first 20.")] = False,
    jobs: Jobs = 1,
    bar: Bar = True,
) -> None:
    """Compare two checkpoints, or check one against its checksums. Exit code 1 if they differ, or it is damaged.

    It compares names, shapes, dtypes and every cell. With the options of convert it compares B, or the receipt, with
    what A becomes by them. Without B and a receipt it checks all files of A against the checksums beside them.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.cli.changes import changes_of, overflow, rules_on, translated

    remap = {"quantized": quantized, "concat": concat, "interleave": interleave, "stack": stack}
    remap |= {"transpose": transpose, "rotary": rotary, "pad": pad}
    changes, known = changes_of(rename, select, exclude, merge, cast, remap), rules_on(rules, mesh)
    if receipt is not None and (b is not None or other_rules is not None or other_mesh or objects is not None):
        raise ValueError("--receipt replaces B: leave out B, and the options of B and of objects")
    if b is None and receipt is None:
        if any((*changes.values(), names, objects, other_rules)):
            raise ValueError("options that compare need a second checkpoint, B, or a --receipt")
        _verify_alone(a, known, all=all, jobs=jobs, bar=bar)
        return
    one = checkpoints.open(a, rules=known)
    changes = translated(changes, one, names)
    effort: Effort = {"overflow": overflow(allow_overflow), "jobs": jobs, "progress": "bar" if bar else None}
    if receipt is not None:
        _verify_receipt(one, receipt, changes, effort, all=all)
    elif b is not None:
        other = checkpoints.open(b, rules=rules_on(other_rules, other_mesh))
        _verify_pair(one, other, changes, objects, effort, all=all)


def _verify_pair(
    one: Checkpoint, other: Checkpoint, changes: Changes, objects: str | None, effort: Effort, *, all: bool
) -> None:
    """Compare two checkpoints."""
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import terminal
    from shardwise.checkpoint.name_groups import rename_between
    from shardwise.checkpoint.selection import Selection

    differences = checkpoints.verify(one, other, **changes, **effort, objects=objects)  # type: ignore[arg-type]
    list_first(differences, "differences", all=all)
    chosen = Selection(changes["select"], changes["exclude"])
    for line in terminal.uncompared(one, other, chosen, objects):  # type: ignore[arg-type]
        say(line)
    if not any(changes.values()) and (hint := rename_between(one, other)) is not None:
        say(f"the names differ in a prefix: try --rename '{hint[0]}={hint[1]}'")
    _verdict("equal, bit-for-bit", any(changes.values()), one.path, other.path, differences)


def _verify_receipt(one: Checkpoint, path: str, changes: Changes, effort: Effort, *, all: bool) -> None:
    """Compare a checkpoint with a receipt."""
    from shardwise.checkpoint import Receipt, receipts

    receipt = Receipt.from_json(Path(path).read_text(encoding="utf-8"))
    differences = receipts.compare(one, receipt, **changes, **effort)
    list_first(differences, "differences", all=all)
    _verdict("equal, by fingerprints", any(changes.values()), one.path, path, differences)


def _verdict(equal: str, changed: bool, one: str, other: str, differences: Sequence[object]) -> None:
    """Ends with exit code 1 where they differ."""
    if differences:
        raise SystemExit(1)
    by, both = ", by these options" if changed else "", (escape(in_line(path)) for path in (one, other))
    Console(highlight=False).print(f"{equal}{by}: {' and '.join(both)}", soft_wrap=True)


def _verify_alone(path: str, rules: Rules | None, *, all: bool, jobs: int, bar: bool) -> None:
    """Check a checkpoint against its own checksums."""
    from shardwise import checkpoint as checkpoints

    damaged = checkpoints.verify(path, rules=rules, jobs=jobs, progress="bar" if bar else None)
    list_first(damaged, "damaged parts", all=all)
    if damaged:
        raise SystemExit(1)
    Console(highlight=False).print(
        f"whole: every byte of {escape(in_line(path))} matches the checksums that were written with it", soft_wrap=True
    )


def diff(
    a: Path_,
    b: Path_,
    rename: Renames = None,
    select: Selects = None,
    exclude: Excludes = None,
    limit: Annotated[int, typer.Option(min=1, help="Print at most this many lines.")] = 40,
    jobs: Jobs = 1,
    bar: Bar = True,
) -> None:
    """Show what changed from A to B, by tensor, the largest relative change first. To prove equality, use verify.

    The change of a tensor is the norm of B - A, relative to that of A.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import changes
    from shardwise.cli.changes import pairs

    one, other = checkpoints.open(a), checkpoints.open(b)
    names = {"rename": pairs(rename or (), "--rename") or None, "select": select, "exclude": exclude}
    progress = "bar" if bar else None
    found = changes.changes(one, other, **names, jobs=jobs, progress=progress)  # type: ignore[arg-type]
    for line in changes.lines(found, limit):
        say(line)
