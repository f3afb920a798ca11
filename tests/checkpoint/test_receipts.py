"""Receipts: one for the same values, wherever they are and however they are sharded."""

import json
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise import checkpoint, cli
from shardwise.checkpoint import receipts
from shardwise.testing import on_ranks


def numbers(*shape, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return (values * 100).to(dtype)


WHOLE = {
    "embed": numbers(37, 64, dtype=torch.bfloat16),
    "layers": [{"w": numbers(40, 30), "norm": numbers(30)}, {"w": numbers(3000, dtype=torch.float64)}],
    "codes": numbers(12, 8).to(torch.float8_e4m3fn),
    "flags": numbers(9) > 0,
    "step": torch.tensor(7),
    "empty": numbers(0, 3),
    "epoch": 3,
}
SPLIT = {"embed": [Shard(0), Shard(1)], "layers.0.w": [Shard(1), Shard(0)], "layers.1.w": [Shard(0), Replicate()]}


def on_mesh(values, mesh, name=""):
    """The same with some tensors as DTensors."""
    if isinstance(values, dict):
        return {key: on_mesh(value, mesh, f"{name}.{key}".lstrip(".")) for key, value in values.items()}
    if isinstance(values, list):
        return [on_mesh(value, mesh, f"{name}.{number}") for number, value in enumerate(values)]
    if name not in SPLIT:
        return values
    return distribute_tensor(values, mesh, SPLIT[name][-mesh.ndim :], src_data_rank=None)


def flipped(values, path, at):
    """A copy in which one bit of one element is another."""
    copy = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)
    tensor = copy
    for step in path:
        tensor = tensor[step]
    tensor.view(torch.uint8).view(-1)[at] ^= 1
    return copy


def test_it_is_the_same_live_saved_converted_and_loaded(tmp_path):
    def train(_rank):
        state = on_mesh(WHOLE, init_device_mesh("cpu", (2, 2)))
        for format in ("safetensors", "dcp"):
            checkpoint.save(state, tmp_path / format, format=format)
        return sw.receipt(state, version=12).to_json()

    (text,) = set(on_ranks(4, train))
    live = sw.Receipt.from_json(text)
    assert (live.version, live.tensors["embed"].layout) == (12, "37x64/S0,S1@2x2")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "out.safetensors")
    found = [sw.receipt(checkpoint.open(tmp_path / name)) for name in ("safetensors", "dcp", "out.safetensors")]

    def serve(_rank):
        into = torch.utils._pytree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, WHOLE)
        into = on_mesh(into, init_device_mesh("cpu", (3,)))
        checkpoint.load(tmp_path / "safetensors", into)
        return sw.receipt(into)

    for other in (*found, *on_ranks(3, serve), sw.receipt(WHOLE)):
        assert live.differences(other) == []
        assert live.matches(other)
        assert other.matches(live)
    assert set(live.tensors) == {
        "embed",
        "layers.0.w",
        "layers.0.norm",
        "layers.1.w",
        "codes",
        "flags",
        "step",
        "empty",
    }


@pytest.mark.parametrize(
    ("path", "at"), [(("embed",), 4735), (("layers", 0, "w"), 0), (("layers", 1, "w"), 23999), (("codes",), 50)]
)
def test_one_flipped_bit_is_found_and_named(path, at, tmp_path):
    """Where the bit is in memory, and where it is in a file."""
    before, changed = sw.receipt(WHOLE), flipped(WHOLE, path, at)
    checkpoint.save(changed, tmp_path / "saved")
    for other in (sw.receipt(changed), sw.receipt(checkpoint.open(tmp_path / "saved"))):
        assert list(map(str, before.differences(other))) == [f"{'.'.join(map(str, path))}: has other values"]
        assert not before.matches(other)


def test_ranks_that_hold_nothing_and_partial_tensors_take_part():
    values = numbers(6, 10)

    def run(rank):
        if rank == 0:
            return sw.receipt(None)
        terms = values if rank == 2 else torch.zeros(6, 10)
        state = {
            "sum": sw.ShardedTensor(terms, "6x10/P@2:1,2"),
            "rows": sw.ShardedTensor(values[3 * rank - 3 : 3 * rank], "6x10/S0@2:1,2"),
        }
        return sw.receipt(state)

    found = on_ranks(3, run)
    alone = sw.receipt({"sum": values, "rows": values})
    assert [alone.differences(one) for one in found] == [[], [], []]
    assert len({one.time for one in found}) == 1


def test_what_one_rank_gets_wrong_is_raised_on_all():
    def run(rank):
        said = []
        for state in (
            {"w": torch.zeros(3 + rank)},
            {"w": torch.zeros(3)} if rank else {"v": torch.zeros(3)},
            {"w": torch.zeros(3, device="meta" if rank else "cpu")},
            [] if rank else {"w": torch.zeros(3)},
        ):
            with pytest.raises((ValueError, TypeError)) as error:
                sw.receipt(state)
            said.append(str(error.value).split("\n")[0])
        return said

    first, second = on_ranks(2, run)
    assert [("w" in said or "state" in said.lower()) for said in first] == [True] * 4, first
    assert first[:2] == second[:2]


def test_a_checkpoint_is_read_in_chunks_that_come_to_the_same(tmp_path, monkeypatch):
    checkpoint.save(WHOLE, tmp_path / "saved")
    opened = checkpoint.open(tmp_path / "saved")
    expected = sw.receipt(opened)
    monkeypatch.setattr(receipts, "CHUNK", 1000)
    read = []
    monkeypatch.setattr(
        receipts.Stream,
        "fill",
        lambda self, *args, fill=receipts.Stream.fill: (read.append(args[1]), fill(self, *args)),
    )
    assert sw.receipt(opened, jobs=2).differences(expected) == []
    assert max(buffer.nbytes for buffer in read) <= 1000
    assert sum(buffer.nbytes for buffer in read) == opened.bytes


def test_a_checkpoint_is_not_shared_by_a_group(tmp_path):
    checkpoint.save({"w": torch.zeros(3)}, tmp_path / "saved")
    with pytest.raises(ValueError, match="read by one process: leave out group="):
        sw.receipt(checkpoint.open(tmp_path / "saved"), group=object())


def test_differences_say_names_shapes_and_dtypes():
    one = sw.receipt({"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(4)})
    other = sw.receipt({"b": torch.zeros(3, 2), "c": torch.zeros(4).double(), "d": torch.zeros(1)})
    assert list(map(str, one.differences(other))) == [
        "a: is missing from the other receipt",
        "d: is only in the other receipt",
        "b: shape (2, 3) and (3, 2)",
        "c: dtype float32 and float64",
    ]


def test_text_and_back():
    found = sw.receipt(WHOLE | {'a "name"\n': torch.zeros(2)}, version=3)
    again = sw.Receipt.from_json(found.to_json())
    assert again == found
    assert len(found.to_json().splitlines()) == len(found.tensors) + 2


GOOD = json.loads(sw.receipt({"w": torch.zeros(2)}).to_json())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: None, "it has no 'shardwise_receipt'"),
        (lambda data: data | {"shardwise_receipt": 1}, "fingerprints of version 1"),
        (lambda data: data | {"version": "x"}, "needs a version or null"),
        (lambda data: data | {"tensors": []}, "needs a version or null"),
        (lambda data: data | {"tensors": {"w": {}}}, "'w' needs shape, dtype, fingerprint, layout"),
        (lambda data: data | {"tensors": {"w": data["tensors"]["w"] | {"shape": [-1]}}}, "'w' needs shape"),
        (lambda data: data | {"tensors": {"w": data["tensors"]["w"] | {"fingerprint": 5}}}, "'w' needs shape"),
    ],
)
def test_text_that_is_no_receipt_is_refused(change, said):
    with pytest.raises(sw.CheckpointError, match=said):
        sw.Receipt.from_json(json.dumps(change(GOOD)))
    with pytest.raises(sw.CheckpointError, match="this is not a receipt"):
        sw.Receipt.from_json("{")


# --- from the shell ---------------------------------------------------------------------------------------------------


@pytest.fixture
def verify(monkeypatch, capsys, tmp_path):
    """Runs verify in a directory of its own: the exit code, and all that was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardwise", "verify", "--no-bar", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        return code, "".join(capsys.readouterr())

    return run


def test_a_checkpoint_is_compared_with_a_receipt(verify, tmp_path):
    (tmp_path / "r.json").write_text(sw.receipt(WHOLE).to_json())
    checkpoint.save(WHOLE, "good")
    checkpoint.save(flipped(WHOLE, ("layers", 0, "norm"), 3), "bad", format="dcp")
    assert verify("good", "--receipt", "r.json") == (0, "equal, by fingerprints: good and r.json\n")
    code, said = verify("bad", "--receipt", "r.json")
    assert (code, said) == (1, "layers.0.norm: has other values\n")


def test_what_a_checkpoint_becomes_is_compared_with_a_receipt(verify, tmp_path):
    state = {"model.w": numbers(5, 4).double(), "model.v": torch.ones(3).double(), "rest": torch.ones(2)}
    checkpoint.save(state, "saved")
    served = {name.removeprefix("model."): value.bfloat16() for name, value in state.items() if name != "rest"}
    (tmp_path / "r.json").write_text(sw.receipt({**served, "more": torch.ones(1)}).to_json())
    options = ["--select", "model.*", "--rename", "model.*=*", "--cast", "bfloat16"]
    code, said = verify("saved", "--receipt", "r.json", *options)
    assert (code, said) == (0, "equal, by fingerprints, by these options: saved and r.json\n")
    code, said = verify("saved", "--receipt", "r.json", "--select", "model.*", "--rename", "model.*=*")
    assert (code, said.splitlines()[0]) == (1, "w: dtype float64 and bfloat16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["good", "--rename", "a=b"], "need a second checkpoint, B, or a --receipt"),
        (["good", "good", "--receipt", "r.json"], "replaces B"),
        (["good", "--receipt", "absent.json"], "absent.json"),
        (["good", "--receipt", "good.json"], "this is not a receipt"),
    ],
)
def test_what_cannot_be_compared_with_a_receipt_is_refused(verify, tmp_path, words, said):
    checkpoint.save({"w": torch.zeros(2)}, "good")
    (tmp_path / "good.json").write_text("[]")
    (tmp_path / "r.json").write_text(sw.receipt({"w": torch.zeros(2)}).to_json())
    code, printed = verify(*words)
    assert code == 2
    assert said in printed
