"""Commands for this machine: a demonstration, measurements, an examination, and a meeting point of jobs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.cli.printing import say
from shardwise.planning import size_in_bytes


def hub(
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default=False)] = None,
    host: Annotated[str, typer.Option(help="The address of this host to listen on.")] = "127.0.0.1",
    file: Annotated[Path | None, typer.Option(help="Instead of a port: a file, for jobs of this host.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with the secret that all jobs know (key=).")] = None,
) -> None:
    """Run a meeting point for sw.publish and sw.subscribe, until it is interrupted.

    It outlives publishers and subscribers. It holds small entries, and no weights.
    """
    if (port is None) == (file is None):
        raise typer.BadParameter("give --port, or --file for jobs of this host")
    from shardwise.publishing.hub import hub as hold
    from shardwise.publishing.meeting import Address

    where = Address(file=file.absolute()) if file is not None else Address.of(f"{host}:{port}")
    with suppress(KeyboardInterrupt):
        hold(where, key_file, lambda at: say(f"meeting point {at}: interrupt to end it"))


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the checkpoints and the page.")] = Path("demo"),
) -> None:
    """Demonstrate in one minute: save, plan, convert, load, sync and publish a small model, on this machine."""
    from shardwise.demo import run

    run(Console(), out)


def bench(
    ranks: Annotated[int, typer.Option(help="Processes of this machine.")] = 4,
    size: Annotated[str, typer.Option(help="The size of the moved tensor, such as 256MiB.")] = "64MiB",
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU of this machine for each process.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Time a few moves on this machine: over each transport, with torch's functions, and as plain memory copies."""
    from shardwise import bench as benchmark

    bytes_moved, console = size_in_bytes(size), Console(highlight=False)
    if json:
        say(benchmark.as_json(list(benchmark.bench(ranks, bytes_moved, device)), ranks, bytes_moved, device))
        return
    with console.status(f"{size} of float32 on {ranks} processes"):
        moves = list(benchmark.bench(ranks, bytes_moved, device))
    console.print(benchmark.table(moves))
    console.print(benchmark.LEGEND.format(size=size, ranks=ranks), style="dim")


def doctor() -> None:
    """Report what this machine can do, and what to change. Exit code 1 if there is something to change.

    Under torchrun (torchrun ... -m shardwise doctor) also how the ranks of the job reach each other. The first prints.
    """
    from shardwise.doctor import examine

    findings = list(examine())
    if os.environ.get("RANK", "0") == "0":
        for found in findings:
            say(f"{found.verdict:5}{found.what}" + (f": {found.fix}" if found.fix else ""))
    if any(found.fix for found in findings):
        raise SystemExit(1)
