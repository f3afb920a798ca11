"""Checksums of blocks: written beside every file, believed only for its data, and checked by load and verify."""

import json
import os
import pickle
import random
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import held, names_in, numbers, same
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Damage, choosing
from shardwise.checkpoint.checking import FileCheck
from shardwise.storage.folders import OutputFolder
from shardwise.storage.sums import BLOCK, BlockSums, Summing, sums_name, with_digest
from shardwise.testing import on_ranks
from shardwise.transports.shared_memory import SharedMemoryTransport

ROWS = 700  # of 1024 float32: a tensor of several blocks
FORMATS = {
    "sharded": lambda path: checkpoint.save(state(), path, durable=False),
    "dcp": lambda path: checkpoint.save(state(), path, format="dcp", durable=False),
    "safetensors": lambda path: converted(path),
    "several": lambda path: converted(path, max_shard_size="2MB"),
    "torch.save": lambda path: converted(path, format="torch.save"),
}


def state():
    return {
        "w": numbers(ROWS, 1024),
        "b": numbers(5),
        "small": {str(at): numbers(at + 1) for at in range(6)},
        "step": 7,
    }


def converted(path, **options):
    source = f"{path}-source"
    checkpoint.save(state(), source, durable=False)
    checkpoint.convert(source, path, durable=False, verify=False, **({"select": ["*"]} | options))
    shutil.rmtree(source)


def empty(values):
    """The same with zeros."""
    if isinstance(values, dict):
        return {name: empty(value) for name, value in values.items()}
    return torch.zeros_like(values) if isinstance(values, torch.Tensor) else values


def into(path):
    """What fills from a checkpoint: safetensors have no values."""
    room = empty(state())
    if "step" not in checkpoint.open(path).objects:
        del room["step"]
    return room


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sums") / request.param.replace(".", "-")
    FORMATS[request.param](path)
    return path


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def flip(file, at, bit=0):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def data_files(path):
    """The files with checksums beside them."""
    return [name for name in names_in(path) if (Path(path) / sums_name(name)).exists()]


# --- written ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=4000), st.lists(st.integers(1, 999), max_size=9), st.integers(0, 3))
def test_the_sums_do_not_depend_on_how_the_bytes_arrive(data, sizes, blocks):
    data += bytes(blocks * BLOCK)
    summing, left = Summing(), memoryview(data)
    for size in sizes:
        summing.update(left[:size])
        left = left[size:]
    summing.update(left)
    sums = summing.finish()
    assert sums == Summing.of(data)
    assert (sums.size, sums.count) == (len(data), -(-len(data) // BLOCK))
    assert all(sums.fits(at, data[slice(*sums.span(at))]) for at in range(sums.count))
    assert BlockSums.read(sums.to_json(), "here") == sums


@given(st.data())
def test_a_flipped_bit_in_the_sums_is_refused(data):
    text = bytearray(Summing.of(b"x" * 3000).to_json())
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(sw.CheckpointError, match="here is damaged: it does not match its own digest"):
        BlockSums.read(bytes(text), "here")


@pytest.mark.parametrize(
    "change", [{"size": -1}, {"size": "1"}, {"block": 5}, {"sums": "zz"}, {"mark": None}, {"sums": ""}]
)
def test_sums_that_make_no_sense_are_refused(change):
    fields = json.loads(Summing.of(b"x" * 3000).to_json())
    del fields["digest"]
    with pytest.raises(sw.CheckpointError, match="here does not have checksums that are known here"):
        BlockSums.read(with_digest(json.dumps(fields | change).encode()), "here")


def test_every_file_has_its_sums_beside_it(written):
    own = {"shardwise.json", ".metadata"}
    assert set(data_files(written)) == set(names_in(written)) - own
    for name in data_files(written):
        sums = BlockSums.read((written / sums_name(name)).read_bytes(), name)
        assert sums == Summing.of((written / name).read_bytes())


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_without_sums_there_are_none(tmp_path, format):
    checkpoint.save(state(), tmp_path / "a", format=format, sums=False)
    checkpoint.convert(tmp_path / "a", tmp_path / "b.pt", sums=False)
    assert not [*tmp_path.rglob("*.sums.json")]
    room = empty(state())
    report = checkpoint.load(tmp_path / "a", room)
    assert report.checked == 0
    assert list(report.without_sums) == [name for name in names_in(tmp_path / "a") if name.endswith(("sors", "distcp"))]
    same(room["w"], state()["w"])
    with pytest.raises(sw.CheckpointError, match="has no checksums: nothing can be checked"):
        checkpoint.verify(tmp_path / "a")


def test_torch_reads_metadata_with_a_digest_after_it(tmp_path):
    checkpoint.save({"w": numbers(6, 4), "step": 3}, tmp_path, format="dcp")
    data = (tmp_path / ".metadata").read_bytes()
    plain = pickle.dumps(pickle.loads(data))
    assert len(data) > len(plain)
    room = {"w": torch.zeros(6, 4), "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    same(room["w"], numbers(6, 4))
    assert room["step"] == 3


def test_sums_in_memory_by_url(tmp_path):
    url = f"memory:/{tmp_path}"
    for start in range(2):
        checkpoint.save({"w": numbers(ROWS, 1024, start=start)}, url)
        room = {"w": torch.zeros(ROWS, 1024)}
        report = checkpoint.load(url, room)
        assert report.checked > BLOCK
        assert checkpoint.verify(url) == []
    assert len([name for name in MemoryFileSystem.store if name.startswith(str(tmp_path))]) == 3
    name = next(name for name in MemoryFileSystem.store if name.startswith(str(tmp_path)) and name.endswith("tensors"))
    data = bytearray(MemoryFileSystem.store[name].getvalue())
    data[BLOCK] ^= 1
    MemoryFileSystem().pipe(name, bytes(data))
    with pytest.raises(sw.CheckpointError, match=rf"bytes {BLOCK} to \d+: does not match its checksum: w in "):
        checkpoint.load(url, room)
    (damage,) = checkpoint.verify(url)
    assert damage.start == BLOCK


# --- never believed for other data ------------------------------------------------------------------------------------


class Crash(BaseException):
    """Ends a writer as kill would: nothing of it runs after that."""


def crashing(monkeypatch, at):
    """The writer dies at its nth change of a name."""
    count = [0]

    def wrap(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            count[0] += 1
            if count[0] > at:
                raise Crash
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "unlink"):
        wrap(name)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize("at", range(6))
def test_a_writer_that_dies_over_a_file_leaves_no_sums_of_other_data(tmp_path, monkeypatch, ending, at):
    """The old file or the new one, with the right sums or none."""
    out = tmp_path / f"model{ending}"
    for start in (1, 2):
        checkpoint.save({"w": numbers(ROWS, 1024, start=start)}, tmp_path / f"in{start}", durable=False)
    checkpoint.convert(tmp_path / "in1", out, verify=False)
    with monkeypatch.context() as patched:
        crashing(patched, at)
        with suppress(Crash):
            checkpoint.convert(tmp_path / "in2", out, verify=False)
    room = {"w": torch.zeros(ROWS, 1024)}
    report = checkpoint.load(out, room)
    assert room["w"][0, 0] in (1, 2)
    same(room["w"], numbers(ROWS, 1024, start=int(room["w"][0, 0])))
    beside = Path(sums_name(str(out)))
    assert (report.without_sums == ()) == beside.exists()
    if beside.exists():
        assert BlockSums.read(beside.read_bytes(), "") == Summing.of(out.read_bytes())


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("at", range(5))
def test_a_save_that_dies_leaves_a_whole_checkpoint_and_the_next_one_cleans_up(tmp_path, monkeypatch, format, at):
    checkpoint.save({"w": numbers(40, 10, start=1)}, tmp_path, format=format)
    with monkeypatch.context() as patched:
        crashing(patched, at)
        with suppress(Crash):
            checkpoint.save({"w": numbers(40, 10, start=2)}, tmp_path, format=format)
    assert checkpoint.verify(tmp_path) == []
    assert checkpoint.load(tmp_path, {"w": torch.zeros(40, 10)}).without_sums == ()
    checkpoint.save({"w": numbers(40, 10, start=3)}, tmp_path, format=format)
    left = {entry.name for entry in tmp_path.iterdir()}
    (data,) = data_files(tmp_path)
    assert left == {data, sums_name(data), "shardwise.json" if format == "safetensors" else ".metadata"}


def test_sums_of_a_file_that_another_program_replaced_are_not_believed(tmp_path):
    checkpoint.save({"w": numbers(ROWS, 1024)}, tmp_path / "in")
    checkpoint.convert(tmp_path / "in", tmp_path / "m.safetensors")
    for more in (0, 1):  # of the same size, and of another one
        save_file({"w": numbers(ROWS + more, 1024, start=5)}, tmp_path / "m.safetensors")
        room = {"w": torch.zeros(ROWS + more, 1024)}
        report = checkpoint.load(tmp_path / "m.safetensors", room)
        same(room["w"], numbers(ROWS + more, 1024, start=5))
        assert (report.checked, report.without_sums) == (0, ("m.safetensors",))
        assert checkpoint.verify(tmp_path / "m.safetensors")
    checkpoint.convert(tmp_path / "in", tmp_path / "m.safetensors", sums=False)
    assert not Path(sums_name(str(tmp_path / "m.safetensors"))).exists()


def test_a_file_that_is_reused_gets_the_sums_that_it_lacks(tmp_path):
    path, out = tmp_path / "in", tmp_path / "out"
    checkpoint.save({"a": numbers(400), "b": numbers(400)}, path)
    checkpoint.convert(path, out, max_shard_size=1600)
    first, second = (name for name in data_files(out) if name.endswith("tensors"))
    (out / "model.safetensors.index.json").unlink()
    (out / sums_name(first)).unlink()
    (out / sums_name(second)).write_bytes(b"damaged")
    made = checkpoint.convert(path, out, max_shard_size=1600)
    assert made.reused == (first, second)
    assert checkpoint.verify(out) == []


def test_removed_files_take_their_sums_along(tmp_path):
    folder = OutputFolder(tmp_path)
    for name in "ab":
        with folder.write(name) as file:
            file.write(b"data")
    folder.remove("a")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b", "b.sums.json"]


def test_a_name_that_cannot_be_longer_has_sums_of_another_name(tmp_path):
    checkpoint.save({"w": numbers(4)}, tmp_path / "in")
    out = tmp_path / ("long" * 60 + ".safetensors")
    checkpoint.convert(tmp_path / "in", out)
    assert checkpoint.load(out, {"w": torch.zeros(4)}).without_sums == ()
    assert checkpoint.verify(out) == []


# --- load -------------------------------------------------------------------------------------------------------------


def test_a_load_of_everything_checks_everything(written):
    report = checkpoint.load(written, into(written))
    assert report.without_sums == ()
    assert report.checked >= report.read > ROWS * 4096


@pytest.mark.parametrize("check", [True, "all"])
def test_a_flipped_bit_is_named_by_file_bytes_tensor_and_box(copied, check):
    entry = checkpoint.open(copied)["w"]
    ((_, span),) = entry.ranges()
    row = 600
    at = span.start + row * 4096 + 17
    flip(copied / span.file, at)
    room = into(copied)
    with pytest.raises(sw.CheckpointError, match="is damaged, and was not loaded") as caught:
        checkpoint.load(copied, room, check=check)
    block = at // BLOCK * BLOCK
    said = re.search(
        r"([^ ]+), bytes (\d+) to (\d+): does not match its checksum: w in \[(\d+):(\d+), 0:1024\]", str(caught.value)
    )
    assert said[1].endswith(span.file)
    assert int(said[2]) == block
    assert int(said[4]) <= row < int(said[5])
    room = into(copied)
    report = checkpoint.load(copied, room, check=False)
    assert report.checked == 0
    assert int((room["w"] != state()["w"]).sum()) == 1


def test_a_rank_checks_the_blocks_of_its_part(tmp_path):
    """The header before it shifts them a little: what is missing of a block is read."""
    checkpoint.save({"w": numbers(16 * 256, 1024)}, tmp_path)  # 16 blocks, and a header

    def run(rank):
        return checkpoint.load(tmp_path, {"w": held(torch.zeros(16 * 256, 1024), f"{16 * 256}x1024/S0@4")})

    reports = on_ranks(4, run)
    (name,) = data_files(tmp_path)
    header = (tmp_path / name).stat().st_size - 16 * BLOCK
    assert [report.read for report in reports] == [4 * BLOCK] * 4
    assert [report.checked for report in reports] == [4 * BLOCK] * 3 + [4 * BLOCK + header]


LONG = bytes(range(256)) * (BLOCK // 64)  # 4 blocks
edges = st.integers(0, len(LONG)) | st.integers(0, 4).map(lambda at: at * BLOCK)


@given(st.lists(st.tuples(edges, edges).map(sorted), max_size=8), edges, st.booleans())
def test_blocks_are_checked_in_whatever_order_they_are_read(spans, flipped, near):
    data = bytearray(LONG)
    at = min(flipped, len(LONG) - 1)
    data[at] ^= 1
    table = FileCheck(Summing.of(LONG), (lambda lo, hi: bytes(data[lo:hi])) if near else None)
    seen = np.zeros(len(LONG), np.bool_)
    for lo, hi in spans:
        if lo < hi:
            table.see(lo, memoryview(data)[lo:hi])
            seen[lo:hi] = True
    for block in table.left():
        lo, hi = table.sums.span(block)
        table.settle(block, memoryview(data)[lo:hi])
    whole = {block for block in range(4) if seen[slice(*table.sums.span(block))].all()}
    checked = {block for block in range(4) if table.has(block)}
    assert whole == checked if not near else whole <= checked
    assert table.damaged == [at // BLOCK] * (at // BLOCK in checked)
    assert table.checked_bytes == len(checked) * BLOCK


@pytest.mark.parametrize("damage", ["missing", "damaged", "truncated"])
def test_sums_that_an_index_promises_must_be_there(copied, damage):
    index = {"shardwise.json", ".metadata", "model.safetensors.index.json"} & set(names_in(copied))
    name = data_files(copied)[0]
    file = copied / sums_name(name)
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        flip(file, 20)
    else:
        file.write_bytes(file.read_bytes()[:-9])
    if damage == "missing" and not index:
        assert checkpoint.load(copied, into(copied)).without_sums == (name,)
    else:
        with pytest.raises(sw.CheckpointError, match=rf"{re.escape(sums_name(name))} is (missing|damaged)"):
            checkpoint.load(copied, into(copied))
    checkpoint.load(copied, into(copied), check=False)


def test_sums_that_are_larger_than_any_are_not_read(tmp_path):
    checkpoint.save({"w": numbers(4)}, tmp_path)
    (name,) = data_files(tmp_path)
    os.truncate(tmp_path / sums_name(name), 2**26 + 1)
    with pytest.raises(sw.CheckpointError, match="has 67108865 bytes: checksums have at most 67108864"):
        checkpoint.load(tmp_path, {"w": torch.zeros(4)})
    assert [damage.file for damage in checkpoint.verify(tmp_path)] == [sums_name(name)]


def test_a_file_that_lost_most_of_its_bytes_is_named(tmp_path):
    checkpoint.save({"w": numbers(16 * 256, 1024)}, tmp_path)
    (name,) = data_files(tmp_path)
    size = (tmp_path / name).stat().st_size
    os.truncate(tmp_path / name, 1000)
    (damage,) = checkpoint.verify(tmp_path)
    assert (damage.file, damage.start, damage.stop) == (name, 1000, size)


@pytest.mark.parametrize("check", ["yes", None, 1, 0])
def test_another_kind_of_check_is_refused(written, check):
    with pytest.raises(ValueError, match="check= must be True, False or 'all', not "):
        checkpoint.load(written, into(written), check=check)


def test_quantized_values_are_checked_as_codes_and_scales(tmp_path):
    rule = checkpoint.Quantized("w", "w_scale", format="fp8-row")
    checkpoint.save({"w": numbers(1024, 1024) / 1e6}, tmp_path / "values")
    checkpoint.convert(tmp_path / "values", tmp_path / "codes.safetensors", remap=[rule])
    room = {"w": torch.zeros(1024, 1024)}
    report = checkpoint.load(tmp_path / "codes.safetensors", room, remap=[checkpoint.Quantized()])
    assert report.read == 1024 * 1024 + 4096
    assert report.checked > BLOCK
    flip(tmp_path / "codes.safetensors", BLOCK // 2)
    with pytest.raises(sw.CheckpointError, match=r"does not match its checksum: (w|w_scale) in "):
        checkpoint.load(tmp_path / "codes.safetensors", room, remap=[checkpoint.Quantized()])


@pytest.mark.parametrize("check", [True, "all"])
@pytest.mark.parametrize("read", ["each", "once"])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_damage_is_one_error_on_all_ranks(tmp_path, format, read, check):
    checkpoint.save(state(), tmp_path, format=format)
    good, (name,) = checkpoint.open(tmp_path), data_files(tmp_path)
    ((_, span),) = good["w"].ranges()

    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        room = empty(state()) | {"w": distribute_tensor(torch.zeros(ROWS, 1024), mesh, [Shard(0)])}
        try:
            report = checkpoint.load(tmp_path, room, group=dist.group.WORLD, read=read, check=check)
        except sw.CheckpointError as error:
            return str(error)
        same(room["w"].full_tensor(), state()["w"])
        return report.checked

    checked = on_ranks(2, run)
    assert all(isinstance(one, int) for one in checked)
    if check == "all":
        assert sum(checked) == (tmp_path / name).stat().st_size
    flip(tmp_path / name, span.start + 650 * 4096)
    said = on_ranks(2, run)
    assert said[0] == said[1]
    assert re.search(r"bytes \d+ to \d+: does not match its checksum: w in \[\d+:700, 0:1024\]", said[0])


@pytest.mark.parametrize("check", [True, "all"])
def test_damage_is_found_in_every_part_of_a_load_that_is_measured(tmp_path, check):
    checkpoint.save({str(at): numbers(16, 16, start=at) for at in range(12)}, tmp_path)
    (name,) = data_files(tmp_path)

    def run(rank):
        SharedMemoryTransport.on_one_host = property(lambda self: False)
        choosing.TRIAL = 2048
        try:
            report = checkpoint.load(
                tmp_path, {str(at): torch.zeros(16, 16) for at in range(12)}, group=dist.group.WORLD, check=check
            )
        except sw.CheckpointError as error:
            return str(error)
        return report.checked

    assert sum(on_ranks(2, run)) >= (tmp_path / name).stat().st_size
    flip(tmp_path / name, -1)
    said = on_ranks(2, run)
    assert said[0] == said[1]
    assert "11 in [0:16, 0:16]" in said[0] or "and 8 more tensors" in said[0]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_damage(written):
    assert checkpoint.verify(written) == []
    assert checkpoint.verify(checkpoint.open(written)) == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(number=st.integers(0), at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_in_its_file_and_tensor(written, number, at, bit):
    names = sorted(entry.name for entry in written.iterdir())
    name = names[number % len(names)]
    file = written / name
    data = file.read_bytes()
    at %= len(data)
    spans = {
        entry: [(box, span) for box, span in one.ranges() if span.file == name and span.start <= at < span.stop]
        for entry, one in checkpoint.open(written).items()
    }
    flip(file, at, bit)
    try:
        found = checkpoint.verify(written)
    finally:
        file.write_bytes(data)
    assert [damage.file for damage in found] == [name]
    (damage,) = found
    assert damage.start <= at < damage.stop
    named = dict(damage.tensors)
    for tensor, hits in spans.items():
        for box, span in hits:
            cell = (at - span.start) // 4
            index = [cell // 1024, cell % 1024] if tensor == "w" else [cell]
            assert all(lo <= i < hi for lo, hi, i in zip(named[tensor].lo, named[tensor].hi, index, strict=True)), box


def test_what_is_missing_or_cut_off_is_found(copied):
    name = data_files(copied)[0]
    size = (copied / name).stat().st_size
    os.truncate(copied / name, size - 5)
    (damage,) = checkpoint.verify(copied)
    assert (damage.file, damage.start, damage.stop) == (name, size - 5, size)


def test_one_file_is_verified_alone(tmp_path):
    checkpoint.save({"w": numbers(4, 4)}, tmp_path)
    (name,) = data_files(tmp_path)
    assert checkpoint.verify(tmp_path / name) == []
    flip(tmp_path / name, (tmp_path / name).stat().st_size - 1)
    (damage,) = checkpoint.verify(tmp_path / name)
    assert str(damage) == (f"{name}, bytes 0 to {damage.stop}: does not match its checksum: w@0,0 in [0:4, 0:4]")


def test_options_that_compare_need_two(tmp_path):
    checkpoint.save({"w": numbers(4)}, tmp_path)
    with pytest.raises(ValueError, match="select= compares two checkpoints, but only one was given"):
        checkpoint.verify(tmp_path, select="w")


def test_damage_shows_control_characters_escaped():
    assert "\x1b" not in str(Damage("a\x1b[2J", 0, 1, "is missing"))


def test_random_loads_of_parts_check_no_more_than_the_files(tmp_path):
    """Any names in any order, so that blocks are met from both ends."""
    tensors = {str(at): numbers(random.Random(at).randrange(1, 90_000)) for at in range(40)}
    checkpoint.save(tensors, tmp_path)
    (name,) = data_files(tmp_path)
    for seed in range(20):
        some = random.Random(seed).sample(sorted(tensors), 25)
        room = {one: torch.zeros_like(tensors[one]) for one in some}
        report = checkpoint.load(tmp_path, room)
        assert report.read == sum(one.nbytes for one in room.values())
        assert report.checked <= (tmp_path / name).stat().st_size
        for one in some:
            same(room[one], tensors[one])


def test_checksums_of_another_kind_are_not_called_changed(tmp_path):
    checkpoint.save({"w": torch.ones(4)}, tmp_path)
    (beside,) = tmp_path.glob("*.sums.json")
    fields = json.loads(beside.read_bytes())
    del fields["digest"]
    beside.write_bytes(with_digest(json.dumps(fields | {"algorithm": "another"}).encode()))
    (found,) = checkpoint.verify(tmp_path)
    assert (found.file, found.what[:45]) == (beside.name, "is damaged, or has checksums of another kind;")
    with pytest.raises(sw.CheckpointError, match="does not have checksums that are known here"):
        checkpoint.load(tmp_path, {"w": torch.zeros(4)})
