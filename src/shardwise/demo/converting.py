"""Act 3: the checkpoint in another format, offline, and compared with what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwise import checkpoint
from shardwise.demo.figures import Figure, by_turns, check, seconds_of
from shardwise.demo.folder import DemoFolder
from shardwise.demo.model import RENAME, Llama
from shardwise.demo.stage import heading, say

SHARDS = 4  # files of the Hugging Face checkpoint, about


def convert(console: Console, folder: DemoFolder, llama: Llama) -> list[Figure]:
    """Convert and compare with a bar, then by turns with torch's converter."""
    heading(console, 3, "It becomes Hugging Face's safetensors, in one process and without GPUs")
    limit = llama.bytes // SHARDS
    with _bar(console) as bar:
        made = checkpoint.convert(
            folder.dcp,
            folder.hf,
            rename=RENAME,
            max_shard_size=limit,
            verify=False,
            progress=_task(bar, "convert a little at a time"),
        )
        differences = checkpoint.verify(
            folder.dcp, folder.hf, rename=RENAME, progress=_task(bar, "compare every cell of both")
        )
    check(not differences, f"{folder.hf} differs from {folder.dcp}: {differences[:1]}")
    files = len({path for entry in made.values() for path in entry.used()})
    say(console, f"{folder.hf}: {len(made)} tensors in {files} files and an index; equal, bit-for-bit.\n")
    with folder.aside() as aside:
        times = by_turns({"ours": _ours(folder.dcp, aside, limit), "torch": _torchs(folder.dcp, aside)})
    ours, torchs = (seconds_of([times], side) for side in ("ours", "torch"))
    return [Figure("convert", llama.bytes, ours, "dcp_to_torch_save", torchs)]


def _ours(source: Path, aside: Path, limit: int) -> Callable[[int], object]:
    """As torch does it: not read back, and left to the system to bring to the disk."""
    return lambda turn: checkpoint.convert(
        source, aside / f"hf{turn}", rename=RENAME, max_shard_size=limit, verify=False, durable=False
    )


def _torchs(source: Path, aside: Path) -> Callable[[int], object]:
    return lambda turn: dcp_to_torch_save(source, aside / f"whole{turn}.pt")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("   {task.description:<27}"),
        BarColumn(bar_width=32),
        DownloadColumn(binary_units=True),
        console=console,
    )


def _task(bar: Progress, what: str) -> Callable[[int, int], None]:
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
