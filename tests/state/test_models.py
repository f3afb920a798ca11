"""One model into another, however both are sharded: the target says what the source says, to the last bit."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from devices import device_type
from models import HOWS, TOKENS, Llama, all_same, fsdp, full, held, logits, said, same, sharded, state, tp, weights
from ranks import ranks  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise as sw

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


def parts(model):
    """This rank's parts of its tensors."""
    found = model.state_dict().items()
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found}


@torch.no_grad()
def fill(model, value):
    for parameter in model.parameters():
        parameter.fill_(value)


def test_every_sharding_becomes_every_other(ranks):  # noqa: F811
    """Held against what torch itself makes of the same weights: the parts of every rank, and what the model says."""

    def run(rank):
        sources, targets = ({how: sharded(how, seed) for how in HOWS} for seed in (1, 2))
        expected = {how: said(model) for how, model in sources.items()}
        for (ours, source), (theirs, target) in product(sources.items(), targets.items()):
            fill(target, 7)
            sw.Resharder(source.state_dict(), target.state_dict()).run()
            all_same(parts(target), parts(sources[theirs]))
            same(said(target), expected[theirs])
            if ours != theirs and theirs in ("plain", "fsdp"):  # which compute with whole weights, as nobody else does
                same(said(target), logits(weights(Llama(1))))
        for target in targets.values():
            same(logits(weights(target)), logits(weights(Llama(1))))

    ranks(4, run)


@pytest.mark.parametrize(("source_how", "target_how"), [("fsdp", "tp"), ("tp", "both")])
def test_every_run_moves_the_values_of_that_moment(ranks, source_how, target_how):  # noqa: F811
    def run(rank):
        source, target = sharded(source_how, seed=1), sharded(target_how, seed=2)
        optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
        sync = sw.Resharder(source.state_dict(), target.state_dict())
        seen = []
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    for parameter in source.parameters():
                        parameter.mul_(1.5)
            elif step == 2:
                full(source(TOKENS)).square().sum().backward()
                optimizer.step()
            expected = weights(source)
            seen.append(sw.fingerprint(held(expected["embed.weight"], "37x32/R@4")))
            sync.run()
            all_same(weights(target), expected)
        same(logits(weights(target)), logits(expected))
        assert len(set(seen)) == 3  # the weights did change

    ranks(4, run)


def test_memory_that_was_replaced_is_found(ranks):  # noqa: F811
    def run(rank):
        source, target = sharded("tp", seed=1), sharded("plain", seed=2)
        for verify in False, True:
            sync = sw.Resharder(dict(source.named_parameters()), dict(target.named_parameters()), verify=verify)
            for step in range(3):
                expected = weights(source)
                sync.run()
                all_same(weights(target), expected)
                for parameter in source.parameters():
                    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                    other = local.detach().clone() + 1
                    local.data = other.t().contiguous().t() if step and other.ndim == 2 else other  # of other strides
                for parameter in target.parameters():
                    parameter.data = torch.zeros_like(parameter)

    ranks(4, run)


@pytest.mark.devices
def test_there_and_back_is_the_identity(ranks):  # noqa: F811
    def run(rank):
        first, other = sharded("both", seed=1), sharded("tp", seed=2)
        before, between = parts(sharded("both", seed=1)), parts(sharded("tp", seed=1))
        for options in {}, {"verify": True}, {"max_bytes": 3000}, {"verify": True, "max_bytes": 2000}:
            there = sw.Resharder(first.state_dict(), other.state_dict(), **options)
            back = sw.Resharder(other.state_dict(), first.state_dict(), **options)
            assert there.plan.peak_bytes <= options.get("max_bytes", 2**62)
            assert len(list(there.plan.buckets())) > (10 if "max_bytes" in options else 0)
            there.run()
            all_same(parts(other), between)
            fill(first, 7)
            back.run()
            all_same(parts(first), before)
            fill(other, 8)

    ranks(4, run)


def test_trainers_and_servers_on_different_ranks(ranks):  # noqa: F811
    def run(rank):
        for source_how, target_how in ("fsdp", "tp"), ("tp", "fsdp"), ("plain", "tp"):
            source, target = sharded(source_how, 1, [0, 1]), sharded(target_how, 2, [2, 3])
            sync = sw.Resharder(state(source), state(target))
            for step in range(2):
                sync.run()
                expected = {name: value * 2.0**step for name, value in weights(Llama(1)).items()}
                if target is not None:
                    found = weights(target)
                    all_same(found, expected)
                    same(logits(found), logits(expected))
                else:
                    with torch.no_grad():
                        for parameter in source.parameters():
                            parameter.mul_(2)

    ranks(4, run)


@pytest.mark.devices
def test_trainers_on_all_ranks_and_servers_on_some(ranks):  # noqa: F811
    def run(rank):
        source, target, twin = sharded("both", 1), sharded("tp", 2, [1, 2]), sharded("tp", 1, [1, 2])
        sw.Resharder(state(source), state(target), verify=True).run()
        if target is not None:
            all_same(parts(target), parts(twin))
            same(said(target), said(twin))
        fill(source, 7)
        sw.Resharder(state(target), state(source)).run()
        all_same(parts(source), parts(sharded("both", 1)))

    ranks(4, run)


def test_models_on_meshes_of_their_own_are_replicas_of_each_other(ranks):  # noqa: F811
    """Two servers, each on two ranks; and norms that FSDP shards along with TP, which has left them alone."""

    def run(rank):
        mesh = DeviceMesh(device_type(), [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        source = sharded("fsdp", 1)
        servers = tp(Llama(2), mesh["tp"])
        sw.Resharder(source.state_dict(), servers.state_dict()).run()
        all_same(weights(servers), weights(Llama(1)))
        trainers = fsdp(tp(Llama(3), mesh["tp"]), mesh["dp"])
        sw.Resharder(servers.state_dict(), trainers.state_dict()).run()
        all_same(weights(trainers), weights(Llama(1)))
        target = sharded("plain", 4)
        sw.Resharder(trainers.state_dict(), target.state_dict()).run()
        all_same(weights(target), weights(Llama(1)))

    ranks(4, run)


def test_a_cast_is_that_of_torch(ranks):  # noqa: F811
    def run(rank):
        source, target = sharded("fsdp", 1), sharded("tp", 2).to(torch.bfloat16)
        for options in {}, {"verify": True}, {"max_bytes": 2000}:
            fill(target, 0)
            there = sw.Resharder(source.state_dict(), target.state_dict(), cast=True, **options)
            there.run()
            expected = {name: value.to(torch.bfloat16) for name, value in weights(Llama(1)).items()}
            all_same(weights(target), expected)
        short = sum(value.numel() for value in expected.values()) * 2 * 4  # what travels is cast before
        assert there.plan.bytes_moved + there.plan.bytes_local <= short
        wide = sharded("both", 3)
        sw.Resharder(target.state_dict(), wide.state_dict(), cast=True, verify=True).run()
        all_same(weights(wide), {name: value.float() for name, value in expected.items()})

    ranks(4, run)


def test_autograd_knows_that_the_target_was_written(ranks):  # noqa: F811
    def run(rank):
        source, target = sharded("fsdp", 1), sharded("plain", 2)
        sync = sw.Resharder(source.state_dict(), dict(target.named_parameters()))
        out = target(TOKENS).sum()
        sync.run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        target.zero_grad()
        target(TOKENS).sum().backward()
        assert all(parameter.grad is not None for parameter in target.parameters())

    ranks(4, run)


def test_tensors_made_in_inference_mode_are_written_there(ranks):  # noqa: F811
    def run(rank):
        source, expected = sharded("fsdp", 1).state_dict(), weights(Llama(1))
        with torch.inference_mode():
            target = {name: torch.zeros_like(value) for name, value in expected.items()}
            for verify in False, True:
                sw.Resharder(source, target, verify=verify).run()
                all_same(target, expected)
                target["embed.weight"].zero_()

    ranks(4, run)


@pytest.mark.devices
def test_a_sub_group_syncs_alone(ranks):  # noqa: F811
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        models = [(sharded("fsdp", seed, at), sharded("tp", 9, at)) for seed, at in ((1, [0, 1]), (2, [2, 3]))]
        source, target = models[rank // 2]
        sw.Resharder(source.state_dict(), target.state_dict(), group=groups[rank // 2], verify=True).run()
        all_same(weights(target), weights(Llama(1 + rank // 2)))

    ranks(4, run)
