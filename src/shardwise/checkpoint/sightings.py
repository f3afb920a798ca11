"""What is at a path that is not a checkpoint, in the words of an error."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.checkpoint.files import Files
from shardwise.quoting import brief

SHOWN = 6  # files and folders in a message
POINTER = b"version https://git-lfs"
BEGINNINGS = {
    POINTER: "a pointer of Git LFS: fetch the file itself with git lfs pull",
    b"GGUF": "GGUF, of llama.cpp",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "a numpy array",
    b"PK\x03\x04": "a zip archive that torch.save did not write",
    b"\x80": "a plain pickle",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"{": "JSON",
}


def kind_of(files: Files, name: str) -> str:
    """What a file seems to be, by how it begins."""
    start = files.read(name, 0, min(len(POINTER), files.size(name)))
    if not start:
        return "empty"
    known = next((kind for beginning, kind in BEGINNINGS.items() if start.startswith(beginning)), None)
    return known or f"data that begins with {brief(start[:8])}"


def seen(files: Files, names: Sequence[str], folders: Sequence[str]) -> str:
    """Files and folders, the first of many."""
    several = [f"{name} ({kind_of(files, name)})" for name in names[:SHOWN]] or ["no files"]
    several += ["..."] if len(names) > SHOWN else []
    below = f"; folders: {', '.join(folders[:SHOWN])}{' ...' if len(folders) > SHOWN else ''}" if folders else ""
    return ", ".join(several) + below
