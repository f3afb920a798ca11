"""Members of zip archives are found where zipfile puts them; a header that is not that of its member is refused."""

import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.files import ByteRange
from shardwise.checkpoint.formats.archives import HEADER, contents, data_starts, directories
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.errors import CheckpointError

ARCHIVES = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=20), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zips")


def written(folder, members, before):
    """The members of an archive that begins somewhere in a file, and the files."""
    path = folder / "file"
    with zipfile.ZipFile(folder / "archive", "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    path.write_bytes(before + (folder / "archive").read_bytes())
    files = LocalFiles(folder)
    (found,) = directories(files, [ByteRange("file", len(before), path.stat().st_size)])
    return files, path, found


@given(ARCHIVES, st.binary(max_size=3))
def test_members_have_their_bytes(folder, members, before):
    files, path, found = written(folder, members, before)
    assert dict(zip(found, contents(files, list(found.values())), strict=True)) == members
    for at, (name, data) in zip(data_starts(files, list(found.values())), members.items(), strict=True):
        assert path.read_bytes()[at:].startswith(data), name


@given(st.data(), ARCHIVES, st.binary(max_size=3))
def test_a_header_that_is_not_that_of_its_member_is_refused(folder, data, members, before):
    _, path, found = written(folder, members, before)
    member = data.draw(st.sampled_from(list(found.values())))
    signature, lengths_and_name = range(4), range(HEADER.size - 4, HEADER.size + len(member.name))
    wrong = data.draw(st.sampled_from([*signature, *lengths_and_name]))
    text = bytearray(path.read_bytes())
    text[member.header + wrong] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(text)
    for read in contents, data_starts:
        with pytest.raises(CheckpointError, match="the file is damaged"):
            read(LocalFiles(folder), [member])
