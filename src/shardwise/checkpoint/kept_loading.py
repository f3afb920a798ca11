"""Load a step that keepers hold in memory: as a checkpoint whose files are memory, each on some hosts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint.entry import Checkpoint, whole_entry
from shardwise.checkpoint.keeping import FoundStep, Keeping
from shardwise.checkpoint.kept_files import KeptFiles, KeptMemory, Readers
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.opening import open_files
from shardwise.checkpoint.random_state import RandomState
from shardwise.errors import CheckpointError
from shardwise.geometry import Box
from shardwise.job.agree import Callers
from shardwise.planning import size
from shardwise.state.traverse import flatten_state_dict
from shardwise.storage.appending import Descriptor
from shardwise.storage.folders import OURS_IN_BYTES, OutputFolder, token_of
from shardwise.storage.keepers import KeeperConnection


class Resumed(NamedTuple):
    """From where `Run.resume` has loaded a step, in bytes on all ranks together.

    `memory`: from keepers of the rank's own host; `other_hosts`: from keepers of other hosts; `disk`: from files.

    >>> Resumed(step=40, memory=4096, other_hosts=0, disk=0)
    Resumed(step=40, 4.00 KiB from memory)
    """

    step: int
    memory: int
    other_hosts: int
    disk: int

    def __repr__(self) -> str:
        words = {"memory": self.memory, "memory of other hosts": self.other_hosts, "the disk": self.disk}
        parts = [f"{size(some)} from {where}" for where, some in words.items() if some]
        return f"Resumed(step={self.step}, {', '.join(parts) or 'no bytes'})"


class KeptLoad(NamedTuple):
    """What is loaded into what, by all callers together; `path` is where the step is on the disk, if it is there."""

    callers: Callers
    keeping: Keeping
    step: FoundStep
    path: str
    into: dict[Any, Any] | torch.nn.Module
    group: dist.ProcessGroup | None

    def run(self, options: Mapping[str, object]) -> str | Resumed:
        """Load it. Returns why it is not whole, if that is so; nothing is written then."""
        kept, told = self.callers.tell(self._map)
        readers = self._readers(told)
        if self.step.index not in readers:
            return "no keeper has its index"
        index = self._index(kept, readers[self.step.index][0][0])
        missing = sorted(self._named(index) - readers.keys())
        on_disk = self.callers.by_first(lambda: self._on_disk(index) if missing else set())
        if lost := sorted(set(missing) - on_disk):
            return f"{lost[0]} is neither in memory nor, as it was, on the disk"
        opened = self._opened
        (files, checkpoint), _ = self.callers.tell(lambda: (opened(kept, readers, index, on_disk=bool(missing)), None))
        self._share_random_states(checkpoint)
        alone = self.callers.transport is None or files.near  # it reaches all that it needs
        read = {"read": "each" if alone else "once"}
        load(checkpoint, self.into, group=self.group, **{**options, **read})  # type: ignore[arg-type]
        return self._report(files)

    def _map(self) -> tuple[dict[str, KeptMemory], list[str]]:
        """What keepers of this host have. One that was lost meanwhile has nothing."""
        kept = dict[str, KeptMemory]()
        for address, names in self.step.hosts.get(self.keeping.host, []):
            wanted = [name for name in names if name not in kept]
            with suppress(CheckpointError), KeeperConnection(address) as keeper:
                files = keeper.fetch(self.step.token, wanted)
                for name, file in zip(wanted, files, strict=True):
                    kept[name] = KeptMemory(Descriptor(file), self.step.sizes[name])
        return kept, sorted(kept)

    def _readers(self, by_rank: Mapping[int, list[str]]) -> dict[str, Readers]:
        """Of every file: the ranks of each host that have it."""
        names = sorted({name for some in by_rank.values() for name in some})
        hosts = self.keeping.hosts
        groups = {name: [tuple(rank for rank in some if name in by_rank[rank]) for some in hosts] for name in names}
        return {name: tuple(group for group in some if group) for name, some in groups.items()}

    def _named(self, index: bytes) -> set[str]:
        """The files of this save that its index names. (Keepers do not list them: there may be thousands.)"""
        names = {match[0].decode() for match in OURS_IN_BYTES.finditer(index)}
        return {name for name in names if token_of(name) == self.step.token}

    def _on_disk(self, index: bytes) -> set[str]:
        """The files of the same save. (An incremental one leaves out what did not change: its index is another.)"""
        with suppress(CheckpointError):
            folder = OutputFolder(self.path)
            if folder.exists(self.step.index) and folder.read(self.step.index) == index:
                return set(folder.names())
        return set()

    def _index(self, kept: Mapping[str, KeptMemory], teller: int) -> bytes:
        """As one rank has it: ranks of other hosts may not."""
        _, told = self.callers.tell(
            lambda: (None, kept[self.step.index].data.tobytes() if self.callers.me == teller else b"")
        )
        return told[teller]

    def _opened(
        self, kept: Mapping[str, KeptMemory], readers: Mapping[str, Readers], index: bytes, *, on_disk: bool
    ) -> tuple[KeptFiles, Checkpoint]:
        near = all(sum(map(len, groups)) == len(self.callers.owners) for groups in readers.values())
        disk = files_at(self.path)[0] if on_disk else None
        files = KeptFiles(
            self.path,
            kept,
            {} if near else readers,
            self.step.sizes,
            disk,
            near=near and (disk is None or disk.near),
            host_of=self.keeping.host_of,
        )
        files.add(self.step.index, index)
        checkpoint = open_files(files)
        checkpoint.sums = False  # memory has none; those on the disk are used
        return files, checkpoint

    def _share_random_states(self, checkpoint: Checkpoint) -> None:
        """Rows that are in memory of another host come to all ranks: each will read its own alone."""
        assert isinstance(checkpoint.files, KeptFiles)
        if checkpoint.files.near or isinstance(self.into, torch.nn.Module):
            return
        leaves, _ = flatten_state_dict(self.into)
        for name in (name for name, one in leaves.items() if isinstance(one, RandomState) and name in checkpoint):
            checkpoint.replace(name, self._in_own_memory(checkpoint, name))

    def _in_own_memory(self, checkpoint: Checkpoint, name: str) -> Any:
        entry, files = checkpoint[name], checkpoint.files
        assert isinstance(files, KeptFiles)

        def mine() -> tuple[None, list[tuple[int, bytes]]]:
            rows = list[tuple[int, bytes]]()
            for at, number in enumerate(entry.file.tolist()):
                groups = files.readers.get(entry.paths[number], (self.callers.owners,))
                if groups[0][0] == self.callers.me:
                    box = entry.boxes.box(at)
                    rows.append((box.lo[0], entry.read(Box(box.lo, box.hi)).numpy().tobytes()))
            return None, rows

        _, told = self.callers.tell(mine)
        rows = dict(row for some in told.values() for row in some)
        files.add(name, b"".join(rows[at] for at in sorted(rows)))
        return whole_entry(name, entry.shape, entry.dtype, 0, 0, [name], files)

    def _report(self, files: KeptFiles) -> Resumed:
        mine = [files.own_memory, files.from_hosts, files.from_disk]
        memory, hosts, disk = self.callers.total(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()
        return Resumed(self.step.number, memory, hosts, disk)
