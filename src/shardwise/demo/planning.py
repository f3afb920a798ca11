"""Act 2: the move to tensor parallel servers, before anything moves."""

from __future__ import annotations

from time import perf_counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.bench.table import seconds
from shardwise.demo.model import LLAMA_8B, SERVERS, TRAINERS, Llama, planned
from shardwise.demo.stage import heading, say, show
from shardwise.job.plan import ModelPlan
from shardwise.layout import Mesh
from shardwise.planning import size
from shardwise.report import draw

SHOWN = "model.layers.0.self_attn.o_proj.weight"
MANY_TRAINERS, MANY_SERVERS = Mesh(fsdp=64), Mesh(tp=8, ranks=range(64, 72))


def show_plan(console: Console, llama: Llama, plan: ModelPlan) -> None:
    """One weight as a picture, the figures of all, and those of a large model."""
    heading(console, 2, "The move to two tensor parallel servers, before anything moves")
    say(console, f"Who holds what of {SHOWN}:\n")
    show(console, _pictures(plan))
    began = perf_counter()
    large = _proven(planned(LLAMA_8B, MANY_TRAINERS, MANY_SERVERS))
    took = perf_counter() - began
    small = _figures(plan, llama, TRAINERS, SERVERS)
    show(console, _totals(small, _figures(large, LLAMA_8B, MANY_TRAINERS, MANY_SERVERS)))
    say(console, f"The 8B took {seconds(took)} to plan, and to prove that every cell is written once.\n")


def _pictures(plan: ModelPlan) -> Table:
    sides = {"4 trainers": plan.sources[SHOWN].layout, "2 servers": plan.targets[SHOWN].layout}
    table = Table.grid(padding=(0, 6, 0, 0))
    table.add_row(*(Text(f"{who}, {layout}") for who, layout in sides.items()))
    table.add_row(*(Text(draw(layout)) for layout in sides.values()))
    return table


def _totals(*models: list[str]) -> Table:
    table = Table("", "this model", "Llama 3 8B", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    words = "ranks", "tensors (q, k and v become one)", "moves between ranks", "no plan moves less than"
    for row in zip((*words, "gathering on every server would move"), *models, strict=True):
        table.add_row(*row)
    return table


def _figures(plan: ModelPlan, llama: Llama, trainers: Mesh, servers: Mesh) -> list[str]:
    """What moves, the least that could, and the usual way: every server receives all weights, and keeps its part."""
    ranks, tensors = f"{trainers.ranks.size} to {servers.ranks.size}", f"{len(plan.sources)} to {len(plan.targets)}"
    bound = sum(link.plan.lower_bound for link in plan.links)
    return [ranks, tensors, *map(size, (plan.bytes_moved, bound, servers.ranks.size * llama.bytes))]


def _proven(plan: ModelPlan) -> ModelPlan:
    for one in {link.plan for link in plan.links}:  # tensors that move alike have one plan
        one.verify()
    return plan
