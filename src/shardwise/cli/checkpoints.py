"""Commands for one checkpoint: inspect and convert."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shardwise import report
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
    Page,
    Path_,
    QuantizedTensors,
    Renames,
    Rotaries,
    RulesFile,
    Selects,
    Stacks,
    Transposes,
)
from shardwise.cli.printing import say
from shardwise.planning import size_in_bytes

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoint
    from shardwise.checkpoint.listing import Row

MOST_ROWS = 1000  # of a table with folded columns, which takes rich a third of a millisecond each


def inspect(
    checkpoint: Path_,
    all: Annotated[bool, typer.Option("--all", help="One line for each tensor.")] = False,
    filter: Annotated[list[str] | None, typer.Option(help="Only names that match: 'layers.0.*'.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most this many lines.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show names as a tree, with sizes.")] = False,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree; implies --tree.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Page = None,
    rules: RulesFile = None,
    mesh: MeshSizes = None,
) -> None:
    """List the tensors of a checkpoint, without reading their values.

    Tensors that are alike share a line: layers.{0..31}.w are layers.0.w to layers.31.w.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import listing, terminal
    from shardwise.cli.changes import rules_on

    opened = checkpoints.open(checkpoint, rules=rules_on(rules, mesh))
    if html is not None:  # before the listing: its reader may close the pipe
        report.write(html, terminal.page(opened))
    if json:
        say(terminal.as_json(opened))
        return
    rows = list(listing.rows(opened, every=all, only=filter))
    say(f"{terminal.summary(opened)}\n")
    if tree or depth is not None:
        _wide_console().print(terminal.tree(opened, only=filter, depth=depth), soft_wrap=True)
        return
    _list_rows(rows[:limit])
    if limit is not None and limit < len(rows):
        say(f"... and {len(rows) - limit:,} more lines")


def _list_rows(rows: Sequence[Row]) -> None:
    """As a table where a person reads; lines are not cut where a program may."""
    from shardwise.checkpoint import listing

    console = Console(highlight=False)
    if console.is_terminal and len(rows) <= MOST_ROWS:
        console.print(listing.table(rows))
    else:
        for line in listing.columns(rows):
            say(line)


def _wide_console() -> Console:
    """Another program may read the names: do not cut them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 10_000)
    return console


def convert(
    source: Path_,
    out: Annotated[str, typer.Argument(help="Where to write it.", show_default=False)],
    format: Annotated[
        str | None,
        typer.Option(help="safetensors, sharded, dcp, megatron-dist, torch.save or deepspeed-universal."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Several safetensors files of this size, such as 5GB.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="How to shard what is written: auto (by the config.json beside the weights), a model such as llama, "
            "gemma or gpt2, the path of a config.json, or a TOML file."
        ),
    ] = None,
    mesh: MeshSizes = None,
    source_rules: RulesFile = None,
    source_mesh: MeshSizes = None,
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
    with_config: Annotated[
        bool, typer.Option("--with-config", help="Also copy config, tokenizer and generation files of SOURCE.")
    ] = False,
    config_from: Annotated[str | None, typer.Option(help="Copy these files of another folder.")] = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="A text file: the names of an optimizer's parameters, one per line, to replace numbers."),
    ] = None,
    objects: ObjectsOf = None,
    jobs: Jobs = 1,
    max_bytes: Annotated[str, typer.Option(help="Memory limit for values.")] = "256MiB",
    verify: Annotated[bool, typer.Option(help="Compare the result with the source.")] = True,
    sums: Annotated[bool, typer.Option(help="Write checksums of every file beside it.")] = True,
    bar: Bar = True,
) -> None:
    """Write a checkpoint in another format, sharding or naming, in little memory.

    If it is interrupted, run the same command again: files that are whole are not written again.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import listing, terminal
    from shardwise.cli.changes import changes_of, overflow, rules_on, translated

    opened = checkpoints.open(source, rules=rules_on(source_rules, source_mesh))
    remap = {"quantized": quantized, "concat": concat, "interleave": interleave, "stack": stack}
    remap |= {"transpose": transpose, "rotary": rotary, "pad": pad}
    changes = translated(changes_of(rename, select, exclude, merge, cast, remap), opened, names)
    with _continued():
        made = checkpoints.convert(
            opened,
            out,
            format=format,
            max_shard_size=max_shard_size,
            rules=rules_on(rules, mesh),
            **changes,
            overflow=overflow(allow_overflow),
            parameters=parameters,
            with_config=config_from if config_from is not None else with_config,
            objects=objects,  # type: ignore[arg-type]
            jobs=jobs,
            max_bytes=size_in_bytes(max_bytes),
            verify=verify,
            sums=sums,
            progress="bar" if bar else None,
        )
    if made.reused:
        again = listing.several(len(made.reused), "file")
        say(f"reused {again} of an earlier conversion, such as {made.reused[0]}")
    checked = f"; read back, every cell is {_right(opened, made, changes['cast'] or ())}" if verify else ""
    Console(highlight=False).print(f"{escape(terminal.summary(made))}{checked}", soft_wrap=True)
    for line in terminal.fates(opened, made, objects):  # type: ignore[arg-type]
        say(line)
    for line in terminal.uncopied(opened, made):
        say(line)


@contextmanager
def _continued() -> Iterator[None]:
    """Print warnings as notes. Ctrl-C exits with the code of a signal, and says what to do next."""
    try:
        with warnings.catch_warnings(record=True) as notes:
            yield
        for note in notes:
            say(f"note: {note.message}", err=True)
    except KeyboardInterrupt as error:
        again = " to continue; files that are whole are reused" if hasattr(error, "__notes__") else ""
        say(f"interrupted: run the same command again{again}", err=True)
        raise SystemExit(130) from None


def _right(opened: Checkpoint, made: Checkpoint, casts: Sequence[object]) -> str:
    """The verdict on cells that were read back. Quantized codes that were cast by name are not called right."""
    from shardwise.job.casts import PLAIN

    named = [rule[0] for rule in casts if isinstance(rule, tuple) and rule[0] in made]
    dtypes = {tensor.dtype for tensor in (*opened.values(), *(made[name] for name in named))}
    return "as it was cast" if made.lost or (named and not dtypes <= set(PLAIN)) else "right"
