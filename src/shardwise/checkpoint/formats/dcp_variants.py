"""Files of torch.distributed.checkpoint that are not archives of torch.save one after the other.

With `serialization_format=SAFETENSORS` the tensors of a file are one safetensors file, after the values. With the
extension ZStandard every box is an archive that is compressed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np
import torch

from shardwise.checkpoint.entry import Positions
from shardwise.checkpoint.files import ByteRange, Bytes, FileLabel, Files
from shardwise.checkpoint.formats.archives import MAX_EXPANSION
from shardwise.checkpoint.formats.safetensors import Header, read_header
from shardwise.checkpoint.formats.safetensors_shards import saved_offsets
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, ints

KEPT = 2**26  # bytes that are kept uncompressed, besides those of the last range
STEP = 2**22  # bytes that are uncompressed at a time
ZSTD = "stream.zstd/1"  # as `.metadata` has it; a smaller version may follow


class EmbeddedTensors:
    """Tensors in safetensors form, from some byte of a file to its end."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._headers = dict[tuple[str, int], tuple[Header, dict[str, tuple[int, ...]]]]()

    def locate(self, ranges: Sequence[ByteRange], boxes: Boxes, name: str, dtype: torch.dtype) -> Positions:
        """The elements of boxes of a tensor, by the byte at which the safetensors form begins that has each of them."""
        starts = [self._start(one, boxes.box(at), name, dtype) for at, one in enumerate(ranges)]
        return Positions(ints(starts))

    def _start(self, where: ByteRange, box: Box, name: str, dtype: torch.dtype) -> int:
        key = where.file, where.start
        if key not in self._headers:
            header = read_header(self._files, *key)
            self._headers[key] = header, saved_offsets(header, self._files.label(where.file))
        header, offsets = self._headers[key]
        tensor, lo = header.tensors.get(name), offsets.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, box.shape) or lo not in (box.lo, None):
            actual = "lacks it" if tensor is None else f"has {tensor.dtype} of shape {tensor.shape} from {lo} on"
            raise CheckpointError(
                f"{self._files.label(where.file)}: {box} of {name!r} should be {dtype} of shape {box.shape}, but the "
                f"file {actual}. torch keeps one box of a tensor in each such file: the others are lost"
            )
        return tensor.start


class CompressedFiles(Files):
    """The files of a checkpoint, and compressed ranges of them as files of their own, uncompressed when first read."""

    def __init__(self, files: Files) -> None:
        self.root, self._files = files.root, files
        self._ranges, self._sizes = dict[str, ByteRange](), dict[str, int]()
        self._kept, self._lock = OrderedDict[str, Bytes](), Lock()

    def add(self, compressed: ByteRange) -> str:
        """The name of a compressed range as a file."""
        name = f"{compressed.file}:{compressed.start}-{compressed.stop}"
        self._ranges[name] = compressed
        return name

    def _file(self, name: str) -> str:
        return self._ranges[name].file if name in self._ranges else name

    def names(self, *, recursive: bool = False) -> list[str]:
        """The real ones."""
        return self._files.names(recursive=recursive)

    def has(self, name: str) -> bool:
        """As the file system says."""
        return name in self._ranges or self._files.has(name)

    def size(self, name: str) -> int:
        """Of the bytes when they are uncompressed."""
        if name in self._ranges and name not in self._sizes:
            self._uncompressed(name)
        return self._sizes[name] if name in self._ranges else self._files.size(name)

    def stamp(self, name: str) -> str:
        """That of the file."""
        return self._files.stamp(self._file(name))

    def path(self, name: str) -> str:
        """That of the file."""
        return self._files.path(self._file(name))

    def label(self, name: str) -> FileLabel:
        """The compressed bytes, as messages show them."""
        return self._files.range_label(self._ranges[name]) if name in self._ranges else self._files.label(name)

    def range_label(self, bytes: ByteRange) -> FileLabel:
        """The compressed bytes, as messages show them."""
        return self.label(bytes.file) if bytes.file in self._ranges else self._files.range_label(bytes)

    def check_unchanged(self, names: Iterable[str], *, within: float = 0) -> None:
        """Of the files."""
        self._files.check_unchanged({self._file(name) for name in names}, within=within)

    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """Of the uncompressed bytes, or of the file."""
        for one in ranges:
            self.check(one)
        return [
            self._uncompressed(one.file)[one.start : one.stop].copy()
            if one.file in self._ranges
            else self._files.fetch([one])[0]
            for one in ranges
        ]

    def _uncompressed(self, name: str) -> Bytes:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        one = self._ranges[name]
        self._files.check(one)
        data = np.frombuffer(uncompress(self._files.fetch([one])[0], self.label(name)), np.uint8)
        with self._lock:
            self._sizes[name] = len(data)
            self._kept[name] = data
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT:
                self._kept.popitem(last=False)
        return data


def uncompress(data: Bytes, where: object) -> bytearray:
    """What zstd compressed. Refused if a few bytes would become very many."""
    try:
        import zstandard
    except ImportError:
        raise CheckpointError(f"{where} is compressed with zstd: pip install 'shardwise[zstd]' to read it") from None
    made, limit = bytearray(), MAX_EXPANSION * (len(data) + 2**20)
    try:
        with zstandard.ZstdDecompressor().stream_reader(data.tobytes()) as reader:
            while part := reader.read(STEP):
                made += part
                if len(made) > limit:
                    raise CheckpointError(
                        f"{where}: {len(data)} bytes would become more than {limit}. Remedy: load it with "
                        f"torch.distributed.checkpoint, and save it without compression"
                    )
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{where} is not compressed with zstd, or damaged: {error}") from error
    return made
