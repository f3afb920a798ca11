"""save: what ranks write of any state dict, judged by the safetensors package and by torch.distributed.checkpoint."""

import math
from pathlib import Path

import fsspec
import fsspec.implementations.memory
import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as judge
from checkpoints import (
    INDEX,
    LAYOUTS,
    data_bytes,
    emptied,
    flat_values,
    has,
    names_in,
    nested_values,
    own_shards,
    pasted,
    same_tensors,
    shards_in,
    split,
    training,
)
from devices import device_type
from models import Llama, dtensor, held, numbers, same, weights
from ranks import ranks  # noqa: F401
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import segments
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it shards
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


TRAININGS = {1: ["plain"], 2: ["tp"], 3: ["fsdp"], 4: ["fsdp", "tp", "both"]}


@pytest.mark.slow
@pytest.mark.parametrize("count", list(TRAININGS))
def test_a_training_is_saved_with_every_cell_once(tmp_path, count):
    def run(rank):
        found = {}
        for how in TRAININGS[count]:
            state = training(how, range(count))
            for format in "safetensors", "dcp":
                checkpoint.save(state, tmp_path / how / format, format=format)
            found[how] = split(state)
        return found

    for how, (tensors, values) in on_ranks(count, run)[0].items():
        has(tmp_path / how / "dcp", tensors, values)
        path = tmp_path / how / "safetensors"
        has(path, tensors, values)
        same_tensors(pasted(path), tensors)
        assert len(names_in(path)) == count + 1
        sizes = data_bytes(path)
        assert max(sizes) <= 1.35 * sum(sizes) / count, sizes


@pytest.mark.devices(group=False)
def test_hybrid_shards_are_written_once_and_evenly(tmp_path):
    def run(rank):
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicas", "shards"))
        model = fully_shard(Llama(5), mesh=mesh)
        checkpoint.save(model.state_dict(), tmp_path)
        return weights(model)

    tensors = on_ranks(4, run)[0]
    same_tensors(pasted(tmp_path), tensors)
    sizes, total = data_bytes(tmp_path), sum(t.numel() * 4 for t in tensors.values())
    assert sum(sizes) == total
    assert max(sizes) <= 1.2 * total / 4, sizes


@pytest.mark.devices(group=False)
def test_a_large_replica_is_written_by_all_in_equal_shares(tmp_path):
    """Small ones are written whole, in turn."""
    large, small = numbers(3, 600_000), {f"small.{at}": numbers(5, start=at) for at in range(8)}

    def run(rank):
        mesh = init_device_mesh(device_type(), (4,))
        state = {"plain": large, "replicated": dtensor(large + 1, mesh, Replicate()), **small}
        checkpoint.save(state, tmp_path, durable=False)

    on_ranks(4, run)
    same_tensors(pasted(tmp_path), {"plain": large, "replicated": large + 1, **small})
    sizes = data_bytes(tmp_path)
    assert max(sizes) - min(sizes) <= 2 * 4 * 4, sizes


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("count", list(LAYOUTS))
def test_our_own_shards_of_any_layout(tmp_path, count):
    def run(rank):
        for format in "safetensors", "dcp":
            state, wholes = own_shards(count)
            checkpoint.save({"deep": [state, (1,)]}, tmp_path / format, format=format)
        return {f"deep.0.{name}": whole for name, whole in wholes.items()}

    wholes = on_ranks(count, run)[0]
    has(tmp_path / "safetensors", wholes, {"deep.1": (1,)})
    has(tmp_path / "dcp", wholes, {"deep.1": (1,)})
    same_tensors(pasted(tmp_path / "safetensors"), wholes)


@pytest.mark.devices(group=False)
def test_several_shards_of_a_rank_and_ranks_without_any(tmp_path):
    """Boxes of any size; overlapping ones; only some ranks hold anything."""
    layouts = {
        "several": "8x6/boxes=0:4,0:6+4:8,0:2+4:8,2:6@3:0,2,0",
        "overlapping": "8x6/overlapping=0:5,0:6+3:8,0:6+0:8,0:6@3:0,1,1",
        "few": "8x6/S0@2:1-2",
        "flat": "8x6/flat=0-5,5-31,31-48@3",
        "split": "8x6/split0=1,0,7@3",
        "deep": "2x4x6/S2,S1@2x2:0-3",
    }
    wholes = {name: numbers(*sw.parse(layout).shape, start=at) for at, (name, layout) in enumerate(layouts.items())}

    def run(rank):
        state = {name: held(wholes[name], layout) for name, layout in layouts.items()}
        checkpoint.save(state, tmp_path)

    on_ranks(4, run)
    has(tmp_path, wholes)
    same_tensors(pasted(tmp_path), wholes)


def test_torchs_own_sharded_tensors(tmp_path):
    """As FSDP1 has them in its sharded state dicts."""
    whole = numbers(10, 7)

    def run(rank):
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.metadata import ShardMetadata

        sizes = {0: (0, 4), 1: (4, 4), 2: (8, 2)}
        start, rows = sizes[rank]
        about = ShardMetadata([start, 0], [rows, 7], f"rank:{rank}/cpu")
        shard = sharded_tensor.Shard(whole[start : start + rows].clone(), about)
        state = {"w": sharded_tensor.init_from_local_shards([shard], 10, 7)}
        for format in "safetensors", "dcp":
            checkpoint.save(state, tmp_path / format, format=format)

    on_ranks(3, run)
    for format in "safetensors", "dcp":
        has(tmp_path / format, {"w": whole})
    same_tensors(pasted(tmp_path / "safetensors"), {"w": whole})
    assert data_bytes(tmp_path / "safetensors") == [112, 112, 56]


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_values_and_nested_names_come_back_as_they_were(tmp_path, count, format):
    def run(rank):
        checkpoint.save({**nested_values(), "w": [numbers(2), {"x": numbers(3)}]}, tmp_path, format=format)

    on_ranks(count, run)
    has(tmp_path, {"w.0": numbers(2), "w.1.x": numbers(3)}, flat_values())
    found = checkpoint.open(tmp_path)
    paths = {name: tuple(path) for name, path in found.paths.items()}
    assert (paths["w.0"], paths["w.1.x"]) == (("w", 0), ("w", 1, "x"))
    assert paths["settings.betas"] == ("settings", "betas")
    signs = [math.copysign(1, value) for value in found.objects["floats"][:4]]
    assert signs == [1, -1, 1, -1]


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"none": None}, {"empty": torch.empty(0, 4)}])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_next_to_nothing(tmp_path, state, format):
    def run(rank):
        checkpoint.save(state, tmp_path, format=format)

    on_ranks(2, run)
    has(tmp_path, *split(state))


def odd_tensors():
    """Shapes and dtypes of every kind; `views` are not contiguous, or are shared."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (6, 4, 16), generator=draw, dtype=torch.uint8)
    every = {}
    for dtype in DTYPES:
        raw = bits[..., : 4 * dtype.itemsize] if dtype != torch.bool else bits[..., :4] % 2
        every[str(dtype)] = raw.contiguous().view(dtype)
    shapes = {"scalar": torch.tensor(2.5), "none": torch.empty(0), "no.rows": torch.empty(0, 3)}
    shapes["deep"] = numbers(1, 1, 2, 1, 3)
    whole = numbers(6, 8)
    views = {
        "transposed": whole.t(),
        "strided": whole[::2, 1::3],
        "narrow": whole[:, 2:5],
        "expanded": numbers(4, 1).expand(4, 3),
        "parameter": nn.Parameter(numbers(3, 3)),
        "tied": whole,
        "tied.too": whole,
    }
    return {**every, **shapes, **views}


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("count", [1, 3])
def test_odd_tensors(tmp_path, count):
    """All dtypes with all bits, also nan's; views; shapes without cells and without dims."""

    def run(rank):
        checkpoint.save(odd_tensors(), tmp_path / "safetensors")
        checkpoint.save(odd_tensors(), tmp_path / "dcp", format="dcp")

    on_ranks(count, run)
    has(tmp_path / "safetensors", odd_tensors())
    has(tmp_path / "dcp", odd_tensors())
    some = {name: value for name, value in odd_tensors().items() if value.numel() and name != "tied.too"}
    same_tensors({name: value for name, value in pasted(tmp_path / "safetensors").items() if name in some}, some)


@pytest.mark.devices(group=False)
def test_odd_tensors_as_dtensors(tmp_path):
    """Rows of 6 over 4 ranks; local tensors that are not contiguous."""
    wholes = {name: value.detach().contiguous() for name, value in odd_tensors().items() if value.ndim}

    def run(rank):
        mesh, state = init_device_mesh(device_type(), (4,)), {}
        for name, value in wholes.items():
            rows, about = [*value.chunk(4), *[value[:0]] * 4][rank], {"shape": value.shape, "stride": value.stride()}
            state[name] = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, **about)
        local = numbers(5, 3, start=100 * rank).t()
        state["turned"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        checkpoint.save(state, tmp_path)

    on_ranks(4, run)
    has(tmp_path, {**wholes, "turned": torch.cat([numbers(5, 3, start=100 * at).t() for at in range(4)])})


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("size", [5, 3_000_000])
def test_plain_tensors_that_differ_between_ranks_are_those_of_the_first_rank(tmp_path, format, size):
    def run(rank):
        state = {"same": torch.ones(7), "own": torch.full((size,), float(rank)), "last": torch.zeros(3)}
        if rank:
            checkpoint.save(state, tmp_path / "made", format=format)
            return
        with pytest.warns(
            UserWarning, match="save: 'own' differs between ranks, .* the first rank that has them are saved"
        ):
            checkpoint.save(state, tmp_path / "made", format=format)

    on_ranks(3, run)
    has(tmp_path / "made", {"same": torch.ones(7), "own": torch.zeros(size), "last": torch.zeros(3)})


def test_very_many_replicas_are_compared_and_saved(tmp_path):
    """More than the ranks tell each other in one packet."""
    state = {str(n): torch.full((3,), float(n)) for n in range(500)}
    on_ranks(2, lambda _: checkpoint.save(state, tmp_path / "made"))
    has(tmp_path / "made", state)


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path):
    def run(rank):
        with pytest.raises(sw.CheckpointError, match=r"'z\S* is torch\.complex128, which safetensors cannot") as error:
            checkpoint.save({"a": numbers(2), "z": numbers(2, dtype=torch.complex128)}, tmp_path / "no")
        return str(error.value)

    said = on_ranks(2, run)
    assert said[0] == said[1]
    assert not (tmp_path / "no").exists()
    checkpoint.save({"z": numbers(2, dtype=torch.complex128)}, tmp_path / "dcp", format="dcp")
    has(tmp_path / "dcp", {"z": numbers(2, dtype=torch.complex128)})


def test_what_is_refused_is_refused_alike_on_all_ranks_and_writes_nothing(tmp_path):
    def run(rank):
        mesh, said = init_device_mesh(device_type(), (2,)), {}
        two = {"a": 1} if rank else {"a": 2}
        cases = {
            "partial": ({"p": DTensor.from_local(numbers(3), mesh, [Partial()])}, {}),
            "names": ({"w": numbers(3), f"only{rank}": numbers(2)}, {}),
            "shapes": ({"w": numbers(3 + rank)}, {}),
            "dtypes": ({"w": numbers(3, dtype=(torch.float32, torch.float64)[rank])}, {}),
            "format": ({"w": numbers(3)}, {"format": "npz"}),
            "formats": ({"w": numbers(3)}, {"format": ("dcp", "safetensors")[rank]}),
            "paths": ({"w": numbers(3)}, {"path": tmp_path / f"no{rank}"}),
            "kind": ([numbers(3)], {}),
            "itself": ({"w": two, "x": object()}, {}),
        }
        for name, (state, options) in cases.items():
            with pytest.raises(sw.ShardwiseError) as error:
                checkpoint.save(state, **{"path": tmp_path / "no", **options})
            said[name] = str(error.value)
        checkpoint.save({"w": numbers(2)}, tmp_path / "yes")
        return said

    said, other = on_ranks(2, run)
    assert said == other
    words = {"partial": "reduce", "names": "only", "shapes": "(3,)", "dtypes": "float64", "format": "npz"}
    words |= {"formats": "dcp", "paths": "no1", "kind": "mapping", "itself": "object"}
    for name, word in words.items():
        assert word in said[name], f"{name}: {said[name]}"
    assert not (tmp_path / "no").exists() or names_in(tmp_path / "no") == []
    has(tmp_path / "yes", {"w": numbers(2)})


def test_values_that_only_some_ranks_have_are_not_lost(tmp_path):
    """They are saved, or refused; never left out without a word."""

    def run(rank):
        state = {"w": numbers(3), **({"late": 5} if rank else {})}
        try:
            checkpoint.save(state, tmp_path / "c")
        except sw.ShardwiseError as error:
            return str(error)
        return None

    said = on_ranks(2, run)
    assert said[0] == said[1]
    assert said[0] is not None or checkpoint.open(tmp_path / "c").objects == {"late": 5}


@pytest.mark.devices(group=False)
def test_a_group_of_some_ranks_saves_alone(tmp_path):
    def run(rank):
        some = dist.new_group([1, 3])
        if rank in (1, 3):
            checkpoint.save({"w": held(numbers(6, 2), "6x2/S0@2:1,3")}, tmp_path, group=some)

    on_ranks(4, run)
    has(tmp_path, {"w": numbers(6, 2)})
    assert len(shards_in(tmp_path)) == 2


def test_large_views_are_packed_a_little_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "CHUNK", 64)
    deep = numbers(4, 5, 6, 7).permute(3, 1, 0, 2)
    views = {"turned": numbers(30, 40).t(), "rows": numbers(3, 400)[:, ::2], "deep": deep}
    checkpoint.save(views, tmp_path)
    has(tmp_path, views)
    same_tensors(pasted(tmp_path), views)


def test_a_file_has_what_its_header_says_and_is_aligned(tmp_path):
    three, four = numbers(3), numbers(2, 2, dtype=torch.float64)
    checkpoint.save({"layer": {"a@1,2": three, "b": four}}, tmp_path)
    (name,) = shards_in(tmp_path)
    with safetensors.safe_open(tmp_path / name, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert sorted(file.keys()) == ["layer.a@1,2@0", "layer.b@0,0"]
    assert int.from_bytes((tmp_path / name).read_bytes()[:8], "little") % 8 == 0
    same_tensors(load_file(tmp_path / name), {"layer.a@1,2@0": three, "layer.b@0,0": four})
    has(tmp_path, {"layer.a@1,2": three, "layer.b": four})


# --- dcp --------------------------------------------------------------------------------------------------------------


def test_torch_loads_what_we_write_into_another_sharding(tmp_path):
    hows = ("fsdp", "tp", "both")

    def run(rank):
        states = {how: training(how, range(4)) for how in hows}
        before = {how: split(state) for how, state in states.items()}
        for how, state in states.items():
            checkpoint.save(state, tmp_path / how, format="dcp")
        for how, other in ("fsdp", "tp"), ("tp", "both"), ("both", "fsdp"):
            into = {**emptied(states[other]), "step": 0}
            judge.load(into, checkpoint_id=tmp_path / how)
            tensors, values = split(into)
            same_tensors(tensors, before[how][0])
            assert values == before[how][1]

    on_ranks(4, run)


def test_torch_loads_what_we_write_into_plain_tensors_and_converts_it(tmp_path):
    def run(rank):
        state, wholes = own_shards(4)
        checkpoint.save({"deep": {"shards": state}, "odd": odd_tensors(), "step": 7}, tmp_path / "dcp", format="dcp")
        return wholes

    wholes = on_ranks(4, run)[0]
    odd = odd_tensors()
    into = {"deep": {"shards": {name: torch.zeros_like(value) for name, value in wholes.items()}}}
    into |= {"odd": {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in odd.items()}, "step": 0}
    judge.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same_tensors(into["deep"]["shards"], wholes)
    same_tensors(into["odd"], odd)
    assert into["step"] == 7
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    same_tensors(found["deep"]["shards"], wholes)
    same_tensors(found["odd"], odd)
    assert found["step"] == 7


def test_nested_names_and_values_survive_torchs_conversion(tmp_path):
    state = {**nested_values(), "w": [numbers(2), {"x": numbers(3), "betas": (0.9, 0.95)}]}
    del state["settings"][3]  # torch knows keys only by names
    checkpoint.save(state, tmp_path / "dcp", format="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    same(found["w"][0], numbers(2))
    same(found["w"][1]["x"], numbers(3))
    assert found["w"][1]["betas"] == (0.9, 0.95)
    del found["w"], state["w"]
    assert repr(dict(sorted(found.items()))) == repr(dict(sorted(state.items())))


def test_torch_saves_over_ours_and_we_over_torchs(tmp_path):
    """In a directory of one format, whoever wrote there last counts."""
    checkpoint.save({"w": numbers(3)}, tmp_path, format="dcp")
    judge.save({"w": numbers(3, start=5)}, checkpoint_id=tmp_path, no_dist=True)
    has(tmp_path, {"w": numbers(3, start=5)})
    checkpoint.save({"w": numbers(3, start=9)}, tmp_path, format="dcp")
    has(tmp_path, {"w": numbers(3, start=9)})
    into = {"w": torch.zeros(3)}
    judge.load(into, checkpoint_id=tmp_path, no_dist=True)
    same(into["w"], numbers(3, start=9))


# --- elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_checkpoint_in_memory_by_its_url(tmp_path, format):
    """What fsspec reaches: saved over an older one, opened, loaded."""
    url = f"memory:/{tmp_path}/{format}"
    for start in range(3):
        checkpoint.save({"a": {"w": numbers(4, 3, start=start)}, "step": start}, url, format=format)
        has(url, {"a.w": numbers(4, 3, start=start)}, {"step": start})
    assert len(checkpoint.open(url).files.names()) == 3
    into = {"a": {"w": torch.zeros(4, 3)}, "step": None}
    checkpoint.load(url, into)
    same(into["a"]["w"], numbers(4, 3, start=2))
    assert into["step"] == 2
    assert str(Path(url)) not in names_in(tmp_path)


def test_relative_paths_and_paths_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for at, path in enumerate(["a/b/c", Path("d"), tmp_path / "e" / "f", f"file://{tmp_path}/g"]):
        checkpoint.save({"w": numbers(2, start=at)}, path, durable=bool(at % 2))
        has(path, {"w": numbers(2, start=at)})
    assert names_in(tmp_path) == ["a", "d", "e", "g"]
    assert names_in(tmp_path / "a" / "b" / "c")[-1] == INDEX


class Remembering(fsspec.implementations.memory.MemoryFileSystem):
    """Remembers what it listed until it is told to forget, as drivers of object stores do."""

    protocol = "remembering"

    def ls(self, path, detail=True, **options):
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **options)
        return self.dircache[path] if detail else [entry["name"] for entry in self.dircache[path]]

    def invalidate_cache(self, path=None):
        self.dircache.clear()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("remembering://", "memory://"))


def test_drivers_that_remember_listings_are_asked_anew(tmp_path):
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    url = f"remembering:/{tmp_path}/run"
    for step in range(3):
        checkpoint.save({"w": torch.full((4,), float(step))}, url)
        assert checkpoint.open(url)["w"].read().tolist() == [float(step)] * 4
    made = checkpoint.convert(url, f"{url}/as.safetensors", cast=torch.half)
    assert made["w"].dtype == torch.half
