"""Act 2: the move to tensor parallel servers, before anything moves."""

from __future__ import annotations

from time import perf_counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.demo.model import LLAMA_8B, SERVERS, Llama, planned
from shardwise.demo.stage import heading, say, seconds
from shardwise.layout import Mesh
from shardwise.planning import size
from shardwise.report import draw
from shardwise.state.plan import ModelPlan

SHOWN = "model.layers.0.self_attn.o_proj.weight"
MANY_TRAINERS, MANY_SERVERS = Mesh(fsdp=64), Mesh(tp=8, ranks=range(64, 72))


def show_plan(console: Console, llama: Llama, plan: ModelPlan) -> None:
    """One weight as a picture, the figures of all, and those of a large model."""
    heading(console, 2, "The move to two tensor parallel servers, planned before anything moves")
    say(console, f"{SHOWN}, and who holds what of it:\n", _pictures(plan), "")
    say(console, *_totals(plan, llama, len(SERVERS.ranks)), "")
    began = perf_counter()
    large = _proven(planned(LLAMA_8B, MANY_TRAINERS, MANY_SERVERS))
    took = seconds(perf_counter() - began)
    say(console, f"A Llama 3 8B from 64 trainers to 8 servers, planned and proven in {took}:")
    say(console, *_totals(large, LLAMA_8B, len(MANY_SERVERS.ranks)), "")


def _pictures(plan: ModelPlan) -> Table:
    sides = {"4 trainers": plan.sources[SHOWN].layout, "2 servers": plan.targets[SHOWN].layout}
    table = Table.grid(padding=(0, 6, 0, 0))
    table.add_row(*(Text(f"{who}, {layout}") for who, layout in sides.items()))
    table.add_row(*(Text(draw(layout)) for layout in sides.values()))
    return table


def _totals(plan: ModelPlan, llama: Llama, servers: int) -> list[str]:
    """What moves, the least that could, and the usual way: every server gathers all weights, and keeps its part."""
    bound = sum(entry.plan.lower_bound for entry in plan.entries)
    rows = {
        "moves between ranks": f"{size(plan.bytes_moved):>10}   {len(plan.sources)} tensors become {len(plan.targets)}: q, k and v are one",
        "no plan moves less than": f"{size(bound):>10}",
        "gathering would move": f"{size(servers * llama.bytes):>10}   every server receives all of it, and keeps its part",
    }
    return [f"{what:<24} {figure}" for what, figure in rows.items()]


def _proven(plan: ModelPlan) -> ModelPlan:
    for one in {entry.plan for entry in plan.entries}:  # tensors that move alike have one plan
        one.verify()
    return plan
