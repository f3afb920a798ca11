"""A whole model, planned: it is trained on 16 ranks and moves to 4 ranks that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from shardwise.layout import Layout, Mesh
from shardwise.planning import Plan, plan, size
from shardwise.report import draw
from shardwise.testing import gather, scatter, simulate

TRAINER = Mesh(fsdp=8, tp=2, hosts=8)
SERVER = Mesh(tp=4)
HIDDEN, HEADS_KV, INNER, WORDS, LAYERS = 4096, 1024, 14336, 128256, 32  # the sizes of Llama 3 8B

# FSDP over tensor parallelism splits a dim that tp has split already: the strided shard S0:2
COLUMNS, ROWS, SMALL = ["S0:2", "S0"], ["S0", "S1"], ["S0", "R"]
TENSORS = [
    ("attn.q", (HIDDEN, HIDDEN), COLUMNS, "S0", LAYERS),
    ("attn.k", (HEADS_KV, HIDDEN), COLUMNS, "S0", LAYERS),
    ("attn.v", (HEADS_KV, HIDDEN), COLUMNS, "S0", LAYERS),
    ("attn.o", (HIDDEN, HIDDEN), ROWS, "S1", LAYERS),
    ("mlp.gate", (INNER, HIDDEN), COLUMNS, "S0", LAYERS),
    ("mlp.up", (INNER, HIDDEN), COLUMNS, "S0", LAYERS),
    ("mlp.down", (HIDDEN, INNER), ROWS, "S1", LAYERS),
    ("norms", (HIDDEN,), SMALL, "R", 2 * LAYERS + 1),
    ("embed", (WORDS, HIDDEN), COLUMNS, "S0", 1),
    ("head", (WORDS, HIDDEN), COLUMNS, "S0", 1),
]


def plan_model(console: Console) -> None:
    """Plan the whole model, show one tensor, and carry a small one out to the last bit."""
    began = perf_counter()
    plans = [(name, made.verify(), times) for name, made, times in _plans()]
    took = perf_counter() - began
    console.print(f"A Llama 3 8B in bf16, from {TRAINER} to {SERVER}: planned and proven in {took:.2f} s\n")
    console.print(_table(plans))
    moved = sum(made.bytes_moved * times for _, made, times in plans)
    bound = sum(made.lower_bound * times for _, made, times in plans)
    console.print(f"\nmoves {size(moved)} in all; no plan can move less than {size(bound)}")
    console.print(f"(gathering every tensor on every server would receive {size(_gathered())})\n")
    source, target = Layout.on_mesh((8, 8), TRAINER, ROWS), Layout.on_mesh((8, 8), SERVER, ["S1"])
    for side, layout in ("trainer", source), ("server", target):
        console.print(f"a small row-parallel weight on the {side}, {layout}:", highlight=False)
        console.print(draw(layout), highlight=False)
    _carry_out(source, target)
    console.print("\nits plan, carried out message by message in one process: equal to the last bit")


def _plans() -> Iterator[tuple[str, Plan, int]]:
    for name, shape, source, target, times in TENSORS:
        trained, served = Layout.on_mesh(shape, TRAINER, source), Layout.on_mesh(shape, SERVER, [target])
        yield name, plan(trained, served, itemsize=2, hosts=TRAINER), times


def _table(plans: list[tuple[str, Plan, int]]) -> Table:
    table = Table("tensors, figures for each", "trainer", "server", "moves", "stays", "messages")
    for column in table.columns[3:]:
        column.justify = "right"
    for name, made, times in plans:
        trainer, server = (",".join(map(str, side.spelling.items)) for side in (made.source, made.target))
        moves, stays = size(made.bytes_moved), size(made.bytes_local)
        table.add_row(f"{times} {name}", trainer, server, moves, stays, str(made.messages))
    return table


def _gathered() -> int:
    """The bytes of the usual way: every server gathers whole tensors, then takes its part."""
    return sum(2 * int(np.prod(shape)) * times * len(SERVER.ranks) for _, shape, _, _, times in TENSORS)


def _carry_out(source: Layout, target: Layout) -> None:
    values = np.random.default_rng(0).standard_normal(source.shape)
    after = simulate(plan(source, target, itemsize=8), scatter(values, source))
    np.testing.assert_array_equal(gather(after, target), values)
