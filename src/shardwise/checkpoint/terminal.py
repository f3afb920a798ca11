"""Checkpoints on the command line: summaries, trees, JSON and pages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text
from rich.tree import Tree

from shardwise import report
from shardwise.checkpoint import comparing
from shardwise.checkpoint.config_files import config_files
from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.listing import dtype_name, inside, kind, several, short, tied
from shardwise.checkpoint.opaque import Objects, opaque_in
from shardwise.checkpoint.selection import Select, Selection
from shardwise.planning import size
from shardwise.quoting import brief, in_line

MAX_DEPTH = 32  # levels of the tree


def summary(checkpoint: Checkpoint) -> str:
    """A summary in one line."""
    dtypes, ties = Counter[str](), tied(checkpoint)
    for name, entry in checkpoint.items():
        dtypes[dtype_name(entry)] += entry.bytes if name not in ties else 0
    files = len({path for entry in checkpoint.values() for path in entry.used()})
    kinds = ", ".join(f"{size(amount)} {name}" for name, amount in dtypes.most_common())
    others = f", {several(len(checkpoint.objects), 'other value')}" if checkpoint.objects else ""
    tensors, where = several(len(checkpoint), "tensor"), several(files, "file")
    tensors += f", {len(ties)} of them tied" if ties else ""
    return f"{in_line(checkpoint.path)}: {checkpoint.format}, {tensors} ({kinds}) in {where}{others}"


def fates(source: Checkpoint, made: Checkpoint, objects: Objects | None = None) -> Iterator[str]:
    """What a conversion did with values that it could not write as they are."""
    for became in dict.fromkeys(one.became for one in made.lost):
        lost = [one for one in made.lost if one.became == became]
        count = several(sum(one.loss.count for one in lost), "value")
        yield f"{count} became {became}, such as in {in_line(lost[0].name)}"
    left = [name for name in source.objects if name not in made.objects]
    if left:
        could = objects is None and made.format != "safetensors" and _opaque(source, left)
        hint = ": --objects carry keeps them" if could else ""
        yield f"left out: {several(len(left), 'other value')}, such as {_named(source, left)}{hint}"
    carried = _opaque(source, made.objects)
    if carried:
        yield f"carried on, not rebuilt: {several(len(carried), 'object')}, such as {_named(source, carried)}"


def uncopied(source: Checkpoint, made: Checkpoint) -> Iterator[str]:
    """The files that `from_pretrained` needs, and that a conversion to its formats did not copy."""
    if made.format not in ("safetensors", "torch.save") or not source.files.near:
        return
    there = set(made.files.names())
    left = [name for name in config_files(source.files) if name not in there]
    if left:
        yield f"not copied: {', '.join(map(in_line, left))}: --with-config copies them"


def uncompared(one: Checkpoint, other: Checkpoint, chosen: Selection, objects: Objects | None) -> Iterator[str]:
    """The values that a comparison left out, and why."""
    why = comparing.uncompared(one, other, chosen, objects)
    for reason in dict.fromkeys(why.values()):
        names = [name for name in why if why[name] == reason]
        yield f"not compared: {several(len(names), 'value')} {reason}, such as {in_line(names[0])}"


def _opaque(source: Checkpoint, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in source.objects and opaque_in(source.objects[name]) is not None]


def _named(source: Checkpoint, names: Sequence[str]) -> str:
    """The first of some values; objects of unknown classes first, with the class."""
    name = next(iter(_opaque(source, names)), names[0])
    one = opaque_in(source.objects[name])
    return in_line(name) + (f" ({in_line(one.name)})" if one is not None else "")


class NameNode:
    """A part of names: what is stored there, and the parts below it."""

    def __init__(self) -> None:
        self.about, self.size = "", 0
        self.below = dict[str, NameNode]()

    def at(self, name: str) -> NameNode:
        """The node of a name."""
        node = self
        for part in name.split(".", MAX_DEPTH):
            node = node.below.setdefault(part, NameNode())
        return node

    @property
    def bytes(self) -> int:
        """Of it and of all below."""
        return self.size + sum(node.bytes for node in self.below.values())

    def grow(self, tree: Tree, depth: int) -> Tree:
        """Add what is below to a tree, down to some levels."""
        for part, node in self.below.items() if depth else ():
            amount = size(node.bytes) if node.bytes or not node.about else ""
            node.grow(tree.add(_text("  ".join(text for text in (part, node.about, amount) if text))), depth - 1)
        return tree


def tree(checkpoint: Checkpoint, *, only: Select = None, depth: int | None = None) -> Tree:
    """Names by their parts, with the bytes below each; other values, too. `depth`: levels to show."""
    root, ties, wanted = NameNode(), tied(checkpoint), Selection(only).of(checkpoint)
    for name, entry in filter(lambda item: wanted(item[0]), checkpoint.items()):
        node, about = root.at(name), f"{dtype_name(entry)} {list(entry.shape)}"
        node.about = f"{about}  tied to {ties[name]}" if name in ties else about
        node.size = 0 if name in ties else entry.bytes
    for name, value in filter(lambda item: wanted(item[0]), checkpoint.objects.items()):
        root.at(name).about = "  ".join(filter(None, (kind(value), short(value), inside(value))))
    return root.grow(Tree(_text(f"{checkpoint.path}  {size(root.bytes)}")), MAX_DEPTH + 1 if depth is None else depth)


def page(checkpoint: Checkpoint) -> str:
    """An HTML page: all tensors by size, and the files of each."""
    entries = checkpoint.values()
    rows = [
        report.Row(name, e.layout, itemsize=e.dtype.itemsize, dtype=dtype_name(e)) for name, e in checkpoint.items()
    ]
    files = {path for entry in entries for path in entry.used()}
    facts = {
        "size": size(checkpoint.bytes),
        "tensors": f"{len(checkpoint):,}",
        "files": f"{len(files):,}",
        "format": checkpoint.format,
    }
    return report.page(rows, title=checkpoint.path, facts=facts, owner="file", names=_numbered(entries))


def _numbered(entries: Iterable[Entry]) -> Sequence[str]:
    """The file names by number, if all tensors use the same numbers."""
    lists = {id(entry.paths): entry.paths for entry in entries}
    return next(iter(lists.values())) if len(lists) == 1 else ()


def as_json(checkpoint: Checkpoint) -> str:
    """Everything, for other programs."""
    ties = tied(checkpoint)
    tensors = {
        name: {
            "dtype": dtype_name(entry),
            "shape": list(entry.shape),
            "bytes": entry.bytes,
            "tied": ties.get(name),
            "shards": [
                {"box": [list(box.lo), list(box.hi)], "file": span.file, "start": span.start, "stop": span.stop}
                for box, span in entry.ranges()
            ],
        }
        for name, entry in checkpoint.items()
    }
    objects = {name: _plain(value) for name, value in checkpoint.objects.items()}
    about = {"path": checkpoint.path, "format": checkpoint.format, "bytes": checkpoint.bytes}
    return json.dumps(
        {**about, "metadata": dict(checkpoint.metadata), "tensors": tensors, "objects": objects}, indent=1
    )


def _plain(value: object) -> object:
    """The value, if JSON can hold it; otherwise a description."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return brief(value)
    return value


def _text(text: str) -> Text:
    """Plain text: brackets are not markup, and control characters are escaped."""
    return Text(in_line(text))
