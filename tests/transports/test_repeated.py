"""What is moved again and again: values change, tensors move to other memory, others come and go in between."""

import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wired import COLUMNS, ROWS, VALUES, WAYS, expect, mapped, part, use, works

import shardwise as sw
from shardwise.transports.segments import this_process

SHAPES = [(64, 96), (128, 40), (7, 9), (33,), (2, 3, 64)]


def models(rank, world):
    """Two state dicts of the same tensors, by rows and by columns (or whole), and the layouts of the second."""
    given, room, layouts = {}, {}, {}
    for at, shape in enumerate(SHAPES):
        source = sw.Layout.chunk(shape, 0, owners=world)
        target = sw.Layout.chunk(shape, len(shape) - 1, owners=world) if at % 2 else sw.Layout.replicated(shape, world)
        given[f"w{at}"], room[f"w{at}"] = sw.empty(source), sw.empty(target)
        layouts[f"w{at}"] = target
    return given, room, layouts


def fill(given, turn):
    """Values that tell cells, tensors and turns apart."""
    whole = {}
    for at, (name, x) in enumerate(given.items()):
        whole[name] = torch.arange(float(torch.Size(x.layout.shape).numel())).reshape(x.layout.shape) + 1e4 * turn + at
        parts = sw.testing.scatter(whole[name].numpy(), x.layout)[dist.get_rank()]
        for shard, array in zip(x.shards, parts, strict=True):
            shard.copy_(torch.from_numpy(array))
    return whole


def check(room, whole, rank):
    for name, x in room.items():
        expect(x, whole[name].numpy(), x.layout, rank)


def test_a_sync_follows_tensors_wherever_they_go(ranks):  # noqa: F811
    def follow(rank, way):
        transport, share = use(way)
        given, room, _ = models(rank, 3)
        sync = sw.Resharder(sw.share_(given) if share else given, room, transport=transport)
        for turn in range(8):
            if turn in (2, 3) and rank != 1:
                _move(given["w1"], share=share)
            if turn == 4:
                _move(room["w2"], share=True)
            if turn == 5:
                sw.share_(given)  # also where it was not
            if turn == 6:
                sw.release_staging()
            whole = fill(given, turn)
            sync.run()
            check(room, whole, rank)
            check(given, whole, rank)
        return True

    assert all(ranks(3, lambda rank: all(follow(rank, way) for way in WAYS)))


def _move(x, *, share):
    """The same tensor in other memory; what it had is free to be used by others."""
    (tensor,) = x.shards
    tensor.data = torch.empty_like(tensor)
    junk = [torch.full_like(tensor, -1.0) for _ in range(3)]
    if share:
        sw.share_([tensor, *junk])


def test_a_state_dict_is_moved_in_every_way_and_under_a_limit(ranks):  # noqa: F811
    def run(rank):
        for way in ("group", "staged", "shared"):
            transport, share = use(way)
            for options in ({}, {"max_bytes": 4096}, {"verify": True}, {"hosts": 2}, {"dtype": torch.float64}):
                given, _, layouts = models(rank, 4)
                whole = fill(sw.share_(given) if share else given, 1)
                found = sw.reshard_state_dict(given, layouts, transport=transport, **options)
                whole = {name: one.to(options.get("dtype")) for name, one in whole.items()}
                check(found, whole, rank)
            given, _, layouts = models(rank, 4)
            whole = fill(sw.share_(given) if share else given, 2)
            check(sw.reshard_state_dict(given, layouts, transport=transport, free=True), whole, rank)
        return True

    assert all(ranks(4, run))


def test_tied_weights_and_views_of_one_storage(ranks):  # noqa: F811
    rows, columns = (sw.Layout.chunk((8, 64), dim, owners=2) for dim in (0, 1))

    def run(rank):
        for way in ("staged", "shared", "read"):
            transport, share = use(way)
            flat = torch.arange(3.0 * 4 * 64) + 1000 * rank
            flat = sw.share_(flat) if share else flat
            views = [flat[at * 256 : (at + 1) * 256].view(4, 64) for at in range(3)]
            given = {f"w{at}": sw.ShardedTensor(view, rows) for at, view in enumerate([*views, views[0]])}
            found = sw.reshard_state_dict(given, [("*", columns)], transport=transport)
            for at in range(4):
                whole = torch.cat(
                    [torch.arange(3.0 * 4 * 64)[256 * (at % 3) :][:256].view(4, 64) + r for r in (0, 1000)]
                )
                expect(found[f"w{at}"], whole.numpy(), columns, rank)
        return True

    assert all(ranks(2, run))


def test_modules_are_shared_with_all_that_looks_at_them(ranks):  # noqa: F811
    def run(rank):
        module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        module[2].weight = module[0].weight
        before = [tensor.clone() for tensor in module.state_dict().values()]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):  # once more does nothing
            assert sw.share_(module) is module
        assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))
        count = mapped()
        sw.share_(dict(module.state_dict()))
        assert mapped() == count
        module(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        weight = module[0].weight
        assert weight is module[2].weight
        assert not torch.equal(weight, before[0])
        rows = sw.ShardedTensor(weight.detach().clone().fill_(rank)[32 * rank :][:32], "64x64/S0@2")
        weight.data[32 * rank :][:32] = rows.local_tensor()
        x = sw.ShardedTensor(weight.data[32 * rank :][:32], "64x64/S0@2")
        found = sw.reshard(x, "64x64/S1@2", transport="shared").local_tensor()
        return found[:, 0].tolist()

    assert ranks(2, run) == [[0.0] * 32 + [1.0] * 32] * 2


def test_several_in_flight_keep_apart(ranks):  # noqa: F811
    def run(rank):
        for way in WAYS:
            transport, share = use(way)
            handles = [
                sw.reshard(
                    part(VALUES * (at + 1), ROWS, rank, shared=share), COLUMNS, async_op=True, transport=transport
                )
                for at in range(5)
            ]
            works(rank, transport=transport, shared=share)
            for at, handle in reversed(list(enumerate(handles))):
                expect(handle.wait(), VALUES * (at + 1), COLUMNS, rank)
        return True

    assert all(ranks(2, run))


def test_gradients_come_back_the_same_way(ranks):  # noqa: F811
    def run(rank):
        for way in WAYS:
            transport, share = use(way)
            x = part(VALUES, ROWS, rank, shared=share).requires_grad_()
            y = sw.reshard(x, COLUMNS, transport=transport)
            (y.local_tensor() * part(VALUES, COLUMNS, rank).local_tensor()).sum().backward()
            assert torch.equal(x.local_tensor().grad, part(VALUES, ROWS, rank).local_tensor())
        return True

    assert all(ranks(2, run))


def test_inference_mode_may_come_and_go(ranks):  # noqa: F811
    def run(rank):
        for way in WAYS:
            transport, share = use(way)
            for inference in (True, False, True):
                with torch.inference_mode(inference):
                    works(rank, transport=transport, shared=share)
        return True

    assert all(ranks(2, run))


def test_a_sharded_model_is_shared_and_trained_on(ranks):  # noqa: F811
    def run(rank):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 31))
        reference = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        use("staged")
        sw.share_(model)
        places = [
            this_process.shared_tensors.place(one.to_local()) is not None
            for one in model.parameters()
            if one.to_local().numel()
        ]
        found = sw.reshard_state_dict(model.state_dict(), [("*", (mesh, "R"))], transport="shared")
        for name, tensor in found.items():
            torch.testing.assert_close(tensor.to_local(), reference[name], rtol=0, atol=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = found["0.weight"].to_local()
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = sw.reshard_state_dict(model.state_dict(), [("*", (mesh, "R"))])["0.weight"].to_local()
        torch.testing.assert_close(after, model.state_dict()["0.weight"].full_tensor(), rtol=0, atol=0)
        return all(places), not torch.equal(after, before)

    assert ranks(2, run) == [(True, True)] * 2
