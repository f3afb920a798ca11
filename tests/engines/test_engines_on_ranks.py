"""Engines over several ranks are filled from trainers and from files, with the fewest bytes."""

import pytest
import torch
import torch.distributed as dist
from loaders import NAN, Engine
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise import EngineError, ShardwiseError
from shardwise.testing import on_ranks

RECORDED = [name for name in Engine.shapes if name != "unused"]


def reference(rank, tp, seed=0):
    engine = Engine(rank, tp)
    engine.load_weights(Engine.values(seed).items())
    return engine


def trained(seed=0):
    mesh = DeviceMesh("cpu", [0, 1])
    values = Engine.values(seed)
    return {name: distribute_tensor(values[name], mesh, [Shard(0)]) for name in RECORDED}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("max_bytes", [None, 64])
def test_trainers_fill_an_engine_again_and_again(verify, max_bytes):
    def run(rank):
        group = dist.new_group([2, 3])
        source = trained() if rank < 2 else None
        engine = Engine(rank - 2, 2)
        target = sw.engines.record(engine.load_weights, Engine.like(), group=group) if rank >= 2 else None
        sync = sw.Resharder(source, target, cast=True, verify=verify, max_bytes=max_bytes)
        for seed in 0, 1:
            for name in source or ():
                source[name].copy_(trained(seed)[name])
            sync.run()
            if rank >= 2:
                engine.assert_equals(reference(rank - 2, 2, seed))
        return sync.plan.bytes_moved, sync.plan.lower_bound

    for moved, least in on_ranks(4, run):
        assert moved == least


@pytest.mark.parametrize("read", ["each", "once"])
@pytest.mark.parametrize("format", ["safetensors", "dcp", "torch.save"])
def test_files_fill_an_engine(tmp_path, read, format):
    path = tmp_path / "run"
    if format == "torch.save":
        torch.save(Engine.values(), path)
    else:
        sw.checkpoint.save(Engine.values(), path, format=format)

    def run(rank):
        engine = Engine(rank, 2)
        target = sw.engines.record(engine.load_weights, path)
        sw.checkpoint.load(path, into=target, group=dist.group.WORLD, read=read)
        engine.assert_equals(reference(rank, 2))

    on_ranks(2, run)


def test_one_process_needs_no_group(tmp_path):
    sw.checkpoint.save(Engine.values(), tmp_path / "run")
    engine = Engine()
    sw.checkpoint.load(tmp_path / "run", into=sw.engines.record(engine.load_weights, tmp_path / "run"))
    engine.assert_equals(reference(0, 1))


def test_parameters_that_were_allocated_anew_are_filled(tmp_path):
    sw.checkpoint.save(Engine.values(), tmp_path / "run")
    engine = Engine()
    recorded = sw.engines.record(engine.load_weights, tmp_path / "run")
    for name, parameter in list(engine.named_parameters()):
        setattr(engine, name, torch.nn.Parameter(torch.full_like(parameter, NAN)))
    recorded.resolve()
    sw.checkpoint.load(tmp_path / "run", into=recorded)
    engine.assert_equals(reference(0, 1))


@pytest.mark.parametrize("wrong", ["raises", "drops"])
def test_a_loader_that_fails_on_one_rank_is_an_error_on_all(wrong):
    def run(rank):
        engine = Engine(rank, 2)

        def load(weights):
            given = list(weights)
            if rank == 1 and wrong == "raises":
                raise RuntimeError("out of luck")
            engine.load_weights(given[1:] if rank == 1 and wrong == "drops" else given)

        with pytest.raises(ShardwiseError) as caught:
            sw.engines.record(load, Engine.like(), module=engine)
        return str(caught.value)

    texts = on_ranks(2, run)
    assert texts[0] == texts[1]
    assert {"raises": "out of luck", "drops": "nothing fills [0:4, 0:6] of parameter 'qkv'"}[wrong] in texts[0]


def test_a_name_that_one_rank_cannot_record_goes_through_the_loader_on_all(tmp_path):
    sw.checkpoint.save(Engine.values(), tmp_path / "run")

    def run(rank):
        engine = Engine(rank, 2)

        def load(weights):
            for name, tensor in weights:
                if name == "norm" and rank == 1:
                    tensor.sum().item()
                engine.load_weights([(name, tensor)])

        target = sw.engines.record(load, tmp_path / "run", module=engine)
        sw.checkpoint.load(tmp_path / "run", into=target, group=dist.group.WORLD)
        engine.assert_equals(reference(rank, 2))
        return list(target.explanation.through_loader)

    assert on_ranks(2, run) == [["norm", "A"]] * 2


def test_a_loader_that_fails_while_it_is_called_is_an_error_on_all_ranks_trainers_too():
    def run(rank):
        group = dist.new_group([2, 3])
        engine, recorded = Engine(rank - 2, 2), []

        def load(weights):
            if recorded and rank == 3:
                raise RuntimeError("out of luck")
            engine.load_weights(weights)

        source, target = trained() if rank < 2 else None, None
        if rank >= 2:
            target = sw.engines.record(load, Engine.like(), module=engine, group=group)
        recorded.append(True)
        sync = sw.Resharder(source, target, cast=True)
        with pytest.raises(Exception, match="out of luck"):
            sync.run()
        return "ok"

    assert on_ranks(4, run) == ["ok"] * 4


def test_ranks_with_different_checkpoints_are_refused():
    def run(rank):
        like = {**Engine.like(), "unused": ((3 + rank,), torch.float32)}
        with pytest.raises(EngineError, match="`like` differs between the ranks"):
            sw.engines.record(Engine(rank, 2).load_weights, like)

    on_ranks(2, run)
