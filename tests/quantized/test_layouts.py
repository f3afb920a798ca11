"""The layout of the scales follows from that of the codes: every owner has the scales of its cells, and no others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import Layout, LayoutError
from shardwise.quantized import FORMATS, scales_layout
from shardwise.testing import strategies

KINDS = [kind for kind in strategies.KINDS if kind != "partial"]


@st.composite
def coupled(draw):
    format = FORMATS["fp8-block"].with_block(draw(st.tuples(st.integers(1, 4), st.integers(1, 4))))
    if draw(st.booleans()):
        format = FORMATS[draw(st.sampled_from(["fp8-row", "fp8-tensor", "int8-scb"]))]
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return draw(strategies.layouts(shape, KINDS)), format


def cells(boxes):
    return {
        cell for box in boxes for cell in np.ndindex(*box.hi) if all(a <= c for a, c in zip(box.lo, cell, strict=True))
    }


@given(coupled())
def test_every_owner_has_the_scales_of_its_cells_and_no_others(given):
    codes, format = given
    scales, blocks = scales_layout(codes, format), format.blocks(codes.shape)
    assert scales.owners() == codes.owners()
    for owner in codes.owners():
        mine = cells(piece.box for piece in codes.pieces(owner))
        wanted = {tuple(c // b for c, b in zip(cell, blocks, strict=True)) for cell in mine}
        assert cells(piece.box for piece in scales.pieces(owner)) == wanted


@given(coupled())
def test_scales_layouts_are_valid_and_the_same_without_dims_of_size_one(given):
    codes, format = given
    scales = scales_layout(codes, format).validate()
    for shape in filter(None, format.scales_shapes(codes.shape)):
        short = scales_layout(codes, format, shape)
        for owner in codes.owners():
            wanted = [piece.box.lo[: len(shape)] for piece in scales.pieces(owner)]
            assert [piece.box.lo for piece in short.pieces(owner)] == wanted


def test_a_cut_through_a_block_gives_its_scale_to_both_sides():
    layout = scales_layout(Layout.chunk((576, 256), 0, 2), "fp8-block")
    assert [str(layout.pieces(rank)[0].box) for rank in (0, 1)] == ["[0:3, 0:2]", "[2:5, 0:2]"]


def test_cuts_between_blocks_give_chunks_of_scales():
    assert scales_layout(Layout.chunk((512, 256), 0, 2), "fp8-block") == Layout.chunk((4, 2), 0, 2)
    assert scales_layout(Layout.chunk((512, 256), 1, 2), "fp8-row", (512,)) == Layout.replicated((512,), 2)


def test_groups_of_two_codes_in_a_byte_have_a_scale_each():
    codes = Layout.chunk((4, 8, 3, 16), 1, 2)
    assert scales_layout(codes, "mxfp4") == Layout.chunk((4, 8, 3), 1, 2)
    within = scales_layout(Layout.chunk((4, 8, 3, 16), 3, 2), "mxfp4")
    assert within == Layout.replicated((4, 8, 3), 2)


def test_wrong_shapes_and_partial_codes_are_refused():
    with pytest.raises(
        LayoutError, match=r"have shape \(5, 3\), but codes of shape \(576, 256\) in fp8-block need \(5, 2\)"
    ):
        scales_layout(Layout.chunk((576, 256), 0, 2), "fp8-block", (5, 3))
    with pytest.raises(LayoutError, match="partial: codes cannot be reduced"):
        scales_layout(Layout.on_mesh((576, 256), {"tp": 2}, ["P"]), "fp8-block")
