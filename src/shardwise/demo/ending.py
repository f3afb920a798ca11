"""Act 6: the page, all figures in one table, and how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.demo.figures import Figure
from shardwise.demo.folder import Folder
from shardwise.demo.stage import heading, say, seconds
from shardwise.planning import size
from shardwise.state.plan import ModelPlan


def end(console: Console, folder: Folder, plan: ModelPlan, figures: Sequence[Figure], took: float) -> None:
    """What was seen, and what is left behind."""
    heading(console, 6, "What it took")
    say(console, _table(figures), "")
    say(
        console,
        "Medians of several turns, ours and torch's one after the other on this machine; the slowest rank counts.",
    )
    page = plan.html(folder.report, title="A Llama-shaped model, from 4 trainers (FSDP) to 2 servers (TP)")
    say(console, f"Every tensor's move as a picture: {page} (open it in a browser)\n")
    console.print(f"Go on with what is in {folder.path} ({took:.0f} s in all):", highlight=False)
    for command in commands(folder):
        console.print(Text(f"  {command}", style="green"), soft_wrap=True)


def commands(folder: Folder) -> list[str]:
    """To try next: look at it, convert it once more, and compare that."""
    dcp, tp2, page = (quote(str(path)) for path in (folder.dcp, folder.path / "tp2", folder.path / "dcp.html"))
    return [
        f"shardwise inspect {dcp} --tree --html {page}",
        f"shardwise convert {dcp} {tp2} --format sharded --rules llama --mesh tp=2 --rename 'model.*=*'",
        f"shardwise verify {dcp} {tp2} --rename 'model.*=*'",
    ]


def _table(figures: Sequence[Figure]) -> Table:
    table = Table(
        "step", "bytes", "shardwise", "torch", "", "torch's way", box=None, pad_edge=False, header_style="bold"
    )
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in figures:
        torchs = ("-", "", "") if one.torch is None else (seconds(one.torch), f"{one.torch / one.ours:.1f}x", one.way)
        table.add_row(one.step, size(one.bytes), seconds(one.ours), *torchs)
    return table
