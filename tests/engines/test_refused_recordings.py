"""Loaders, engines and calls that cannot be right are refused, with the reason."""

import time

import pytest
import torch
from loaders import Engine

import shardwise as sw
from shardwise import EngineError, ShardwiseError

LIKE = {"w": ((2, 2), torch.float32)}


def module_with(**parameters):
    module = torch.nn.Module()
    for name, tensor in parameters.items():
        setattr(module, name, torch.nn.Parameter(tensor))
    return module


def test_a_loader_that_raises_is_named_with_the_tensor():
    def load(weights):
        for _ in weights:
            raise KeyError("no such layer")

    with pytest.raises(EngineError, match=r"the loader failed at 'w' of shape \[2, 2\]: KeyError.*no such layer"):
        sw.engines.record(load, LIKE)


def test_a_shape_that_contradicts_the_engine_is_refused():
    module = module_with(weight=torch.zeros(3, 3))

    def load(weights):
        for _, tensor in weights:
            module.weight.data.copy_(tensor)

    with pytest.raises(EngineError, match=r"at 'w' of shape \[2, 2\]"):
        sw.engines.record(load, LIKE, module=module)


def test_a_loader_that_hangs_is_ended():
    def load(weights):
        while True:
            time.sleep(0.01)

    with pytest.raises(EngineError, match=r"did not finish within 0\.2 s"):
        sw.engines.record(load, LIKE, timeout=0.2)


def test_a_parameter_that_nothing_fills_is_named_with_its_cells():
    module = module_with(weight=torch.zeros(3, 2), bias=torch.zeros(4))

    def load(weights):
        for _, tensor in weights:
            module.weight.data[:2].copy_(tensor)

    with pytest.raises(
        EngineError, match=r"nothing fills \[2:3, 0:2\] of parameter 'weight'\n.*\[0:4\] of parameter 'bias'"
    ):
        sw.engines.record(load, LIKE, module=module)
    recorded = sw.engines.record(load, LIKE, module=module, strict=False)
    assert len(recorded.explanation.problems) == 2


def test_cells_that_two_names_fill_are_named():
    module = module_with(weight=torch.zeros(3, 2))

    def load(weights):
        for name, tensor in weights:
            module.weight.data["ab".index(name) :][:2].copy_(tensor)

    like = dict.fromkeys("ab", ((2, 2), torch.float32))
    with pytest.raises(EngineError, match=r"\[1:2, 0:2\] of parameter 'weight' is filled by 'a', and then by 'b'"):
        sw.engines.record(load, like, module=module)
    recorded = sw.engines.record(load, like, module=module, strict=False)
    assert recorded["b"].shards[0].data_ptr() == module.weight[1:].data_ptr()


def test_values_that_come_from_nowhere_are_refused():
    module = module_with(weight=torch.zeros(2, 2))

    def load(weights):
        for _ in weights:
            module.weight.data.normal_()

    with pytest.raises(EngineError, match=r"'weight' gets values that are not in the checkpoint: .* aten\.normal_"):
        sw.engines.record(load, LIKE, module=module)


def test_a_parameter_of_another_shape_is_never_skipped():
    engine = Engine()
    recorded = sw.engines.record(engine.load_weights, Engine.like())
    engine.norm = torch.nn.Parameter(torch.zeros(0))
    with pytest.raises(EngineError, match=r"parameter 'norm' of the engine has shape \[0\].*had shape \[6\]"):
        recorded.resolve()


def test_parameters_without_memory_are_refused_before_they_are_filled(tmp_path):
    with torch.device("meta"):
        engine = Engine()
    recorded = sw.engines.record(engine.load_weights, Engine.like())
    with pytest.raises(EngineError, match="on the meta device"):
        recorded.resolve()
    sw.checkpoint.save(Engine.values(), tmp_path / "run")
    with pytest.raises(ShardwiseError, match="'q' of the state dict has no memory"):
        sw.checkpoint.load(tmp_path / "run", into=recorded)


def test_targets_of_an_engine_cannot_be_replaced():
    recorded = sw.engines.record(Engine().load_weights, Engine.like())
    with pytest.raises(EngineError, match="'q' of a recorded engine cannot be replaced"):
        recorded["q"] = torch.zeros(8, 6)


@pytest.mark.parametrize("like", [3, ["w"], None])
def test_a_like_that_is_none_is_refused(like):
    with pytest.raises(TypeError, match="like= must be"):
        sw.engines.record(lambda weights: None, like)


def copying(module):
    return lambda weights: [getattr(module, name).data.copy_(tensor) for name, tensor in weights]


def test_a_parameter_in_shared_memory_that_nothing_fills_is_named_with_its_cells():
    memory = torch.zeros(8)
    module = module_with(p=memory[:4].view(2, 2), q=memory[4:].view(2, 2))
    with pytest.raises(EngineError, match=r"nothing fills \[0:2, 0:2\] of parameter 'q'"):
        sw.engines.record(copying(module), {"p": ((2, 2), torch.float32)}, module=module)


def test_a_parameter_with_other_strides_is_refused():
    module = module_with(w=torch.zeros(3, 2).t())
    recorded = sw.engines.record(copying(module), {"w": ((2, 3), torch.float32)}, module=module)
    module.w = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(EngineError, match=r"strides \[3, 1\].* now, but had .*strides \[1, 2\]"):
        recorded.resolve()


def test_parameters_that_are_not_tied_any_more_are_refused():
    with torch.device("meta"):
        module = module_with(a=torch.zeros(2, 2))
        module.inner = torch.nn.Module()
        module.inner.b = module.a
    recorded = sw.engines.record(copying(module), {"a": ((2, 2), torch.float32)}, module=module)
    module.to_empty(device="cpu")
    with pytest.raises(EngineError, match=r"'a' and 'inner\.b' of the engine were one tensor"):
        recorded.resolve()


def test_cells_beside_the_parameters_in_their_memory_are_not_dropped():
    memory = torch.zeros(8)
    module = module_with(p=memory[:4])

    def load(weights):
        for _, tensor in weights:
            memory.copy_(tensor)

    with pytest.raises(EngineError, match="'w' goes to cells beside the parameters"):
        sw.engines.record(load, {"w": ((8,), torch.float32)}, module=module)


def test_a_loader_that_changes_other_names_when_it_is_called_is_refused_before_it_does(tmp_path):
    weight = torch.zeros(2)

    def load(weights):
        for name, tensor in weights:
            weight.copy_(tensor) if name == "w" else weight.mul_(tensor.item())

    recorded = sw.engines.record(load, {"w": ((2,), torch.float32), "s": ((), torch.float32)})
    sw.checkpoint.save({"w": torch.ones(2), "s": torch.tensor(3.0)}, tmp_path / "run")
    with pytest.raises(EngineError, match="given 's' alone, writes to cells of 'w'"):
        sw.checkpoint.load(tmp_path / "run", into=recorded)
    assert weight.tolist() == [1.0, 1.0]


def test_an_index_that_is_out_of_range_is_refused_as_the_loader_would():
    def load(weights):
        for _, tensor in weights:
            tensor[torch.tensor([5])]

    with pytest.raises(EngineError, match="IndexError"):
        sw.engines.record(load, LIKE)
