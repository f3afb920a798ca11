"""Windows of files that are read straight into memory: as the mapped file has them, and never past its end."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import checkpoint
from shardwise.checkpoint import window_reads
from shardwise.checkpoint.files import ByteRange
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.checkpoint.window_reads import WindowReader
from shardwise.errors import CheckpointError
from shardwise.geometry import Window

BYTES = np.random.default_rng(0).integers(0, 128, 2**16, dtype=np.uint8)
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.complex128]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "data").write_bytes(BYTES.tobytes())
    return LocalFiles(folder)


@st.composite
def windows(draw, room):
    """A window of so many elements, with any strides: gaps, transposed dims, elements that come several times."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    strides = [draw(st.integers(0, 200)) for _ in shape]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return Window(0, tuple(shape), tuple(strides), draw(st.integers(0, room - reach)))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 15), st.sampled_from([64, 1024, 2**20]), st.booleans())
def test_every_window_is_read_as_the_file_has_it(files, data, dtype, skip, chunk, cold):
    source = data.draw(windows(len(BYTES) // 16 - 2))
    becomes = data.draw(st.sampled_from([dtype, torch.complex128]))
    spaces = data.draw(st.integers(1, 3))
    strides = tuple(spaces * stride for stride in torch.empty(source.shape, device="meta").stride())
    memory = [torch.zeros(7 + source.volume * spaces, dtype=becomes)]
    target = Window(0, source.shape, strides, 7)
    at = source._replace(offset=source.offset * dtype.itemsize + skip)
    words = torch.from_numpy(BYTES[skip:][: (len(BYTES) - 16) // 16 * 16].copy()).view(dtype)
    expected = words.as_strided(source.shape, source.strides, source.offset).to(becomes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_reads, "CHUNK", chunk)
        patch.setattr(window_reads, "GAP", chunk // 4)
        patch.setattr(window_reads, "LONG", chunk // 16)
        if cold:
            patch.setattr(LocalFiles, "cached", lambda self, bytes: False)
        read = WindowReader(files).read("data", at, dtype, target, memory, None)
    if read:
        torch.testing.assert_close(
            memory[0].as_strided(source.shape, strides, 7), expected, rtol=0, atol=0, equal_nan=True
        )
    else:
        assert not memory[0].any()
        assert not cold


def test_a_look_sees_all_values_before_they_are_cast(files, monkeypatch):
    monkeypatch.setattr(LocalFiles, "cached", lambda self, bytes: False)
    monkeypatch.setattr(window_reads, "CHUNK", 64)
    seen, memory = [], [torch.zeros(100)]
    window = Window(0, (100,), (1,), 0)
    assert WindowReader(files).read(
        "data", window, torch.uint8, window, memory, lambda values: seen.extend(value.clone() for value in values)
    )
    assert torch.cat(seen).tolist() == BYTES[:100].tolist() == memory[0].tolist()
    assert max(map(len, seen)) == 64


def test_what_was_read_is_cached_and_what_was_dropped_is_not(tmp_path):
    (tmp_path / "data").write_bytes(bytes(10 * 2**20))
    files = LocalFiles(tmp_path)
    every = ByteRange("data", 0, 10 * 2**20)
    files.read_into("data", 0, np.empty(10 * 2**20, np.uint8))
    with open(tmp_path / "data", "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = files.cached(every)
    files.read_into("data", 0, np.empty(10 * 2**20, np.uint8))
    if not files.cached(every):
        pytest.skip("this file system cannot tell what is cached")
    assert not dropped


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """Between two reads of one tensor."""
    torch.save({"w": torch.arange(2.0**20).view(2**10, 2**10)}, tmp_path / "m.pt")
    found = checkpoint.open(tmp_path / "m.pt")
    monkeypatch.setattr(LocalFiles, "cached", lambda self, bytes: False)
    monkeypatch.setattr(window_reads, "CHUNK", 2**16)
    read_into, reads = LocalFiles.read_into, []

    def cutting(self, name, start, memory):
        reads.append(start)
        if len(reads) == 5:
            os.truncate(tmp_path / "m.pt", 2**17)
        return read_into(self, name, start, memory)

    monkeypatch.setattr(LocalFiles, "read_into", cutting)
    into = {"w": torch.zeros(2**10, 2**10, dtype=torch.float64)}
    with pytest.raises(CheckpointError, match=r"m\.pt was replaced or changed since the checkpoint was opened"):
        checkpoint.load(found, into)
    assert len(reads) >= 5


def test_many_threads_read_with_readers_of_their_own(files):
    def work(results):
        memory = [torch.zeros(50, 4, dtype=torch.uint8)]
        window, target = Window(0, (50, 4), (100, 2), 3), Window(0, (50, 4), (4, 1), 0)
        for _ in range(50):
            results.append(WindowReader(files).read("data", window, torch.uint8, target, memory, None))
            if not results[-1]:
                return
        np.testing.assert_array_equal(memory[0], np.lib.stride_tricks.as_strided(BYTES[3:], (50, 4), (100, 2)))

    found = [[] for _ in range(4)]
    threads = [threading.Thread(target=work, args=(results,)) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found)
