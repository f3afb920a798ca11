"""save(rename=, remap=): what is saved is what load and convert would make of it."""

import pytest
import torch
from devices import device_type
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise import Concat, Interleaved, Padded, Rotary, Stack, Transposed, checkpoint
from shardwise.testing import on_ranks


def cells(*shape, start=1):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


STATE = {
    "q": cells(8, 6),
    "k": cells(8, 6, start=100),
    "qkv": cells(24, 4, start=200),
    "embed": cells(11, 4, start=400),
    "e.0": cells(3, 2, start=500),
    "e.1": cells(3, 2, start=600),
    "t": cells(5, 3, start=700),
    "r": cells(8, 2, start=800),
    "plain": cells(7, start=900),
}
RULES = [
    Interleaved("qk", ["q", "k"], [2, 2]),
    Concat("qkv", ["a", "b"], sizes=[8, 16]),
    Padded("embed", multiple=8),
    Stack("e", "e.{}"),
    Transposed("t"),
    Rotary("r", 4, to="halves"),
]
EXPECTED = {
    "qk": torch.stack([STATE["q"].view(4, 2, 6), STATE["k"].view(4, 2, 6)], 1).reshape(16, 6),
    "a": STATE["qkv"][:8],
    "b": STATE["qkv"][8:],
    "embed": torch.cat([STATE["embed"], torch.zeros(5, 4)]),
    "e": torch.stack([STATE["e.0"], STATE["e.1"]]),
    "t": STATE["t"].T,
    "r": STATE["r"].view(2, 2, 2, 2).transpose(1, 2).reshape(8, 2),
    "new": STATE["plain"],
}
RENAME = {"plain": "new"}


def holds(path, step=3):
    found = checkpoint.open(path)
    assert set(found) == set(EXPECTED)
    for name, value in EXPECTED.items():
        torch.testing.assert_close(found[name].read(), value, rtol=0, atol=0, msg=name)
    assert found.objects["step"] == step


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_one_process_saves_other_names_and_shapes(tmp_path, format):
    checkpoint.save({**STATE, "step": 3}, tmp_path / "c", format=format, rename=RENAME, remap=RULES)
    holds(tmp_path / "c")


@pytest.mark.devices(group=False)
def test_several_ranks_save_other_names_and_shapes(tmp_path):
    def run(rank):
        mesh = DeviceMesh(device_type(), [0, 1])
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in STATE.items()}
        checkpoint.save({**state, "step": 3}, tmp_path / "c", rename=RENAME, remap=RULES)

    on_ranks(2, run)
    holds(tmp_path / "c")


def test_renamed_tensors_are_saved_as_they_are_and_stay_tied(tmp_path):
    state = {"model": {"embed": STATE["embed"], "head": STATE["embed"]}, "step": 3}
    checkpoint.save(state, tmp_path / "c", rename={"model.*": "*"})
    found = checkpoint.open(tmp_path / "c")
    assert set(found) == {"embed", "head"}
    assert found["embed"].shared == found["head"].shared is not None
    with pytest.raises(ValueError, match="two leaves of the state dict would both be 'one'"):
        checkpoint.save(state, tmp_path / "d", rename=lambda name: "one")


def test_quantizing_is_left_to_convert(tmp_path):
    rule = sw.Quantized("w", "w_scale", format="fp8-row")
    with pytest.raises(TypeError, match="save without it, then `convert` with it"):
        checkpoint.save({"w": cells(4, 2)}, tmp_path / "c", remap=[rule])


def test_parts_of_unlike_dtypes_are_refused(tmp_path):
    state = {"q": cells(4, 2), "k": cells(4, 2).double()}
    with pytest.raises(ValueError, match="'qk' is put together from"):
        checkpoint.save(state, tmp_path / "c", remap=[Concat("qk", ["q", "k"])])


@pytest.mark.devices(group=False)
def test_a_state_dict_is_resharded_under_other_names():
    def run(rank):
        mesh = DeviceMesh(device_type(), [0, 1])
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in STATE.items()}
        made = sw.reshard_state_dict(
            {**state, "step": 3}, [("*", lambda shape: sw.Layout.chunk(shape, -1, 2))], rename=RENAME, remap=RULES
        )
        assert set(made) == {*EXPECTED, "step"}
        for name, value in EXPECTED.items():
            torch.testing.assert_close(made[name].local_tensor(), value.chunk(2, -1)[rank], rtol=0, atol=0)
        with pytest.raises(ValueError, match="'qk' is None, which leaves a tensor as it is, but rules make it"):
            sw.reshard_state_dict(state, [("*", None)], rename=RENAME, remap=RULES)

    on_ranks(2, run)


def test_rules_come_in_any_iterable_or_as_a_single_one(tmp_path):
    rule, state = Concat("qk", ["q", "k"]), {"q": torch.arange(3), "k": torch.arange(2)}
    expected = torch.cat([state["q"], state["k"]])

    def run(rank):
        for number, once in enumerate((lambda: [rule], lambda: iter([rule]), lambda: rule)):
            target = {"qk": torch.zeros(5, dtype=torch.int64)}
            sw.Resharder(state, target, remap=once()).run()
            moved = sw.reshard_state_dict(state, [("*", lambda shape: sw.Layout.chunk(shape, 0, 1))], remap=once())
            checkpoint.save(state, tmp_path / str(number), remap=once())
            found = target["qk"], moved["qk"].local_tensor(), checkpoint.open(tmp_path / str(number))["qk"].read()
            for one in found:
                torch.testing.assert_close(one, expected, rtol=0, atol=0)

    on_ranks(1, run)


@pytest.mark.parametrize("remap", [[], RULES])
def test_a_rename_that_matches_nothing_is_refused(tmp_path, remap):
    with pytest.raises(ValueError, match=r"rename= has 'modle\.\*', which matches no name"):
        checkpoint.save(STATE, tmp_path / "c", rename={"plain": "new", "modle.*": "*"}, remap=remap)
    assert not (tmp_path / "c").exists()


def test_a_rename_that_matches_nothing_is_refused_on_all_ranks(tmp_path):
    def save(rank):
        with pytest.raises(ValueError, match="rename= has 'b', which matches no name"):
            checkpoint.save({"a": torch.ones(2)}, tmp_path / "c", rename={"b": "c"})
        checkpoint.save({"a": torch.ones(2)}, tmp_path / "c", rename={"a": "c"})

    on_ranks(2, save)
    assert set(checkpoint.open(tmp_path / "c")) == {"c"}
