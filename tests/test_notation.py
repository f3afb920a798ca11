"""Text and layouts are inverses; a bad text is answered with the place, what was expected and a suggestion."""

import pickle
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise import Box, Fused, Heads, Layout, Mesh, NotationError, ShardwiseError, notation, parse
from shardwise.testing import strategies


@given(strategies.layouts())
@settings(max_examples=150)
def test_parse_is_the_inverse_of_str(layout):
    again = parse(str(layout))
    assert again == layout
    assert str(again) == str(layout)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), st.permutations(["dp", "tp_1", "_X"]), st.integers(0, 2**62)
)
@settings(max_examples=60)
def test_named_meshes_on_any_ranks_round_trip(sizes, names, above):
    mesh = Mesh.of(sizes, names[: len(sizes)], ranks=[above + 3 * n for n in range(Mesh.of(sizes).ranks.size)])
    layout = Layout.on_mesh((6, 4), mesh, ["S-1", "Pmax", "R"][: len(sizes)])
    assert str(parse(str(layout))) == str(layout)
    assert parse(str(layout)) == layout


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
@settings(max_examples=60)
def test_ranges_of_owners_are_written_so_that_they_read_back(owners):
    text = f"{len(owners)}/boxes={'+'.join(f'{i}:{i + 1}' for i in range(len(owners)))}@{len(owners)}"
    assert notation.read(f"{text}:{notation.write_ranges(owners)}").owners == tuple(owners)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1], "0,1"),
        ([8, 9, 10], "8-10"),
        ([0, 2, 4, 7], "0-4/2,7"),
        ([5, 4, 3], "5,4,3"),
        ([2, 2, 2], "2,2,2"),
    ],
)
def test_ranges_are_short_where_numbers_run_evenly(numbers, text):
    assert notation.write_ranges(numbers) == text


DOCUMENTED = {
    "4096x1024/S0@8": Layout.chunk((4096, 1024), 0, 8),
    "4096x1024/S0,R@fsdp=4,tp=2": Layout.on_mesh((4096, 1024), Mesh(fsdp=4, tp=2), ["S0", "R"]),
    "4096x1024/R,S1@2x4:8-15": Layout.on_mesh((4096, 1024), Mesh.of((2, 4), ranks=range(8, 16)), ["R", "S1"]),
    "10x6/split0=3,5,2@3": Layout.split((10, 6), 0, [3, 5, 2]),
    "96x64/fused0=64,16,16@4": Layout.fused((96, 64), 0, [64, 16, 16], 4),
    "96x64/R,fused0=64,16,16:8,2,2@2x4": Layout.on_mesh((96, 64), (2, 4), ["R", Fused(0, (64, 16, 16), (8, 2, 2))]),
    "16x64/heads0=2@tp=4": Layout.on_mesh((16, 64), Mesh(tp=4), [Heads(0, 2)]),
    "100x6/cyclic0=8@4": Layout.cyclic((100, 6), 0, 8, 4),
    "8x64/experts0=0,1,2,1+3,0,1,2,3@4": Layout.experts((8, 64), 0, [0, 1, 2, (1, 3), 0, 1, 2, 3]),
    "100x6/zigzag0@4": Layout.zigzag((100, 6), 0, 4),
    "8x6/boxes=0:4,0:6+4:8,0:6@2": Layout.boxes((8, 6), [(0, (0, 0), (4, 6)), (1, (4, 0), (8, 6))]),
    "8x6/flat=0-20,20-48@2": Layout.flat((8, 6), [(0, 0, 20), (1, 20, 48)]),
    "scalar/R@4": Layout.replicated((), 4),
}


@pytest.mark.parametrize("text", DOCUMENTED)
def test_the_documented_examples_mean_what_they_say(text):
    assert text in notation.__doc__
    assert parse(text) == DOCUMENTED[text]
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("8x6/S-2@4", "8x6/S0@4"),
        ("8x6/Psum@4", "8x6/P@4"),
        ("8x6/S0@4:0,1,2,3", "8x6/S0@4"),
        ("8x6/S0@4:0-3/1", "8x6/S0@4"),
        ("8x6/S0@4:6-9", "8x6/S0@4:6,7,8,9"),
        ("8x6/S0@4:0-6/2", "8x6/S0@4:0,2,4,6"),
    ],
)
def test_other_ways_to_write_the_same(text, same):
    assert parse(text) == parse(same)


def test_owners_of_boxes_and_ranges_follow_their_order():
    assert parse("8/boxes=4:8+0:4@2:7,3").owners(Box((4,), (5,))) == (7,)
    assert parse("8/flat=4-8,0-4@2:7,3").owners(Box((0,), (1,))) == (3,)
    assert [p.box.lo for p in parse("8/boxes=4:8+0:4@2:7,7").pieces(7)] == [(4,), (0,)]


BAD = [
    # (text, where, words)
    ("", 0, ["a shape", "4096x1024"]),
    ("x6/S0@4", 0, ["a shape"]),
    ("8x/S0@4", 2, ["a shape"]),
    ("8x6", 3, ["'/'", "S0"]),
    ("8x6 /S0@4", 3, ["'/'"]),
    ("8x6/", 4, ["a placement"]),
    ("8x6/Q0@4", 4, ["a placement", "S0"]),
    ("8x6/S@4", 4, ["a placement"]),
    ("8x6/s0@4", 4, ["did you mean S0?"]),
    ("8x6/r@4", 4, ["did you mean R?"]),
    ("8x6/S0,@2x2", 7, ["a placement"]),
    ("8x6/S0:@4", 6, ["'@'"]),
    ("8x6/Pmean@4", 5, ["a reduction", "avg"]),
    ("8x6/S0", 6, ["'@'", "fsdp=4,tp=2"]),
    ("8x6/S0@", 7, ["how many owners"]),
    ("8x6/S0@four", 7, ["how many owners"]),
    ("8x6/S0@4x", 9, ["how many owners"]),
    ("8x6/S0@fsdp=", 12, ["how many owners"]),
    ("8x6/S0@fsdp=4,2", 14, ["how many owners"]),
    ("8x6/S0@4 ", 8, ["the end"]),
    ("8x6/S0,R@4", 10, ["one placement for each of the 1 mesh axes, not 2"]),
    ("8x6/S0@4:", 9, ["an owner"]),
    ("8x6/S0@4:0-2", 9, ["4 owners, not 3"]),
    ("8x6/S0@2:0,3-1", 11, ["rising range"]),
    ("8x6/S0@2:0-9/0", 9, ["rising range"]),
    ("8x6/S0@2:0-999999999999", 9, ["at most 2 owners"]),
    ("8x6/splt0=3,5@2", 4, ["did you mean split?"]),
    ("8x6/box=0:8,0:6@1", 4, ["did you mean boxes?"]),
    ("8x6/split=3,5@2", 9, ["the dim", "split0=..."]),
    ("8x6/split0:3,5@2", 10, ["'='"]),
    ("8x6/split0=3,x@2", 13, ["a size"]),
    ("8x6/split0=3,5@3", 16, ["2 items of split, not 3"]),
    ("8x6/cyclic0=2,3@3", 13, ["no more numbers"]),
    ("8x6/experts0=@2", 13, ["the rank of an expert"]),
    ("8x6/experts0=0+@2", 14, ["'@'"]),
    ("8x6/zigzag0,3@3", 11, ["no more numbers"]),
    ("8x6/R,heads0=2,3@2x3", 14, ["no more numbers"]),
    ("8x6/heads0@3", 10, ["'='", "the number of heads"]),
    ("8x6/heads=2@3", 9, ["the dim", "heads0"]),
    ("8x6/R,fusd0=8@1x2", 6, ["did you mean fused?"]),
    ("8x6/fused0=4,4:x@2", 14, ["'@'"]),
    ("8x6/fused0=@2", 11, ["the size of a segment"]),
    ("8x6/boxes=0:8@1", 10, ["2 ranges such as 0:4, one per dim, not 1"]),
    ("8x6/boxes=0-8,0:6@1", 11, ["ranges such as 0:4"]),
    ("8x6/boxes=0:8,0:6@2", 19, ["1 items of boxes, not 2"]),
    ("scalar/boxes=0:1@1", 13, ["'.'"]),
    ("8x6/flat=0:20@1", 10, ["0-20"]),
    ("8x6/flat=0-20,@1", 14, ["0-20"]),
]


@pytest.mark.parametrize(("text", "where", "words"), BAD, ids=[text for text, _, _ in BAD])
def test_a_bad_text_is_answered_with_place_expectation_and_suggestion(text, where, words):
    with pytest.raises(NotationError) as caught:
        parse(text)
    error = caught.value
    assert error.position == where, str(error)
    assert [word for word in words if word not in str(error)] == [], str(error)
    shown, caret = str(error).splitlines()[-2:]
    assert caret.index("^") - 2 == error.position
    assert shown == f"  {text}"


def test_the_caret_stands_under_the_place_in_a_long_text():
    text = f"{'1x' * 200}2/Q@4"
    with pytest.raises(NotationError) as caught:
        parse(text)
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown[caret.index("^")] == "Q"
    assert len(shown) < 100


@pytest.mark.parametrize("text", ["8x6/S2@4", "8x6/R@2:1,1", "8x6/split0=3,4@2", "8x6/S0@0", "8x6/S0@x=2,x=2"])
def test_a_text_that_reads_well_but_means_nothing_is_refused_too(text):
    with pytest.raises(ShardwiseError):
        parse(text)


def test_errors_survive_pickling():
    with pytest.raises(NotationError) as caught:
        parse("8x6/S0@four")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.position) == (str(caught.value), 7)


@pytest.mark.parametrize(
    "text",
    [
        "0/fused0=0:9999999999999999998@2",
        "0/heads0=9999999999999999998@2",
        f"{'9' * 5000}/R@1",
        f"8/S0@{'9' * 5000}",
        "8/S0@ranks=2",
        "8/S0@self=2",
        "8/S0@hosts=2",
    ],
)
def test_odd_numbers_and_names_give_a_layout_or_an_error_of_ours(text):
    assert_layout_or_refusal(text)


def assert_layout_or_refusal(text):
    try:
        found = parse(text)
    except ShardwiseError:
        return
    assert isinstance(found, Layout)
    assert parse(str(found)) == found


TEXTS = [
    *DOCUMENTED,
    "8x6/S0:2,S0@2x2:3,1,0,2",
    "6/overlapping=0:4+2:6@2",
    "8x6/Pavg,R@dp=2,tp=2:0-6/2",
    "scalar/boxes=.+.@2",
]
PARTS = [
    *"0123456789x/@:,-+=.SRP",
    "split0=",
    "boxes=",
    "flat=",
    "cyclic1=",
    "heads0=",
    "fused0=",
    "zigzag1",
    "Pmax",
    "fsdp=",
    "\n",
    "\u0663",
    " ",
]


@st.composite
def mutated(draw):
    """A good text with a few pieces put in, taken out or doubled."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start, stop = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        stop = min(stop, start + 4)
        text = text[:start] + draw(st.sampled_from([*PARTS, text[start:stop] * 2, ""])) + text[stop:]
    return text


@given(mutated())
@settings(max_examples=400)
def test_no_text_gives_anything_but_a_layout_or_an_error_of_ours(text):
    assume(not re.search(r"\d{6}", text))  # worlds of millions are allowed, and slow
    assert_layout_or_refusal(text)


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_no_noise_gives_anything_but_an_error_of_ours(text):
    assert_layout_or_refusal(text)
