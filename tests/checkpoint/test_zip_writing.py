"""Archives are the bytes that Python's zipfile writes into a stream."""

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.formats import zips
from shardwise.checkpoint.formats.zips import archive_segments
from shardwise.checkpoint.segments import Data, size_of, write_segments

NAMES = st.text("abc/._0", min_size=1, max_size=90)
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=300), st.booleans()), unique_by=lambda one: one[0], max_size=5)


def written(members):
    """By us: each member is bytes, or data that is written later."""
    segments = archive_segments(
        [(name, Data(len(data), lambda f, d=data: f.write(d)) if later else data) for name, data, later in members]
    )
    file = io.BytesIO()
    write_segments(file, segments)
    assert size_of(segments) == len(file.getvalue())
    return file.getvalue()


class Stream(io.RawIOBase):
    """It cannot seek."""

    def __init__(self):
        self.bytes = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.bytes += data
        return len(data)

    def tell(self):
        return len(self.bytes)


def by_zipfile(members, limit):
    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data, _ in members:
            info, large = zipfile.ZipInfo(name), len(data) >= limit
            padding = -(stream.tell() + 30 + len(name) + 4 + (20 if large else 0)) % 64
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(info, "w", force_zip64=large) as member:
                member.write(data)
    return bytes(stream.bytes)


@pytest.mark.parametrize("limit", [2**31 - 1, 100, 1000])
@given(members=MEMBERS)
def test_archives_are_what_zipfile_writes(limit, members):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zipfile, "ZIP64_LIMIT", limit)
        patched.setattr(zips, "LARGE", limit)
        assert written(members) == by_zipfile(members, limit)


def test_members_begin_at_multiples_of_64_and_have_their_checksums():
    data = written([("a", b"x" * 100, True), ("bb", b"y" * 7, True)])
    assert [data.index(b"x" * 100) % 64, data.index(b"yyyyyyy") % 64] == [0, 0]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


def test_archives_may_have_more_members_than_16_bits_count():
    members = [(f"archive/data/{at}", b"", False) for at in range(70_000)]
    with zipfile.ZipFile(io.BytesIO(written(members))) as archive:
        assert len(archive.namelist()) == 70_000
