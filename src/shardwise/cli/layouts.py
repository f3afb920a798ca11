"""Commands for layouts and plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shardwise import report
from shardwise.cli.options import Page
from shardwise.cli.printing import say
from shardwise.layout import parse
from shardwise.notation import write_ranges
from shardwise.planning import plan as make_plan
from shardwise.planning import size_in_bytes

LayoutText = Annotated[str, typer.Argument(help="A layout, such as 4096x1024/S0@8", show_default=False)]
DTYPE_BITS = re.compile(r"(?:bool|[a-z]+?)(\d+)?(?:_e\d+m\d+\w*)?")  # float32, bf16, uint8, float8_e4m3fn


def show(layout: LayoutText, html: Page = None) -> None:
    """Draw which owner holds which cells."""
    parsed = parse(layout).validate()
    terms = "" if parsed.op is None else f", {parsed.terms} terms to {parsed.op}"
    say(f"{parsed}: shape {parsed.shape} over {len(parsed.owners())} owners{terms}\n")
    say(report.draw(parsed))
    idle = sorted(set(parsed.owners()).difference(parsed.form.holders.owners.tolist()))
    if idle:
        say(f"\nnothing on owner{'s' * (len(idle) > 1)} {write_ranges(idle)}")
    if html is not None:
        report.write(html, report.page(parsed))


def plan(
    source: LayoutText,
    target: LayoutText,
    itemsize: Annotated[int | None, typer.Option(help="Bytes per element, by default 4.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the elements: bf16, float32, float8_e4m3fn ...")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Memory limit for staging per owner, such as 64MiB.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Owners per host.")] = None,
    relabel: Annotated[bool, typer.Option(help="Permute the target's owners so that the fewest bytes move.")] = False,
    verify: Annotated[bool, typer.Option(help="Prove the plan against both layouts.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Also write the plan to this file; - prints it instead of the summary.")
    ] = None,
    html: Page = None,
) -> None:
    """Show what moves from SOURCE to TARGET, and who sends how much to whom."""
    options = {"max_bytes": None if max_bytes is None else size_in_bytes(max_bytes), "hosts": hosts}
    made = make_plan(parse(source), parse(target), itemsize=_itemsize(itemsize, dtype), relabel=relabel, **options)
    if verify:
        made.verify()
    if json == Path("-"):
        say(made.to_json())
        return
    if json is not None:
        report.write(json, made.to_json())
    if html is not None:
        made.html(html)
    say(made.explain())
    say(f"\n{report.matrix(made)}")
    if verify:
        say("\nverified: every target cell is written exactly once, by an owner that has it")


def _itemsize(itemsize: int | None, dtype: str | None) -> int:
    """
    >>> [_itemsize(None, dtype) for dtype in ("bf16", "float64", "float8_e4m3fn", "bool", None)]
    [2, 8, 1, 1, 4]
    """
    if dtype is None:
        return 4 if itemsize is None else itemsize
    if itemsize is not None:
        raise ValueError("--itemsize and --dtype say the same: give one of them")
    match = DTYPE_BITS.fullmatch(dtype)
    bits = int(match[1] or 0) if match and dtype != "bool" else 8 * (dtype == "bool")
    if bits not in (8, 16, 32, 64, 128):
        raise ValueError(
            f"--dtype {dtype!r} is not a dtype of whole bytes: write bf16, float32 or float8_e4m3fn, or --itemsize"
        )
    return bits // 8
