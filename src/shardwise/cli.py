"""The command line: parse, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shardwise import report
from shardwise.demo import run as run_demo
from shardwise.errors import ShardwiseError
from shardwise.layout import parse
from shardwise.notation import write_ranges
from shardwise.planning import plan as make_plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Any sharding of a tensor to any other: look at layouts, plan moves.",
    epilog="Layouts are written like 4096x1024/S0@8 or 4096x1024/S0,R@fsdp=4,tp=2.",
)

LayoutText = Annotated[str, typer.Argument(help="A layout, such as 4096x1024/S0@8", show_default=False)]


@app.callback()
def shardwise() -> None:
    """Any sharding of a tensor to any other."""


@app.command()
def show(layout: LayoutText) -> None:
    """Draw who holds what."""
    found = parse(layout).validate()
    terms = "" if found.op is None else f", {found.terms} terms to {found.op}"
    typer.echo(f"{found}: shape {found.shape} over {len(found.owners())} owners{terms}\n")
    typer.echo(report.draw(found))
    idle = [owner for owner in found.owners() if not found.pieces(owner)]
    if idle:
        typer.echo(f"\nnothing on owner {write_ranges(idle)}")


@app.command()
def plan(
    source: LayoutText,
    target: LayoutText,
    itemsize: Annotated[int, typer.Option(help="Bytes per element.")] = 4,
    max_bytes: Annotated[int | None, typer.Option(help="The most that an owner stages at a time.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Owners per host.")] = None,
    relabel: Annotated[bool, typer.Option(help="Let target owners be permuted so that the least moves.")] = False,
    verify: Annotated[bool, typer.Option(help="Prove the plan against both layouts.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
) -> None:
    """Tell what moves from SOURCE to TARGET, and who sends how much to whom."""
    made = make_plan(parse(source), parse(target), itemsize=itemsize, max_bytes=max_bytes, hosts=hosts, relabel=relabel)
    if verify:
        made.verify()
    typer.echo(made.explain())
    typer.echo(f"\n{report.matrix(made)}")
    if verify:
        typer.echo("\nverified: every target cell is written exactly once, by an owner that has it")
    if json is not None:
        json.write_text(made.to_json())


@app.command()
def demo() -> None:
    """Plan the move of a whole model, move a real tensor, and sync a real model between processes of this machine."""
    run_demo(Console())


def main() -> None:
    """The `shardwise` command. Bad input ends with exit code 2 and one message."""
    try:
        app()
    except (ShardwiseError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
