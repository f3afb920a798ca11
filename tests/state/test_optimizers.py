"""Optimizer states by name, between any shardings: training goes on as if nothing had happened."""

import pytest
import torch
from models import TOKENS, all_same, full, sharded, weights
from ranks import ranks  # noqa: F401
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

import shardwise as sw

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


def trained(how, seed, steps):
    """A model and its optimizer, after some steps."""
    model = sharded(how, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    full(model(TOKENS)).square().mean().backward()
    optimizer.step()


def whole(state_dict):
    """The tensors of an optimizer's state by name, as whole tensors."""
    found = {}
    for name, values in state_dict["state"].items():
        for key, value in values.items():
            found[f"{name}.{key}"] = full(value).clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return found


def loaded(how, seed, found, optimizer_state):
    """Another model, with these weights and this state of its optimizer."""
    model = sharded(how, seed)
    model.load_state_dict(found)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    return model, optimizer


def test_training_continues_as_it_was(ranks):  # noqa: F811
    """FSDP to FSDP over fewer rows a rank, through a sharding by columns: every step gives the same weights."""

    def run(rank):
        model, optimizer = trained("fsdp", 1, 2)
        states = get_optimizer_state_dict(model, optimizer)
        before = whole(states)
        assert before["embed.weight.step"] == 2
        columns = [("*.step", None), ("*norm.weight*", "S0"), ("*", "S1")]
        mesh = states["state"]["embed.weight"]["exp_avg"].device_mesh
        there = sw.reshard_state_dict(states, columns, mesh=mesh, max_bytes=5000)
        assert there["state"]["embed.weight"]["exp_avg"].placements == (Shard(1),)
        assert there["state"]["embed.weight"]["step"].ndim == 0
        assert there["param_groups"] == states["param_groups"]
        back = sw.reshard_state_dict(there, states, verify=True)
        all_same(whole(back), before)
        again, continued = loaded("fsdp", 2, sw.reshard_state_dict(model.state_dict(), model.state_dict()), back)
        assert continued.param_groups[0]["lr"] == 0.01
        for _ in range(2):
            step(model, optimizer)
            step(again, continued)
        all_same(weights(again), weights(model))

    ranks(4, run)


@pytest.mark.parametrize(("source_how", "target_how"), [("both", "fsdp"), ("fsdp", "tp")])
def test_states_go_to_models_of_another_sharding(ranks, source_how, target_how):  # noqa: F811
    """The same numbers, however they lie: those of a twin that torch itself loaded from the whole state."""

    def run(rank):
        model, optimizer = trained(source_how, 1, 1)
        twin, like = trained(target_how, 3, 1)
        states = get_optimizer_state_dict(model, optimizer)
        found = sw.reshard_state_dict(states, get_optimizer_state_dict(twin, like))
        all_same(whole(found), whole(states))
        values = sw.reshard_state_dict(model.state_dict(), twin.state_dict())
        ours = loaded(target_how, 2, values, found)
        options = StateDictOptions(full_state_dict=True)
        theirs = sharded(target_how, 4)
        set_model_state_dict(theirs, weights(model), options=options)
        other = torch.optim.AdamW(theirs.parameters(), lr=0.5)
        full_state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(theirs, other, full_state, options=options)
        for _ in range(2):
            step(*ours)
            step(theirs, other)
        all_same(weights(ours[0]), weights(theirs))

    ranks(4, run)


@pytest.mark.devices
def test_states_of_a_plain_optimizer_by_number(ranks):  # noqa: F811
    """torch.optim's own state dict: int keys, and plain tensors that all ranks have."""

    def run(rank):
        model, optimizer = trained("plain", 1, 2)
        states = optimizer.state_dict()
        assert 0 in states["state"]

        def by_rows(name):
            if not name.endswith(("exp_avg", "exp_avg_sq")):
                return None
            shape = states["state"][int(name.split(".")[1])]["exp_avg"].shape
            return "x".join(map(str, shape)) + "/S0@4"

        there = sw.reshard_state_dict(states, by_rows)
        assert list(there["state"]) == list(states["state"])
        assert isinstance(there["state"][0]["exp_avg"], sw.ShardedTensor)
        assert there["state"][0]["step"] is states["state"][0]["step"]
        back = sw.reshard_state_dict(there, states)
        again = sharded("plain", 2)
        again.load_state_dict(model.state_dict())
        continued = torch.optim.AdamW(again.parameters())
        continued.load_state_dict(back)
        step(model, optimizer)
        step(again, continued)
        all_same(weights(again), weights(model))

    ranks(4, run)


def test_a_sync_of_optimizer_states_into_another(ranks):  # noqa: F811
    def run(rank):
        model, optimizer = trained("fsdp", 1, 1)
        other, target = trained("both", 2, 1)
        ours, theirs = (get_optimizer_state_dict(*pair)["state"] for pair in ((model, optimizer), (other, target)))
        sync = sw.Resharder(ours, theirs, verify=True)
        sync.run()
        all_same(whole({"state": theirs}), whole({"state": ours}))
        step(model, optimizer)  # in place, steps and moments alike
        sync.run()
        assert theirs["embed.weight"]["step"] == 2
        all_same(whole({"state": theirs}), whole({"state": ours}))

    ranks(4, run)
