"""The checkpoints of a run, a folder for each step: which are whole, which one is the latest, and how one is removed.

A step is there while its folder has an index of ours, which `save` writes last. To remove it, the index is set aside
under another name first: from then on it is not a step, whatever happens. Then the files of ours go, and the index set
aside goes last, so that a removal that was interrupted is finished later. Files of others stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.storage.folders import (
    ASIDE,
    INDEXES,
    OURS,
    OURS_IN_BYTES,
    OutputFolder,
    indexed_files,
    sidecar_name,
    token_of,
)
from shardwise.storage.increments import earlier_files
from shardwise.storage.locks import LOCK, PARTIAL, claim_folder
from shardwise.storage.paths import PathLike, file_system, readable

STEP = re.compile(r"step-([0-9]{8,})")
LATEST, LONGEST_LATEST = "latest", 64
INDEX_NAMES = INDEXES[:2]  # of the formats that `save` writes
REMOVING = 8  # files that are removed at a time


def folder_name(step: int) -> str:
    """The name of the folder of a step.

    >>> folder_name(1200), step_of("step-00001200"), step_of("step-1200")
    ('step-00001200', 1200, None)
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


class StepFolders:
    """The folder of a run, and those of its steps. One process at a time writes here."""

    def __init__(self, path: PathLike) -> None:
        self.run, self._start = OutputFolder(path), os.getcwd()
        self._needed = dict[int, set[str]]()

    @property
    def relative(self) -> bool:
        """True if the path depends on the working directory."""
        return self.run.local is not None and not self.run.local.is_absolute()

    def check_directory(self) -> None:
        """Refuse to look elsewhere than before. (It is not made absolute: ranks may have directories of their own.)"""
        if self.relative and os.getcwd() != self._start:
            raise CheckpointError(
                f"the run {self.run.path} has a relative path, and the working directory has changed from "
                f"{self._start} to {os.getcwd()}: give Run an absolute path"
            )

    def path_of(self, step: int) -> str:
        """The path or URL of a step."""
        return self.run.path_of(folder_name(step))

    def all(self) -> list[int]:
        """The steps that have a folder, whole or not, ascending."""
        return sorted(step for name in self._folders() if (step := step_of(name)) is not None)

    def _folders(self) -> list[str]:
        system, place = file_system(self.run.path)
        with readable(self.run.path), suppress(FileNotFoundError):
            if system is None:
                return [entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
            system.invalidate_cache(place)  # other processes change it, too
            return [str(path).rstrip("/").rpartition("/")[2] for path in system.ls(place, detail=False)]
        return []

    def is_saved(self, step: int) -> bool:
        """True if it has an index: its save has ended."""
        return self._index(step) is not None

    def saved(self) -> Iterator[int]:
        """The steps that have an index, the newest first. Each is looked at when it is asked for."""
        return filter(self.is_saved, reversed(self.all()))

    def whole(self) -> Iterator[int]:
        """The steps that have all their files, the newest first."""
        return (step for step in reversed(self.all()) if self.damage(step) is None)

    def damage(self, step: int) -> str | None:
        """Why a step is not whole: it has no index, it cannot be read, or a file that it names is missing."""
        folder, index = self._folder(step), self._index(step)
        if index is None:
            return f"{folder.path} has no index"
        try:
            data = folder.read(index)
            earlier = earlier_files(data)
            missing = sorted(_named(data) - {file for some in earlier.values() for file in some} - set(folder.names()))
            return f"{folder.path_of(missing[0])} is missing" if missing else _earlier_damage(folder, earlier)
        except CheckpointError as error:
            return str(error)

    def before(self, step: int) -> str | None:
        """The path of the newest whole step before one that an incremental save can be compared with."""
        older = (one for one in self.whole() if one < step)
        return next((self.path_of(one) for one in older if self._index(one) == INDEX_NAMES[0]), None)

    def needed_by_newer(self, step: int) -> set[str]:
        """Files that steps after this one need, in any folder. (Names are unique: they have random tokens.)"""
        newer = (one for one in self.all() if one > step and self.is_saved(one))
        return {name for one in newer for name in self._needed_by(one)}

    def _needed_by(self, step: int) -> set[str]:
        if step not in self._needed:
            self._needed[step] = _named(self._folder(step).read(self._index(step) or INDEX_NAMES[0]))
        return self._needed[step]

    def forget(self, step: int) -> None:
        """It was saved again."""
        self._needed.pop(step, None)

    def index_bytes(self, step: int) -> bytes | None:
        """The index of a step; None if it has none."""
        index = self._index(step)
        with suppress(CheckpointError):
            return None if index is None else self._folder(step).read(index)
        return None

    def _folder(self, step: int) -> OutputFolder:
        return OutputFolder(self.path_of(step))

    def _index(self, step: int) -> str | None:
        there = set(self._folder(step).names())
        return next((name for name in INDEX_NAMES if name in there), None)

    # --- the latest step ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a folder in which something else has a file `latest`."""
        data = self.run.tail(LATEST, LONGEST_LATEST)
        if data and self.latest() is None:
            raise CheckpointError(
                f"{self.run.path_of(LATEST)} was not written by shardwise: it has {brief(data)}. "
                f"Give another folder, or remove it"
            )

    def latest(self) -> int | None:
        """What the file `latest` says. It may be wrong: only the folders of the steps count."""
        return step_of(self.run.tail(LATEST, LONGEST_LATEST).decode(errors="replace").strip())

    def set_latest(self, step: int) -> None:
        """Replace the file `latest`."""
        remove_partial(self.run, LATEST)
        with self.run.write(LATEST, sums=False) as file:
            file.write(f"{folder_name(step)}\n".encode())

    # --- removal ------------------------------------------------------------------------------------------------------

    def set_aside(self, step: int) -> None:
        """From now on it is not a step. Its files are still there."""
        folder, index = self._folder(step), self._index(step)
        if index is None:
            return
        data = folder.read(index)
        if not _named(data) and not any(map(token_of, folder.names())):
            raise CheckpointError(f"{folder.path} was not saved by shardwise: move it to another folder")
        with folder.write(ASIDE[index], sums=False) as file:  # also on object stores, which cannot rename
            file.write(data)
        folder.remove(index)
        if index in folder.names():
            raise CheckpointError(f"{folder.path_of(index)} cannot be removed: check the permissions of its folder")
        _flush(folder.local)

    def sweep(self, step: int) -> bool:
        """Remove what a removal or a save that died has left in the folder of a step, and the folder if it is empty.

        Files that newer steps need stay, with the index set aside, until no step needs them. True if nothing is left
        to remove.
        """
        folder = self._folder(step)
        names = folder.names()
        if LOCK in names or not set(names).isdisjoint(ASIDE.values()):
            with suppress(CheckpointError), claim_folder(folder, token_hex(8)):  # which removes files of dead writers
                _remove_unneeded(folder, lambda: self.needed_by_newer(step))
            names = folder.names()
        with suppress(OSError):
            if folder.local is not None and not names:
                folder.local.rmdir()
        return LOCK not in names and set(names).isdisjoint(ASIDE.values())


def _remove_unneeded(folder: OutputFolder, elsewhere: Callable[[], set[str]]) -> None:
    """If an index was set aside, remove all files of ours that no index names, and at last the one set aside.

    `elsewhere`: files that indexes in other folders name.
    """
    aside = [name for name in folder.names() if name in ASIDE.values()]
    if not aside:
        return
    needed = indexed_files(folder, INDEX_NAMES)
    unneeded = [name for name in folder.names() if _belongs_to_none(name, needed | elsewhere())]
    with ThreadPoolExecutor(REMOVING) as pool:
        list(pool.map(folder.remove, unneeded))
    if not any(_belongs_to_none(name, needed) for name in folder.names()):
        for name in aside:
            remove_partial(folder, name)
            folder.remove(name)


def _earlier_damage(folder: OutputFolder, earlier: Mapping[str, Collection[str]]) -> str | None:
    """Why files in other folders cannot be read that an index names."""
    for name, files in earlier.items():
        missing = folder.beside(name).missing(files)
        if missing:
            return f"{folder.beside(name).path_of(missing[0])} is missing, which {folder.path} needs"
    return None


def _named(index: bytes) -> set[str]:
    """The files of ours that an index names."""
    return {match[0].decode() for match in OURS_IN_BYTES.finditer(index)}


def _belongs_to_none(name: str, files: set[str]) -> bool:
    """True for a file of ours that is not one of these, and for what is beside one, such as its checksums."""
    match = OURS.match(name)
    return match is not None and match[0] not in files and name[match.end() :][:1] in ("", ".")


def remove_partial(folder: OutputFolder, name: str) -> None:
    """Remove what a process left that died while it wrote this file."""
    for other in folder.names():
        if PARTIAL.fullmatch(other) and other.startswith(sidecar_name(name, "")):
            folder.remove(other)


def _flush(folder: Path | None) -> None:
    """Flush the names in a directory to the disk."""
    if folder is None:
        return
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
