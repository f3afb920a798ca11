"""States of an optimizer by number become states by the names of parameters."""

import pytest
import torch
from checkpoints import has
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.state.traverse import flatten_state_dict


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(
        [{"params": [model[1].bias, model[0].bias], "lr": 0.1}, {"params": [model[0].weight]}]
    )
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


ORDER = ["1.bias", "0.bias", "0.weight"]


@pytest.mark.parametrize("around", [None, "optimizer"])
@pytest.mark.parametrize("file", [True, False])
def test_the_names_are_those_that_torch_gives(tmp_path, around, file):
    model, optimizer = trained()
    state, named = optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)
    torch.save(state if around is None else {around: state, "step": 3}, tmp_path / "optimizer.pt")
    names = ORDER
    if file:
        names = tmp_path / "names.txt"
        names.write_text("\n".join(ORDER) + "\n\n")
    checkpoint.convert(tmp_path / "optimizer.pt", tmp_path / "out.pt", parameters=names)
    flat, _ = flatten_state_dict(named if around is None else {around: named, "step": 3})
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    found = checkpoint.open(tmp_path / "out.pt")
    has(tmp_path / "out.pt", tensors, dict(found.objects))
    assert dict(found.objects) == {name: value for name, value in flat.items() if name not in tensors}
    assert list(found.paths.values()) == [*flatten_state_dict(torch.load(tmp_path / "out.pt"))[1].values()]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ORDER[:2], "an optimizer of 3 parameters, but parameters= has 2 different names in 2"),
        ([*ORDER[:2], ORDER[0]], "has 2 different names in 3"),
        ([*ORDER, "more"], "has 4 different names in 4"),
    ],
)
def test_other_numbers_of_names_are_refused(tmp_path, names, message):
    torch.save(trained()[1].state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(tmp_path / "optimizer.pt", tmp_path / "out.pt", parameters=names)


def test_a_checkpoint_without_an_optimizer_or_with_two_is_refused(tmp_path):
    state = trained()[1].state_dict()
    for saved, count in (({"w": torch.ones(2)}, 0), ({"a": state, "b": state}, 2)):
        torch.save(saved, tmp_path / "m.pt")
        with pytest.raises(CheckpointError, match=f"the states of {count} optimizers"):
            checkpoint.convert(tmp_path / "m.pt", tmp_path / "out.pt", parameters=ORDER)


@pytest.mark.parametrize("number", [2, -1])
def test_the_state_of_a_number_that_no_group_has_is_refused(tmp_path, number):
    state = {number: {"exp_avg": torch.ones(2)}}
    torch.save({"state": state, "param_groups": [{"params": [0, 1]}]}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=f"has the state of parameter {number}, but its groups have 2"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "out.pt", parameters=["a", "b"])


def test_names_that_are_no_text_are_refused(tmp_path):
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, tmp_path / "a.pt")
    (tmp_path / "names").write_bytes(b"\xff\n")
    with pytest.raises(CheckpointError, match="needs a text file with a name in each line"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "out.pt", parameters=tmp_path / "names")


def test_names_in_another_order_than_the_shapes_of_the_weights_are_refused(tmp_path):
    state = {number: {"exp_avg": torch.ones(2 + number), "step": torch.tensor(1.0)} for number in (0, 1)}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1]}]}
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}, "optimizer": optimizer}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="give the names in the order of the groups"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "out.pt", parameters=["b", "a"])
    assert "optimizer.state.b.exp_avg" in checkpoint.convert(
        tmp_path / "a.pt", tmp_path / "b.pt", parameters=["a", "b"]
    )
