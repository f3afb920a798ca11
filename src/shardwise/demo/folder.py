"""The directory that a demo leaves behind. Nothing is removed from it that a demo did not write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MARKER = ".shardwise-demo"


@dataclass(frozen=True)
class DemoFolder:
    """The paths in the directory."""

    path: Path

    @staticmethod
    def claim(path: Path) -> DemoFolder:
        """Make it, or take it over from an earlier demo: without what that one left."""
        folder = DemoFolder(path)
        marker = path / MARKER
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: give a directory, shardwise demo --out DIR")
        if path.is_dir() and any(path.iterdir()) and not marker.is_file():
            raise FileExistsError(
                f"{path} is not empty, and no demo has written it: give another directory, shardwise demo --out DIR"
            )
        path.mkdir(parents=True, exist_ok=True)
        marker.write_text("shardwise demo wrote dcp, hf and report.html, and replaces them when it runs again.\n")
        for old in folder.dcp, folder.hf, folder.scratch, folder.report:
            _remove(old)
        return folder

    @property
    def dcp(self) -> Path:
        """What the trainers save: a checkpoint of torch."""
        return self.path / "dcp"

    @property
    def hf(self) -> Path:
        """The same as Hugging Face has it."""
        return self.path / "hf"

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.path / "report.html"

    @property
    def scratch(self) -> Path:
        """The directory of files that are not kept."""
        return self.path / "scratch"

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """A directory on the same disk, for a while."""
        self.scratch.mkdir()
        try:
            yield self.scratch
        finally:
            _remove(self.scratch)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
