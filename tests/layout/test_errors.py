"""Bad input is refused with a ShardwiseError that says what was asked, what was found and the remedy."""

import numpy as np  # noqa: F401  the tables below are evaluated
import pytest

from shardwise import Box, Layout, Mesh, Partial, PlanError, Shard, ShardwiseError, StridedShard, parse, plan  # noqa: F401

ROWS = Layout.chunk((8, 6), 0, owners=4)

SHAPES = {
    "'8x6'": ["whole number", "'8'"],
    "8": ["sequence of whole numbers", "8"],
    "None": ["sequence of whole numbers", "None"],
    "(8, -1)": ["at least 0", "-1"],
    "(8, 2.0)": ["whole number", "2.0"],
    "(8, True)": ["whole number", "True"],
    "(8, '6')": ["whole number", "'6'"],
    "(2**30, 2**30)": ["2**50 cells"],
    "(2**80,)": ["2**50 cells"],
    "(0, 2**60)": ["2**50 cells"],
}
DIMS = {
    "2": ["no dim 2", "(8, 6)", "0..1"],
    "-3": ["no dim -3", "(8, 6)"],
    "0.0": ["dim", "0.0"],
    "True": ["dim", "True"],
    "'0'": ["dim", "'0'"],
    "None": ["dim", "None"],
    "2**70": ["no dim"],
}
OWNERS = {
    "0": ["number of owners", "at least 1", "0"],
    "-2": ["number of owners", "-2"],
    "2.0": ["owners", "2.0"],
    "True": ["owners", "True"],
    "'ab'": ["owners", "'ab'"],
    "[]": ["non-empty list", "[]"],
    "[0, 1.5]": ["whole numbers", "1.5"],
    "[True, False]": ["whole numbers", "True"],
    "[2, True]": ["whole numbers", "True"],
    "[[0, 1], [2, 3]]": ["whole numbers", "[[0, 1]"],
    "[[0], [1, 2]]": ["whole numbers", "[1, 2]"],
    "[0, -1]": ["numbered from 0", "-1"],
    "[0, 2**63]": ["2**63 - 1", str(2**63)],
    "[0, 2**70]": ["2**63 - 1"],
    "2**40": ["owners", str(2**40)],
    "2**80": ["owners", str(2**80)],
}
CALLS = [
    ("Layout.chunk({}, 0, 4)", SHAPES),
    ("Layout.split({}, 0, [8])", SHAPES),
    ("Layout.on_mesh({}, (4,), ['R'])", SHAPES),
    ("Layout.boxes({}, [(0, (0, 0), (8, 6))])", SHAPES),
    ("Layout.replicated({}, 4)", SHAPES),
    ("Layout.cyclic({}, 0, 2, 4)", SHAPES),
    ("Layout.flat({}, [(0, 0, 8)])", SHAPES),
    ("Layout.fused({}, 0, [8], 4)", SHAPES),
    ("Layout.chunk((8, 6), {}, 4)", DIMS),
    ("Layout.split((8, 6), {}, [8])", DIMS),
    ("Layout.cyclic((8, 6), {}, 2, 4)", DIMS),
    ("Layout.fused((8, 6), {}, [8], 4)", DIMS),
    ("Layout.on_mesh((8, 6), (4,), [Shard({})])", DIMS),
    ("Layout.on_mesh((8, 6), (4,), [StridedShard({}, 2)])", DIMS),
    ("Layout.chunk((8, 6), 0, {})", OWNERS),
    ("Layout.split((8, 6), 0, [4, 4], {})", OWNERS),
    ("Layout.replicated((8, 6), {})", OWNERS),
    ("Layout.cyclic((8, 6), 0, 2, {})", OWNERS),
    ("Layout.fused((8, 6), 0, [8], {})", OWNERS),
]
CONSTRUCTORS = {
    "Layout.split((8, 6), 0, [4, 5])": ["[4, 5]", "9", "dim 0", "(8, 6)", "8"],
    "Layout.split((8, 6), 0, [9, -1])": ["at least 0", "-1"],
    "Layout.split((8, 6), 0, [4.0, 4.0])": ["whole number", "4.0"],
    "Layout.split((8, 6), 0, 8)": ["sequence", "8"],
    "Layout.split((8, 6), 0, [4, 4], 3)": ["2 sizes", "3 owners"],
    "Layout.split((8,), 0, [1] * 20)": ["add up to 20", "..."],
    "Layout.fused((8, 6), 0, [4, 5], 2)": ["segments", "9", "dim 0"],
    "Layout.fused((8, 6), 0, [8], [1, 1])": ["owner 1", "more than once"],
    "Layout.cyclic((8, 6), 0, 0, 2)": ["block", "0"],
    "Layout.cyclic((8, 6), 0, 1.5, 2)": ["block", "1.5"],
    "Layout.cyclic((8, 6), 0, True, 2)": ["block", "True"],
    "Layout.cyclic((8, 6), 0, 2, [3, 3])": ["owner 3", "more than once"],
    "Layout.cyclic((2**40,), 0, 1, 2)": ["blocks", str(2**40)],
    "Layout.replicated((8, 6), [0, 0])": ["owner 0", "more than once"],
    "Layout.chunk((), 0, 2)": ["0-d", "replicated"],
    "Layout.flat((8, 6), [])": ["non-empty", "(owner, start, stop)"],
    "Layout.flat((8, 6), [(0, 4)])": ["(owner, start, stop)"],
    "Layout.flat((8, 6), [3])": ["(owner, start, stop)"],
    "Layout.flat((8, 6), 3)": ["(owner, start, stop)"],
    "Layout.flat((8, 6), [(0, 4, 49)])": ["4:49", "48 cells", "(8, 6)"],
    "Layout.flat((8, 6), [(0, 9, 4)])": ["9:4"],
    "Layout.flat((8, 6), [(0, 0.0, 4)])": ["whole number", "0.0"],
    "Layout.flat((8, 6), [('a', 0, 4)])": ["owners", "'a'"],
    "Layout.flat((8, 6), [(-1, 0, 4)])": ["owners", "-1"],
    "Layout.flat((8, 6), [(0, 0, 2**70)])": ["48 cells"],
    "Layout.boxes((8, 6), [])": ["non-empty"],
    "Layout.boxes((8, 6), 3)": ["(owner, lo, hi)"],
    "Layout.boxes((8, 6), [3])": ["(owner, lo, hi)"],
    "Layout.boxes((8, 6), [(0, (0, 0))])": ["(owner, lo, hi)"],
    "Layout.boxes((8, 6), [(0, (0, 0), (8, 6)), (1, (0, 0))])": ["(owner, lo, hi)"],
    "Layout.boxes((8, 6), [(0, (0,), (8,))])": ["lo and hi of 2", "(8, 6)"],
    "Layout.boxes((8, 6), [(0, (0, 0), (8, 6)), (1, (0,), (8,))])": ["lo and hi of 2"],
    "Layout.boxes((8, 6), [(0, (0, 0), (8, 7))])": ["box 0 of owner 0", "(8, 7)", "(8, 6)"],
    "Layout.boxes((8, 6), [(0, (-1, 0), (8, 6))])": ["box 0 of owner 0", "(-1, 0)"],
    "Layout.boxes((8, 6), [(5, (4, 0), (2, 6))])": ["owner 5", "lo <= hi"],
    "Layout.boxes((8, 6), [(0, (0.0, 0), (8, 6))])": ["whole numbers"],
    "Layout.boxes((8, 6), [(0, ('0', '0'), ('8', '6'))])": ["whole numbers"],
    "Layout.boxes((8, 6), [(0, (False, False), (8, 6))])": ["whole numbers"],
    "Layout.boxes((8, 6), [(0, (0, 0), (2**70, 6))])": ["(8, 6)"],
    "Layout.boxes((8, 6), (np.array([0]), np.zeros((1, 2), int), np.array([[2**63, 6]], 'u8')))": [str(2**63)],
    "Layout.boxes((8, 6), [(0.5, (0, 0), (8, 6))])": ["owners", "0.5"],
    "Layout.boxes((8, 6), [(0, (0, 0), (8, 6))], overlap='yes')": ["overlap", "'yes'", "'replicas'"],
    "Layout.boxes((8, 6), (np.array([0]), np.zeros((2, 2), int), np.ones((1, 2), int)))": ["lo and hi"],
    "Layout.boxes((8, 6), (np.array([0]), np.zeros((1, 2), int)))": ["three arrays"],
}
MESHES = {
    "Layout.on_mesh((8, 6), Mesh(x=2), ['S0', 'R'])": ["1 axes", "2 placements"],
    "Layout.on_mesh((8, 6), Mesh(fsdp=2), {'fspd': 'S0'})": ["'fspd'", "did you mean 'fsdp'?"],
    "Layout.on_mesh((8, 6), Mesh(fsdp=2), {'zz': 'S0'})": ["no axis 'zz'", "fsdp"],
    "Layout.on_mesh((8, 6), (2,), ['X'])": ["'X'", "S0"],
    "Layout.on_mesh((8, 6), (2,), ['S'])": ["'S'"],
    "Layout.on_mesh((8, 6), (2,), ['Pmean'])": ["'mean'", "avg"],
    "Layout.on_mesh((8, 6), (2,), [0])": ["0 is not a placement"],
    "Layout.on_mesh((8, 6), (2,), [None])": ["None is not a placement"],
    "Layout.on_mesh((8, 6), (2,), 3)": ["placements", "3"],
    "Layout.on_mesh((8, 6), (2,), None)": ["placements", "None"],
    "Layout.on_mesh((8, 6), (2,), ['S2'])": ["no dim 2"],
    "Layout.on_mesh((), (2,), ['S0'])": ["0-d"],
    "Layout.on_mesh((8, 6), (2,), ['S0:0'])": ["split factor", "0"],
    "Layout.on_mesh((8, 6), (2,), [StridedShard(0, 0)])": ["split factor", "0"],
    "Layout.on_mesh((8, 6), (2,), [StridedShard(0, -2)])": ["split factor", "-2"],
    "Layout.on_mesh((8, 6), (2,), [StridedShard(0, 1.5)])": ["split factor", "1.5"],
    "Layout.on_mesh((8, 6), (2,), [StridedShard(0, 2**62)])": ["split factor", str(2**62)],
    "Layout.on_mesh((8, 6), (2, 2), ['P', 'Pmax'])": ["mix", "max", "sum"],
    "Layout.on_mesh((8, 6), 4, ['S0'])": ["mesh", "4"],
    "Layout.on_mesh((8, 6), None, ['S0'])": ["mesh", "None"],
    "Layout.on_mesh((8, 6), (0,), ['S0'])": ["at least 1", "0"],
    "Layout.on_mesh((8, 6), (2.0,), ['S0'])": ["whole number", "2.0"],
    "Layout.on_mesh((8, 6), {'x': True}, ['S0'])": ["'x'", "True"],
    "Layout.on_mesh((8, 6), {3: 2}, ['S0'])": ["name", "3"],
    "Layout.on_mesh((8, 6), (2**40,), ['S0'])": ["owners", str(2**40)],
    "Partial('mean')": ["'mean'", "sum", "avg"],
    "Mesh()": ["at least one axis"],
    "Mesh(x=2, ranks=[0, 1, 2])": ["2 owners", "3"],
    "Mesh(x=2, ranks=[1, 1])": ["owner 1", "more than once"],
    "Mesh(x=2, ranks=[0.0, 1.0])": ["whole numbers", "1."],
    "Mesh(x=2, ranks=[[0], [1, 2]])": ["whole numbers", "[1, 2]"],
    "Mesh(x=2, hosts=[0, 1, 2])": ["3 hosts", "2 owners"],
    "Mesh(x=2, hosts=0)": ["hosts", "0"],
    "Mesh(x=2, hosts=1.5)": ["hosts", "1.5"],
    "Mesh(x='2')": ["'x'", "'2'"],
    "Mesh.of((2, 2), names=['x'])": ["names", "'x'"],
    "Mesh.of((2, 2), names=['x', 'x'])": ["'x'"],
    "Mesh.of((2,), names=['a b'])": ["'a b'"],
    "Mesh.of((2,), names=['ranks'])": ["'ranks'"],
}
QUESTIONS = {
    "ROWS.pieces(4)": ["no owner 4", "4 owners"],
    "ROWS.pieces(-1)": ["no owner -1"],
    "ROWS.pieces(0.5)": ["no owner 0.5"],
    "ROWS.local_shape('0')": ["no owner '0'"],
    "ROWS.local_shapes(None)": ["no owner None"],
    "ROWS.pieces(2**70)": ["no owner"],
    "ROWS.owners(Box((0,), (4,)))": ["1 dims", "(8, 6)"],
    "ROWS.relabel({9: 1})": ["no owner 9"],
    "ROWS.relabel({0: 1})": ["owner 1", "more than once"],
    "ROWS.relabel({0: -1})": ["owners", "-1"],
    "parse('8x6/S0@1000000000000')": ["owners", "1000000000000"],
    "parse('1000000000000/cyclic0=1@2')": ["blocks", "1000000000000"],
}
PLANS = {
    "plan(3, ROWS)": ["source", "3"],
    "plan(ROWS, None)": ["target", "None"],
    "plan(ROWS, '8x6/Z@4')": ["placement", "8x6/Z@4"],
    "plan(ROWS, Layout.chunk((6, 8), 0, 4))": ["(8, 6)", "(6, 8)"],
    "plan(ROWS, parse('8x6/boxes=0:4,0:6@1'))": ["[4:8, 0:6] has no owner"],
    "plan(parse('8x6/boxes=0:4,0:6@1'), ROWS)": ["[4:8, 0:6] has no owner"],
    "plan(ROWS, ROWS, itemsize=0)": ["itemsize", "0"],
    "plan(ROWS, ROWS, itemsize=-4)": ["itemsize", "-4"],
    "plan(ROWS, ROWS, itemsize=4.0)": ["itemsize", "4.0"],
    "plan(ROWS, ROWS, itemsize=True)": ["itemsize", "True"],
    "plan(ROWS, ROWS, itemsize='4')": ["itemsize", "'4'"],
    "plan(ROWS, ROWS, itemsize=2**60)": ["itemsize"],
    "plan(ROWS, ROWS, max_bytes=0)": ["max_bytes", "0"],
    "plan(ROWS, ROWS, max_bytes=1.5)": ["max_bytes", "1.5"],
    "plan(ROWS, ROWS, itemsize=4, max_bytes=24)": ["max_bytes=24", "4 owners", "at least 28"],
    "plan('1000000000000/R@1', '1000000000000/R@1:1', max_bytes=12)": ["max_bytes=12", "rounds"],
    "plan(ROWS, ROWS, hosts=0)": ["hosts", "0"],
    "plan(ROWS, ROWS, hosts=2.0)": ["hosts", "2.0"],
    "plan(ROWS, ROWS, hosts='ab')": ["hosts", "'ab'"],
    "plan(ROWS, ROWS, hosts={0: 'a'})": ["no host for owner 1", "3 of 4"],
    "plan(ROWS, ROWS, hosts={o: [] for o in range(4)})": ["hosts", "[]"],
    "plan(ROWS, ROWS, hosts=Mesh(x=4))": ["hosts"],
    "plan(ROWS, ROWS).for_owner(9)": ["owner 9"],
    "plan(ROWS, ROWS).for_owner(0.5)": ["owner 0.5"],
}
CROSSED = {call.format(value): words for call, values in CALLS for value, words in values.items()}


@pytest.mark.parametrize("call", [*CROSSED, *CONSTRUCTORS, *MESHES, *QUESTIONS, *PLANS])
def test_is_refused_in_words(call):
    words = next(table[call] for table in (CROSSED, CONSTRUCTORS, MESHES, QUESTIONS, PLANS) if call in table)
    with pytest.raises(ShardwiseError) as caught:
        eval(call)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_errors_are_value_errors_too():
    with pytest.raises(ValueError, match="no dim 2"):
        Layout.chunk((8, 6), 2, 4)
    with pytest.raises(PlanError, match="one shape") as caught:
        plan(ROWS, Layout.chunk((6, 8), 0, 4))
    assert isinstance(caught.value, ValueError)
