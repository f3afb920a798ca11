"""A checkpoint as people look at it: a table, a tree of names, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.table import Table
from rich.tree import Tree

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.planning import size


def summary(checkpoint: Checkpoint) -> str:
    """What it is, in a line."""
    dtypes = Counter[str]()
    for entry in checkpoint.values():
        dtypes[_dtype(entry)] += entry.bytes
    files = len({path for entry in checkpoint.values() for path in entry.used()})
    kinds = ", ".join(f"{size(amount)} {name}" for name, amount in dtypes.most_common())
    others = f", {len(checkpoint.objects)} other values" if checkpoint.objects else ""
    where = f"{files} file{'s' * (files != 1)}"
    return f"{checkpoint.path}: {checkpoint.format}, {len(checkpoint)} tensors ({kinds}) in {where}{others}"


def table(checkpoint: Checkpoint) -> Table:
    """A row for every tensor."""
    found = Table("name", "dtype", "shape", "shards", "layout", "size", box=None, header_style="bold", pad_edge=False)
    for column in found.columns[3::2]:
        column.justify = "right"
    for name, entry in checkpoint.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        found.add_row(name, _dtype(entry), shape, str(entry.shards), _layout(entry), size(entry.bytes))
    for name, value in checkpoint.objects.items():
        found.add_row(name, type(value).__name__, _short(value), "", "", "")
    return found


def tree(checkpoint: Checkpoint) -> Tree:
    """Names by their parts, with the bytes below each."""
    whole: dict[str, Any] = {}
    for name, entry in checkpoint.items():
        at = whole
        for part in name.split("."):
            at = at.setdefault(part, {})
        at[""] = entry
    return _grown(Tree(f"{checkpoint.path}  {size(checkpoint.bytes)}"), whole)


def _grown(found: Tree, names: dict[str, Any]) -> Tree:
    for part, below in names.items():
        if part == "":
            continue
        entry = below.get("")
        about = f"  {_dtype(entry)} {list(entry.shape)}" if entry is not None else ""
        _grown(found.add(f"{part}{about}  {size(_bytes(below))}", highlight=False), below)
    return found


def _bytes(names: dict[str, Any]) -> int:
    return sum(below.bytes if part == "" else _bytes(below) for part, below in names.items())


def as_json(checkpoint: Checkpoint) -> str:
    """All that is known, for tools."""
    tensors = {
        name: {
            "dtype": _dtype(entry),
            "shape": list(entry.shape),
            "bytes": entry.bytes,
            "shards": [
                {"box": [list(box.lo), list(box.hi)], "file": span.file, "start": span.start, "stop": span.stop}
                for box, span in entry.ranges()
            ],
        }
        for name, entry in checkpoint.items()
    }
    objects = {name: _short(value) for name, value in checkpoint.objects.items()}
    about = {"path": checkpoint.path, "format": checkpoint.format, "bytes": checkpoint.bytes}
    return json.dumps(
        {**about, "metadata": dict(checkpoint.metadata), "tensors": tensors, "objects": objects}, indent=1
    )


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _layout(entry: Entry) -> str:
    if entry.shards <= 1:
        return "whole"
    return entry.layout.brief(width=40).partition("/")[2] if entry.shards <= 4096 else "many boxes"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
