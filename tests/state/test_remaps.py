"""Tensors under other names, several that become one, one that becomes several, and dims in another order."""

from functools import lru_cache

import pytest
import torch
from models import HOWS, KEYS, Llama, all_same, held, lies, meshes, numbers, sharded, weights
from nested import terms
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import Concat, Stack, Transposed
from shardwise.job.names import renamed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
OPTIONS = ({}, {"verify": True}, {"max_bytes": 64}, {"verify": True, "max_bytes": 200})
FUSED = [
    Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"]),
    Concat("*.gate_up.weight", ["*.gate.weight", "*.up.weight"]),
]


@lru_cache
def layouts(shape):
    """Of every kind, some of them on a few ranks."""
    last = len(shape) - 1
    cells = torch.Size(shape).numel()
    return [
        sw.Layout.chunk(shape, 0, 4),
        sw.Layout.chunk(shape, last, [2, 0, 3]),
        sw.Layout.on_mesh(shape, (2, 2), ["S0", f"S{last}"]),
        sw.Layout.on_mesh(shape, (2, 2), ["R", f"S{last}"]),
        sw.Layout.replicated(shape, [1, 3]),
        sw.Layout.cyclic(shape, 0, 1, 4),
        sw.Layout.flat(shape, [(3, 0, cells // 3), (0, cells // 3, cells - 2), (1, cells - 2, cells)]),
        sw.Layout.chunk(shape, 0, [3]),
    ]


def source_layouts(values, turn):
    return [layouts(tuple(value.shape))[(turn + 3 * at) % 8] for at, value in enumerate(values.values())]


def sides(source, target, turn):
    """Both sides by layouts that change from turn to turn: the tensors of this rank, and how the target lies."""
    given = {
        name: held(value, at) for (name, value), at in zip(source.items(), source_layouts(source, turn), strict=True)
    }
    asked = dict(zip(target, source_layouts(target, 5 * turn + 1), strict=True))
    room = {name: held(torch.full_like(value, -1), asked[name]) for name, value in target.items()}
    return given, room, asked


def becomes(source, target, turns=4, **options):
    """What one side is becomes what the other is, between many shardings, and back."""
    for turn in range(turns):
        for ours, theirs in (source, target), (target, source):
            given, room, asked = sides(ours, theirs, turn)
            sw.Resharder(given, room, **options, **OPTIONS[turn % 4]).run()
            for name, value in theirs.items():
                lies(room[name], value, asked[name])


QKV = {"a.q": numbers(8, 6), "a.k": numbers(4, 6, start=100), "a.v": numbers(4, 6, start=200)}
EXPERTS = {f"e.{i}.up": numbers(6, 4, start=100 * i) for i in range(5)}


@pytest.mark.devices
def test_several_tensors_become_one_and_back(ranks):  # noqa: F811
    def run(rank):
        rows = Concat("*.qkv", ["*.q", "*.k", "*.v"])
        becomes(QKV, {"a.qkv": torch.cat(list(QKV.values()))}, remap=[rows])
        across = {name: value.t().contiguous() for name, value in QKV.items()}
        for dim in 1, -1:
            columns = Concat("*.qkv", ["*.q", "*.k", "*.v"], dim=dim)
            becomes(across, {"a.qkv": torch.cat(list(across.values()), dim=1)}, turns=2, remap=[columns])

    ranks(4, run)


@pytest.mark.devices
def test_experts_become_one_tensor_and_back(ranks):  # noqa: F811
    def run(rank):
        for dim in 0, 1, -1:
            stacked = {"e.up": torch.stack(list(EXPERTS.values()), dim=dim)}
            becomes(EXPERTS, stacked, turns=4 if dim == 0 else 1, remap=[Stack("*.up", "*.{}.up", dim=dim)])

    ranks(4, run)


@pytest.mark.devices
def test_parts_without_cells(ranks):  # noqa: F811
    def run(rank):
        parts = {"a.q": numbers(4, 6), "a.k": numbers(0, 6), "a.v": numbers(4, 6, start=50)}
        rows = Concat("*.qkv", ["*.q", "*.k", "*.v"])
        whole = {"a.qkv": torch.cat(list(parts.values()))}
        for source, target in ("4x6/S0@4", "8x6/S1@4"), ("4x6/R@2:1,3", "8x6/S0@4"):
            placed = {"a.q": source, "a.k": "0x6/S0@4", "a.v": source, "a.qkv": target}
            for ours, theirs in (parts, whole), (whole, parts):
                given = {name: held(value, placed[name]) for name, value in ours.items()}
                room = {name: held(torch.full_like(value, -1), placed[name]) for name, value in theirs.items()}
                sw.Resharder(given, room, remap=[rows]).run()
                for name, value in theirs.items():
                    lies(room[name], value, placed[name])

    ranks(4, run)


@pytest.mark.devices
def test_dims_stored_in_another_order(ranks):  # noqa: F811
    def run(rank):
        flat, deep = numbers(6, 4), numbers(3, 4, 5)
        becomes({"w": flat, "b": flat}, {"w": flat.t().contiguous(), "b": flat}, remap=[Transposed("w")])
        becomes({"w": deep}, {"w": deep.permute(2, 1, 0).contiguous()}, turns=2, remap=[Transposed("*")])
        for turn in range(4):
            turned = {"w": deep.permute(1, 2, 0).contiguous()}  # the source is the target, its dims in this order
            given, room, asked = sides({"w": deep}, turned, turn)
            sw.Resharder(given, room, remap=[Transposed("w", order=(2, 0, 1))]).run()
            lies(room["w"], turned["w"], asked["w"])

    ranks(4, run)


@pytest.mark.devices
def test_all_of_it_at_once_under_other_names_and_dtypes(ranks):  # noqa: F811
    def run(rank):
        source = {**{f"model.{name}": value for name, value in {**QKV, **EXPERTS}.items()}, "model.w": numbers(6, 4)}
        target = {
            "e.up": torch.stack(list(EXPERTS.values())).to(torch.bfloat16),
            "w": source["model.w"].t().contiguous(),
            "a.qkv": torch.cat(list(QKV.values())).double(),
        }
        remap = [Concat("*.qkv", ["*.q", "*.k", "*.v"]), Stack("*.up", "*.{}.up"), Transposed("w")]
        for turn in range(4):
            given, room, asked = sides(source, target, turn)
            how = {"rename": {"model.*": "*"}, "remap": remap, "cast": True}
            sw.Resharder(given, room, **how, **OPTIONS[turn]).run()
            for name, value in target.items():
                lies(room[name], value, asked[name])

    ranks(4, run)


def test_the_weights_of_a_llama_as_a_server_stores_them(ranks):  # noqa: F811
    def fused(found):
        """As vLLM stores them: q, k, v in one, gate and up in one."""
        found = {name.replace(".attention.", ".self_attn."): value for name, value in found.items()}
        for at in range(2):
            layer = f"layers.{at}"
            parts = {
                "self_attn.qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
                "mlp.gate_up": ("mlp.gate", "mlp.up"),
            }
            for whole, names in parts.items():
                several = [found.pop(f"{layer}.{name}.weight") for name in names]
                found[f"{layer}.{whole}.weight"] = torch.cat(several)
        return found

    def run(rank):
        expected = fused(weights(Llama(1)))
        assert expected["layers.1.self_attn.qkv.weight"].shape[0] == 32 + 2 * 4 * KEYS
        names = {"*.attention.*": "*.self_attn.*"}
        back = {"*.self_attn.*": "*.attention.*"}
        where = {name: placed(name, value.shape) for name, value in expected.items()}
        for how in HOWS:
            model = sharded(how, 1)
            room = {name: held(torch.zeros_like(value), where[name]) for name, value in expected.items()}
            sw.Resharder(model.state_dict(), room, rename=names, remap=FUSED, verify=how == "tp").run()
            for name, value in expected.items():
                lies(room[name], value, where[name])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            sw.Resharder(room, model.state_dict(), rename=back, remap=FUSED).run()
            all_same(weights(model), weights(Llama(1)))

    def placed(name, shape):
        """Servers on ranks 0 and 2: q, k and v each split over both, as they are in one tensor; the rest by rows."""
        qkv = sw.Layout.fused(shape, 0, [32, 16, 16], [0, 2]) if "qkv" in name else None
        return qkv or sw.Layout.chunk(shape, 0, [0, 2])

    ranks(4, run)


# --- names -----------------------------------------------------------------------------------------------------------

RENAMES = [
    {"one.w": "first.w", "two.w": "second.w"},
    {"one.*": "first.*", "two.*": "second.*"},
    [("one.w", "first.w"), ("o*", "never"), ("two.*", "second.*")],  # the first match wins
    lambda name: name.replace("one", "first").replace("two", "second"),
    lambda name: [name.replace("one", "first").replace("two", "second")],
]


def test_tensors_get_other_names_by_a_mapping_by_rules_and_by_a_function(ranks):  # noqa: F811
    source = {"one.w": numbers(6, 4), "two.w": numbers(4, 6, start=50), "same": numbers(5, 3)}
    target = {"second.w": source["two.w"], "same": source["same"], "first.w": source["one.w"]}

    def run(rank):
        for turn, rename in enumerate(RENAMES):
            given, room, asked = sides(source, target, turn)
            sw.Resharder(given, room, rename=rename).run()
            for name, value in target.items():
                lies(room[name], value, asked[name])

    ranks(4, run)


@pytest.mark.parametrize("rule", ["ab", ("a",), ("a", "b", "c"), (1, "b"), {"a": "b", "c": "d"}, 7])
def test_a_rule_that_is_no_pair_of_a_pattern_and_a_name_is_refused(rule):
    with pytest.raises(ValueError, match="a rule is a pair of a pattern and the new name, not"):
        renamed("a", [rule])


@pytest.mark.devices
def test_tied_weights(ranks):  # noqa: F811
    embed = numbers(6, 4)

    def run(rank):
        # one becomes two
        target = {"embed.w": embed, "head.w": embed, "other": embed + 1}
        given, room, asked = sides({"embed.w": embed, "other": embed + 1}, target, 1)
        sw.Resharder(given, room, rename={"embed.*": ["embed.*", "head.*"]}).run()
        for name, value in target.items():
            lies(room[name], value, asked[name])
        # two names of the same memory become one, and two of the same memory
        shared = held(embed, "6x4/S0@4")
        for theirs, how in ({"embed": 0}, {"strict": False}), ({"embed": 0, "head": 0}, {}):
            room = dict.fromkeys(theirs, held(torch.zeros(6, 4), "6x4/S1@4"))
            sw.Resharder({"embed": shared, "head": shared}, room, **how).run()
            lies(room["embed"], embed, "6x4/S1@4")

    ranks(4, run)


def test_what_the_target_does_not_want_can_be_left_out(ranks):  # noqa: F811
    def run(rank):
        source = {"a": numbers(6, 4), "rotary": numbers(5), "b": numbers(4, 6), "old.a": numbers(2, 2)}
        target = {"b": source["b"], "a": source["a"]}
        given, room, asked = sides(source, target, 2)
        sync = sw.Resharder(given, room, strict=False)
        assert {entry.link.source for entry in sync.plan.links} == {"a", "b"}
        sync.run()
        for name, value in target.items():
            lies(room[name], value, asked[name])

    ranks(4, run)


def test_nested_state_dicts_and_values_that_are_no_tensors(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(8, 6)
        source = {"model": {"w": held(whole, "8x6/S0@4"), 1: [held(whole + 1, "8x6/S1@4")]}, "step": rank}
        target = {"model": {"w": torch.zeros(8, 6), 1: [torch.zeros(8, 6)]}, "epoch": "one", "empty": {}}
        sw.Resharder(source, target).run()
        all_same({"w": target["model"]["w"], "l": target["model"][1][0]}, {"w": whole, "l": whole + 1})
        assert target["epoch"] == "one"

    ranks(4, run)


@pytest.mark.devices
def test_terms_are_added_up_on_the_way(ranks):  # noqa: F811
    def run(rank):
        row, _ = meshes()
        whole = numbers(8, 6)
        room = {"w": held(torch.zeros(8, 6), "8x6/S1@4"), "b": torch.zeros(6)}
        sync = sw.Resharder({"w": terms(whole, row), "b": whole[0].clone()}, room)
        for _ in range(2):
            sync.run()
            lies(room["w"], whole, "8x6/S1@4")
            all_same({"b": room["b"]}, {"b": whole[0]})

    ranks(4, run)


@pytest.mark.devices
def test_terms_are_added_up_into_a_part_of_a_tensor(ranks):  # noqa: F811
    def run(rank):
        row, _ = meshes()
        whole = numbers(8, 6)
        given = {"q": terms(whole, row), "k": held(whole + 50, "8x6/S0@4")}
        room = {"qk": held(torch.zeros(16, 6), "16x6/S1@4")}
        sw.Resharder(given, room, remap=[Concat("qk", ["q", "k"])]).run()
        lies(room["qk"], torch.cat([whole, whole + 50]), "16x6/S1@4")

    ranks(4, run)
