"""Targets and sources that torch's own checkpoints take: LocalShardsWrapper, DCP's chunk protocol, meta tensors."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as judge
from devices import device_type
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import shardwise as sw
from shardwise import checkpoint
from shardwise import sharded_tensor as ours
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own

WHOLE = torch.arange(48, dtype=torch.float64).reshape(8, 6)
COLUMNS = {0: [(4, 6), (0, 2)], 1: [], 2: [(2, 4)]}  # as torchrec shards a table by columns; one rank has none
WAYS = [{}, {"read": "once"}]


def wrapped(mesh, rank, fill=None):
    """Some columns of the whole, as a DTensor of chunks."""
    parts = [WHOLE[:, a:b].clone() if fill is None else torch.full((8, b - a), fill).double() for a, b in COLUMNS[rank]]
    local = LocalShardsWrapper(parts, [(0, a) for a, _ in COLUMNS[rank]])
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())


def parts(x):
    return [shard.tolist() for shard in x.to_local().local_shards()]


def test_chunks_are_saved_and_loaded_as_torch_does(tmp_path):
    def run(rank):
        mesh = init_device_mesh(device_type(), (3,))
        judge.save({"w": wrapped(mesh, rank)}, checkpoint_id=tmp_path / "torchs")
        for name, format in ("ours", "safetensors"), ("dcp", "dcp"):
            checkpoint.save({"w": wrapped(mesh, rank)}, tmp_path / name, format=format)
        for name in "torchs", "ours", "dcp":
            for way in WAYS:
                target = wrapped(mesh, rank, -1.0)
                checkpoint.load(tmp_path / name, {"w": target}, **way)
                assert parts(target) == [WHOLE[:, a:b].tolist() for a, b in COLUMNS[rank]]
                whole = {"w": torch.zeros_like(WHOLE)}
                checkpoint.load(tmp_path / name, whole, **way)
                torch.testing.assert_close(whole["w"], WHOLE)
        target = wrapped(mesh, rank, -1.0)
        judge.load({"w": target}, checkpoint_id=tmp_path / "dcp")
        assert parts(target) == [WHOLE[:, a:b].tolist() for a, b in COLUMNS[rank]]
        with pytest.raises(sw.LayoutError, match="only knows the chunks of its own rank"):
            sw.layout_of(target)

    on_ranks(3, run)


OUTSIDE = (
    r"a LocalShardsWrapper outside a DTensor does not know the shape .*DTensor.from_local\(.*init_from_local_shards"
)


def test_a_wrapper_outside_a_dtensor_is_refused_with_the_remedy(tmp_path):
    checkpoint.save({"w": WHOLE}, tmp_path / "saved")

    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (3,)), torch.zeros_like(WHOLE)
        x = sw.ShardedTensor(WHOLE, "8x6/R@3")
        for bare in wrapped(mesh, rank).to_local(), LocalShardsWrapper([WHOLE.clone()], [(0, 0)]):
            state = {"w": bare}
            for call, *given in (
                (checkpoint.save, state, tmp_path / "bare"),
                (checkpoint.load, tmp_path / "saved", state),
                (partial(checkpoint.load, read="once"), tmp_path / "saved", state),
                (sw.Resharder, state, {"w": whole}),
                (sw.Resharder, {"w": whole}, state),
                (sw.reshard_state_dict, state, {"w": "8x6/R@3"}),
                (sw.reshard_state_dict, {"w": x}, state),
            ):
                with pytest.raises(ValueError, match=f"'w': {OUTSIDE}"):
                    call(*given)
            for call, *given in (
                (sw.reshard, bare, "8x6/R@3"),
                (sw.reshard, x, bare),
                (partial(sw.reshard, out=bare), x),
                (sw.fingerprint, bare),
                (sw.layout_of, bare),
            ):
                with pytest.raises(ValueError, match=OUTSIDE):
                    call(*given)
        assert not (tmp_path / "bare").exists()

    on_ranks(3, run)


class Rows:
    """Answers DCP's questions, and is no tensor."""

    def __init__(self, size, start, memory):
        self.shape, self.start, self.memory = torch.Size(size), start, memory

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([self.start, 0]), self.memory.shape)]

    def __get_tensor_shard__(self, index):
        assert tuple(index.offset) == (self.start, 0)
        return self.memory


def test_objects_that_list_their_chunks_are_filled_and_saved(tmp_path):
    checkpoint.save({"w": WHOLE, "n": 1}, tmp_path / "saved")

    def run(rank):
        for way in WAYS:
            rows = Rows(WHOLE.shape, 4 * rank, torch.zeros(6, 4, dtype=torch.float64).T)  # of any strides
            into = {"a": [rows]}
            checkpoint.load(tmp_path / "saved", into, rename={"w": "a.0"}, **way)
            assert into["a"][0] is rows
            torch.testing.assert_close(rows.memory, WHOLE[4 * rank : 4 * rank + 4])
        checkpoint.save({"w": rows}, tmp_path / "again")
        same = {"w": torch.zeros_like(WHOLE)}
        checkpoint.load(tmp_path / "again", same)
        torch.testing.assert_close(same["w"], WHOLE)
        with pytest.raises(ValueError, match=r"(?s)'w' of the state dict.*\[7:8, 0:6\] has no owner"):
            checkpoint.save({"w": Rows((8, 6), 4 * rank, rows.memory[: 4 - rank])}, tmp_path / "gap")
        assert not (tmp_path / "gap").exists()

    on_ranks(2, run)


def test_chunks_that_do_not_fit_are_refused(tmp_path):
    checkpoint.save({"w": WHOLE}, tmp_path / "saved")
    for rows, words in (
        (Rows((9, 6), 0, torch.zeros(4, 6)), "has shape"),
        (Rows((8, 6), 6, torch.zeros(4, 6)), "w"),
    ):
        with pytest.raises((ValueError, sw.CheckpointError), match=words):
            checkpoint.load(tmp_path / "saved", {"w": rows})


def of_ranks(*held, fill=None):
    """A container that was made without a process group, with the rows of these ranks of four."""
    metadata = [ours.ShardMetadata([2 * rank, 0], [2, 6], f"rank:{rank}/cpu") for rank in range(4)]
    shards = [
        ours.Shard(WHOLE[2 * r : 2 * r + 2].clone() if fill is None else torch.full((2, 6), fill).double(), metadata[r])
        for r in held
    ]
    whole = ours.ShardedTensorMetadata(metadata, WHOLE.shape, ours.TensorProperties(torch.float64))
    return ours.ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, whole)


@pytest.mark.parametrize("held", [(0,), (3,), (2, 1), (0, 1, 2, 3)], ids=str)
def test_containers_without_a_process_group_are_filled_with_their_own_rows(tmp_path, held):
    checkpoint.save({"w": WHOLE}, tmp_path / "saved")
    target = of_ranks(*held, fill=-1.0)
    checkpoint.load(tmp_path / "saved", {"w": target})
    for rank, shard in zip(held, target.local_shards(), strict=True):
        torch.testing.assert_close(shard.tensor, WHOLE[2 * rank : 2 * rank + 2])
    if len(held) == 4:
        checkpoint.save({"w": target}, tmp_path / "again")
        whole = {"w": torch.zeros_like(WHOLE)}
        checkpoint.load(tmp_path / "again", whole)
        torch.testing.assert_close(whole["w"], WHOLE)
    else:
        with pytest.raises(ValueError, match="has no owner"):
            checkpoint.save({"w": target}, tmp_path / "again")
    assert sw.layout_of(target) == sw.Layout.chunk((8, 6), 0, owners=4)
    with pytest.raises(sw.LayoutError, match="made without a process group"):
        target.container  # noqa: B018  # as all that moves it asks for


# --- tensors without memory ------------------------------------------------------------------------------------------


def test_tensors_on_meta_are_replaced_as_torch_does(tmp_path):
    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        judge.save(
            {"w": DTensor.from_local(WHOLE[:, 3 * rank : 3 * rank + 3].clone(), mesh, [Shard(1)]), "p": WHOLE},
            checkpoint_id=tmp_path / "saved",
        )
        for way in [None, *WAYS]:
            with torch.device("meta"):
                empty = torch.empty(4, 6, dtype=torch.float64), torch.empty(6, 8, dtype=torch.float64).T
            into = {"w": DTensor.from_local(empty[0], mesh, [Shard(0)], run_check=False), "p": empty[1]}
            target = into["w"]
            if way is None:
                judge.load(into, checkpoint_id=tmp_path / "saved")
            else:
                checkpoint.load(tmp_path / "saved", into, **way)
            assert into["w"] is not target
            assert (into["w"].placements, into["w"].shape, into["w"].device.type) == ((Shard(0),), WHOLE.shape, "cpu")
            torch.testing.assert_close(into["w"].to_local(), WHOLE[4 * rank : 4 * rank + 4])
            torch.testing.assert_close(into["p"], WHOLE)
            assert into["p"].stride() == (1, 8)

    on_ranks(2, run)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_on_meta_is_loaded_by_assigning(tmp_path):
    full = Tied()
    checkpoint.save(full.state_dict(), tmp_path / "saved")
    with torch.device("meta"):
        model = Tied()
    into = model.state_dict()
    checkpoint.load(tmp_path / "saved", into)
    assert into["embed.weight"].data_ptr() == into["head.weight"].data_ptr()
    model.load_state_dict(into, assign=True)
    torch.testing.assert_close(model.state_dict(), full.state_dict())


def test_what_the_checkpoint_lacks_stays_on_meta(tmp_path):
    checkpoint.save({"w": WHOLE}, tmp_path / "saved")
    into = {"w": torch.empty(8, 6, device="meta"), "other": torch.empty(3, device="meta")}
    checkpoint.load(tmp_path / "saved", into, strict=False)
    torch.testing.assert_close(into["w"], WHOLE.float())
    assert into["other"].is_meta


def test_sharded_tensors_on_meta_are_told_the_remedy(tmp_path):
    checkpoint.save({"w": WHOLE}, tmp_path / "saved")
    into = {"w": sw.ShardedTensor(torch.empty(8, 6, device="meta"), "8x6/R@1")}
    with pytest.raises(sw.ExchangeError, match=r"no memory.*to_empty"):
        checkpoint.load(tmp_path / "saved", into)
