"""The versions that a rank holds: each a copy of its tensors, in memory that is used again and again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Lock, Thread

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.messages import Tensors
from shardwise.job.deltas import changed_cells, mostly_changed
from shardwise.job.side import Side
from shardwise.job.snapshot import Snapshot

Ends = tuple[int, int]  # the numbers of two versions: the base, and the later one


@dataclass(eq=False)
class HeldVersion:
    """One version. `whole` once all of it is copied; `dropped` once nobody new may read it."""

    number: int
    side: Side
    whole: bool = False
    dropped: bool = False
    tainted: bool = False  # its memory must not be written again: another process may read it
    mapped: bool = False  # another process was sent its memory
    readers: int = 0


class HeldVersions:
    """Committed by one thread, read by others. Memory of a version is free once it is dropped and nobody reads it.

    As a rule `keep` versions are held. `most` is a limit for the time that the rank which drops versions is away.
    """

    def __init__(self, keep: int = 1, most: int = 8) -> None:
        self._keep, self._most = keep, most
        self._versions, self._spare = dict[int, HeldVersion](), list[Snapshot]()
        self._changed, self._comparing = Condition(), Lock()
        self._masks = dict[tuple[Ends, str, torch.dtype], Tensors | None]()  # what has changed between two versions
        self._compared = set[tuple[str, torch.dtype]]()  # what was ever compared
        self._next, self._ahead, self._closed = None, None, False

    _next: Ends | None  # to compare ahead
    _ahead: Thread | None  # which does it

    def __contains__(self, number: int) -> bool:
        return number in self._versions

    @property
    def numbers(self) -> list[int]:
        """The numbers of versions that can be read."""
        with self._changed:
            return [number for number, one in self._versions.items() if one.whole and not one.dropped]

    @property
    def bytes(self) -> int:
        """Of all copies, also of memory that waits for the next version, and of what has changed between them."""
        with self._changed:
            sides = [one.side for one in self._versions.values()]
            copies = sum(side.bytes for side in (*sides, *self._spare) if isinstance(side, Snapshot))
            return copies + sum(mask.nbytes for masks in self._masks.values() for mask in masks or ())

    def warm_up(self, tensors: Mapping[str, Tensors]) -> None:
        """Allocate and touch memory for versions: the first copy into new memory takes ten times as long."""
        for _ in range(self._keep + 1):
            memory = Snapshot(tensors)
            memory.take(tensors)
            self._spare.append(memory)

    def new_memory(self, tensors: Mapping[str, Tensors]) -> Snapshot:
        """Memory for a copy of these: free memory, or new."""
        with self._changed:
            self._spare = [spare for spare in self._spare if spare.fits(tensors)]
            if self._spare:
                return self._spare.pop()
        return Snapshot(tensors)

    def begin(self, number: int, side: Side) -> HeldVersion:
        """A version whose memory is being filled: readers wait for it."""
        with self._changed:
            self._versions[number] = HeldVersion(number, side)
            unread = [one for one in self._versions.values() if not one.readers and one.number != number]
            for old in unread[: max(0, len(self._versions) - self._most)]:
                self.drop(old.number, tainted=old.mapped)
            return self._versions[number]

    def finish(self, version: HeldVersion) -> None:
        """The copy is complete: readers may start."""
        with self._changed:
            version.whole = True
            self._changed.notify_all()

    def drop(self, number: int, *, tainted: bool = False) -> None:
        """Let nobody new read it. Memory that nobody reads any more is used again; released, if it is tainted."""
        with self._changed:
            version = self._versions.get(number)
            if version is not None:
                version.dropped, version.tainted = True, version.tainted or tainted
                self._tidy(version)

    def hold(self, held: Collection[int], newest: int, tainted: Collection[int]) -> None:
        """Drop all versions up to the newest that are not among these."""
        for number in [one for one in list(self._versions) if one <= newest and one not in held]:
            self.drop(number, tainted=number in tainted)

    @contextmanager
    def reading(self, number: int, patience: float, *, mapped: bool = False) -> Iterator[Side]:
        """The memory of a version, which stays as it is meanwhile. `mapped`: another process reads on afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: (one := self._versions.get(number)) is not None and one.whole, patience)
            version = self._versions.get(number)
            if version is None or not version.whole:
                raise ExchangeError(f"version {number} is not available on this rank")
            version.readers += 1
            version.mapped |= mapped
        try:
            yield version.side
        finally:
            with self._changed:
                version.readers -= 1
                self._tidy(version)

    def wait_unread(self, number: int, seconds: float | None) -> bool:
        """Wait until nobody reads a version. False if somebody still does after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: number not in self._versions, seconds)

    def _tidy(self, version: HeldVersion) -> None:
        if version.dropped and not version.readers and self._versions.get(version.number) is version:
            del self._versions[version.number]
            self._masks = {key: mask for key, mask in self._masks.items() if version.number not in key[0]}
            enough = len(self._versions) + len(self._spare) > self._keep
            if isinstance(version.side, Snapshot) and not version.tainted and not enough:
                self._spare.append(version.side)
            self._changed.notify_all()

    def changed(self, ends: Ends, name: str, dtype: torch.dtype, sides: tuple[Side, Side]) -> Tensors | None:
        """Where two versions differ in a tensor, as it travels; None if most of it does.

        They are compared once for all who pull.
        """
        key = ends, name, dtype
        with self._comparing:
            with self._changed:  # not while they are compared: a commit must not wait for that
                self._compared.add((name, dtype))
                if key in self._masks:
                    return self._masks[key]
            base, current = (side.memory(name) for side in sides)
            mask = None if mostly_changed(current, base, dtype) else changed_cells(current, base, dtype)
            with self._changed:
                self._masks[key] = mask
            return mask

    # --- compared before anybody pulls -------------------------------------------------------------------------------

    def compare_ahead(self, ends: Ends) -> None:
        """Let a thread compare all tensors that were compared in earlier versions. It leaves out older ends."""
        with self._changed:
            self._next = ends
            if self._ahead is None and not self._closed:
                self._ahead = Thread(target=self._run_ahead, name="shardwise comparison", daemon=True)
                self._ahead.start()

    def _run_ahead(self) -> None:
        while (ends := self._take_next()) is not None:
            with suppress(ExchangeError), self.reading(ends[0], 0.0) as base, self.reading(ends[1], 0.0) as side:
                self._compare_all(ends, (base, side))

    def _take_next(self) -> Ends | None:
        with self._changed:
            ends, self._next = self._next, None
            if ends is None or self._closed:
                self._ahead = None
                return None
            return ends

    def _compare_all(self, ends: Ends, sides: tuple[Side, Side]) -> None:
        with self._changed:
            compared = list(self._compared)
        for name, dtype in compared:
            if self._closed or self._next is not None:  # a newer version is there: nobody needs these
                return
            self.changed(ends, name, dtype, sides)

    def close(self) -> None:
        """Free all memory that nobody reads."""
        with self._changed:
            self._closed, ahead = True, self._ahead
        if ahead is not None:  # a thread that is inside torch when the interpreter ends may abort the process
            ahead.join()
        with self._changed:
            self._spare.clear()
            for version in list(self._versions.values()):
                version.dropped = True
                self._tidy(version)
            self._spare.clear()
