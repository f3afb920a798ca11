"""Paths and URLs: which driver reaches them, and errors of the system that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointError
from shardwise.quoting import brief

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

PathLike = str | os.PathLike[str]


def file_system(path: PathLike) -> tuple[AbstractFileSystem | None, str]:
    """The fsspec driver of a path or URL, None for local files; and the path that the driver knows."""
    text: str | bytes = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{text!r} is not a path or URL")
    if "://" not in text:
        return None, text
    import fsspec

    try:
        system, place = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text}: {error}") from error
    protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
    return (None if "local" in protocols else system), place


def absolute(path: PathLike) -> str:
    """The same path or URL, wherever it is used: this process may change its working directory."""
    system, place = file_system(path)
    return os.fspath(path) if system is not None else str(Path(place).absolute())


def same_location(a: str, b: str) -> bool:
    """True if two paths or URLs lead to one file."""
    (one, here), (other, there) = file_system(a), file_system(b)
    if one is None and other is None:
        return os.path.realpath(here) == os.path.realpath(there)
    return bool(one == other) and here.rstrip("/") == there.rstrip("/")


def inside(name: object, where: object) -> str:
    """A file name from an index; refused if it leads out of the checkpoint."""
    text = name if isinstance(name, str) else ""
    parts = [part for part in text.split("/") if part not in {"", "."}]
    odd = "\\" in text or not text.isprintable()
    if not parts or text.startswith("/") or ".." in parts or odd:
        raise CheckpointError(f"{where} names the file {brief(name)}, which is not inside the checkpoint")
    return "/".join(parts)


@contextmanager
def readable(what: object) -> Iterator[None]:
    """Turn errors of the system into CheckpointErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise unreadable(what, error) from error


def unreadable(what: object, error: OSError) -> CheckpointError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{what} is missing")
    return CheckpointError(f"{what} cannot be read: {error.strerror or error}")


def beside(folder: str, name: str) -> str:
    """Something in the directory that a directory is in. Object stores have no `..`.

    >>> beside("run/b", "a/w"), beside("memory://run/b/", "a/w")
    ('run/b/../a/w', 'memory://run/a/w')
    """
    if "://" in folder:
        return join_path(folder.rstrip("/").rpartition("/")[0], name)
    return join_path(join_path(folder, os.pardir), name)


def own_name(folder: str) -> str:
    """The name of a directory in the one that it really is in, whatever links lead to it."""
    return folder.rstrip("/").rpartition("/")[2] if "://" in folder else os.path.basename(os.path.realpath(folder))


def join_path(folder: str, name: str) -> str:
    """A file of a directory or URL.

    >>> join_path("a", "b"), join_path("/", "b"), join_path("memory://", "b")
    ('a/b', '/b', 'memory://b')
    """
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"
