"""Archives as torch.save writes them: a zip file with a pickle that describes everything, and a member per storage.

Reading: `read_archives` finds the members, `Archive.root` runs the pickle with stubs, `ArchiveTemplates` finds the
elements of many similar archives by comparing bytes. Writing: `write_archive` streams tensors, so that none has to be
in memory.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import prod
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.checkpoint.atomic_files import write_tensor
from shardwise.checkpoint.entry import Located
from shardwise.checkpoint.files import WORDS, ByteRange, Bytes, Files, RangeLabel
from shardwise.checkpoint.opaque import Opaque, OpaqueError, opaque_in
from shardwise.checkpoint.pickles import UnknownNames, check_tree, unpickle
from shardwise.checkpoint.unpickle_stubs import MAX_SIZE, TensorStub
from shardwise.checkpoint.zips import ZipDirectory, ZipMember, contents, data_starts, directories, without_checksums
from shardwise.containers.sharded import is_sharded
from shardwise.containers.torch_private import rebuild_tensor, rebuild_typed_tensor
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, ints, row_major

if TYPE_CHECKING:
    from typing_extensions import Buffer

Reduction = tuple[Callable[..., object], tuple[object, ...]]
MAX_EXPANSION = 64  # how often a storage may be repeated by strides of 0; small ones up to so many MiB
ALIGN = 64
IMPORTABLE = re.compile(r"\w+(\.\w+)*")
TYPED_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class Archive(NamedTuple):
    """What torch.save wrote into some bytes of a file: the pickle, and the other members."""

    location: ByteRange
    where: RangeLabel
    pickle: bytes
    members: ZipDirectory
    folder: str

    def root(self) -> object:
        """What was saved, with stubs for its tensors."""
        value = unpickle(self.pickle, self.where, UnknownNames())
        check_tree(value, self.where, 8 * len(self.pickle) + 1000)
        return value

    def is_described_before(self, storage: ZipMember) -> bool:
        """True if the members that describe a storage are before it."""
        describing = (self.members.get(f"{self.folder}{name}") for name in ("data.pkl", "byteorder"))
        return all(member is None or member.stop <= storage.header for member in describing)

    def storage(self, tensor: TensorStub, name: str, what: str = "") -> ZipMember:
        """The member with the elements of a tensor; refused if it has too few."""
        member = self.members.get(f"{self.folder}data/{tensor.storage.key}")
        if member is None:
            raise CheckpointError(f"{self.where} has no storage {tensor.storage.key!r}, which {what}{name!r} is in")
        needed, size = tensor.elements * tensor.dtype.itemsize, tensor.dtype.itemsize
        if not needed <= tensor.storage.bytes == member.size or prod(tensor.shape) * size >= MAX_SIZE:
            raise CheckpointError(
                f"{self.where}: {what}{name!r} (shape {tensor.shape}, strides {tensor.strides}) needs {needed} bytes "
                f"of storage {tensor.storage.key!r}, which should have {tensor.storage.bytes} and has {member.size}"
            )
        if prod(tensor.shape) * size > MAX_EXPANSION * (member.size + 2**20):
            raise CheckpointError(
                f"{self.where}: {what}{name!r} (shape {tensor.shape}, strides {tensor.strides}) repeats {member.size} "
                f"bytes of its storage to {prod(tensor.shape) * size}. Remedy: clone() it before saving"
            )
        return member


def read_archives(files: Files, archives: Sequence[ByteRange]) -> list[Archive]:
    """What torch.save wrote into these bytes; the pickles are not run yet."""
    members = directories(files, archives)
    where = list(map(files.range_label, archives))
    folders = list(map(_folder, where, members))
    pickles = [listed[f"{folder}data.pkl"] for listed, folder in zip(members, folders, strict=True)]
    orders = [(at, f"{folder}byteorder") for at, folder in enumerate(folders) if f"{folder}byteorder" in members[at]]
    data = contents(files, pickles + [members[at][name] for at, name in orders])
    for (at, _), order in zip(orders, data[len(archives) :], strict=True):
        if order != b"little":
            raise CheckpointError(f"{where[at]}: its byte order is {order[:16]!r}; only 'little' can be read")
    return list(map(Archive, archives, where, data, members, folders))


def _folder(where: RangeLabel, members: ZipDirectory) -> str:
    """The folder of all members of an archive."""
    folder = next(
        (name[: -len("data.pkl")] for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), ""
    )
    if not folder:
        raise CheckpointError(f"{where}: this archive has no data.pkl: it was not written by torch.save")
    if f"{folder}constants.pkl" in members:
        raise CheckpointError(
            f"{where}: a TorchScript program is not a checkpoint. Remedy: load it with torch.jit.load, and save its "
            f"state_dict() with torch.save"
        )
    return folder


def tensor_reader(files: Files, archive: Archive, name: str) -> Callable[[TensorStub], torch.Tensor]:
    """Makes real tensors of the stubs in a value. Tensors that share a storage still do."""
    storages = dict[str, torch.Tensor]()

    def read(tensor: TensorStub) -> torch.Tensor:
        member, key = archive.storage(tensor, name, "a tensor in "), tensor.storage.key
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if key not in storages:
            storages[key] = torch.frombuffer(bytearray(contents(files, [member])[0]), dtype=torch.uint8)
        size, whole = tensor.dtype.itemsize, storages[key]
        words = whole[: whole.numel() // size * size].view(WORDS[size])
        return words.as_strided(tensor.shape, tensor.strides, tensor.offset).view(tensor.dtype)

    return read


TemplateKey = tuple[int, tuple[int, ...], torch.dtype]  # the bytes of an archive, and the shape and dtype of its tensor


class TensorArchive(NamedTuple):
    """An archive of one tensor: the member with the elements, and the byte at which its data begins."""

    archive: Archive
    tensor: TensorStub
    storage: ZipMember
    begins: int

    @property
    def start(self) -> int:
        """The byte of the first element, from the start of the archive."""
        return self.begins - self.archive.location.start + self.tensor.offset * self.tensor.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the tensor, in elements."""
        return self.tensor.strides


class ArchiveTemplate(NamedTuple):
    """What similar archives have in common: all bytes before the elements, and the directory without its checksums.

    `start`: the byte of the first element, `directory`: that of the directory, from the start of the archive.
    """

    start: int
    strides: tuple[int, ...]
    head: bytes
    tail: Bytes
    mask: Bytes
    directory: int

    def ranges(self, archive: ByteRange) -> list[ByteRange]:
        """The bytes of an archive to compare."""
        first, second = archive.start + len(self.head), archive.start + self.directory
        return [ByteRange(archive.file, archive.start, first), ByteRange(archive.file, second, archive.stop)]

    def fits(self, head: Bytes, tail: Bytes) -> bool:
        """True if an archive with these bytes is like the template."""
        return head.tobytes() == self.head and not ((tail ^ self.tail) & self.mask).any()


class ArchiveTemplates:
    """The templates of a checkpoint: of many similar archives only the first is parsed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known = dict[TemplateKey, ArchiveTemplate | None]()  # None if the elements are not described before them

    def locate(self, archives: Sequence[ByteRange], boxes: Boxes, name: str, dtype: torch.dtype) -> Located:
        """The elements of boxes of a tensor, each in an archive of its own."""
        shapes = list(map(tuple, (boxes.hi - boxes.lo).tolist()))
        keys = [(one.stop - one.start, shape, dtype) for one, shape in zip(archives, shapes, strict=True)]

        def read(rows: Sequence[int]) -> list[TensorArchive]:
            return self._read([archives[at] for at in rows], [boxes.box(at) for at in rows], name, dtype)

        new = {key: at for at, key in enumerate(keys) if key not in self._known}
        self._known |= zip(new, map(self._template, read(list(new.values()))), strict=True)
        known = list(self._matching(archives, [self._known[key] for key in keys]))
        others = [at for at, one in enumerate(known) if one is None]
        read_now = dict(zip(others, read(others), strict=True))
        places = [(one.start, one.strides) for one in (one or read_now[at] for at, one in enumerate(known))]
        plain = all(strides == row_major(shape) for (_, strides), shape in zip(places, shapes, strict=True))
        strides = None if plain else ints([strides for _, strides in places]).reshape(boxes.lo.shape)
        return Located(ints([one.start + start for one, (start, _) in zip(archives, places, strict=True)]), strides)

    def _matching(
        self, archives: Sequence[ByteRange], templates: Sequence[ArchiveTemplate | None]
    ) -> Iterator[ArchiveTemplate | None]:
        """The template of every archive that is like it."""
        pairs = zip(archives, templates, strict=True)
        parts = iter(self._files.fetch([part for one, template in pairs if template for part in template.ranges(one)]))
        for template in templates:
            yield template if template and template.fits(next(parts), next(parts)) else None

    def _read(
        self, archives: Sequence[ByteRange], boxes: Sequence[Box], name: str, dtype: torch.dtype
    ) -> list[TensorArchive]:
        """Parse them."""
        if not archives:
            return []
        read = read_archives(self._files, archives)
        tensors = [_only_tensor(archive, box, name, dtype) for archive, box in zip(read, boxes, strict=True)]
        members = [archive.storage(tensor, name) for archive, tensor in zip(read, tensors, strict=True)]
        return list(map(TensorArchive, read, tensors, members, data_starts(self._files, members)))

    def _template(self, read: TensorArchive) -> ArchiveTemplate | None:
        file, first, stop = read.archive.location
        if not read.archive.is_described_before(read.storage):
            return None
        directory = max(member.stop for member in read.archive.members.values())
        head, tail = self._files.fetch([ByteRange(file, first, read.begins), ByteRange(file, directory, stop)])
        mask = without_checksums(tail)
        return ArchiveTemplate(read.start, read.strides, head.tobytes(), tail.copy(), mask, directory - first)


def _only_tensor(archive: Archive, box: Box, name: str, dtype: torch.dtype) -> TensorStub:
    tensor = archive.root()
    if isinstance(tensor, TensorStub) and (tensor.dtype, tensor.shape) == (dtype, box.shape):
        return tensor
    actual = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, TensorStub) else "not a tensor"
    raise CheckpointError(f"{archive.where}: {box} of {name!r} should be {dtype} of shape {box.shape}, but is {actual}")


class TensorRecord:
    """Takes the place of a tensor in a pickle: row-major, in a zip member of its own."""

    def __init__(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape

    def __reduce__(self) -> Reduction:
        hooks: OrderedDict[str, object] = OrderedDict()  # not OrderedDict[str, object](), which pickles its type
        args = (_StorageRecord(self), 0, self.shape, row_major(self.shape), False, hooks)
        if self.dtype in TYPED_STORAGES:
            return rebuild_tensor, args
        return rebuild_typed_tensor, (*args, self.dtype, None)


class _StorageRecord:
    """Takes the place of its storage."""

    def __init__(self, tensor: TensorRecord) -> None:
        self.tensor = tensor


Records = dict[str, tuple[int, Callable[[IO[bytes]], None]]]  # by key: the number of bytes, and what writes them


class _Pickler(pickle.Pickler):
    """Tensors inside values become records, too."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if is_sharded(obj):
            raise CheckpointError(
                f"{obj!r} is inside a value that one rank saves whole: put it into a dict or list of the state dict"
            )
        key = f"value{len(self._records)}"
        self._records[key] = obj.numel() * obj.element_size(), partial(write_tensor, obj)
        return TensorRecord(key, obj.dtype, tuple(obj.shape)).__reduce__()

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if not isinstance(obj, _StorageRecord):
            return None
        tensor, count = obj.tensor, prod(obj.tensor.shape)
        if tensor.dtype in TYPED_STORAGES:
            return "storage", TYPED_STORAGES[tensor.dtype], tensor.key, "cpu", count
        return "storage", torch.UntypedStorage, tensor.key, "cpu", count * tensor.dtype.itemsize


PYTHON_PICKLER: Any = pickle._Pickler  # the slow one in Python can write any instruction


class _OpaquePickler(PYTHON_PICKLER):  # type: ignore[misc]
    """Also writes objects of unknown classes, by the name of the class, which is not imported."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    reducer_override, persistent_id = _Pickler.reducer_override, _Pickler.persistent_id

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        """Write the instructions that made the object."""
        if not isinstance(obj, Opaque):
            super().save(obj, save_persistent_id)
            return
        if not IMPORTABLE.fullmatch(obj.module) or not IMPORTABLE.fullmatch(obj.qualname):
            raise CheckpointError(f"{obj!r} has no name that can be written: objects='drop' leaves it out")
        self._save_name(obj.module, obj.qualname)
        if obj.how != "name":
            self._save_parts(obj)

    def _save_name(self, module: str, qualname: str) -> None:
        """Protocol 2 names only what is at the top of a module; the rest are attributes."""
        owner, _, name = qualname.rpartition(".")
        if not owner:
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            return
        self.write(pickle.GLOBAL + b"builtins\ngetattr\n")
        self._save_name(module, owner)
        self.save(name)
        self.write(pickle.TUPLE2 + pickle.REDUCE)

    def _save_parts(self, obj: Opaque) -> None:
        self.save(obj.parts.args)
        self.write(pickle.REDUCE if obj.how == "call" else pickle.NEWOBJ)
        for code, listed in (pickle.APPENDS, obj.parts.items), (pickle.SETITEMS, [*chain(*obj.parts.pairs)]):
            if listed:
                self.write(pickle.MARK)
                for item in listed:
                    self.save(item)
                self.write(code)
        if obj.parts.state is not None:
            self.save(obj.parts.state)
            self.write(pickle.BUILD)


class _CountingStream(io.RawIOBase):
    """A stream that begins here, and cannot seek: an archive may be inside a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        self._file.write(data)
        self._at += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._at


def write_archive(file: IO[bytes], value: object, records: Records) -> int:
    """Write a value with a TensorRecord for each of `records`; returns the number of bytes."""
    stream = _CountingStream(file)
    text, records = _pickle(value, records)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ("data.pkl", text), ("byteorder", b"little"):
            with _new_member(archive, stream, name, len(data)) as record:
                record.write(data)
        for key, (size, write) in records.items():
            with _new_member(archive, stream, f"data/{key}", size) as record:
                write(record)
        with _new_member(archive, stream, "version", 2) as record:
            record.write(b"3\n")
    return stream.tell()


def _pickle(value: object, records: Records) -> tuple[bytes, Records]:
    """The pickle; and the records, with those of tensors inside values."""
    for kind in (_Pickler, _OpaquePickler):  # the second one is slower
        text, extended = io.BytesIO(), dict(records)
        with suppress(OpaqueError):
            kind(text, extended).dump(value)
            break
    return text.getvalue(), extended


def _new_member(archive: zipfile.ZipFile, stream: _CountingStream, name: str, size: int) -> IO[bytes]:
    """A member whose first byte is aligned, by padding in its header."""
    info, large = zipfile.ZipInfo(f"archive/{name}"), size >= zipfile.ZIP64_LIMIT
    start = stream.tell() + 30 + len(info.filename) + 4 + (20 if large else 0)
    padding = -start % ALIGN
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)


def torch_save_bytes(value: object) -> bytes:
    """What torch.save writes of a value without TensorRecords."""
    file = io.BytesIO()
    if opaque_in(value) is None:
        torch.save(value, file)
    else:
        write_archive(file, value, {})
    return file.getvalue()
