"""Bytes that go from file to file inside the system, and where it cannot."""

import errno
import os

import pytest

from shardwise.errors import CheckpointError
from shardwise.storage.appending import AppendOnlyFile, Descriptor

DATA = bytes(range(256)) * 20_000  # several times what goes through at once


def taken(folder, *spans):
    """The spans of a file, appended to a new one."""
    (folder / "source").write_bytes(DATA)
    with (folder / "made").open("wb", buffering=0) as raw:
        made = AppendOnlyFile(raw)
        made.write(b"head")
        for start, count in spans:
            made.copy_from(Descriptor(os.open(folder / "source", os.O_RDONLY), "the source"), start, count)
    return (folder / "made").read_bytes()


def refused(monkeypatch, which, code):
    """os.splice that refuses every call of one side."""
    splice = os.splice

    def some(source, into, count, offset_src=None):
        if (offset_src is None) == (which == "writing"):
            raise OSError(code, os.strerror(code))
        return splice(source, into, count, offset_src=offset_src)

    monkeypatch.setattr(os, "splice", some)


def test_bytes_come_as_they_are(tmp_path):
    assert taken(tmp_path, (3, 2_500_001), (0, 7)) == b"head" + DATA[3:2_500_004] + DATA[:7]


@pytest.mark.parametrize("which", ["reading", "writing"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EXDEV])
def test_what_the_system_does_not_do_is_done_here(tmp_path, monkeypatch, which, code):
    refused(monkeypatch, which, code)
    assert taken(tmp_path, (3, 2_500_001), (0, 7)) == b"head" + DATA[3:2_500_004] + DATA[:7]


def test_systems_without_splice_copy(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "splice")
    assert taken(tmp_path, (3, 2_500_001)) == b"head" + DATA[3:2_500_004]


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    refused(monkeypatch, "writing", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        taken(tmp_path, (0, 10))


def test_a_source_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    refused(monkeypatch, "reading", errno.EIO)
    with pytest.raises(CheckpointError, match="the source cannot be read: Input/output error"):
        taken(tmp_path, (0, 10))


def test_a_source_that_became_shorter_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="the source was truncated"):
        taken(tmp_path, (len(DATA) - 5, 10))
