"""Rules that compose: a tensor is taken apart and put together through names that neither side has."""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import held, lies

import shardwise as sw
from shardwise import Concat, Interleaved, Rotary, Stack, Transposed, checkpoint
from shardwise.job.remap import links, shapes_after
from shardwise.testing import on_ranks

# --- trees of tensors ------------------------------------------------------------------------------------------------
# A node has a tag, and a tensor for each place: 'r.1.0/t3' is node t3 in part 0 of part 1 of the root.


@dataclass
class Node:
    """`kind` says how its children make it. `turned`: dims are in reverse order towards the root.

    `rotary`: heads of so many cells along the first dim lie in pairs towards the leaves, in halves towards the root.
    """

    tag: str
    kind: str
    turned: bool = False
    rotary: int = 0
    dim: int = 0
    group: list = field(default_factory=list)
    count: int = 0
    children: list = field(default_factory=list)
    values: dict = field(default_factory=dict)  # by place: towards the leaves, before dims are reversed

    def name(self, place):
        return f"{place}/{self.tag}"

    def upward(self, place):
        value = halves(self.values[place], self.rotary) if self.rotary else self.values[place]
        return value.T if self.turned else value

    def sizes(self):
        place = next(iter(self.values))
        return [child.upward(place).shape[self.dim] for child in self.children]

    def rules(self):
        whole = f"*/{self.tag}"
        if self.kind == "concat":
            parts = [f"*/{child.tag}" for child in self.children]
            return [Interleaved(whole, parts, self.group, self.dim) if self.group else Concat(whole, parts, self.dim)]
        return [Stack(whole, f"*.{{}}/{self.children[0].tag}", self.dim)] if self.kind == "stack" else []


def halves(value, head):
    """Rotary pairs of every head as two halves."""
    return value.reshape(len(value) // head, head // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def pairs(value, head):
    """Rotary halves of every head as pairs."""
    return value.reshape(len(value) // head, 2, head // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def alternating(value, group, dim):
    """The parts that alternate along a dim."""
    places = np.arange(value.shape[dim]) % sum(group)
    edges = np.cumsum([0, *group])
    return [np.compress((places >= a) & (places < b), value, dim) for a, b in pairwise(edges)]


@st.composite
def trees(draw):
    """The root of a tree, from shapes: values are made from the root down, so that all parts fit."""
    numbers = iter(range(1000))

    def grow(values, depth):
        node = Node(f"t{next(numbers)}", "leaf", turned=draw(st.booleans()))
        node.values = {place: value.T.copy() if node.turned else value for place, value in values.items()}
        shape = next(iter(node.values.values())).shape
        heads = [head for head in (2, 4, 6) if shape and shape[0] and shape[0] % head == 0]
        node.rotary = draw(st.sampled_from([0, *heads]))
        if node.rotary:
            node.values = {place: pairs(value, node.rotary) for place, value in node.values.items()}
        kinds = ["leaf", "concat", "stack", "concat", "stack"] if depth and shape else ["leaf"]
        node.kind = draw(st.sampled_from(kinds))
        if node.kind != "leaf":
            node.dim = draw(st.integers(0, len(shape) - 1))
            size = shape[node.dim]
            if node.kind == "stack" and size:
                node.count = size
                below = {
                    f"{place}.{at}": np.asarray(np.take(value, at, node.dim))
                    for place, value in node.values.items()
                    for at in range(size)
                }
                node.children = [grow(below, depth - 1)]
            else:
                node.kind = "concat"
                cuts = sorted(draw(st.lists(st.integers(0, size), min_size=1, max_size=2)))
                apart = {place: np.split(value, cuts, node.dim) for place, value in node.values.items()}
                if size % 2 == 0 and size and draw(st.booleans()):
                    node.group = draw(st.sampled_from([[1, 1], *([[1, 2, 1]] * (size % 4 == 0)), [size // 2] * 2]))
                    apart = {p: alternating(value, node.group, node.dim) for p, value in node.values.items()}
                for at in range(len(node.group) or len(cuts) + 1):
                    node.children.append(grow({place: parts[at] for place, parts in apart.items()}, depth - 1))
        return node

    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return grow({"r": whole}, draw(st.integers(2, 4)))


def frontier(draw, node):
    """The nodes where one side has its tensors: none below another, all leaves below one of them."""
    if not node.children or draw(st.sampled_from([True, False, False])):
        return {node.tag}
    return set().union(*(frontier(draw, child) for child in node.children))


def everything(node):
    return [node, *(one for child in node.children for one in everything(child))]


@st.composite
def moves(draw):
    """The tensors of both sides, and the rules between them in any order."""
    root = draw(trees())
    ours, theirs = frontier(draw, root), frontier(draw, root)

    def inner(node, side):  # above the tensors of that side
        return node.tag not in side and any(one.tag in side for one in everything(node))

    source, target, rules, orders = {}, {}, [], []
    for node in everything(root):
        up = node.tag in ours and not inner(node, theirs)  # the other side is here, or nearer to the root
        down = node.tag in theirs and not inner(node, ours)
        between = inner(node, ours) != inner(node, theirs)
        rules += node.rules() if between else []
        if between or node.tag in ours | theirs:
            upward = inner(node, ours) or (node.tag in ours and up)
            turns = [Transposed(f"*/{node.tag}")] * node.turned
            rotary = [Rotary(f"*/{node.tag}", node.rotary, "halves" if upward else "pairs")] * bool(node.rotary)
            orders.append([*rotary, *turns] if upward else [*turns, *rotary])
            rules += orders[-1]
        for place, value in node.values.items():
            if node.tag in ours:
                source[node.name(place)] = value if up else node.upward(place)
            if node.tag in theirs:
                target[node.name(place)] = value if down and node.tag not in ours else node.upward(place)
    rules = draw(st.permutations(rules))
    for order in (order for order in orders if len(order) == 2):  # what is done to one name is done in this order
        first, second = sorted(map(rules.index, order))
        rules[first], rules[second] = order
    return source, target, rules, root


def test_the_drawn_trees_are_deep():
    """The strategy itself: chains of several rules occur, of every kind."""
    seen = set()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(moves())
    def look(move):
        seen.add(tuple(sorted(type(rule).__name__ for rule in move[2])))

    look()
    assert any(kinds.count("Stack") > 1 and "Concat" in kinds and "Transposed" in kinds for kinds in seen)
    assert any("Stack" in kinds and "Interleaved" in kinds and "Rotary" in kinds for kinds in seen)


# --- every way from one side to the other ----------------------------------------------------------------------------


def shapes(values):
    return {name: value.shape for name, value in values.items()}


def cells(view, whole):
    """A part of a numpy array, as a view of it."""
    first = whole[(..., *(slice(at, None) for at in view.start))]
    strides = [whole.strides[dim.of] * dim.step for dim in view.dims]
    return np.lib.stride_tricks.as_strided(first, view.shape, strides)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


@settings(max_examples=100)
@given(moves())
def test_links_compose_as_numpy_does(move):
    source, target, rules, _ = move
    found = {name: np.full_like(value, -1) for name, value in target.items()}
    for link in links(shapes(source), shapes(target), remap=rules):
        cells(link.target_view, found[link.target])[...] = cells(link.source_view, source[link.source])
    same(found, target)


def sized(rules, root):
    """As they must be where no target has the parts."""
    sizes = {f"*/{node.tag}": node.sizes() for node in everything(root) if node.kind == "concat" and not node.group}
    return [replace(rule, sizes=sizes[rule.whole]) if isinstance(rule, Concat) else rule for rule in rules]


@settings(max_examples=60)
@given(moves())
def test_names_and_shapes_are_known_without_a_target(move):
    source, target, rules, root = move
    rules = sized(rules, root)
    assert shapes_after(shapes(source), remap=rules) == shapes(target)


def turned_round(rules):
    """For the way back: what is done to one name is undone in the other order."""
    other = {"halves": "pairs", "pairs": "halves"}
    return [replace(rule, to=other[rule.to]) if isinstance(rule, Rotary) else rule for rule in reversed(rules)]


def tensors(values):
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves())
def test_load_convert_and_back(tmp_path_factory, move):
    source, target, rules, root = move
    folder = tmp_path_factory.mktemp("composed")
    torch.save(tensors(source), folder / "in.pt")
    into = {name: torch.full_like(value, -1) for name, value in tensors(target).items()}
    checkpoint.load(folder / "in.pt", into, remap=rules)
    same({name: value.numpy() for name, value in into.items()}, target)
    rules = sized(rules, root)
    checkpoint.convert(folder / "in.pt", folder / "out.pt", remap=rules, durable=False)
    same({name: value.numpy() for name, value in torch.load(folder / "out.pt").items()}, target)
    checkpoint.convert(folder / "out.pt", folder / "back.pt", remap=turned_round(rules), durable=False)
    same({name: value.numpy() for name, value in torch.load(folder / "back.pt").items()}, source)


LAYOUTS = [
    lambda shape: sw.Layout.replicated(shape, [0, 1]),
    lambda shape: sw.Layout.chunk(shape, 0, 2),
    lambda shape: sw.Layout.chunk(shape, len(shape) - 1, [1, 0]),
]


def placed(name, value, turn):
    shape = tuple(value.shape)
    return (LAYOUTS[(len(name) + turn) % 3] if shape and 0 not in shape else LAYOUTS[0])(shape)


@pytest.mark.devices
def test_resharder_composes_between_shardings():
    drawn = []

    @settings(max_examples=16, database=None, derandomize=True)
    @given(moves())
    def draw(move):
        drawn.append(move)

    draw()

    def run(rank):
        for turn, (source, target, given_rules, _) in enumerate(drawn):
            for ours, theirs, rules in (source, target, given_rules), (target, source, turned_round(given_rules)):
                given = {name: held(value, placed(name, value, turn)) for name, value in tensors(ours).items()}
                asked = {name: placed(name, value, turn + 1) for name, value in theirs.items()}
                room = {name: held(torch.full_like(v, -1), asked[name]) for name, v in tensors(theirs).items()}
                sw.Resharder(given, room, remap=rules).run()
                for name, value in tensors(theirs).items():
                    lies(room[name], value, asked[name])

    on_ranks(2, run)


# --- experts ---------------------------------------------------------------------------------------------------------

STACKS = [Stack("*.gate", "*.{}.gate"), Stack("*.up", "*.{}.up")]
ACROSS = Concat("*.gate_up", ["*.gate", "*.up"], dim=1)
EACH = {f"e.{at}.{name}": (rows, 3) for at in range(4) for name, rows in (("gate", 2), ("up", 5))}


def test_gate_and_up_of_every_expert_become_one_tensor():
    planned = links(EACH, {"e.gate_up": (4, 7, 3)}, remap=[ACROSS, *STACKS])
    assert len(planned) == 8
    assert str(planned[5].target_view.region) == "[1:2, 2:7, 0:3]"
    assert planned[5].source == "e.1.up"
    back = {link.target: link.source_view for link in links({"e.gate_up": (4, 7, 3)}, EACH, remap=[*STACKS, ACROSS])}
    assert back == {link.source: link.target_view for link in planned}


def test_some_experts_are_taken_from_a_stack_of_all_where_that_is_allowed():
    some = {"e.1.up": (5, 3), "e.3.up": (5, 3)}
    planned = links({"e.up": (4, 5, 3)}, some, remap=STACKS[1:], strict=False)
    assert [str(link.source_view.region) for link in planned] == ["[1:2, 0:5, 0:3]", "[3:4, 0:5, 0:3]"]
    with pytest.raises(ValueError, match=r"no place for cells \[0:1, 0:5, 0:3\] of 'e.up'; strict=False leaves"):
        links({"e.up": (4, 5, 3)}, some, remap=STACKS[1:])


REFUSED = {
    "a part of an unknown size": (
        ({"qkv": (12, 4)}, {"q": (8, 4)}, [Concat("qkv", ["q", "k", "v"])]),
        "the size of 'k', a part of 'qkv', is not known: give sizes= (by Concat(",
    ),
    "more experts than there is room for": (
        (EACH, {"e.up": (3, 5, 3)}, STACKS[1:]),
        "'e.up' is a stack of 3 tensors, but the source has 'e.3.up' too (by Stack(",
    ),
    "a whole beside one of its parts": (
        ({"qk": (4, 4), "q": (2, 4)}, {"q": (2, 4), "k": (2, 4)}, [Concat("qk", ["q", "k"])]),
        "the source has 'q', and 'qk' of which it is a part: leave one out (by Concat(",
    ),
    "one order of dims for a whole and its parts": (
        ({"q": (4, 4), "k": (4, 4)}, {"qk": (4, 8)}, [Concat("qk", ["q", "k"]), Transposed("*")]),
        "Transposed(name='*', order=None) fits 'qk' and what that is made of: give a name that fits one of them",
    ),
    "two ways on the way": (
        (EACH, {"e.gate_up": (4, 7, 3)}, [ACROSS, *STACKS, Concat("*.gate", ["*.0.gate", "*.1.gate"])]),
        "'e.gate' would come both from Stack(whole='*.gate', part='*.{}.gate', dim=0) and from Concat(",
    ),
    "parts of unlike shapes on the way": (
        ({"e.0.up": (5, 3), "e.1.up": (5, 2)}, {"all": (2, 5, 3)}, [Concat("all", ["e.up"]), STACKS[1]]),
        "'e.1.up' has shape (5, 2), but its part of 'e.up' has (5, 3) (by Stack(",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what):
    (source, target, rules), words = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(words)):
        links(source, target, remap=rules, strict=False)
