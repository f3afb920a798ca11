"""Checkpoints on the command line: options as the values that functions take; trees, JSON and pages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from rich.text import Text
from rich.tree import Tree

from shardwise import report
from shardwise.checkpoint import comparing
from shardwise.checkpoint.config_files import config_files
from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.listing import dtype_name, inside, kind, several, short, tied
from shardwise.checkpoint.megatron_names import translation
from shardwise.checkpoint.opaque import Objects, opaque_in
from shardwise.checkpoint.rules import Rules, read_rules
from shardwise.checkpoint.selection import Select, Selection
from shardwise.job.remap import Concat, Interleaved, Padded, Remap, Rotary, Stack, Transposed
from shardwise.job.remap_rules import ROTARY_ORDERS
from shardwise.planning import size
from shardwise.quantized.moves import Rule
from shardwise.quantized.recognition import Quantized
from shardwise.quoting import brief, in_line

MAX_DEPTH = 32  # levels of the tree
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
CastRule = torch.dtype | tuple[str, torch.dtype | None]


# --- options ----------------------------------------------------------------------------------------------------------


class Changes(TypedDict):
    """Keyword arguments of `convert` and `verify`."""

    rename: list[tuple[str, str]] | None
    select: Sequence[str] | None
    exclude: Sequence[str] | None
    merge: str | None
    cast: list[CastRule] | None
    remap: list[Rule]


def pairs(texts: Sequence[str], option: str, form: str = "pattern=new") -> list[tuple[str, str]]:
    """
    >>> pairs(["model.*=*"], "--rename")
    [('model.*', '*')]
    """
    parts = [text.partition("=") for text in texts]
    for text, (left, equals, right) in zip(texts, parts, strict=True):
        if not (left and equals and right):
            raise ValueError(f"{option} {text!r} is not a pair: write '{form}'")
    return [(left, right) for left, _, right in parts]


def casts(texts: Sequence[str]) -> list[CastRule] | None:
    """Rules, and a dtype for the rest.

    >>> casts(["bfloat16", "*.norm.*=float32", "*_scale=keep"])
    [torch.bfloat16, ('*.norm.*', torch.float32), ('*_scale', None)]
    """
    return [_dtype(text) if "=" not in text else _rule(text) for text in texts] or None


def _rule(text: str) -> CastRule:
    ((pattern, becomes),) = pairs([text], "--cast")
    return pattern, None if becomes == "keep" else _dtype(becomes)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, SHORT.get(name, name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype: write bfloat16 or float32, for example")
    return dtype


RemapOptions = Mapping[str, Sequence[str] | None]  # the texts of every option


def remaps(options: RemapOptions) -> list[Rule]:
    """
    >>> remaps({"concat": ["*.qkv=*.q,*.k,*.v@0:64,32,32"], "stack": ["*.w=*.{}.w@1"]})
    [Concat(whole='*.qkv', parts=('*.q', '*.k', '*.v'), dim=0, sizes=(64, 32, 32)), Stack(whole='*.w', ...
    >>> remaps({"rotary": ["*.q=halves:128"], "pad": ["embed=multiple:64"]})
    [Rotary(name='*.q', head_dim=128, to='halves', ...), Padded(name='embed', size=None, multiple=64, ...)]
    """
    return [_READ[option](text) for option, texts in options.items() for text in texts or ()]


def _concat(text: str) -> Remap:
    whole, (parts, dim, sizes) = _pair_along(text, "--concat", "whole=a,b,c")
    return Concat(whole, tuple(parts.split(",")), dim, sizes)


def _interleave(text: str) -> Remap:
    whole, (parts, dim, sizes) = _pair_along(text, "--interleave", "whole=a,b:1,1")
    if sizes is None:
        raise ValueError(
            f"--interleave {text!r} has no sizes: add those that the parts have in one group, such as one head: "
            f"'*.qkv=*.q,*.k,*.v:64,64,64'"
        )
    return Interleaved(whole, tuple(parts.split(",")), sizes, dim)


def _stack(text: str) -> Remap:
    whole, (part, dim, _) = _pair_along(text, "--stack", "whole=part.{}")
    return Stack(whole, part, dim)


def _rotary(text: str) -> Remap:
    name, (to, dim, sizes) = _pair_along(text, "--rotary", "name=halves:128")
    order = next((one for one in ROTARY_ORDERS if one == to), None)
    if order is None or sizes is None or len(sizes) != 1:
        raise ValueError(f"--rotary {text!r}: write 'name=halves:128' or 'name=pairs:128', with the size of a head")
    return Rotary(name, sizes[0], order, dim=dim)


def _pad(text: str) -> Remap:
    name, (size, dim, multiple) = _pair_along(text, "--pad", "name=1024")
    if size == "multiple" and multiple is not None and len(multiple) == 1:
        return Padded(name, multiple=multiple[0], dim=dim)
    if not size.isdecimal():
        raise ValueError(f"--pad {text!r}: write 'name=1024', or 'name=multiple:64'")
    return Padded(name, int(size), dim=dim)


def _quantized(text: str) -> Quantized:
    names, _, format = text.partition("@")
    codes, _, scales = names.partition(",")
    if text != "auto" and not (codes and scales and format):
        raise ValueError(f"--quantized {text!r}: write 'auto', or CODES,SCALES@FORMAT as in '*.w,*.w_scale@fp8-row'")
    return Quantized() if text == "auto" else Quantized(codes, scales, format=format)


_READ: dict[str, Callable[[str], Rule]] = {
    "concat": _concat,
    "interleave": _interleave,
    "stack": _stack,
    "transpose": Transposed,
    "rotary": _rotary,
    "pad": _pad,
    "quantized": _quantized,
}


def _pair_along(text: str, option: str, form: str) -> tuple[str, tuple[str, int, tuple[int, ...] | None]]:
    ((left, right),) = pairs([text], option, form)
    return left, _along(right, option)


def _count(text: str, axis: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--mesh '{axis}={text}': write one axis and a whole number, as in --mesh tp=2 --mesh dp=4")
    return int(text)


def _along(text: str, option: str) -> tuple[str, int, tuple[int, ...] | None]:
    """'a,b@1:4,2' as the names, the dim and the sizes."""
    rest, _, sizes = text.partition(":")
    names, _, dim = rest.partition("@")
    try:
        return names, int(dim or 0), tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError:
        raise ValueError(f"{option} {text!r}: write whole numbers for dim and sizes, as in 'a,b@1:4,2'") from None


def changes(
    rename: Sequence[str] | None,
    select: Sequence[str] | None,
    exclude: Sequence[str] | None,
    merge: str | None,
    cast: Sequence[str] | None,
    remap: RemapOptions,
) -> Changes:
    """The options of `convert` and `verify` that say what a checkpoint becomes."""
    return {
        "rename": pairs(rename or (), "--rename") or None,
        "select": select,
        "exclude": exclude,
        "merge": merge,
        "cast": casts(cast or ()),
        "remap": remaps(remap),
    }


def translated(changes: Changes, opened: Checkpoint, names: str | None) -> Changes:
    """The same, with the names of another framework."""
    if names is None:
        return changes
    if changes["rename"]:
        raise ValueError("--names and --rename cannot be combined: rename in a separate conversion")
    found = translation(opened, names)
    return {
        **changes,
        "select": changes["select"] or found["select"],
        "remap": [*found["remap"], *changes["remap"]],
    }


def rules_on(rules: str | None, mesh: Sequence[str]) -> Rules | None:
    """Rules by name or file, on a mesh such as ["tp=2"]."""
    if rules is None:
        if mesh:
            raise ValueError("--mesh needs --rules")
        return None
    parsed = read_rules(rules)
    sizes = {axis: _count(count, axis) for axis, count in pairs(mesh, "--mesh", "tp=2")}
    return parsed.with_mesh(**sizes) if sizes else parsed


# --- listings ---------------------------------------------------------------------------------------------------------


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
