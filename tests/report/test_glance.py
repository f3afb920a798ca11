"""Values show themselves in notebooks and in figures, without scripts and without waiting for long."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from time import perf_counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from shardwise import Layout, Resharder, ShardedTensor, checkpoint, parse, plan, receipt
from shardwise.planning import size
from shardwise.report.tiles import COLOURS
from shardwise.testing import on_ranks


def rectangles(html):
    return re.findall(r"<rect ", html)


def test_a_layout_shows_its_tiles():
    html = parse("8x6/S0@4")._repr_html_()
    assert len(rectangles(html)) == 4
    assert "8x6/S0@4" in html
    assert "<script" not in html


def test_a_plan_shows_both_layouts_and_its_totals():
    p = plan("8x6/S0@4", "8x6/S1@3")
    html = p._repr_html_()
    assert len(rectangles(html)) == 7
    assert f"moves {size(p.bytes_moved)}, {size(p.bytes_local)} stay" in html


def test_a_sharded_tensor_shows_who_holds_what_and_reads_no_value():
    html = ShardedTensor(torch.empty(2, 6, device="meta"), "2x6/S0@1")._repr_html_()
    assert "rank 0 holds [0:2, 0:6]" in html
    assert len(rectangles(html)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0x6/S0@3", "no cells"),
        ("scalar/R@2", "2 replicas"),
        ("9/cyclic0=2@2", "2 owners"),
        ("2x2x2x2/S3@2", "first slice"),
        ("8x6/P@4", "sum of 4 terms"),
        ("4096x4096/S0@4096", "64 tiles for 4,096"),
    ],
)
def test_every_layout_is_well_formed_and_says_what_is_left_out(text, said):
    html = parse(text)._repr_html_()
    assert ET.fromstring(html).tag == "div"
    assert said in html


def test_a_plan_of_very_many_owners_does_not_make_all_copies():
    p = plan(Layout.chunk((2**14, 2**14), 0, owners=2**14), Layout.chunk((2**14, 2**14), 1, owners=2**14))
    start = perf_counter()
    assert "16,384 owners" in p._repr_html_()
    assert perf_counter() - start < 5
    assert "copies" not in vars(p)


@pytest.mark.parametrize(
    ("source", "target"), [("8x6/S0,R@2x2", "8x6/P@4"), ("4x4x4/S0@4", "4x4x4/S2@200"), ("scalar/R@2", "scalar/R@3")]
)
def test_a_figure_has_both_layouts_and_the_flows(source, target, tmp_path):
    found = plan(source, target).figure()
    assert len(found.axes) == 3
    assert found.axes[0].get_title() == f"source {source}"
    found.savefig(tmp_path / "plan.pdf")
    assert (tmp_path / "plan.pdf").read_bytes().startswith(b"%PDF")


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(1, 40))
def test_the_owners_of_a_figure_have_colours_by_turns(before, after):
    both = plan(Layout.chunk((80,), 0, owners=before), Layout.chunk((80,), 0, owners=after)).figure().axes[:2]
    for axes, owners in zip(both, (before, after), strict=True):
        holders = range(-(-80 // -(-80 // owners)))  # the last may have nothing
        assert [to_hex(tile.get_facecolor()) for tile in axes.patches] == [COLOURS[at % len(COLOURS)] for at in holders]


def test_without_matplotlib_a_figure_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None; import shardwise\n"
        "try: shardwise.plan('8/S0@2', '8/R@2').figure()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "a figure needs matplotlib: pip install 'shardwise[plot]'\n"


def cells(html):
    tree = ET.fromstring(html)
    return [[cell.text or "" for cell in row] for row in tree.iter("tr")]


def test_a_checkpoint_and_a_receipt_show_rows_and_escape_names(tmp_path):
    evil = "<b>&\x1b[2J"
    torch.save({f"h.{n}.w": torch.ones(2, 3) for n in range(3)} | {evil: torch.ones(1)}, tmp_path / "p.pt")
    opened = checkpoint.open(tmp_path / "p.pt")
    titles, alike, other = cells(opened._repr_html_())
    assert titles == ["name", "tensors", "dtype", "shape", "shards", "layout", "size"]
    assert alike == ["h.{0..2}.w", "3", "float32", "2 x 3", "1", "whole", "72 B"]
    assert other[0] == "<b>&\\x1b[2J"
    rows = cells(receipt(opened)._repr_html_())
    assert [row[0] for row in rows] == ["name", "h.0.w", "h.1.w", "h.2.w", "<b>&\\x1b[2J"]
    assert rows[1][1:3] == ["[2, 3]", "float32"]


def test_long_listings_show_the_first_rows_and_count_the_others(tmp_path):
    torch.save({f"w{n:03d}": torch.ones(1) for n in range(70)}, tmp_path / "p.pt")
    html = checkpoint.open(tmp_path / "p.pt")._repr_html_()
    assert len(cells(html)) == 51
    assert "... and 20 more" in html


def test_a_plan_of_a_model_shows_its_totals_and_every_kind_of_move():
    source, target = {"w": torch.ones(4, 2), "b": torch.ones(3)}, {"w": torch.zeros(4, 2), "b": torch.zeros(3)}
    made = on_ranks(1, lambda rank: (lambda p: (p.explain(), p._repr_html_()))(Resharder(source, target).plan))[0]
    titles, *rows = cells(made[1])
    assert titles == ["tensors", "move", "between ranks", "such as"]
    assert len(rows) == 2
    assert made[0].splitlines()[0] in made[1]
