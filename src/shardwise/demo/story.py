"""The acts in their order, and what they hand on."""

from __future__ import annotations

from time import perf_counter

import torch
from rich.console import Console

from shardwise.demo.converting import convert
from shardwise.demo.ending import end
from shardwise.demo.folder import DemoFolder
from shardwise.demo.loading import load
from shardwise.demo.model import Llama, planned
from shardwise.demo.planning import show_plan
from shardwise.demo.publishing import publish_versions
from shardwise.demo.saving import save
from shardwise.demo.syncing import sync


def tell(console: Console, folder: DemoFolder, llama: Llama) -> None:
    """From the trainers' checkpoint to the page. In one thread: several wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _acts(console, folder, llama)
    finally:
        torch.set_num_threads(threads)


def _acts(console: Console, folder: DemoFolder, llama: Llama) -> None:
    began = perf_counter()
    weights, plan = llama.weights(), planned(llama)
    fingerprints = save(console, folder, llama, weights)
    show_plan(console, llama, plan)
    figures = [
        *convert(console, folder, llama),
        *load(console, folder, llama, fingerprints),
        *sync(console, llama, weights, plan),
    ]
    publish_versions(console, folder, llama, weights)
    end(console, folder, plan, figures, perf_counter() - began)
