"""What lies at a path or URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import Files, readable
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.checkpoint.remote_files import RemoteFiles
from shardwise.errors import CheckpointError


def files_at(path: Any) -> tuple[Files, str | None]:
    """The files at a path or URL; and the name of the file, where it is one and no directory."""
    system, place = place_of(path)
    if system is not None:
        return _remote(system, place, os.fspath(path))
    local = Path(place)
    with readable(place):
        if local.is_dir():
            return LocalFiles(local), None
        if local.exists():
            return LocalFiles(local.parent), local.name
    raise CheckpointError(f"there is nothing at {place}")


def place_of(path: Any) -> tuple[Any, str]:
    """The driver of fsspec for a path or URL, None for files of this machine; and the path that they know."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{text!r} is no path or URL")
    if "://" not in text:
        return None, text
    import fsspec  # type: ignore[import-untyped]

    try:
        system, place = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text}: {error}") from error
    protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
    return (None if "local" in protocols else system), place


def _remote(system: Any, place: str, url: str) -> tuple[Files, str | None]:
    with readable(url):
        system.invalidate_cache()  # what was there before may not be there now
        if system.isdir(place):
            return RemoteFiles(system, place, url), None
        if system.isfile(place):
            folder, _, name = place.rpartition("/")
            return RemoteFiles(system, folder, system.unstrip_protocol(folder)), name
    raise CheckpointError(f"there is nothing at {url}")


def same_place(a: str, b: str) -> bool:
    """True where two paths or URLs lead to one file."""
    (one, here), (other, there) = place_of(a), place_of(b)
    if one is None and other is None:
        return os.path.realpath(here) == os.path.realpath(there)
    return bool(one == other) and here.rstrip("/") == there.rstrip("/")
