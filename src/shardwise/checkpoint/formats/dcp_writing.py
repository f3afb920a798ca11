"""Writes what torch.distributed.checkpoint loads: a file of torch.save archives for every rank, then `.metadata`.

After its archives, where torch does not look, a file has a list of them: an interrupted conversion resumes from there.

Nested names. torch's reader makes a list wherever a path goes on with anything but a str, and turns the keys of dicts
into str when it looks up where a value belongs. What would come out changed is therefore written in another way, so
that torch's reader rebuilds the same dicts and lists, and ours the same keys:

- A dict with int keys that holds tensors also has its skeleton, the dict without the tensors, as an item of its own.
  torch's reader starts from it, and fills in the tensors. Int keys are floats in paths: they find the same key of the
  skeleton, and our reader can tell them from positions in lists.
- A dict with int keys, a tuple, or a list that torch does not enter is one value if it holds no tensors. The paths of
  the leaves in it are written, too: torch ignores them, and our reader finds the leaves by them.
- The rest is refused: other values beside tensors under int keys, and tensors inside tuples.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

import torch

from shardwise.checkpoint.formats.dcp import METADATA, SUMS, TIED, DcpPath
from shardwise.checkpoint.formats.torch_save import tensor_archive, torch_save_bytes
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_key_types, check_overlaps
from shardwise.checkpoint.segments import Data, Segment, size_of, write_segments
from shardwise.checkpoint.values import CARRIED, encode
from shardwise.containers.torch_private import storage_info
from shardwise.errors import CheckpointError
from shardwise.state.traverse import OBJ_PATH, PATH_ITEM, Key, Place, dotted, set_element
from shardwise.storage.folders import OutputFolder
from shardwise.storage.sums import ALGORITHM, with_trailer

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata as torch_metadata

END, MAGIC = Struct("<Q16s"), b"shardwise items\n"
OTHER_FORMATS = (
    "Remedy: str keys (torch's get_optimizer_state_dict gives them), or another format: the default of save, "
    "'sharded' or 'torch.save' of convert"
)
Paths = Mapping[str, OBJ_PATH]
ItemKey = tuple[str, tuple[int, ...] | None, tuple[int, ...]]  # name, first cell and shape


class Item(NamedTuple):
    """An archive in a file: a box of a tensor, or a value."""

    name: str
    lo: tuple[int, ...] | None
    shape: tuple[int, ...]
    file: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.start + self.size


class DcpWriter(Writer):
    """Writes a file for every owner; that of the first one also has the values."""

    index_name = METADATA

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse what torch's reader would change."""
        contents.once("dcp fits", lambda: _check_leaves(contents))
        nesting(contents)
        for name, value in contents.values.items():
            encode(value, name, CARRIED)

    def file(self, owner: int) -> str:
        """The file name of an owner."""
        return f"__{self.numbers[owner]}_{self.token}.distcp"

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> list[Item]:
        """Write the archives of an owner one after the other, unless an earlier try has written them."""
        name = self.file(me)
        values = nesting(contents).values if self.numbers[me] == 0 else {}
        earlier = _read_items(self.folder, name)
        if earlier and [item[:3] for item in earlier] == _item_keys(parts, values):
            self.folder.reuse(name)
            return earlier
        data = {key: torch_save_bytes(value) for key, value in values.items()}
        known = contents.once("dcp items", lambda: _items(parts, name))
        items = _followed([item._replace(file=name) for item in known], data, name)
        end = self.marked(contents, "dcp end", lambda: _items_bytes(items), given=_values_in(items))
        with self.folder.write(name) as file:
            write_segments(file, [*(one for part in parts for one in _archive(part)), *data.values(), end])
        return items

    def index(self, results: Mapping[int, list[Item]], contents: Contents) -> bytes:
        """A pickle of torch's metadata; after it, where torch does not look, a digest of it."""
        return self.index_of([item for several in results.values() for item in several], contents)

    def index_of(self, items: Sequence[Item], contents: Contents, *, with_paths: bool = True) -> bytes:
        """The index of items. `with_paths=False`: names are keys of one dict."""

        def make() -> bytes:
            made = _metadata(items, contents, with_paths)
            if self.folder.sums:
                made.__dict__[SUMS] = ALGORITHM  # torch ignores it
            return pickle.dumps(made)

        text = self.marked(contents, "dcp metadata", make, given=(self.folder.sums, _values_in(items)))
        return with_trailer(text) if self.folder.sums else text


def _check_leaves(contents: Contents) -> None:
    check_overlaps(contents)
    check_key_types(contents)


def _items(parts: Sequence[TensorPart], name: str) -> list[Item]:
    """Where the archives of these parts are in a file, one after the other."""
    items, at = list[Item](), 0
    for part in parts:
        items.append(Item(part.name, part.box.lo, part.shape, name, at, size_of(_archive(part))))
        at = items[-1].stop
    return items


def _followed(items: list[Item], values: Mapping[str, bytes], name: str) -> list[Item]:
    """With the values after them."""
    for key, data in values.items():
        items.append(Item(key, None, (), name, items[-1].stop if items else 0, len(data)))
    return items


def _archive(part: TensorPart) -> list[Segment]:
    return tensor_archive(part.dtype, part.shape, Data(part.bytes, part.write))


def _values_in(items: Sequence[Item]) -> list[tuple[str, int, int]]:
    """Where the values are: what is known of the tensors does not tell it."""
    return [(item.name, item.start, item.size) for item in items if item.lo is None]


def _items_bytes(items: Sequence[Item]) -> bytes:
    """The end of a file: its items, their length in bytes, and the magic number."""
    text = json.dumps(items).encode()
    return text + END.pack(len(text), MAGIC)


def _read_items(folder: OutputFolder, name: str) -> list[Item]:
    """The items of a file; none if they cannot be read, or do not fill the file."""
    end = folder.tail(name, END.size)
    if len(end) < END.size or END.unpack(end)[1] != MAGIC:
        return []
    text = folder.tail(name, END.size + END.unpack(end)[0])[: -END.size]
    with suppress(ValueError, TypeError):
        items = [
            Item(key, None if lo is None else tuple(lo), tuple(shape), *where)
            for key, lo, shape, *where in json.loads(text)
        ]
        if folder.has(name, b"PK", sum(item.size for item in items) + len(text) + END.size):
            return items
    return []


def _item_keys(parts: Sequence[TensorPart], values: Iterable[str]) -> list[ItemKey]:
    """What a file should have."""
    return [*((part.name, part.box.lo, part.shape) for part in parts), *((key, None, ()) for key in values)]


def _metadata(items: Sequence[Item], contents: Contents, with_paths: bool) -> torch_metadata.Metadata:
    from torch.distributed.checkpoint import metadata as torch_metadata  # slow to import

    stored = dict[str, object]()
    places = dict[torch_metadata.MetadataIndex, object]()
    chunks = {name: list[torch_metadata.ChunkStorageMetadata]() for name in contents.tensors}
    again = defaultdict[str, list[str]](list)
    for name, one in contents.tied.items():
        again[one].append(name)
    for item in items:
        lo, place = None if item.lo is None else torch.Size(item.lo), storage_info(item.file, item.start, item.size)
        for name in (item.name, *again[item.name]):
            places[torch_metadata.MetadataIndex(name, lo)] = place
            if lo is not None:
                chunks[name].append(torch_metadata.ChunkStorageMetadata(lo, torch.Size(item.shape)))
            else:
                stored[name] = torch_metadata.BytesStorageMetadata()
    for name, (dtype, layout) in contents.tensors.items():
        properties = torch_metadata.TensorProperties(dtype=dtype)
        stored[name] = torch_metadata.TensorStorageMetadata(properties, torch.Size(layout.shape), chunks[name])
    nested = nesting(contents)
    version = getattr(torch_metadata, "CURRENT_DCP_VERSION", None)
    described = cast("dict[str, torch_metadata.STORAGE_TYPES]", {**nested.skeletons, **stored})
    paths = dict(nested.paths) if with_paths else None
    made = torch_metadata.Metadata(described, paths, places, **({"version": version} if version else {}))
    if contents.tied:
        made.__dict__[TIED] = dict(contents.tied)  # torch ignores it; without it our reader refuses shared bytes
    return made


class Nesting(NamedTuple):
    """The contents of a checkpoint as torch's reader has to see them."""

    values: Mapping[str, object]
    paths: Mapping[str, DcpPath]
    skeletons: Mapping[str, object]


def nesting(contents: Contents) -> Nesting:
    """By the rules at the top of this file; refuses what torch's reader would change."""
    paths, groups, skeletons = contents.once("dcp nesting", lambda: _nested(contents))
    values = {name: contents.path_of(name) for name in contents.values}
    return Nesting(_grouped(contents.values, values, groups), paths, skeletons)


def _nested(contents: Contents) -> tuple[dict[str, DcpPath], set[OBJ_PATH], dict[str, object]]:
    """What depends on paths alone: paths as they are written, containers that are one value, and skeletons."""
    tensors, values = ({name: contents.path_of(name) for name in part} for part in (contents.tensors, contents.values))
    _check(tensors, values)
    groups = _groups(tensors.values(), values.values())
    _check_names({**tensors, **values}, map(dotted, groups))
    skeletons = _skeletons(tensors)
    paths = {name: _dcp_path(path) for name, path in {**tensors, **values}.items()}
    paths |= {dotted(root): root for root in groups} | {name: root for name, (root, _) in skeletons.items()}
    return paths, groups, {name: skeleton for name, (_, skeleton) in skeletons.items()}


def _outermost(path: OBJ_PATH) -> OBJ_PATH | None:
    """The outermost container on a path that torch would not rebuild: a dict with int keys, or a tuple."""
    return next((path[:at] for at, key in enumerate(path) if type(key) in (Key, Place)), None)


def _groups(tensors: Iterable[OBJ_PATH], values: Iterable[OBJ_PATH]) -> set[OBJ_PATH]:
    """The containers that are stored as one value: those that torch would change, and lists that it does not enter."""
    changed = {root for path in values if (root := _outermost(path))}
    stored = {_within(path, changed) or path for path in values}
    if all(int not in map(type, path) for path in stored):
        return {path for path in changed if _within(path, changed) is None}
    entered = {inside for path in tensors for inside, _ in _lists(path)}
    entered |= {inside for path in stored for inside, end in _lists(path) if end < len(path)}
    roots = changed | {inside for path in stored for inside, _ in _lists(path) if inside not in entered}
    return {path for path in roots if _within(path, roots) is None}


def _within(path: OBJ_PATH, groups: Collection[OBJ_PATH]) -> OBJ_PATH | None:
    """The outermost of some containers that a path leads into."""
    return next((path[:end] for end in range(1, len(path)) if path[:end] in groups), None)


def _lists(path: OBJ_PATH) -> Iterable[tuple[OBJ_PATH, int]]:
    """The lists on a path, and where each run of nested lists ends: torch enters them for what is there."""
    end = len(path)
    for at in range(len(path) - 1, 0, -1):
        if type(path[at]) is int:
            yield path[:at], end
        else:
            end = at


def _check(tensors: Paths, values: Paths) -> None:
    odd = {name: path for name, path in {**tensors, **values}.items() if not {*map(type, path)} <= {str, int}}
    inner = {name: root for name, path in odd.items() if name in values and (root := _outermost(path)) is not None}
    around = {path[:end] for path in tensors.values() for end in range(len(path))} if inner else ()
    for name, path in odd.items():
        if type(path[0]) is not str:
            _refuse(name, "has an int as a key of the outermost dict")
        if any(type(key) is Key and int(float(key)) != int(key) for key in path):
            _refuse(name, "has a key of more than 53 bits")
        if name in tensors and any(type(key) is Place for key in path):
            _refuse(name, "is a tensor inside a tuple")
        if name in inner and inner[name] in around:
            _refuse(name, f"is not a tensor, and is beside tensors in {dotted(inner[name])!r}, which has int keys")


def _refuse(name: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{name!r} {why}: torch.distributed.checkpoint would read back something else. {OTHER_FORMATS}"
    )


def _check_names(paths: Paths, groups: Iterable[str]) -> None:
    """Refuse names that torch cannot distinguish: it joins keys by dots."""
    for name, path in paths.items():
        if name != dotted(path):
            _refuse(dotted(path), "is the name of two things ('a.b' and 'b' in 'a', or 1 and '1')")
    for name in groups:
        if name in paths:
            _refuse(name, "is the name of two things")


def _grouped(values: Mapping[str, object], paths: Paths, groups: set[OBJ_PATH]) -> dict[str, object]:
    """The values that are stored: some of them contain others."""
    stored = dict[str, object]()
    for name, value in values.items():
        path = paths[name]
        root = _within(path, groups)
        if root is None:
            stored[name] = value
        else:
            set_element(stored, (dotted(root), *path[len(root) :]), value)
    return stored


def _skeletons(tensors: Paths) -> dict[str, tuple[OBJ_PATH, object]]:
    """Dicts with int keys, without their tensors: by a name of their own, the path and the dict."""
    roots, trees = {root for path in tensors.values() if (root := _outermost(path))}, dict[str, object]()
    for path in tensors.values() if roots else ():
        for root in (path[:end] for end in range(1, len(path)) if path[:end] in roots):
            set_element(trees, (dotted(root), *path[len(root) :]), None)
    return {_unused(f"{dotted(root)}{{}}", tensors): (root, trees[dotted(root)]) for root in roots}


def _unused(name: str, names: Paths) -> str:
    return name if name not in names else _unused(f"{name}{{}}", names)


def _dcp_path(path: OBJ_PATH) -> DcpPath:
    return path if {*map(type, path)} <= {str, int} else tuple(map(_step, path))


def _step(key: PATH_ITEM) -> PATH_ITEM | float | tuple[int]:
    """A key of a path, as it is written."""
    return float(key) if type(key) is Key else (int(key),) if type(key) is Place else key
