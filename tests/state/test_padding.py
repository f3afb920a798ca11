"""Padding, alternating parts and rotary orders: between shardings, from files and into files."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import held, lies

import shardwise as sw
from shardwise import Concat, Interleaved, Padded, Rotary, Stack, Transposed, checkpoint
from shardwise.containers.delivered import DeliveredTensor, Delivery
from shardwise.job.remap import links, shapes_after
from shardwise.testing import on_ranks


def cells(*shape, start=1):
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


# --- padding composes ------------------------------------------------------------------------------------------------


@st.composite
def padded_moves(draw):
    """Parts that are padded, joined, perhaps padded again, and transposed; both sides, and the rules."""
    count, rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parts = {f"{n}.part": cells(rows, columns, start=10 * n + 1) for n in range(count)}
    rules, more = [], draw(st.integers(0, 3))
    values = list(parts.values())
    if more:
        rules.append(Padded("*.part", size=rows + more))
        values = [torch.nn.functional.pad(value, (0, 0, 0, more)) for value in values]
    kind = draw(st.sampled_from(["concat", "stack", "interleaved"]))
    if kind == "stack":
        whole, rule = torch.stack(values), Stack("whole", "{}.part")
    elif kind == "concat":
        whole, rule = torch.cat(values), Concat("whole", list(parts))
    else:
        whole, rule = torch.stack(values, 1).reshape(-1, columns), Interleaved("whole", list(parts), [1] * count)
    rules.append(rule)
    again = draw(st.integers(0, 3))
    if again:
        rules.append(Padded("whole", size=columns + again, dim=-1))
        whole = torch.nn.functional.pad(whole, (0, again))
    if draw(st.booleans()):
        rules.append(Transposed("whole"))
        whole = whole.permute(*reversed(range(whole.dim()))).contiguous()
    return parts, {"whole": whole}, rules


def same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def like(values):
    return {name: torch.full_like(value, -1) for name, value in values.items()}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(padded_moves())
def test_padded_tensors_are_loaded_and_converted(tmp_path_factory, move):
    source, target, rules = move
    folder = tmp_path_factory.mktemp("padded")
    torch.save(source, folder / "in.pt")
    into = like(target)
    checkpoint.load(folder / "in.pt", into, remap=rules)
    same(into, target)
    checkpoint.convert(folder / "in.pt", folder / "out.pt", remap=rules, durable=False)
    same(torch.load(folder / "out.pt"), target)


def test_padded_tensors_are_synced_between_shardings():
    drawn = []

    @settings(max_examples=12, database=None, derandomize=True)
    @given(padded_moves())
    def draw(move):
        drawn.append(move)

    draw()

    def run(rank):
        for source, target, rules in drawn:
            given = {n: held(value, sw.Layout.chunk(value.shape, 0, 2)) for n, value in source.items()}
            asked = {n: sw.Layout.chunk(value.shape, -1, [1, 0]) for n, value in target.items()}
            room = {n: held(torch.full_like(value, -1), asked[n]) for n, value in target.items()}
            for verify in False, True:
                sync = sw.Resharder(given, room, remap=rules, verify=verify)
                sync.run()
                for name, value in target.items():
                    lies(room[name], value, asked[name])

    on_ranks(2, run)


# --- a vocabulary ----------------------------------------------------------------------------------------------------

WORDS = Padded("embed", multiple=8)


def test_a_longer_target_is_filled_with_zeros_or_left_as_it_is(tmp_path):
    checkpoint.save({"embed": cells(11, 4)}, tmp_path / "c")
    for rule, expected in (WORDS, 0.0), (Padded("embed", fill="keep"), 7.0):
        into = {"embed": torch.full((16, 4), 7.0)}
        checkpoint.load(tmp_path / "c", into, remap=[rule])
        torch.testing.assert_close(into["embed"], torch.cat([cells(11, 4), torch.full((5, 4), expected)]))


@pytest.mark.devices
def test_a_verified_sync_keeps_padding():
    def run(rank):
        source = sw.ShardedTensor([cells(3, 2)] * (rank == 0), sw.Layout.chunk((3, 2), 0, [0]))
        target = sw.ShardedTensor([torch.full((2, 2), 9.0)], sw.Layout.chunk((4, 2), 0, 2))
        sw.Resharder({"a": source}, {"a": target}, remap=[Padded("a", fill="keep")], verify=True).run()
        expected = torch.cat([cells(3, 2), torch.full((1, 2), 9.0)]).chunk(2)[rank]
        torch.testing.assert_close(target.shards[0], expected)

    on_ranks(2, run)


def test_memory_that_an_engine_gets_has_no_padding_to_keep():
    def run(rank):
        layout, delivery = sw.Layout.chunk((4, 2), 0, 1), Delivery(("a",), lambda filled: None)
        target = DeliveredTensor(delivery, layout, torch.float32, device=torch.device("cpu"), group=None, owner=0)
        with pytest.raises(ValueError, match="'a' gets new memory, which has no padding to keep"):
            sw.Resharder({"a": cells(3, 2)}, {"a": target}, remap=[Padded("a", fill="keep")])

    on_ranks(1, run)


def test_tensors_on_the_meta_device_have_no_padding_to_keep(tmp_path):
    checkpoint.save({"a": cells(2, 3)}, tmp_path / "saved")
    into = {"a": torch.empty(4, 3, device="meta")}
    with pytest.raises(sw.CheckpointError, match="'a' gets new memory, which has no padding to keep"):
        checkpoint.load(tmp_path / "saved", into, remap=[Padded("a", fill="keep")])


def test_padding_alone_is_loaded(tmp_path):
    checkpoint.save({"a": torch.empty(0, 3)}, tmp_path / "empty")
    into = {"a": cells(2, 3)}
    checkpoint.load(tmp_path / "empty", into, remap=[Padded("a")])
    torch.testing.assert_close(into["a"], torch.zeros(2, 3))


def test_the_padding_of_a_longer_source_is_left_out(tmp_path):
    checkpoint.save({"embed": cells(16, 4)}, tmp_path / "c")
    into = {"embed": torch.zeros(11, 4)}
    checkpoint.load(tmp_path / "c", into, remap=[WORDS])
    torch.testing.assert_close(into["embed"], cells(16, 4)[:11])
    checkpoint.convert(tmp_path / "c", tmp_path / "d", remap=[Padded("embed", size=11)], durable=False)
    torch.testing.assert_close(checkpoint.open(tmp_path / "d")["embed"].read(), cells(16, 4)[:11])


def test_padding_is_not_sent():
    def run(rank):
        source = {"embed": held(cells(11, 4), sw.Layout.chunk((11, 4), 0, 2))}
        target = {"embed": held(torch.full((4096, 4), 7.0), sw.Layout.chunk((4096, 4), 0, 2))}
        sync = sw.Resharder(source, target, remap=[Padded("embed")])
        sync.run()
        lies(target["embed"], torch.cat([cells(11, 4), torch.zeros(4085, 4)]), sw.Layout.chunk((4096, 4), 0, 2))
        return sync.plan.bytes_moved, "zeros of 4085x4 for embed" in sync.plan.explain()

    moved, told = on_ranks(2, run)[0]
    assert moved == 5 * 4 * 4  # the rows of rank 1
    assert told


def test_readers_that_share_files_fill_padding_too(tmp_path):
    checkpoint.save({"embed": cells(11, 4)}, tmp_path / "c")

    def run(rank):
        layout = sw.Layout.chunk((16, 4), 0, 2)
        into = {"embed": held(torch.full((16, 4), 7.0), layout)}
        checkpoint.load(tmp_path / "c", into, remap=[WORDS], read="once", group=torch.distributed.group.WORLD)
        lies(into["embed"], torch.cat([cells(11, 4), torch.zeros(5, 4)]), layout)

    on_ranks(2, run)


# --- alternating parts -----------------------------------------------------------------------------------------------


@pytest.mark.devices
def test_qkv_of_every_head_becomes_q_k_and_v_of_a_server():
    heads, size, width = 4, 3, 5
    q, k, v = (cells(heads, size, width, start=1000 * n) for n in range(3))
    fused = torch.stack([q, k, v], 1).reshape(-1, width)
    rule = Interleaved("qkv", ["q", "k", "v"], [size] * 3)

    def run(rank):
        source = {"qkv": held(fused, sw.Layout.chunk(fused.shape, 0, 2))}
        layout = sw.Layout.chunk((heads * size, width), 1, 2)
        target = {n: held(torch.zeros(heads * size, width), layout) for n in "qkv"}
        sync = sw.Resharder(source, target, remap=[rule])
        sync.run()
        for name, value in zip("qkv", (q, k, v), strict=True):
            lies(target[name], value.reshape(-1, width), layout)
        return sync.plan.bytes_moved == sync.plan.lower_bound, sync.plan.links[1].link

    least, link = on_ranks(2, run)[0]
    assert least
    assert str(link.source_view) == "[3:33 as 4 by 9 x 3 by 1, 0:5]"


def test_a_thousand_alternating_rows_are_one_window():
    planned = links({"gu": (4096, 8)}, {"g": (2048, 8), "u": (2048, 8)}, remap=[Interleaved("gu", ["g", "u"], [1, 1])])
    assert [str(link.source_view) for link in planned] == ["[0:4095:2, 0:8]", "[1:4096:2, 0:8]"]
    assert [link.target_view.is_whole((2048, 8)) for link in planned] == [True, True]


def test_meta_llama_becomes_transformers_llama():
    heads, size, width = 2, 8, 3
    meta = cells(heads * size, width)
    expected = meta.view(heads, size // 2, 2, width).transpose(1, 2).reshape(heads * size, width)
    (first, *rest) = links({"q": meta.shape}, {"q": meta.shape}, remap=[Rotary("q", size, to="halves")])
    assert not rest
    found = torch.zeros_like(meta)
    strided(first.target_view, found).copy_(strided(first.source_view, meta))
    torch.testing.assert_close(found, expected)


def strided(view, whole):
    offset = sum(at * stride for at, stride in zip(view.start, whole.stride(), strict=True))
    return whole.as_strided(view.shape, [whole.stride(d.of) * d.step for d in view.dims], offset)


def test_cells_that_are_not_rotary_stay():
    value, rule = cells(12), Rotary("q", 6, to="halves", rotary_dim=4, start=1)
    found = torch.zeros(12)
    for link in links({"q": (12,)}, {"q": (12,)}, remap=[rule]):
        strided(link.target_view, found).copy_(strided(link.source_view, value))
    assert found.tolist() == [1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11, 12]


# --- refused ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "no parts": (
        ({"gu": (8, 2)}, {"g": (4, 2), "u": (4, 2)}, [Concat("gu", [])]),
        "`parts` must be a list of different names",
    ),
    "no whole groups": (
        ({"gu": (7, 2)}, {"g": (4, 2), "u": (3, 2)}, [Interleaved("gu", ["g", "u"], [1, 1])]),
        "7 along dim 0 is not a multiple of a group: 2, all sizes (by Interleaved(",
    ),
    "sizes of other parts": (
        ({"gu": (8, 2)}, {"g": (4, 2), "u": (4, 2)}, [Interleaved("gu", ["g", "u"], [1])]),
        "`sizes` must be a list with a whole number above 0 for each part",
    ),
    "parts of other lengths": (
        ({"gu": (9, 2)}, {"g": (5, 2), "u": (4, 2)}, [Interleaved("gu", ["g", "u"], [1, 2])]),
        "'g' has shape (3, 2) in the source, but (5, 2) in the target",
    ),
    "half a head": (
        ({"q": (10, 2)}, {"q": (10, 2)}, [Rotary("q", 4, to="pairs")]),
        "'q': 10 along dim 0 is not a multiple of head_dim=4 (by Rotary(",
    ),
    "an odd number of rotary cells": (
        ({"q": (10, 2)}, {"q": (10, 2)}, [Rotary("q", 5, to="pairs")]),
        "5 rotary cells from cell 0 on are not an even part of 5",
    ),
    "an unknown order": (
        ({"q": (8, 2)}, {"q": (8, 2)}, [Rotary("q", 4, to="neox")]),
        '`to` "halves" or "pairs"',
    ),
    "padding along another dim": (
        ({"e": (10, 2)}, {"e": (10, 3)}, [Padded("e")]),
        "'e': (10, 2) and (10, 3) differ in other dims than dim 0 (by Padded(",
    ),
    "padding of another size": (
        ({"e": (10, 2)}, {"e": (12, 2)}, [Padded("e", size=16)]),
        "'e': neither (10, 2) nor (12, 2) has size=16 along dim 0",
    ),
    "padding to no multiple": (
        ({"e": (10, 2)}, {"e": (12, 2)}, [Padded("e", multiple=8)]),
        "'e': 12 along dim 0 is not a multiple of multiple=8",
    ),
    "padding that is kept on the way": (
        ({"e": (3, 2), "f": (1, 2)}, {"ef": (5, 2)}, [Padded("e", size=4, fill="keep"), Concat("ef", ["e", "f"])]),
        'fill="keep" is only possible for a tensor of the target itself',
    ),
    "two rules of one kind": (
        ({"e": (3, 2)}, {"e": (5, 2)}, [Padded("e"), Padded("*")]),
        "'e' would come both from Padded(name='e'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what):
    (source, target, rules), words = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(words)):
        links(source, target, remap=rules)


def test_conversions_need_a_size_and_keep_nothing():
    with pytest.raises(ValueError, match=re.escape("give either size= or multiple= (by Padded(")):
        shapes_after({"e": (3, 2)}, remap=[Padded("e")])
    with pytest.raises(ValueError, match="a new tensor has no padding to keep"):
        shapes_after({"e": (3, 2)}, remap=[Padded("e", size=4, fill="keep")])


def test_padding_of_one_tensor_excuses_no_other():
    with pytest.raises(ValueError, match=re.escape("no place for cells [0:2, 0:2] of 'qk'")):
        links(
            {"e": (3, 2), "qk": (4, 2)},
            {"e": (5, 2), "k": (2, 2)},
            remap=[Padded("e"), Concat("qk", ["q", "k"], sizes=[2, 2])],
        )
    with pytest.raises(ValueError, match=re.escape("no place for cells [0:1, 0:1] of 'qk'")):
        links({"qk": (4, 2)}, {"k": (2, 2)}, remap=[Interleaved("qk", ["q", "k"], [1, 1])])
