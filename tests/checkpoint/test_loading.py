"""load: any checkpoint into any sharding on any number of ranks, in place and to the last bit; all else is refused."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as judge
from checkpoints import (
    INDEX,
    LAYOUTS,
    emptied,
    flat_values,
    has,
    nested_values,
    own_shards,
    rewritten,
    same_tensors,
    shards_in,
    split,
    training,
)
from devices import device_type
from models import dtensor, full, held, lies, numbers, same, sharded
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.files import ByteRange
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.state.traverse import flatten_state_dict
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it shards


def addresses(state_dict):
    """Where the memory of every tensor is."""
    flat, _ = flatten_state_dict(state_dict)
    locals_ = {name: v.to_local() if isinstance(v, DTensor) else v for name, v in flat.items()}
    return {name: v.data_ptr() for name, v in locals_.items() if isinstance(v, torch.Tensor)}


def both_ways(path, into, **options):
    """Load it twice, each rank for itself and every byte once; the values of both."""
    found, before = [], addresses(into)
    for read in {"read": "each"}, {"read": "once"}, {"group": dist.group.WORLD}:
        emptied(into)
        checkpoint.load(path, into, **read, **options)
        assert addresses(into) == before
        found.append(split(into))
    same_tensors(found[0][0], found[1][0])
    assert repr(found[0][1]) == repr(found[1][1])
    return found[0]


# --- from anywhere to anywhere ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Directories with a training as we save it and as torch does, by their shardings; and what is in them."""
    path = tmp_path_factory.mktemp("trainings")

    def run(rank):
        found = {}
        for how in "fsdp", "tp", "both":
            state = training(how, range(4))
            checkpoint.save(state, path / "ours" / how, durable=False)
            judge.save(state, checkpoint_id=path / "torch" / how)
            found[f"ours/{how}"] = found[f"torch/{how}"] = split(state)
        return found

    return {path / name: contents for name, contents in on_ranks(4, run)[0].items()}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [("plain", 1), ("tp", 2), ("fsdp", 3), ("both", 4)])
def test_a_training_goes_on_in_any_sharding(trainings, how, count):
    """Saved on 4 ranks by us and by torch; weights, the state of the optimizer, and values."""

    def run(rank):
        into = training(how, range(count))
        for path, (tensors, values) in list(trainings.items())[count % 3 :: 3] if count > 1 else trainings.items():
            into["step"] = None
            found, others = both_ways(path, into)
            same_tensors(found, tensors)
            assert others == values

    on_ranks(count, run)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    """The same weights as one safetensors file, as several with an index, and as a file of torch.save."""
    path = tmp_path_factory.mktemp("whole")
    tensors = on_ranks(1, lambda rank: split(sharded("plain", 8, [0]).state_dict())[0])[0]
    save_file(tensors, path / "one.safetensors")
    torch.save(tensors, path / "saved.pt")
    names, several = list(tensors), path / "several"
    several.mkdir()
    where = {name: f"model-{at % 3 + 1:05d}-of-00003.safetensors" for at, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, several / file, {"format": "pt"})
    about = {"metadata": {"total_size": 1}, "weight_map": where}
    (several / "model.safetensors.index.json").write_text(json.dumps(about))
    paths = [path / "one.safetensors", path / "saved.pt", several, several / "model.safetensors.index.json"]
    return paths, tensors


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [("plain", 1), ("fsdp", 2), ("fsdp", 3), ("tp", 4), ("both", 4)])
def test_whole_files_are_loaded_into_any_sharding(whole_files, how, count):
    paths, tensors = whole_files

    def run(rank):
        into = sharded(how, 5, range(count)).state_dict()
        for path in paths:
            same_tensors(both_ways(path, into)[0], tensors)

    on_ranks(count, run)


def test_through_all_shardings_and_numbers_of_ranks_and_back(tmp_path):
    """Each one loads what the last one saved."""
    steps = [("fsdp", 4), ("tp", 2), ("both", 4), ("plain", 1), ("fsdp", 3), ("tp", 4)]

    def run(rank, at):
        how, count = steps[at]
        state = sharded(how, at, range(count)).state_dict()
        if at:
            checkpoint.load(tmp_path / str(at - 1), state, **({"read": "once"} if at % 2 else {}))
        checkpoint.save(state, tmp_path / str(at), durable=False, format=("safetensors", "dcp")[at % 2])
        return split(state)[0]

    whole = [on_ranks(count, lambda rank, at=at: run(rank, at))[0] for at, (_, count) in enumerate(steps)]
    same_tensors(whole[-1], whole[0])
    has(tmp_path / "5", whole[0])


@pytest.mark.slow
@pytest.mark.devices(group=False)
@pytest.mark.parametrize("count", list(LAYOUTS))
def test_our_own_shards_of_any_layout_from_any_other(tmp_path, count):
    """What four ranks saved in many layouts, into as many others, cell by cell."""
    sources = on_ranks(4, lambda rank: checkpoint.save({"w": own_shards(4)[0]}, tmp_path) or own_shards(4)[1])[0]

    def run(rank):
        rename = {f"w.{source}": [f"{source} -> {layout}" for layout in LAYOUTS[count]] for source in sources}
        for read in "each", "once":
            into = {f"{source} -> {to}": held(torch.zeros(9, 6), to) for source in sources for to in LAYOUTS[count]}
            checkpoint.load(tmp_path, into, rename=rename, read=read)
            for source, whole in sources.items():
                for layout in LAYOUTS[count]:
                    lies(into[f"{source} -> {layout}"], whole, layout)

    on_ranks(count, run)


def test_ranks_without_a_part_and_memory_that_is_not_contiguous(tmp_path):
    wholes = {"a": numbers(8, 6), "b": numbers(8, 6, start=50), "c": numbers(6, 8, start=90), "d": torch.tensor(3.0)}
    checkpoint.save({**wholes, "e": torch.empty(0, 5)}, tmp_path)

    def run(rank):
        for read in {"read": "each"}, {"read": "once"}:
            room, turned = torch.zeros(20, 20), torch.zeros(8, 6).t()
            some = held(torch.zeros(8, 6), "8x6/S1@2:1-2")
            leaf = nn.Parameter(torch.zeros(8, 6))
            before = leaf.data_ptr()
            into = {"a": some, "b": leaf, "c": turned.t().t(), "d": room[3, 3], "e": torch.empty(0, 5)}
            checkpoint.load(tmp_path, {**into, "c": room[2:14:2, 1:17:2]}, **read)
            lies(some, wholes["a"], "8x6/S1@2:1-2")
            assert leaf.requires_grad
            assert leaf.data_ptr() == before
            same(leaf, wholes["b"])
            same(room[2:14:2, 1:17:2], wholes["c"])
            same(room[3, 3], wholes["d"])
            assert room.count_nonzero() == 48 + 1

    on_ranks(3, run)


def test_tied_weights_are_loaded_into_what_they_share(tmp_path):
    module = nn.Module()
    module.a = module.b = nn.Parameter(numbers(3, 4))
    checkpoint.save(module.state_dict(), tmp_path)
    other = nn.Module()
    other.a = other.b = nn.Parameter(torch.zeros(3, 4))
    checkpoint.load(tmp_path, other.state_dict())
    assert other.a is other.b
    same(other.a, numbers(3, 4))


def test_values_are_set_in_their_places(tmp_path):
    checkpoint.save({**nested_values(), "w": [numbers(2), {"x": numbers(3), "n": 5}]}, tmp_path)
    into = {**dict.fromkeys(nested_values()), "w": [torch.zeros(2), {"x": torch.zeros(3), "n": 0}]}
    into |= {"empty": {"list": None, "dict": None, "tuple": None, "text": None}}
    into["settings"] = {3: "", "betas": None, "size": None, "dtype": None}
    inner = into["w"][1]
    checkpoint.load(tmp_path, into)
    assert into["w"][1] is inner
    assert inner["n"] == 5
    same(inner["x"], numbers(3))
    flat, _ = flatten_state_dict({name: into[name] for name in nested_values()})
    assert repr(flat) == repr(flat_values())


# --- what is read -----------------------------------------------------------------------------------------------------


def reading(into, path, **options):
    """Load; how often this rank read every byte of tensors, by file."""
    spans, read_into, elements = [], LocalFiles.read_into, LocalFiles.elements

    def counted(self, name, start, memory):
        spans.append(ByteRange(name, start, start + len(memory)))
        return read_into(self, name, start, memory)

    def seen(self, windows, dtype):
        spans.extend(ByteRange.of(file, window, dtype.itemsize) for file, window in windows)
        return elements(self, windows, dtype)

    LocalFiles.read_into, LocalFiles.elements = counted, seen
    try:
        checkpoint.load(path, into, check=False, **options)  # which reads a little more around it
    finally:
        LocalFiles.read_into, LocalFiles.elements = read_into, elements
    times = Counter()
    for file, start, stop in spans:
        if file.endswith(".safetensors"):
            head = (path / file).read_bytes()
            times.update((file, at) for at in range(max(start, 8 + int.from_bytes(head[:8], "little")), stop))
    return times


def many_shapes():
    """Scalars that lie across the shares of ranks, few long rows, many short ones."""
    shapes = [(), (2, 400), (50, 3), (), (1, 1, 90), (7,), (3, 3, 3), (), (4, 4)]
    return {str(at): numbers(*shape, start=at) for at, shape in enumerate(shapes)}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_with_a_group_every_byte_is_read_by_one_rank(tmp_path, count):
    wholes = many_shapes()
    on_ranks(2, lambda rank: checkpoint.save(wholes, tmp_path))

    def run(rank):
        into = {name: torch.zeros(value.shape) for name, value in wholes.items()}
        times = reading(into, tmp_path, group=dist.group.WORLD, read="once")
        same_tensors(into, wholes)
        return times

    found = on_ranks(count, run)
    assert set(Counter(at for times in found for at in times).values()) == {1}
    shares, total = [len(times) for times in found], sum(4 * value.numel() for value in wholes.values())
    assert sum(shares) == total
    assert max(shares) <= 1.6 * total / count, shares


@pytest.mark.devices(group=False)
def test_scalars_alone_are_read_by_one_rank_each(tmp_path):
    wholes = {str(at): torch.tensor(at + 0.5, dtype=torch.float64) for at in range(3)}
    checkpoint.save(wholes, tmp_path)

    def run(rank):
        into = {name: torch.zeros_like(value) for name, value in wholes.items()}
        checkpoint.load(tmp_path, into, group=dist.group.WORLD, read="once")
        same_tensors(into, wholes)

    on_ranks(4, run)


@pytest.mark.devices(group=False)
def test_without_a_group_a_rank_reads_what_it_needs_and_no_more(tmp_path):
    whole = numbers(12, 5)
    on_ranks(3, lambda rank: checkpoint.save({"w": held(whole, "12x5/S0@3"), "other": numbers(99)}, tmp_path))

    def run(rank):
        into = {"w": held(torch.zeros(12, 5), "12x5/S0@4")}
        return reading(into, tmp_path, strict=False)

    for times in on_ranks(4, run):
        assert len(times) == 3 * 5 * 4
        assert set(times.values()) == {1}


# --- names, shapes, dtypes --------------------------------------------------------------------------------------------


def llama(size=2):
    """Weights as Hugging Face names them."""
    found = {}
    for layer in range(size):
        for at, (name, rows) in enumerate({"q": 8, "k": 4, "v": 4}.items()):
            found[f"model.layers.{layer}.{name}_proj.weight"] = numbers(rows, 6, start=1000 * layer + 100 * at)
        for expert in range(3):
            found[f"model.layers.{layer}.experts.{expert}.up"] = numbers(5, 4, start=1000 * layer + 20 * expert)
        found[f"model.layers.{layer}.down"] = numbers(3, 7, start=layer)
    return found


def fused(weights, size=2):
    """The same as a serving engine has them."""
    found = {}
    for layer in range(size):
        parts = [weights[f"model.layers.{layer}.{name}_proj.weight"] for name in "qkv"]
        experts = [weights[f"model.layers.{layer}.experts.{expert}.up"] for expert in range(3)]
        found[f"layers.{layer}.qkv_proj.weight"] = torch.cat(parts)
        found[f"layers.{layer}.experts.up"] = torch.stack(experts)
        found[f"layers.{layer}.down"] = weights[f"model.layers.{layer}.down"].t().contiguous()
    return found


RULES = [
    sw.Concat("*.qkv_proj.weight", ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]),
    sw.Stack("*.experts.up", "*.experts.{}.up"),
    sw.Transposed("*.down"),
]
FUSED = {"qkv_proj.weight": "16x6/fused0=8,4,4@4", "experts.up": "3x5x4/S1@4", "down": "7x3/S0,S1@2x2"}


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("read", ["each", "once"])
def test_names_and_parts_are_mapped_on_the_way(tmp_path, read):
    apart = llama()
    together = fused(apart)

    def run(rank):
        checkpoint.save({name: held(whole, split_rows(whole)) for name, whole in apart.items()}, tmp_path / "apart")
        layouts = {name: next(FUSED[end] for end in FUSED if name.endswith(end)) for name in together}
        into = {name: held(torch.zeros_like(whole), layouts[name]) for name, whole in together.items()}
        checkpoint.load(tmp_path / "apart", into, rename={"model.*": "*"}, remap=RULES, read=read)
        for name, whole in together.items():
            lies(into[name], whole, layouts[name])
        checkpoint.save(into, tmp_path / "together")
        back = {name: held(torch.zeros_like(whole), split_rows(whole)) for name, whole in apart.items()}
        checkpoint.load(tmp_path / "together", back, rename=lambda name: f"model.{name}", remap=RULES, read=read)
        for name, whole in apart.items():
            lies(back[name], whole, split_rows(whole))

    on_ranks(4, run)
    has(tmp_path / "together", together)


def split_rows(whole):
    return f"{'x'.join(map(str, whole.shape))}/S0@4"


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float16),
    (torch.int64, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bool, torch.int32),
    (torch.float32, torch.complex64),
]


@pytest.mark.devices(group=False)
@pytest.mark.parametrize("read", ["each", "once"])
def test_dtypes_are_cast_as_torch_does(tmp_path, read):
    wholes = {str(at): (numbers(6, 5) / 7).to(source) for at, (source, _) in enumerate(CASTS)}
    checkpoint.save(wholes, tmp_path)

    def run(rank):
        into = {str(at): held(torch.zeros(6, 5, dtype=target), "6x5/S0@2") for at, (_, target) in enumerate(CASTS)}
        checkpoint.load(tmp_path, into, read=read, cast=[(str(at), target) for at, (_, target) in enumerate(CASTS)])
        for at, (_, target) in enumerate(CASTS):
            lies(into[str(at)], wholes[str(at)].to(target), "6x5/S0@2")

    on_ranks(2, run)


def test_a_cast_that_loses_the_imaginary_part_is_refused(tmp_path):
    checkpoint.save({"z": numbers(3, dtype=torch.complex64)}, tmp_path)
    with pytest.raises(ValueError, match="imaginary"):
        checkpoint.load(tmp_path, {"z": torch.zeros(3)})


@pytest.fixture
def small(tmp_path):
    """A small checkpoint."""
    state = {"embed.weight": numbers(4, 3), "head.weight": numbers(2, 3), "head.bias": numbers(2), "step": 7}
    checkpoint.save(state, tmp_path / "small")
    return tmp_path / "small"


def filled_like_small():
    return {"embed.weight": torch.zeros(4, 3), "head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2), "step": 0}


WRONG = {
    "missing": ({"head.wieght": torch.zeros(2, 3)}, {}, ["head.wieght", "nearest: 'head.weight'", "strict=False"]),
    "value": ({"stepp": 3}, {}, ["stepp", "nearest: 'step'", "strict=False"]),
    "shape": ({"embed.weight": torch.zeros(3, 4)}, {}, ["embed.weight", "(4, 3)", "(3, 4)"]),
    "dims": ({"head.bias": torch.zeros(2, 1)}, {}, ["head.bias", "(2,)", "(2, 1)"]),
    "dtype": ({"head.bias": torch.zeros(2).double()}, {"cast": False}, ["head.bias", "float64", "cast=True"]),
    "tensor": ({"step": torch.zeros(())}, {}, ["step"]),
    "expanded": ({"head.bias": torch.zeros(1).expand(2)}, {}, ["head.bias"]),
    "rule": ({}, {"remap": [sw.Concat("x", ["head.weight"])], "rename": {"head.bias": "y"}}, ["head.bias"]),
    "rename": ({}, {"rename": {"head.*": "embed.*"}}, ["embed.weight", "head.weight"]),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(small, case):
    """On one process alone, and on ranks in both ways of reading; everywhere the same."""
    changed, options, words = WRONG[case]
    into = {**filled_like_small(), **changed}
    alone = refusal(small, into, **options)
    for word in words:
        assert word in alone
    assert all(not value.count_nonzero() for value in into.values() if isinstance(value, torch.Tensor))

    def run(rank):
        said = [refusal(small, into, read=read, group=dist.group.WORLD, **options) for read in ("each", "once")]
        checkpoint.load(small, filled_like_small(), group=dist.group.WORLD)  # the group can be used after that
        return said

    said, other = on_ranks(2, run)
    assert said == other
    for word in words:
        assert word in said[0]
        assert word in said[1]


def refusal(path, into, **options):
    """What is said where it is refused as it should be."""
    with pytest.raises(sw.ShardwiseError) as error:
        checkpoint.load(path, into, check=False, **options)  # which reads a little more around it
    return str(error.value)


def test_strict_refuses_what_the_checkpoint_lacks_and_else_it_is_left(small):
    into = {**filled_like_small(), "new.weight": torch.ones(3), "late": 5}
    for name in "new.weight", "late":
        assert name in refusal(small, {**filled_like_small(), name: into[name]})
    checkpoint.load(small, into, strict=False)
    same(into["embed.weight"], numbers(4, 3))
    same(into["new.weight"], torch.ones(3))
    assert (into["step"], into["late"]) == (7, 5)


def test_what_only_the_checkpoint_has_is_left(small):
    into = filled_like_small()
    del into["head.weight"]
    checkpoint.load(small, into)
    same(into["embed.weight"], numbers(4, 3))
    assert "head.weight" not in into


def test_a_tensor_of_the_checkpoint_is_not_passed_over_where_a_number_is_expected(small):
    """It is refused, or the number is set: silence would go on with the wrong number."""
    into = {**filled_like_small(), "head.bias": 0.5}
    try:
        checkpoint.load(small, into)
    except sw.ShardwiseError as error:
        said = str(error)
    else:
        said = "head.bias was passed over" if into["head.bias"] == 0.5 else "head.bias was set"
    assert "head.bias" in said
    assert "passed over" not in said


def test_options_that_are_nothing_are_refused(small):
    with pytest.raises(ValueError, match="read= must be 'each' or 'once', not 'twice'"):
        checkpoint.load(small, filled_like_small(), read="twice")
    with pytest.raises(TypeError, match="mapping"):
        checkpoint.load(small, [torch.zeros(3)])


def test_ranks_that_disagree_all_raise_the_same(small, tmp_path):
    checkpoint.save({"embed.weight": numbers(4, 3)}, tmp_path / "other")

    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (2,)), filled_like_small()
        rows = dtensor(torch.zeros(2), mesh, Shard(0))
        partial = {**whole, "head.bias": DTensor.from_local(torch.zeros(2), mesh, [Partial()])}
        cases = {
            "names": (small, {**whole, f"only{rank}": torch.zeros(1)}),
            "shapes": (small, {**whole, "head.bias": torch.zeros(2 + rank)}),
            "partial": (small, partial),
            "gone": (small if rank else tmp_path / "nowhere", whole),
            "other": (small if rank else tmp_path / "other", whole),
            "kinds": (small, {**whole, "head.bias": rows} if rank else whole),
        }
        said = {}
        for name, (path, into) in cases.items():
            for read in "each", "once":
                said[name, read] = refusal(path, into, group=dist.group.WORLD, read=read)
        return said

    said, other = on_ranks(2, run)
    assert said == other
    words = {"names": "only", "shapes": "head.bias", "partial": "partial", "gone": "nowhere", "other": "other"}
    for (name, _), text in said.items():
        assert words.get(name, "rank") in text


def test_a_value_that_only_one_rank_asks_for_in_vain_raises_on_all(small):
    def run(rank):
        into = {**filled_like_small(), **({"late": 5} if rank else {})}
        return refusal(small, into, group=dist.group.WORLD)

    said, other = on_ranks(2, run)
    assert said == other
    assert "late" in said


def test_cells_that_no_file_has_are_named(tmp_path):
    whole = numbers(12, 4)
    on_ranks(3, lambda rank: checkpoint.save({"w": held(whole, "12x4/S0@3")}, tmp_path))
    rewritten(tmp_path / INDEX, lambda said: said["tensors"]["w"].update(layout="12x4/boxes=0:4,0:4+8:12,0:4@2:0,2"))
    with pytest.raises(sw.CheckpointError, match=r"no file has \[4:8, 0:4\] of 'w'") as error:
        checkpoint.load(tmp_path, {"w": torch.zeros(12, 4)})
    assert str(tmp_path) in str(error.value)


def test_a_file_that_is_missing_is_named_on_all_ranks(tmp_path):
    whole = numbers(12, 4)
    on_ranks(3, lambda rank: checkpoint.save({"w": held(whole, "12x4/S0@3"), "r": held(numbers(2), "2/R@1")}, tmp_path))
    lost = shards_in(tmp_path)[1]
    (tmp_path / lost).unlink()

    def run(rank):
        into, some = {"w": held(torch.zeros(12, 4), "12x4/S0@3"), "r": torch.zeros(2)}, {"r": torch.zeros(2)}
        checkpoint.load(tmp_path, some, strict=False)  # the file is not needed for that
        same(some["r"], numbers(2))
        return [refusal(tmp_path, into, group=dist.group.WORLD, read=read) for read in ("each", "once")]

    found = on_ranks(3, run)
    assert found == [found[0]] * 3
    for text in found[0]:
        assert f"{lost} is missing" in text


def test_an_opened_checkpoint_is_loaded_from_again_and_again(small):
    found = checkpoint.open(small)
    for _ in range(2):
        into = filled_like_small()
        checkpoint.load(found, into)
        same(into["head.weight"], numbers(2, 3))
    assert repr(found) == f"Checkpoint({str(small)!r}, sharded, 3 tensors)"
    assert found.bytes == 4 * (12 + 6 + 2)


@pytest.mark.devices(group=False)
def test_replicas_on_a_mesh_are_all_filled(tmp_path):
    checkpoint.save({"w": numbers(8, 6)}, tmp_path)

    def run(rank):
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        into = {"w": dtensor(torch.zeros(8, 6), mesh, Replicate(), Shard(1))}
        for read in "each", "once":
            into["w"].to_local().zero_()
            checkpoint.load(tmp_path, into, read=read)
            same(full(into["w"]), numbers(8, 6))
            same(into["w"].to_local(), numbers(8, 6)[:, 3 * (rank % 2) : 3 * (rank % 2) + 3].contiguous())

    on_ranks(4, run)
