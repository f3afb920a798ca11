"""Tied weights: several names for the same memory. They are filled, and stored once where the format can say so."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import names_in
from devices import device_type
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import Resharder, checkpoint, reshard_state_dict
from shardwise.containers import ties
from shardwise.errors import CheckpointError
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled:UserWarning")
ROWS = {"mesh": {"tp": 2}, "rule": [{"name": "*", "placements": {"tp": "S0"}}]}
MIXED = {
    "mesh": {"tp": 2},
    "rule": [{"name": "head.*", "placements": {"tp": "S1"}}, {"name": "*", "placements": {"tp": "S0"}}],
}
TARGETS = {
    "sharded": {"format": "sharded", "rules": ROWS},
    "dcp": {"format": "dcp"},
    "dcp of two": {"format": "dcp", "rules": ROWS},
    "one.pt": {},
}


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight


def weights(seed=0):
    return {name: value.clone() for name, value in Tied(seed).state_dict().items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def values_of(path):
    return {name: entry.read() for name, entry in checkpoint.open(path).items()}


def size(path):
    return sum(file.stat().st_size for file in ([path] if path.is_file() else map(path.joinpath, names_in(path))))


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["head.weight", "embed.weight"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_tied_target_that_the_checkpoint_lacks_is_filled(tmp_path, lacking, strict):
    save_file({name: value for name, value in weights().items() if name != lacking}, tmp_path / "m.safetensors")
    model = Tied(1)
    checkpoint.load(tmp_path / "m.safetensors", into=model.state_dict(), strict=strict)
    same(model.state_dict(), weights())


def test_names_that_are_missing_are_still_missing(tmp_path):
    found = weights()
    save_file({"embed.weight": found["embed.weight"]}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"has nothing for 'norm\.weight'.*'norm\.bias'") as error:
        checkpoint.load(tmp_path / "m.safetensors", into=Tied().state_dict())
    assert "head.weight" not in str(error.value)
    save_file({"norm.weight": found["norm.weight"], "norm.bias": found["norm.bias"]}, tmp_path / "n.safetensors")
    with pytest.raises(CheckpointError, match=r"has nothing for 'embed\.weight'.*'head\.weight'"):
        checkpoint.load(tmp_path / "n.safetensors", into=Tied().state_dict())


def test_a_tied_target_is_filled_under_a_new_name(tmp_path):
    found = {f"model.{name}": value for name, value in weights().items() if name != "head.weight"}
    save_file(found, tmp_path / "m.safetensors")
    model = Tied(1)
    checkpoint.load(tmp_path / "m.safetensors", into=model.state_dict(), rename={"model.*": "*"})
    same(model.state_dict(), weights())


UNTIED = {
    "a part": lambda whole: whole[:4],
    "other strides": lambda whole: whole.t(),
    "another dtype": lambda whole: whole.view(torch.int32),
    "another shape": lambda whole: whole.view(-1),
    "rows from elsewhere": lambda whole: whole.flip(0),
}


@pytest.mark.parametrize("how", UNTIED)
def test_memory_that_is_shared_in_part_or_otherwise_is_not_tied(tmp_path, how):
    whole = torch.arange(64.0).reshape(8, 8)
    save_file({"a": whole}, tmp_path / "m.safetensors")
    target = torch.zeros(8, 8)
    with pytest.raises(CheckpointError, match="has nothing for 'b'"):
        checkpoint.load(tmp_path / "m.safetensors", into={"a": target, "b": UNTIED[how](target)})


def test_memory_that_is_made_anew_whenever_it_is_looked_at_is_not_tied(monkeypatch):
    """It may be at the same address every time."""
    monkeypatch.setattr(ties, "memory_of", lambda value: [value.clone()])
    state = {f"w{at}": torch.full((4096,), float(at)) for at in range(20)}
    assert ties.ties_of(state) == {}


def test_tensors_without_cells_are_not_tied(tmp_path):
    save_file({"a": torch.zeros(0, 3)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="has nothing for 'b'"):
        checkpoint.load(tmp_path / "m.safetensors", into={"a": torch.zeros(0, 3), "b": torch.zeros(0, 3)})


@pytest.mark.parametrize("read", ["each", "once"])
@pytest.mark.parametrize("how", ["fully sharded", "by hand"])
def test_tied_dtensors_are_filled_on_all_ranks(tmp_path, how, read):
    save_file({name: value for name, value in weights().items() if name != "head.weight"}, tmp_path / "m.safetensors")

    def run(rank):
        mesh, model = init_device_mesh(device_type(), (3,)), Tied(1)
        if how == "fully sharded":
            fully_shard(model, mesh=mesh)
            state = model.state_dict()
        else:  # two objects with the same local memory
            state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}
            one = state["embed.weight"]
            about = {"run_check": False, "shape": one.shape, "stride": one.stride()}
            state["head.weight"] = DTensor.from_local(one.to_local(), mesh, [Shard(0)], **about)
        checkpoint.load(tmp_path / "m.safetensors", into=state, read=read)
        return {name: value.full_tensor().detach() for name, value in state.items()}

    for found in on_ranks(3, run):
        same(found, weights())


def test_targets_that_are_tied_on_some_ranks_only_are_not_tied(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")

    def run(rank):
        a = torch.zeros(4)
        with pytest.raises(CheckpointError, match="has nothing for 'b'") as error:
            checkpoint.load(tmp_path / "m.safetensors", into={"a": a, "b": torch.zeros(4) if rank else a}, read="once")
        return str(error.value)

    told = on_ranks(2, run)
    assert told[0] == told[1]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("read", ["each", "once"])
def test_tied_targets_of_a_checkpoint_that_has_two_values_for_them_are_refused(tmp_path, read, prefix):
    found = {prefix + name: value for name, value in weights().items()}
    save_file(found, tmp_path / "equal.safetensors")
    found[f"{prefix}head.weight"][63, 15] += 1
    save_file(found, tmp_path / "other.safetensors")

    def run(rank):
        model, how = Tied(1), {"read": read, "rename": {f"{prefix}*": "*"} if prefix else None}
        with pytest.raises(
            CheckpointError, match=r"'embed\.weight' and 'head\.weight' share their memory .* but differ in .*other"
        ):
            checkpoint.load(tmp_path / "other.safetensors", into=model.state_dict(), **how)
        same(model.state_dict(), weights(1))
        checkpoint.load(tmp_path / "equal.safetensors", into=model.state_dict(), **how)
        same(model.state_dict(), weights())

    on_ranks(2, run)


def test_two_values_for_one_memory_are_refused_after_casts_too(tmp_path):
    save_file({"a": torch.tensor([1.0]), "b": torch.tensor([1.0 + 2**-20])}, tmp_path / "m.safetensors")
    memory = torch.zeros(1)
    with pytest.raises(CheckpointError, match="share their memory"):
        checkpoint.load(tmp_path / "m.safetensors", into={"a": memory, "b": memory})
    short = torch.zeros(1, dtype=torch.bfloat16)
    checkpoint.load(tmp_path / "m.safetensors", into={"a": short, "b": short})  # one value, once it is cast
    assert short.item() == 1.0


# --- saving and converting --------------------------------------------------------------------------------------------


def check_untied(path, expected):
    """Into memory of its own for every name, by our own loader."""
    into = {name: torch.zeros_like(value) for name, value in expected.items()}
    checkpoint.load(path, into=into)
    same(into, expected)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_tied_tensors_are_saved_once_and_every_name_is_found(tmp_path, format):
    model = Tied()
    checkpoint.save(model.state_dict(), tmp_path / "tied", format=format)
    checkpoint.save(weights(), tmp_path / "apart", format=format)
    assert size(tmp_path / "apart") - size(tmp_path / "tied") > 64 * 16 * 4 - 200
    same(values_of(tmp_path / "tied"), weights())
    check_untied(tmp_path / "tied", weights())
    other = Tied(1)
    checkpoint.load(tmp_path / "tied", into=other.state_dict())
    same(other.state_dict(), weights())


def test_torch_loads_tied_tensors_that_we_saved(tmp_path):
    checkpoint.save(Tied().state_dict(), tmp_path / "dcp", format="dcp")
    for into in (Tied(1).state_dict(), weights(1)):
        dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
        same(into, weights())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt", weights_only=True), weights())


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_tied_shards_are_saved_once_by_all_ranks(tmp_path, format):
    def run(rank):
        model = Tied()
        fully_shard(model, mesh=init_device_mesh(device_type(), (3,)))
        checkpoint.save(model.state_dict(), tmp_path / "tied", format=format)
        apart = Tied()
        apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
        fully_shard(apart, mesh=init_device_mesh(device_type(), (3,)))
        checkpoint.save(apart.state_dict(), tmp_path / "apart", format=format)
        state = model.state_dict()
        for value in state.values():
            value.zero_()
        if format == "dcp":
            dcp.load(state, checkpoint_id=tmp_path / "tied")
        else:
            checkpoint.load(tmp_path / "tied", into=state)
        return {name: value.full_tensor().detach() for name, value in state.items()}

    for found in on_ranks(3, run):
        same(found, weights())
    same(values_of(tmp_path / "tied"), weights())
    assert size(tmp_path / "apart") - size(tmp_path / "tied") > 64 * 16 * 4 - 600


def test_three_names_nested_and_of_plain_views_are_one(tmp_path):
    memory = torch.arange(3000.0).reshape(30, 100)
    state = {"a": [memory, {"b": memory.view(30, 100)}], "c": memory[:], "d": memory[1:], "step": 3}
    checkpoint.save(state, tmp_path / "tied")
    assert size(tmp_path / "tied") < 2.2 * memory.nbytes
    found = checkpoint.open(tmp_path / "tied")
    same(
        {name: entry.read() for name, entry in found.items()},
        {"a.0": memory, "a.1.b": memory, "c": memory, "d": memory[1:]},
    )
    assert found.objects["step"] == 3


@pytest.mark.parametrize("start", ["one.pt", "ours", "dcp"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_conversion_of_tied_tensors_writes_them_once(tmp_path, start, kind):
    if start == "one.pt":
        torch.save(Tied().state_dict(), tmp_path / start)
    else:
        checkpoint.save(Tied().state_dict(), tmp_path / start, format={"ours": "safetensors"}.get(start, start))
    torch.save(weights(), tmp_path / "apart.pt")
    (tmp_path / "tied").mkdir()
    (tmp_path / "apart").mkdir()
    checkpoint.convert(tmp_path / start, tmp_path / "tied" / kind, durable=False, **TARGETS[kind])
    checkpoint.convert(tmp_path / "apart.pt", tmp_path / "apart" / kind, durable=False, **TARGETS[kind])
    assert size(tmp_path / "apart" / kind) - size(tmp_path / "tied" / kind) > 64 * 16 * 4 - 600
    same(values_of(tmp_path / "tied" / kind), weights())
    check_untied(tmp_path / "tied" / kind, weights())
    assert checkpoint.verify(tmp_path / start, tmp_path / "tied" / kind) == []
    if kind == "one.pt":
        found = torch.load(tmp_path / "tied" / kind, weights_only=True)
        same(found, weights())
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    if kind.startswith("dcp"):
        into = weights(1)
        dcp.load(into, checkpoint_id=tmp_path / "tied" / kind, no_dist=True)
        same(into, weights())


def test_tied_tensors_that_become_different_are_written_apart(tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "in.pt")
    cast = [("head.weight", torch.float64)]
    checkpoint.convert(tmp_path / "in.pt", tmp_path / "cast.pt", cast=cast, durable=False)
    expected = weights() | {"head.weight": weights()["head.weight"].double()}
    same(torch.load(tmp_path / "cast.pt", weights_only=True), expected)
    checkpoint.convert(tmp_path / "in.pt", tmp_path / "rows", format="sharded", rules=MIXED, durable=False)
    found = checkpoint.open(tmp_path / "rows")
    assert str(found["head.weight"].layout) != str(found["embed.weight"].layout)
    same(values_of(tmp_path / "rows"), weights())
    turned = [checkpoint.Transposed("head.weight")]
    checkpoint.convert(tmp_path / "in.pt", tmp_path / "turned.pt", remap=turned, durable=False)
    same(
        torch.load(tmp_path / "turned.pt", weights_only=True), weights() | {"head.weight": weights()["head.weight"].t()}
    )


def test_safetensors_cannot_share_bytes_and_a_warning_says_so(tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "in.pt")
    with pytest.warns(UserWarning, match=r"'head\.weight' .* 'embed\.weight'.* written again .*4\.00 KiB"):
        checkpoint.convert(tmp_path / "in.pt", tmp_path / "out.safetensors", durable=False)
    same(load_file(tmp_path / "out.safetensors"), weights())
    checkpoint.convert(tmp_path / "in.pt", tmp_path / "less.safetensors", select=["embed.*", "norm.*"], durable=False)
    assert "head.weight" not in load_file(tmp_path / "less.safetensors")
    model = Tied(1)
    checkpoint.load(tmp_path / "less.safetensors", into=model.state_dict())
    same(model.state_dict(), weights())


def test_an_interrupted_conversion_of_tied_tensors_continues(tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "in.pt")

    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    for kind in ("sharded", "dcp of two"):
        with pytest.raises(KeyboardInterrupt):
            checkpoint.convert(tmp_path / "in.pt", tmp_path / kind, durable=False, progress=stop, **TARGETS[kind])
        made = checkpoint.convert(tmp_path / "in.pt", tmp_path / kind, durable=False, **TARGETS[kind])
        assert made.reused
        same(values_of(tmp_path / kind), weights())
        assert len(names_in(tmp_path / kind)) == 3


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("nothing", "'head.weight' .*tied to 'nothing'"),
        ("head.weight", "'head.weight' .*tied to itself"),
        ("norm.weight", "'head.weight' .*tied to 'norm.weight'"),
        (3, "'head.weight' .*tied to 3"),
    ],
)
def test_an_index_that_ties_a_name_to_something_else_is_refused(tmp_path, said, words):
    checkpoint.save(Tied().state_dict(), tmp_path, sums=False)
    index = tmp_path / "shardwise.json"
    text = index.read_text()
    assert text.count('"tied": "embed.weight"') == 1
    index.write_text(
        text.replace('"tied": "embed.weight"', f'"tied": {said if said == 3 else chr(34) + said + chr(34)}')
    )
    with pytest.raises(CheckpointError, match=words):
        values_of(tmp_path)


# --- moving -----------------------------------------------------------------------------------------------------------


def test_tied_sources_and_targets_of_a_sync_stay_right():
    def run(rank):
        mesh, trainer, engine = init_device_mesh(device_type(), (2,)), Tied(), Tied(1)
        fully_shard(trainer, mesh=mesh)
        sync, expected = Resharder(trainer.state_dict(), engine.state_dict()), weights()
        for _ in range(2):
            with torch.no_grad():
                trainer.embed.weight.add_(1.0)
            sync.run()
            expected["embed.weight"].add_(1.0)
            expected["head.weight"].add_(1.0)
            same(engine.state_dict(), expected)
        whole = {name: (mesh, [Replicate()]) for name in expected}
        found = reshard_state_dict(trainer.state_dict(), to=whole)
        same({name: value.to_local().detach() for name, value in found.items()}, expected)

    on_ranks(2, run)
