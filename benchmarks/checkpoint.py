"""Checkpoints: loaded into another sharding, saved, converted; against torch.distributed.checkpoint and cp."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from mmap import mmap
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import peers
from benchmarks.caches import forget
from benchmarks.loading import COUNT, MODEL, RANK, SERVERS, corners_of
from benchmarks.measure import Effort, Row, Target, against_the_limit
from benchmarks.memory import rise
from benchmarks.model import RANKS, model, placement, tensor_of
from shardwise import Layout, checkpoint, layout_of, plan
from shardwise.bench.clock import Interval, Task, every_repeat, interleaved, together
from shardwise.bench.limit import strided_copies
from shardwise.bench.moves import meet
from shardwise.bench.table import seconds
from shardwise.checkpoint.entry import Local, match
from shardwise.checkpoint.formats.sharded import index_bytes
from shardwise.checkpoint.formats.writers import Contents
from shardwise.geometry import row_major
from shardwise.job.remap import links
from shardwise.layout import local_shapes
from shardwise.testing import on_ranks

TITLE = "Checkpoints"
READ = 2**22  # bytes that are read by a call
ABOUT = """
The model of the section before (289 tensors, 0.7 GiB in bfloat16), saved fully sharded by four ranks, loaded tensor
parallel by four ranks, into tensors that are there. `dcp.load` reads the very files that we read ("from DCP"); ours are
safetensors files with an index. The page cache is warm, and both sides were found equal before the clock started.
`read="once"` reads every byte on one rank and sends it on, for files that are far away; here they are not. Memory is
what a rank takes beside its tensors and the mapped files.

"Cold" is one process that loads whole tensors from files that were dropped from the page cache before. Plain reads are
calls that read the same files from start to end into memory; a note has the same with O_DIRECT, past the page cache.

Saving writes to the same disk, with and without waiting for it (`fsync`), on both sides. The limit of a load are
strided copies of the same boxes from memory to memory; that of a save are files into which every rank writes the bytes
of its tensors and nothing else. Converting is one process, DCP to one safetensors file without reading it back; the
peer is torch's `dcp_to_torch_save`, and `cp` copies as many bytes.
Memory is the most that a process had beside mapped files (RssAnon), above what it had before.

The large checkpoint has 100,000 shards: 1,000 tensors of 12 kinds, each in 100 files. One rank opens it and plans what
it needs of each tensor: which boxes of which files go where in its memory. The peer reads its `.metadata` and makes
DCP's local load plan.
"""


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with TemporaryDirectory(dir=os.environ.get("SHARDWISE_BENCH", None)) as folder:
        ranks = on_ranks(RANKS, lambda _: _measured(folder, effort.large), timeout=900)
        found = [times for times, _ in ranks]
        most = [max(ones) / 2**20 for ones in zip(*(memory for _, memory in ranks), strict=True)]
        memory = [f"{one:.1f} MiB of memory (10 wanted)" for one in most]
        ours, theirs, once, peer, copies, saved, saves, safe, safes, as_dcp, plain, plain_safe = (
            together(ranks) for ranks in zip(*found, strict=True)
        )
        for name, took, times, share, note in (
            ("load from our safetensors", ours, 8, 0.7, memory[0]),
            ("load from DCP", theirs, 6, 0.55, memory[1]),
        ):
            row = Row(name, took, peer, "dcp.load", Target(times), note, copies)
            yield row
            yield against_the_limit(row, Target(share, percent=True))
        yield Row('load from our safetensors, read="once"', once, peer, "dcp.load", limit=copies)
        durable = Row("save, fsync", safe, safes, "dcp.save", Target(1.5), limit=plain_safe)
        yield durable
        yield against_the_limit(durable, Target(0.9, percent=True), "plain writes")
        yield Row("save, no fsync", saved, saves, "dcp.save", Target(1.5), limit=plain)
        yield Row("save as DCP, no fsync", as_dcp, saves, "dcp.save", limit=plain)
        yield from _cold(folder, effort)
        yield from _conversions(folder, effort)
        yield from _openings(folder, effort)


# --- on a rank -------------------------------------------------------------------------------------------------------


def _measured(folder: str, repeats: int) -> tuple[list[list[Interval]], list[int]]:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    torch.manual_seed(dist.get_rank())
    source = {name: tensor_of(shape, mesh, Shard(0)) for name, shape in model().items()}
    target = {name: tensor_of(shape, mesh, placement(name)) for name, shape in model().items()}
    _dcp_save(source, f"{folder}/dcp", sync=False)
    checkpoint.save(source, f"{folder}/ours", durable=False)
    everybody = dist.group.WORLD
    jobs: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.load(f"{folder}/ours", target),
        lambda _: checkpoint.load(f"{folder}/dcp", target),
        lambda _: checkpoint.load(f"{folder}/ours", target, group=everybody, read="once"),
        lambda _: dcp.load(target, checkpoint_id=f"{folder}/dcp"),
    ]
    memory = [rise(partial(job, None), "RssAnon") for job in jobs[:2]]
    for job in jobs:
        _check(job, source, target, mesh)
    jobs.append(_copies(source, target))
    loads, _ = every_repeat(*(Task(job, meet, repeats) for job in jobs))
    saving: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.save(source, f"{folder}/a", durable=False),
        lambda _: _dcp_save(source, f"{folder}/b", sync=False),
        lambda _: checkpoint.save(source, f"{folder}/c"),
        lambda _: _dcp_save(source, f"{folder}/d", sync=True),
        lambda _: checkpoint.save(source, f"{folder}/e", format="dcp", durable=False),
        lambda _: _plain_save(source, f"{folder}/f", sync=False),
        lambda _: _plain_save(source, f"{folder}/g", sync=True),
    ]
    for job in saving:
        job(None)
    saves, _ = every_repeat(*(Task(job, _settled, repeats) for job in saving))
    return loads + saves, memory


def _settled() -> None:
    """All ranks, once the disk has what was written before."""
    dist.barrier()
    os.sync()
    dist.barrier()


def _check(job: Callable[[Any], Any], source: dict[str, DTensor], target: dict[str, DTensor], mesh: DeviceMesh) -> None:
    for tensor in target.values():
        tensor.to_local().zero_()
    job(None)
    for name, tensor in target.items():
        if not torch.equal(source[name].redistribute(mesh, [placement(name)]).to_local(), tensor.to_local()):
            raise RuntimeError(f"{name} was not loaded as it was saved")


def _copies(source: dict[str, DTensor], target: dict[str, DTensor]) -> Callable[[Any], Any]:
    plans = [plan(layout_of(source[name]), layout_of(x), itemsize=x.dtype.itemsize) for name, x in target.items()]
    copies = strided_copies(dist.get_rank(), [(one, torch.bfloat16, None) for one in plans])
    assert copies is not None, "checkpoints are copied"
    return lambda _: copies()


def _plain_save(state: dict[str, DTensor], path: str, *, sync: bool) -> None:
    """Nothing but the bytes of this rank."""
    with open(f"{path}.{dist.get_rank()}", "wb") as file:
        for tensor in state.values():
            file.write(tensor.to_local().view(torch.uint8).numpy())
        file.flush()
        if sync:
            os.fsync(file.fileno())
    dist.barrier()


def _dcp_save(state: dict[str, DTensor], path: str, *, sync: bool) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=sync))


# --- from the disk ---------------------------------------------------------------------------------------------------


def _cold(folder: str, effort: Effort) -> Iterator[Row]:
    for name, format in ("ours", "our safetensors"), ("dcp", "DCP"):
        files = [path for path in Path(f"{folder}/{name}").iterdir() if path.suffix in (".safetensors", ".distcp")]
        into = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in model().items()}
        room = torch.zeros(max(path.stat().st_size for path in files), dtype=torch.uint8).numpy()

        def load(_: Any, path: str = f"{folder}/{name}", into: dict[str, torch.Tensor] = into) -> None:
            checkpoint.load(path, into)

        def dropped(files: list[Path] = files) -> None:
            _drop(files)

        ours, plain, direct = interleaved(
            Task(load, dropped, effort.large),
            Task(partial(_plain_reads, files, room), dropped, effort.large),
            Task(partial(_direct_reads, files), dropped, effort.large),
        )
        note = f"with O_DIRECT {seconds(direct.seconds)}"
        yield Row(f"load from {format}, cold", ours.seconds, plain.seconds, "plain reads", Target(0.9), note)


def _drop(files: list[Path]) -> None:
    """From the page cache, once all is on the disk."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_reads(files: list[Path], room: Any, _: Any) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := file.readinto(room[at : at + READ].data):
                at += count


def _direct_reads(files: list[Path], _: Any) -> None:
    with mmap(-1, READ) as room:
        for path in files:
            file, at = os.open(path, os.O_RDONLY | os.O_DIRECT), 0
            while count := os.preadv(file, [room], at):
                at += count
            os.close(file)


# --- converting ------------------------------------------------------------------------------------------------------

OURS = "from shardwise import checkpoint; checkpoint.convert({0!r}, {1!r}, verify=False, durable=False)"
TORCHS = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; dcp_to_torch_save({0!r}, {1!r})"
WATCHED = """
import json, time, warnings
warnings.simplefilter("ignore")
import torch, shardwise.checkpoint, torch.distributed.checkpoint.format_utils
from benchmarks.memory import rise
def work():
    global took
    started = time.perf_counter()
    {job}
    took = time.perf_counter() - started
most = rise(work, "RssAnon")
print(json.dumps([took, most]))
"""


def _conversions(folder: str, effort: Effort) -> Iterator[Row]:
    source, ours, theirs = f"{folder}/dcp", f"{folder}/one.safetensors", f"{folder}/one.pt"
    found = dict[str, list[tuple[float, float]]]()
    for _ in range(effort.large):
        for name, job in ("ours", OURS.format(source, ours)), ("torch", TORCHS.format(source, theirs)):
            Path(ours).unlink(missing_ok=True)
            Path(theirs).unlink(missing_ok=True)
            found.setdefault(name, []).append(_watched(job))
    mine, peer = (tuple(median(column) for column in zip(*found[name], strict=True)) for name in ("ours", "torch"))
    memory = f"{mine[1] / 2**20:.0f} MiB of memory against {peer[1] / 2**20:.0f}: {100 * mine[1] / peer[1]:.1f} %"
    yield Row("convert DCP to safetensors", mine[0], peer[0], "dcp_to_torch_save", Target(2), f"{memory} (10 % wanted)")
    checkpoint.convert(source, ours, verify=False, durable=False)

    def converted(path: str) -> Task:
        def work(_: Any) -> None:  # without what it returns: that keeps the file, and to free it is not what is timed
            checkpoint.convert(path, f"{folder}/to.safetensors", verify=False, durable=False)

        return Task(
            work,
            lambda: _ready(f"{folder}/to.safetensors", path),
            effort.large,
        )

    copied, again, plain = interleaved(
        Task(lambda _: shutil.copyfile(ours, f"{folder}/copy"), lambda: _ready(f"{folder}/copy", ours), effort.large),
        converted(source),
        converted(f"{folder}/ours"),
    )
    yield Row("four safetensors files to one", plain.seconds, copied.seconds, "cp", Target(0.6))
    yield Row("four DCP files to one safetensors file", again.seconds, copied.seconds, "cp", Target(0.6))
    verified = interleaved(Task(lambda _: checkpoint.verify(source, ours), repeats=effort.large))[0]
    yield Row("verify DCP against safetensors, bit-for-bit", verified.seconds)


def _ready(out: str, source: str) -> None:
    """Without what was written before, once the disk has all else, and with the source in the page cache."""
    Path(out).unlink(missing_ok=True)
    os.sync()
    for file in Path(source).iterdir() if Path(source).is_dir() else [Path(source)]:
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def _watched(job: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.replace("{job}", job)], capture_output=True, check=True, text=True
    )
    took, most = json.loads(done.stdout.splitlines()[-1])
    return took, most


# --- a large one -----------------------------------------------------------------------------------------------------

SHARDS = 100


def _openings(folder: str, effort: Effort) -> Iterator[Row]:
    kinds = list(islice(cycle(MODEL), COUNT))
    saved = [Layout.chunk(shape, 0, SHARDS) for shape, _ in kinds]
    lying = {(shape, place): Layout.on_mesh(shape, SERVERS, ["S0", place]) for shape, place in MODEL}
    targets = [lying[kind] for kind in kinds]  # those of equal DTensors are one object, too
    loads = {layout: peers.load(layout.shape, corners_of(layout), []) for layout in set(saved)}
    asked = [
        (loads[layout], target.local_shape(RANK), place)
        for layout, target, (_, place) in zip(saved, targets, kinds, strict=True)
    ]
    theirs, ours = Path(folder, "large_dcp"), Path(folder, "large")
    metadata = peers.written(peers.model(asked, SERVERS, RANK), theirs, SHARDS)
    ours.mkdir()
    contents = Contents(
        {name: (torch.bfloat16, layout) for name, layout in zip(metadata.state, saved, strict=True)}, {}, {}
    )
    files = [f"shard-{n:05d}-of-{SHARDS:05d}-00000000.safetensors" for n in range(SHARDS)]
    (ours / "shardwise.json").write_bytes(index_bytes(files, contents, {n: n for n in range(SHARDS)}))
    wanted = {
        name: Local(layout, RANK, tuple(map(row_major, local_shapes(layout, RANK))))
        for name, layout in zip(metadata.state, targets, strict=True)
    }
    mine, from_dcp, peer = interleaved(
        Task(lambda _: _planned(ours, wanted), forget, effort.peer),
        Task(lambda _: _planned(theirs, wanted), forget, effort.slow_peer),
        Task(lambda _: peers.read_and_plan(metadata.state, theirs), repeats=effort.slow_peer),
    )
    if not mine.result == from_dcp.result == peer.result:
        raise RuntimeError(f"{mine.result} and {from_dcp.result} copies, but the peer finds {peer.result}")
    sizes = " and ".join(f"{sum(f.stat().st_size for f in at.iterdir()) / 2**20:.1f} MiB" for at in (ours, theirs))
    note = f"{mine.result:,} copies; our index and DCP's metadata have {sizes}"
    yield Row("open 100,000 shards and plan a load", mine.seconds, peer.seconds, "DCP", Target(50), note)
    yield Row("the same, from DCP's metadata", from_dcp.seconds, peer.seconds, "DCP")


def _planned(path: Path, targets: dict[str, Local]) -> int:
    found = checkpoint.open(path)
    shapes = {name: found[name].shape for name in found}
    listed = links(shapes, shapes)
    return sum(len(match(found[link.source], targets[link.target], link).targets) for link in listed)
