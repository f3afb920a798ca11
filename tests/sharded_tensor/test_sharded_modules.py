"""Modules with sharded parameters and outputs: the same bodies run against torch's names and ours."""

import pytest
import torch
from familiar import BOTH, TORCH, columns, numbers, ours, placed, rows, same
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed._shard import api as torchs_api
from torch.distributed._shard import sharder as torchs_sharder
from torch.distributed._shard import sharding_plan as torchs_plan

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own

for module in torchs_plan, torchs_sharder, torchs_api:
    vars(TORCH).update({name: value for name, value in vars(module).items() if name not in vars(TORCH)})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.ReLU())


@BOTH
def test_a_parameter_becomes_a_sharded_one(ranks, api):  # noqa: F811
    def run(rank):
        module = Net()
        whole = module.one.weight.detach().clone()
        with torch.no_grad():
            module.one.weight.add_(rank)  # the values of the source rank count
        api.shard_parameter(module.one, "weight", rows(1, 0, api=api), src_rank=1)
        found = module.one.weight
        assert isinstance(found, api.ShardedTensor)
        assert isinstance(found, nn.Parameter)
        assert [name for name, _ in module.named_parameters()][:2] == ["one.weight", "one.bias"]
        assert (found.requires_grad, found.local_tensor().is_leaf) == (True, True)
        same(found.local_tensor(), whole[3 * (1 - rank) : 3 * (1 - rank) + 3] + 1)
        assert found.sharding_spec() == rows(1, 0, api=api)

    ranks(2, run)


@BOTH
def test_what_is_no_parameter_is_refused_in_torchs_words(ranks, api):  # noqa: F811
    def run(rank):
        module, spec = nn.Linear(4, 6), rows(0, 1, api=api)
        with pytest.raises(ValueError, match="does not match with src_rank"):
            api.shard_parameter(module, "weight", spec, src_rank=rank)
        with pytest.raises(AttributeError, match="Linear has no attribute `foo`"):
            api.shard_parameter(module, "foo", spec)
        with pytest.raises(ValueError, match="does not match with sharding_spec"):
            api.shard_parameter(module, "weight", rows(rank, 1 - rank, api=api))
        del module.bias
        module.bias = "foo"
        with pytest.raises(ValueError, match=r"Expected Linear\.bias to be a Tensor, but found str"):
            api.shard_parameter(module, "bias", spec)

    ranks(2, run)


@BOTH
def test_a_module_is_sharded_by_a_plan(ranks, api):  # noqa: F811
    def run(rank):
        module = Net()
        weights = [parameter.detach().clone() for parameter in (module.one.weight, module.two[0].weight)]
        plan = api.ShardingPlan({"one.weight": rows(0, 1, api=api), "two.0.weight": columns(1, 0, api=api)})
        api.shard_module(module, plan)
        same(module.one.weight.local_tensor(), weights[0][3 * rank : 3 * rank + 3])
        same(module.two[0].weight.local_tensor(), weights[1][:, 3 * (1 - rank) : 3 * (1 - rank) + 3])

    ranks(2, run)


@BOTH
def test_outputs_are_resharded_and_taken_apart(ranks, api):  # noqa: F811
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.st = api._shard_tensor(numbers(4, 2), rows(0, 1, api=api))

        def forward(self):
            return self.st

    def run(rank):
        api.shard_module(module := Table(), api.ShardingPlan({}, {"": columns(0, 1, api=api)}, [""]))
        same(module(), numbers(4, 2)[:, rank])  # the dim of length 1 is dropped
        same(api._collect_local_shard(Table())(), numbers(4, 2)[2 * rank : 2 * rank + 2])
        found = api._reshard_output(Table(), columns(0, 1, api=api))()
        assert found.sharding_spec() == columns(0, 1, api=api)

    ranks(2, run)


@BOTH
@pytest.mark.parametrize(
    ("plan", "output", "kind", "words"),
    [
        ({"one": 5}, None, TypeError, "Only `ShardingSpec` and `Sharder` are supported to shard 'one'"),
        ({}, {"one": 5}, TypeError, "Only `ShardingSpec` is supported as output_plan for 'one'"),
        ({"": "sharder"}, None, KeyError, "Module path must not be empty for custom sharder!"),
        ({"one": "sharder", "one.weight": "spec"}, None, RuntimeError, "already a Sharder entry for module one"),
        ({"three.weight": "spec"}, None, AttributeError, "three"),
    ],
)
def test_plans_that_fit_no_module_are_refused_in_torchs_words(api, plan, output, kind, words):
    class Same(api.Sharder):
        def shard(self, module):
            return module

    known = {"sharder": Same(), "spec": api.ChunkShardingSpec(0, placed(0))}
    given = {name: known.get(how, how) for name, how in plan.items()}
    with pytest.raises(kind, match=words):
        api.shard_module(Net(), api.ShardingPlan(given, output))


def test_a_sharder_replaces_its_module():
    class Doubled(ours.Sharder):
        def shard(self, module):
            return nn.Sequential(module, module)

    module = Net()
    ours.shard_module(module, ours.ShardingPlan({"two.0": Doubled()}))  # torch sets an attribute `mod_name` instead
    assert [type(part).__name__ for part in module.two] == ["Sequential", "ReLU"]
