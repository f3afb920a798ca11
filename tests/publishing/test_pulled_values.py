"""Pulled weights are those that were published, whatever the shardings of the two jobs."""

import sys
from pathlib import Path

import pytest
import torch
from numbered import Derived, Weights, cells
from separate_jobs import SHAPES, by_columns, by_rows, jobs, replicated  # noqa: F401

import shardwise as sw
from shardwise import Concat, Layout, Padded, Quantized, Transposed

for folder in ("engines", "quantized"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

from loaders import Engine  # noqa: E402
from references import dequantized, random_codes, random_scales  # noqa: E402

SMALL = sw.quantized.FORMATS["fp8-block"].with_block((4, 3))


def uneven(owners):
    """All on the last rank but for a row of each on the first: others have nothing, or an empty shard."""
    return {
        name: Layout.split(shape, 0, [1, *[0] * (owners - 2), shape[0] - 1][-owners:], range(owners))
        if owners > 1
        else Layout.replicated(shape, 1)
        for name, shape in SHAPES.items()
    }


def cyclic(owners):
    """Several shards of a tensor on a rank."""
    return {name: Layout.cyclic(shape, 0, 2, owners) for name, shape in SHAPES.items()}


def boxed(owners):
    """Other cuts for each tensor, on some of the ranks only."""
    return {
        "w": Layout.boxes(
            (12, 10), [(owners - 1, (0, 0), (12, 3)), (0, (0, 3), (5, 10)), (owners - 1, (5, 3), (12, 10))]
        ),
        "b": Layout.replicated((7,), [owners - 1]),
        "norm": Layout.chunk((5, 4, 3), 1, [0]),
    }


@pytest.mark.parametrize(
    ("size", "source", "far"), [(1, cyclic, None), (2, by_rows, "a"), (3, uneven, None), (4, boxed, "a")]
)
def test_every_sharding_becomes_every_other_from_the_publisher_and_from_each_other(jobs, size, source, far):  # noqa: F811
    trainer = jobs.trainer(size, source(size), keep=2, host=far)
    layouts = [(1, replicated), (2, by_columns), (3, uneven)]
    servers = [jobs.server(count, layout(count), host=far and "b") for count, layout in layouts]
    for version in range(1, 4):
        trainer.commit(version)
        for server in servers[version - 1 :] + servers[: version - 1]:  # each is the first one of its host once
            assert server.pull() == version
    assert trainer.versions == [2, 3]


def test_plain_tensors_of_one_process_without_a_group_go_to_ranks_and_back(jobs):  # noqa: F811
    alone = jobs.trainer(1, replicated(1), kind="plain")
    alone.commit(1)
    two = jobs.server(2, boxed(2), verify=True)
    assert two.pull() == 1
    single = jobs.server(1, replicated(1), kind="plain", grouped=True)  # a group of one
    assert single.pull() == 1


# --- remapped --------------------------------------------------------------------------------------------------------


def source_of(step):
    """The whole tensors of the trainer, as floats."""
    return {name: cells(name, shape, torch.float32, step) for name, shape in SHAPES.items()}


def fused(step):
    given = source_of(step)
    w, b = given["w"], given["b"]
    padded = torch.full((9,), -3.0)  # what was there stays
    padded[:7] = b
    return {"model.ww": torch.cat([w, w]), "model.bias": padded, "model.norm": given["norm"].permute(2, 1, 0)}


def subscribes(layouts, whole, **options):
    """What makes a server whose weights are those of `whole`."""

    def prepare(me):
        me.weights = Derived(me.rank, layouts, whole, kind=options.get("kind", "sharded"))

    return prepare


def test_weights_are_renamed_joined_padded_and_transposed_on_the_way(jobs):  # noqa: F811
    floats = dict.fromkeys(SHAPES, torch.float32)
    trainer = jobs.trainer(2, by_rows(2), floats)
    rules = [
        Concat("model.ww", ["w", "w2"]),
        Padded("model.bias", fill="keep"),
        Transposed("model.norm"),
    ]
    options = {"remap": rules, "rename": {"b": "model.bias", "norm": "model.norm", "w": ["w", "w2"]}}
    layouts = [
        {"ww": Layout.chunk((24, 10), 1, 2), "bias": Layout.chunk((9,), 0, 2), "norm": Layout.replicated((3, 4, 5), 2)},
        {"ww": Layout.chunk((24, 10), 0, 3), "bias": Layout.replicated((9,), 3), "norm": Layout.chunk((3, 4, 5), 2, 3)},
    ]
    layouts = [{f"model.{name}": layout for name, layout in one.items()} for one in layouts]
    servers = [jobs.server(2, prepare=subscribes(layouts[0], fused), **options)]
    servers += [jobs.server(3, prepare=subscribes(layouts[1], fused), host="b", **options) for _ in range(2)]
    for version in 1, 2:
        trainer.commit(version)
        for server in servers:  # one maps them, one is sent them, and one gets them from that one
            assert server.pull() == version


def test_weights_are_cast_on_the_way(jobs):  # noqa: F811
    trainer = jobs.trainer(2, by_rows(2), dict.fromkeys(SHAPES, torch.float64))
    trainer.commit(3)
    narrow = {"w": torch.float32, "b": torch.bfloat16, "norm": torch.float16}

    def whole(step):
        return {name: cells(name, SHAPES[name], torch.float64, step).to(dtype) for name, dtype in narrow.items()}

    for host in None, "b", "b":
        server = jobs.server(2, prepare=subscribes(by_columns(2), whole), cast=True, overflow="allow", host=host)
        assert server.pull() == 3


def test_a_server_that_wants_less_gets_less(jobs):  # noqa: F811
    jobs.trainer(2).commit(1)
    server = jobs.server(1, {"b": Layout.replicated((7,), 1)}, strict=False)
    assert server.pull() == 1


def nested(me):
    """Dicts and lists around plain tensors, beside what is not a tensor."""
    floats = dict.fromkeys(SHAPES, torch.float32)
    me.weights = Weights(me.rank, replicated(1), floats, kind="plain")
    flat = me.weights.state
    me.weights.state = {"model": {"w": flat["w"], "b": flat["b"]}, "more": [flat["norm"], "text"], "step": 7}


def test_nested_state_dicts_are_published_and_filled(jobs):  # noqa: F811
    trainer = jobs.trainer(1, prepare=nested)
    trainer.commit(2)
    assert jobs.server(1, prepare=nested).pull() == 2


# --- what engines have -----------------------------------------------------------------------------------------------


class RecordedEngine:
    """The parameters of an engine, filled under the names of a checkpoint."""

    def __init__(self, rank, size):
        self.rank, self.size, self.engine = rank, size, Engine(rank, size)
        self.state = sw.engines.record(self.engine.load_weights, Engine.like())
        self.names = [name for name in Engine.shapes if name != "unused"]

    def step(self):
        for step in range(4):
            loaded = Engine(self.rank, self.size)
            loaded.load_weights(Engine.values(step).items())
            pairs = zip(self.engine.parameters(), loaded.parameters(), strict=True)
            if all(torch.equal(mine, theirs) for mine, theirs in pairs):
                return step
        return None


class EngineWeights:
    """Weights of a trainer, as an engine's checkpoint has them."""

    def __init__(self):
        self.state = {name: value for name, value in Engine.values().items() if name != "unused"}

    def fill(self, step):
        for name, value in Engine.values(step).items():
            if name in self.state:
                self.state[name].copy_(value)


def test_engines_are_filled_through_a_recording_of_their_own_loader(jobs):  # noqa: F811
    def trains(me):
        me.weights = EngineWeights()

    def serves(me):
        me.weights = RecordedEngine(me.rank, me.size)

    RecordedEngine(0, 1)  # imports much: once here, and not on every rank
    trainer = jobs.trainer(1, prepare=trains)
    servers = [jobs.server(2, prepare=serves, cast=True, overflow="allow", host=host) for host in (None, "b")]
    for version in 1, 2:
        trainer.commit(version)
        for server in servers:
            assert server.pull() == version


def codes_at(step):
    """Quantized weights, others at every step."""
    shape = (11, 10)
    return {"a.w": random_codes(shape, SMALL, step), "a.s": random_scales(SMALL.grid(shape), torch.float32, step)}


class Codes:
    """A trainer's weights that are codes and scales, by rows."""

    def __init__(self, rank, size):
        self._parts = Derived(
            rank,
            {"a.w": Layout.chunk((11, 10), 0, size), "a.s": Layout.chunk(codes_at(0)["a.s"].shape, 1, size)},
            codes_at,
        )
        self.state = self._parts.state

    def fill(self, step):
        for name, shards in self._parts.shards.items():
            for shard, value in zip(shards, self._parts._expected[step % 8][name], strict=True):
                shard.copy_(value)


def test_codes_and_scales_are_dequantized_on_the_way(jobs):  # noqa: F811
    def trains(me):
        me.weights = Codes(me.rank, me.size)

    def whole(step):
        given = codes_at(step)
        return {"a.w": dequantized(given["a.w"], given["a.s"], SMALL, torch.bfloat16)}

    trainer = jobs.trainer(2, prepare=trains)
    rule = Quantized("*.w", "*.s", format=SMALL)
    layouts = [{"a.w": Layout.chunk((11, 10), 1, 2)}, {"a.w": Layout.cyclic((11, 10), 0, 2, 3)}]
    servers = [jobs.server(2, prepare=subscribes(layouts[0], whole), remap=[rule])]
    servers += [jobs.server(3, prepare=subscribes(layouts[1], whole), remap=[rule], host="b") for _ in range(2)]
    for version in 1, 2:
        trainer.commit(version)
        for server in servers:
            assert server.pull() == version
