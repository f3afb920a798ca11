"""Act 7: all figures in one table, the page, and how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.bench.table import seconds
from shardwise.demo.figures import TURNS, Figure
from shardwise.demo.folder import DemoFolder
from shardwise.demo.stage import MARGIN, heading, say, show
from shardwise.job.plan import ModelPlan
from shardwise.planning import size

TITLE = "A Llama-shaped model from 4 trainers (FSDP) to 2 servers (TP)"


def end(console: Console, folder: DemoFolder, plan: ModelPlan, figures: Sequence[Figure], took: float) -> None:
    """Print the times, and what is left behind."""
    heading(console, 7, "What it took, beside torch on the same machine")
    show(console, _table(figures))
    say(console, f"Medians of {TURNS} turns; from the first rank's start to the last one's end.")
    say(console, "Ours fills tensors that are there; redistribute (DTensor's) makes new ones.")
    say(console, "gather, broadcast: full_tensor on the trainers, sent whole, cut on servers.\n")
    page = plan.html(folder.report, title=TITLE)
    console.print(
        Text.assemble((f"Done in {took:.0f} s. ", "bold"), f"To look at every tensor's move: {page}"), soft_wrap=True
    )
    console.print("To go on:")
    for command in commands(folder):
        console.print(Text(f"{MARGIN}{command}", style="green"), soft_wrap=True)


def commands(folder: DemoFolder) -> list[str]:
    """To try next: look at the checkpoint, write it as the servers hold it, and compare that."""
    dcp, tp2, page = (quote(str(path)) for path in (folder.dcp, folder.path / "tp2", folder.path / "dcp.html"))
    return [
        f"shardwise inspect {dcp} --tree --html {page}",
        f"shardwise convert {dcp} {tp2} --format sharded --rules llama --mesh tp=2 --rename 'model.*=*'",
        f"shardwise verify {dcp} {tp2} --rename 'model.*=*'",
    ]


def _table(figures: Sequence[Figure]) -> Table:
    heads = "step", "bytes", "shardwise", "torch", "ratio", "torch's way"
    table = Table(*heads, box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in figures:
        torchs = ("-", "", "") if one.torch is None else (seconds(one.torch), f"{one.torch / one.ours:.1f}x", one.way)
        table.add_row(one.step, size(one.bytes), seconds(one.ours), *torchs)
    return table
