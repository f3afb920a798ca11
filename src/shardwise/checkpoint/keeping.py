"""A rank's part in keeping the steps of a run in memory: its keeper, and what that holds.

A step is put together as files in shared memory: this rank's own, byte for byte as on the disk, and copies of those of
others. The keeper gets their descriptors. The step before is forgotten only when all ranks' keepers hold this one: when
the next one is about to be kept. So at any moment one step is whole, whoever dies.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import NamedTuple

from shardwise.checkpoint.formats.writers import Writer
from shardwise.checkpoint.kept_copies import CopyJob, Holders, Vacancies, holders
from shardwise.checkpoint.save_options import check_seconds
from shardwise.checkpoint.saving import Saved, describe_file
from shardwise.checkpoint.segments import Segment, size_of
from shardwise.checkpoint.staging import SaveMemory, StagedFile, stage
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers
from shardwise.job.snapshot import segment_of
from shardwise.planning import size as in_units
from shardwise.storage.appending import Descriptor
from shardwise.storage.available_memory import available_memory
from shardwise.storage.folders import OutputFolder
from shardwise.storage.keepers import (
    HeldStep,
    KeeperConnection,
    KeeperLostError,
    find_keepers,
    host_name,
    name_on_this_host,
    start_keeper,
)

LINE, LONGEST_LINE = ".run.line", 256
STEPS = 2  # that are held
log = logging.getLogger("shardwise")


class RunLine(NamedTuple):
    """Tells a run from others that were in the same folder, and its jobs apart.

    `newest`: the number of the newest job that has kept a step. What jobs before it have kept does not count any more:
    their training was left for another one.
    """

    run: str
    newest: int

    @staticmethod
    def of(folder: OutputFolder) -> RunLine:
        """That of a folder; a new one where it has none."""
        words = folder.tail(LINE, LONGEST_LINE).decode(errors="replace").split()
        if len(words) == 2 and words[1].isdecimal():
            return RunLine(words[0], int(words[1]))
        made = RunLine(token_hex(8), 0)
        made.write(folder)
        return made

    def write(self, folder: OutputFolder) -> None:
        """Replace it."""
        with folder.write(LINE, sums=False) as file:
            file.write(f"{self.run} {self.newest}\n".encode())


def leave_kept_steps(folder: OutputFolder) -> None:
    """A job without keepers goes on: what jobs before it have kept must not come back later."""
    if folder.exists(LINE):
        line = RunLine.of(folder)
        line._replace(newest=line.newest + 1).write(folder)


class KeptStep(NamedTuple):
    """What this rank's keeper holds of a step."""

    number: int
    token: str
    files: Sequence[StagedFile]


@dataclass(frozen=True)
class KeepOptions:
    """How steps are kept: keywords of `Run`."""

    copies: int
    lease: float

    def check(self) -> None:
        """Refuse invalid ones."""
        copies, lease = self.__dict__.values()
        if type(copies) is not int or copies < 1:
            raise ValueError(f"memory={copies!r}: give the number of copies to keep, such as 2, or None")
        check_seconds("lease", lease)


class Keeping:
    """Keeps steps of a run in memory. All ranks make it, and call its methods together."""

    def __init__(self, callers: Callers, folder: OutputFolder, options: KeepOptions) -> None:
        self._options, self._folder = options, folder
        self._memory, self._job = SaveMemory(), CopyJob()
        self._held, self._unsure = list[KeptStep](), list[StagedFile]()
        self._number, self._saves, self._committed = -1, 0, False
        self._keeper: KeeperConnection | None = None
        if sys.platform != "linux":
            raise CheckpointError("memory= of Run needs Linux: give Run without it")
        place, self._line = callers.by_first(lambda: (os.path.realpath(folder.path), RunLine.of(folder)))
        self._run = f"{place if folder.local is not None else folder.path}\n{self._line.run}"
        _, told = callers.tell(lambda: (None, host_name()))
        hosts = defaultdict[str, list[int]](list)
        for rank, host in told.items():
            hosts[host].append(rank)
        self.host_of, self.host, self.hosts = told, told[callers.me], list(hosts.values())
        self._who: Holders = holders(self.hosts, options.copies)
        self._speaks = hosts[self.host][0] == callers.me  # for its host
        self._earlier = list[KeeperConnection]()  # keepers of earlier jobs, of this host
        self._name = name_on_this_host(self._run)
        callers.all_do(self._find_earlier)
        callers.all_do(self._own_keeper)  # now, because a process takes a moment to start
        places = len(self._who[0][1]) + 1
        if callers.first and places < options.copies:
            few = "%s: memory=%s, but these ranks have room for %s of the copies of a step: start more ranks, or hosts"
            log.warning(few, folder.path, options.copies, places)

    def _find_earlier(self) -> None:
        """Those of jobs before, on one rank of each host."""
        if self._speaks:
            self._earlier = find_keepers(self._name)

    def _own_keeper(self) -> KeeperConnection:
        if self._keeper is None:
            self._keeper = start_keeper(self._name, self._options.lease)
        return self._keeper

    def _replace_keeper(self, error: KeeperLostError) -> None:
        """It may only stand still, and go on later: what it holds is not written again, and so not used again."""
        log.warning("%s: another one is started", error)
        if self._keeper is not None:
            self._keeper.kill()
        self._keeper, self._held = None, []

    # --- keep ---------------------------------------------------------------------------------------------------------

    def begin(self, callers: Callers, number: int, at: int | None) -> None:
        """Before step `number` is kept, after step `at`: forget the steps after `at`, and all but the newest before."""
        self._number, self._saves = number, self._saves + 1

        def forget() -> None:
            for keeper in self._earlier:
                self._retain_up_to(keeper, number if at is None else at)
            before = [one for one in self._held if at is None or one.number <= at][-1:]
            self._retain(before)

        callers.all_do(forget)

    def _retain_up_to(self, keeper: KeeperConnection, at: int) -> None:
        try:
            keeper.retain([one.token for one in keeper.held() if _number(one) <= at])
        except KeeperLostError as error:
            log.warning("%s", error)

    def _retain(self, kept: Sequence[KeptStep]) -> None:
        """Only these; the memory of the others is used again once the keeper has let go of it."""
        tokens = {one.token for one in kept}
        gone = [file for one in self._held if one.token not in tokens for file in one.files] + self._unsure
        self._held, self._unsure = list(kept), []
        if self._keeper is None:
            return
        try:
            self._keeper.retain(sorted(tokens))
        except KeeperLostError as error:
            self._replace_keeper(error)
            return
        for file in gone:
            self._memory.give_back(file.memory)

    def keep(
        self, callers: Callers, saved: Saved, writer: Writer, check: Callable[[], None]
    ) -> tuple[StagedFile, bytes]:
        """Keep the files of a save. Returns this rank's file, and the index."""
        mine = [rank for rank, others in self._who if callers.me in others]
        vacancies = Vacancies(saved.contents, mine)

        def describe() -> tuple[list[tuple[str, list[Segment]]], tuple[object, int, int]]:
            check()
            own, result = describe_file(writer, callers.me, saved.parts(), saved.contents)
            theirs = saved.contents._replace(made=None)  # what is known from earlier saves is of this rank's file
            copies = [describe_file(writer, rank, vacancies.parts(rank), theirs)[0] for rank in mine]
            files = [own, *copies]
            return files, (result, self._lacking([size_of(segments) for _, segments in files]), available_memory())

        files, told = callers.tell(describe)
        with callers.refusals():
            self._check_room({rank: numbers for rank, (_, *numbers) in told.items()})
        results = {rank: result for rank, (result, *_) in told.items()}

        def put_together() -> bytes:
            self._stage(files)
            return writer.index(results, saved.contents) if callers.first else b""

        index = callers.from_first(put_together)  # others might write the same in other words
        self._job.run(callers, saved.flat, saved.sources, saved.contents, self._who, vacancies)
        callers.all_do(lambda: self._hold(writer, index))
        self._commit(callers, writer.token)
        return self._held[-1].files[0], index

    def _lacking(self, sizes: Sequence[int]) -> int:
        """Bytes that this rank needs to hold so many steps, beyond what it has."""
        held = [file.memory.numel() for one in self._held for file in one.files]
        return max(0, STEPS * sum(sizes) - self._memory.spare - sum(held))

    def _check_room(self, by_rank: Mapping[int, Sequence[int]]) -> None:
        for ranks in self.hosts:
            needed, there = sum(by_rank[rank][0] for rank in ranks), min(by_rank[rank][1] for rank in ranks)
            if needed > there:
                raise CheckpointError(
                    f"memory={self._options.copies} needs {in_units(needed)} for {STEPS} steps on the host of rank "
                    f"{ranks[0]}, which has {in_units(there)} left: use more hosts, or give Run without memory="
                )

    def _stage(self, files: Sequence[tuple[str, list[Segment]]]) -> None:
        for name, segments in files:
            file = stage(name, segments, self._memory)._replace(kept=True)
            self._unsure.append(file)
            if segment_of(file.memory) is None:
                raise CheckpointError(f"the system has no shared memory for {in_units(file.size)}: see memory= of Run")

    def _hold(self, writer: Writer, index: bytes) -> None:
        """Hand the files over. A keeper that was lost is replaced."""
        whole = Descriptor.of_memory("shardwise index", index)
        files = {writer.main: (whole.number, len(index))}
        for one in self._unsure:
            segment = segment_of(one.memory)
            assert segment is not None, "or it was refused"
            files[one.name] = segment.file, one.size
        job = self._line.newest + (not self._committed)
        known = {"number": self._number, "job": job, "save": self._saves, "index": writer.main}
        try:
            self._own_keeper().hold(writer.token, known, files)
        except KeeperLostError as error:
            self._replace_keeper(error)
            self._own_keeper().hold(writer.token, known, files)

    def _commit(self, callers: Callers, token: str) -> None:
        """All keepers hold the step: keepers of earlier jobs are not needed any more."""
        self._held.append(KeptStep(self._number, token, self._unsure))
        self._unsure = []
        if not self._committed:
            line = self._line._replace(newest=self._line.newest + 1)
            callers.all_do(lambda: line.write(self._folder) if callers.first else None)
            self._line, self._committed = line, True
            self._end_earlier()

    def _end_earlier(self) -> None:
        for keeper in self._earlier:
            keeper.end()
        self._earlier.clear()

    @property
    def newest(self) -> int | None:
        """The newest step that this rank's keeper holds."""
        return self._held[-1].number if self._held else None

    # --- what is held -------------------------------------------------------------------------------------------------

    def find(self, callers: Callers) -> dict[int, list[FoundStep]]:
        """What the keepers of all hosts hold, by the number of the step. The same on all ranks."""

        def look() -> tuple[None, list[tuple[str, HeldStep]]]:
            return None, self._look() if self._speaks else []

        _, told = callers.tell(look)
        found = dict[str, FoundStep]()
        for rank, several in told.items():
            for address, one in several:
                found.setdefault(one.token, FoundStep.of(one)).add(self.host_of[rank], address, one)
        found = {token: one for token, one in found.items() if one.age[0] >= self._line.newest}
        steps = defaultdict[int, list[FoundStep]](list)
        for step in sorted(found.values(), key=lambda one: one.age, reverse=True):
            steps[step.number].append(step)
        return dict(steps)

    def _look(self) -> list[tuple[str, HeldStep]]:
        """On this host."""
        held = list[tuple[str, HeldStep]]()
        for keeper in find_keepers(self._name):
            with keeper, suppress(CheckpointError):  # it has just ended
                held += [(keeper.address, one) for one in keeper.held()]
        return held

    # --- end ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The run has ended: free all memory."""
        self._end_earlier()
        if self._keeper is not None:
            self._keeper.end()
        self.leave()

    def leave(self) -> None:
        """Keepers stay for their lease."""
        for keeper in (*self._earlier, *([self._keeper] if self._keeper else [])):
            keeper.close()
        self._earlier.clear()
        self._held.clear()
        self._unsure.clear()
        self._memory.release()


class FoundStep:
    """A step that keepers hold, or a part of it: who has which files. `hosts`: address and names by host.

    `age`: the number of its job, and of its save in that.
    """

    def __init__(self, token: str, number: int, index: str, age: tuple[int, int]) -> None:
        self.token, self.number, self.index, self.age = token, number, index, age
        self.hosts, self.sizes = defaultdict[str, list[tuple[str, list[str]]]](list), dict[str, int]()

    @staticmethod
    def of(held: HeldStep) -> FoundStep:
        """As one keeper says."""
        job, save = held.step["job"], held.step["save"]
        assert isinstance(job, int)
        assert isinstance(save, int)
        return FoundStep(held.token, _number(held), str(held.step["index"]), (job, save))

    def add(self, host: str, address: str, held: HeldStep) -> None:
        """What a keeper has of it."""
        self.hosts[host].append((address, list(held.sizes)))
        self.sizes |= held.sizes


def _number(held: HeldStep) -> int:
    number = held.step["number"]
    assert isinstance(number, int)
    return number
