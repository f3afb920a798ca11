"""ShardedTensor: a plain container of local tensors and a layout."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import sharded_tensor as ours


def one(**kwargs):
    return sw.ShardedTensor(torch.arange(12.0).reshape(2, 6), "2x6/S0@1", **kwargs)


def test_it_says_what_it_holds():
    x = one()
    assert (x.shape, x.ndim, x.dtype, x.device) == (torch.Size([2, 6]), 2, torch.float32, torch.device("cpu"))
    assert repr(x) == "ShardedTensor(2x6/S0@1, torch.float32, rank 0 holds [0:2, 0:6])"
    nothing = sw.ShardedTensor([], "2x6/S0@1:3")
    assert repr(nothing) == "ShardedTensor(2x6/S0@1:3, no shards, rank 0 holds nothing)"
    assert (nothing.dtype, nothing.device, nothing.requires_grad) == (None, None, False)
    many = sw.ShardedTensor(torch.zeros(6), "6/cyclic0=1@1")
    assert "rank 0 holds [0:6]" in repr(many)


def test_nothing_is_copied():
    local = torch.zeros(4, 6)[::2]
    assert sw.ShardedTensor(local, "2x6/S0@1").local_tensor() is local


def test_several_shards_of_a_rank():
    layout = sw.Layout.boxes((4, 4), [(0, (0, 0), (2, 4)), (0, (2, 0), (4, 4))])
    x = sw.ShardedTensor([torch.zeros(2, 4), torch.ones(2, 4)], layout)
    assert len(x.shards) == 2
    with pytest.raises(sw.LayoutError, match=r"2 shards .* look at \.shards"):
        x.local_tensor()


@pytest.mark.parametrize(
    ("shards", "layout", "words"),
    [
        (torch.zeros(3, 6), "2x6/S0@1", r"tensors of shapes \[\(2, 6\)\], but it brought \[\(3, 6\)\]"),
        ([], "2x6/S0@1", r"brought \[\]"),
        (torch.zeros(2, 6), "2x6/S0@1:3", r"shapes \[\], but"),
        (["x"], "2x6/S0@1", "must be a tensor, not 'x'"),
        (torch.zeros(2, 6), 7, "a Layout or its notation, not 7"),
        (
            [torch.zeros(2), torch.zeros(2, dtype=torch.int8)],
            sw.Layout.boxes((4,), [(0, (0,), (2,)), (0, (2,), (4,))]),
            "one dtype and device",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards, layout, words):
    with pytest.raises(sw.LayoutError, match=words):
        sw.ShardedTensor(shards, layout)


def test_it_changes_dtype_and_device_and_leaves_autograd():
    x = one().requires_grad_()
    assert x.requires_grad
    assert x.to(torch.float64).dtype == torch.float64
    assert x.cpu().layout == x.layout
    assert not x.detach().requires_grad
    assert x.clone().local_tensor().data_ptr() != x.local_tensor().data_ptr()
    assert x.grad is None
    x.local_tensor().sum().backward()
    assert x.grad.local_tensor().tolist() == [[1.0] * 6] * 2


def test_cuda_asks_for_a_gpu():
    if torch.cuda.is_available():
        assert one().cuda().device.type == "cuda"
    else:
        with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
            one().cuda()


@pytest.mark.devices
def test_it_is_pickled_with_its_layout(ranks):  # noqa: F811
    def run(rank):
        x = sw.ShardedTensor(torch.arange(6.0).reshape(1, 6) + 6 * rank, "2x6/S0@2")
        back = pickle.loads(pickle.dumps(x))
        return back.layout == x.layout and torch.equal(back.gather(dst=None), torch.arange(12.0).reshape(2, 6))

    assert ranks(2, run) == [True, True]


def test_a_pickle_is_only_loaded_where_the_same_cells_are(ranks):  # noqa: F811
    def run(rank):
        for text, fits in (("2x6/S0@2", False), ("1x6/R@2", True)):
            mine = pickle.dumps(sw.ShardedTensor(torch.full((1, 6), float(rank)), text))
            told = [None, None]
            dist.all_gather_object(told, mine)
            if fits:
                assert pickle.loads(told[1 - rank]).local_tensor()[0, 0] == 1 - rank
            else:
                with pytest.raises(sw.LayoutError, match=f"was pickled on rank {1 - rank}, and cannot be loaded"):
                    pickle.loads(told[1 - rank])

    ranks(2, run)


def test_a_part_belongs_to_the_rank_that_made_it_also_in_a_new_process_group(ranks, tmp_path):  # noqa: F811
    rows = ours.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])

    def run(rank):
        row = torch.full((1, 6), float(rank))
        made = [sw.ShardedTensor(row, "2x6/S0@2"), ours.ShardedTensor._init_from_local_tensor(row, rows, 2, 6)]
        whole = sw.ShardedTensor(torch.ones(6), "6/R@2")
        dist.barrier()
        dist.destroy_process_group()
        made += [x.clone() for x in made]
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "again"), 2), rank=1 - rank, world_size=2)
        for x in (*made, *(x.detach() for x in made)):
            assert f"rank {rank} holds [{rank}:{rank + 1}, 0:6]" in repr(x)
            with pytest.raises(
                sw.ExchangeError, match=f"was made on rank {rank}, but this process is rank {1 - rank} now"
            ):
                sw.reshard(x, "2x6/R@2")
            with pytest.raises(sw.LayoutError, match="holds other cells"):
                pickle.loads(pickle.dumps(x))
        dcp.save({"w": made[0], "v": made[1]}, checkpoint_id=tmp_path / "saved")
        found = {"w": torch.zeros(2, 6), "v": torch.zeros(2, 6)}
        dcp.load(found, checkpoint_id=tmp_path / "saved")
        assert [found[name][:, 0].tolist() for name in "wv"] == [[0.0, 1.0]] * 2
        assert sw.reshard(whole, "6/S0@2").local_tensor().tolist() == [1.0] * 3

    ranks(2, run)


def test_layouts_of_all_that_can_be_asked_for():
    assert sw.layout_of(one()) == sw.parse("2x6/S0@1")
    assert sw.layout_of("2x6/S0@1") == sw.parse("2x6/S0@1")
    assert sw.layout_of(sw.parse("2x6/S0@1")) == sw.parse("2x6/S0@1")
    with pytest.raises(sw.LayoutError, match="does not say where its cells live"):
        sw.layout_of(torch.zeros(2))
