"""The acts in their order, and what they hand on."""

from __future__ import annotations

from time import perf_counter

from rich.console import Console

from shardwise.demo.converting import convert
from shardwise.demo.ending import end
from shardwise.demo.folder import Folder
from shardwise.demo.loading import load
from shardwise.demo.model import Llama, planned
from shardwise.demo.planning import show_plan
from shardwise.demo.saving import save
from shardwise.demo.syncing import sync


def tell(console: Console, folder: Folder, llama: Llama | None) -> None:
    """From the trainers' checkpoint to the page."""
    began, llama = perf_counter(), llama or Llama()
    weights, plan = llama.weights(), planned(llama)
    fingerprints = save(console, folder, llama, weights)
    show_plan(console, llama, plan)
    figures = [
        *convert(console, folder, llama),
        *load(console, folder, llama, fingerprints),
        *sync(console, llama, weights, plan),
    ]
    end(console, folder, plan, figures, perf_counter() - began)
