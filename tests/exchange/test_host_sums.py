"""What hosts add up before anything crosses: the same bits as without hosts, and less on the links."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from copying import crossing, hosted
from exchanges import BITS, arrays, within
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, in_a_tree
from threads import carried

from shardwise import Layout, Mesh, plan
from shardwise.exchange.reduce import BITWISE
from shardwise.planning.host_sums import host_sums, subtrees
from shardwise.planning.hosts import Hosts

SHAPE = (24, 10)
SOURCES = {  # placements, mesh, and owners per host
    "two hosts": ("P", (8,), 4),
    "three hosts": ("P", (12,), 4),
    "odd hosts": ("P", (6,), 3),
    "odder hosts": ("P", (7,), 3),
    "rows of hosts": ("S0,P", (2, 4), 4),
    "terms of hosts": ("P,S0", (2, 4), 4),
    "every host has all": ("R,P", (2, 4), 4),
    "replicas inside": ("P,R", (2, 4), 4),
    "pairs of hosts have all": ("R,P", (2, 4), 2),
    "terms twice": ("P,P", (2, 4), 4),
    "columns and terms": ("P,S1,R", (4, 2, 2), 4),
}
WAYS = [  # of every dtype some operations and targets
    (torch.float32, {"sum": ["R", "S1"], "avg": ["S0"]}),
    (torch.bfloat16, {"sum": ["R"], "avg": ["Pmax"]}),
    (torch.int8, {"product": ["R"], "sum": ["P"]}),
]


def source_of(name, op="sum"):
    placements, mesh, per_host = SOURCES[name]
    words = [word.replace("P", f"P{op}" if op != "sum" else "P") for word in placements.split(",")]
    return Layout.on_mesh(SHAPE, mesh, words), per_host


def random_terms(layout, dtype):
    """Terms of very different size on every owner; replicas have the same."""
    random = np.random.default_rng(1)
    values = random.standard_normal((layout.terms, *SHAPE)) * 10.0 ** random.integers(-3, 4, (layout.terms, *SHAPE))
    terms = torch.from_numpy(np.clip(values, -100, 100) if dtype == torch.int8 else values).to(dtype)
    held = {}
    for owner in layout.owners():
        term = int(layout.form.holders.term_of(np.array([owner]))[0])
        (box,) = [piece.box for piece in layout.pieces(owner)]
        held[owner] = [terms[term][box.slices].clone()]
    return held


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("dtype", "ways"), WAYS, ids=str)
def test_no_bit_depends_on_hosts(name, dtype, ways):
    for op, targets in ways.items():
        source, per_host = source_of(name, op)
        held = random_terms(source, dtype)
        for target in targets:
            to = Layout.on_mesh(SHAPE, (len(source.owners()),), [target])
            bits = BITS[dtype.itemsize]
            flat = carried(plan(source, to, itemsize=dtype.itemsize), held)
            made = plan(source, to, itemsize=dtype.itemsize, hosts=per_host)
            assert_same_buffers(arrays(carried(made, held), bits), arrays(flat, bits))


def test_short_floats_cross_as_sums_in_float32():
    source, per_host = source_of("two hosts")
    held = random_terms(source, torch.bfloat16)
    made = plan(source, "24x10/R@8", itemsize=2, hosts=per_host)
    exact = in_a_tree(torch.add, [held[owner][0].float() for owner in range(8)]).bfloat16()
    torch.testing.assert_close(carried(made, held)[5][0], exact, rtol=0, atol=0)
    cells = 24 * 10
    assert [len(made.legs), crossing(made)] == [2, 2 * cells]
    across = sum(
        size
        for row, sizes in enumerate(made.matrix().tolist())
        for column, size in enumerate(sizes)
        if row // per_host != column // per_host
    )
    assert across == 4 * cells + 2 * cells


@given(hosted(["partial"]), st.sampled_from([None, 64, 4096]), st.integers(0, 64))
@settings(max_examples=20, deadline=None)
def test_no_bit_of_any_plan_depends_on_hosts(case, limit, inline):
    source, target, hosts = case
    assume(source.op not in BITWISE and target.op not in BITWISE and source.terms > 1)
    random, bits = np.random.default_rng(2), BITS[8]
    held = {
        owner: [torch.from_numpy(random.standard_normal(shape)) for shape in source.local_shapes(owner)]
        for owner in source.owners()
    }
    for replicas in range(len(source.form.holders.counts)):  # which must be equal
        first, *others = source.form.holders.expand(np.array([replicas]))[1].tolist()
        for other in others:
            held[other] = [tensor.clone() for tensor in held[first]]
    flat = carried(plan(source, target, itemsize=8), held)
    least = 8 * (2 * len({*source.owners(), *target.owners()}) - 1)
    made = plan(
        source, target, itemsize=8, hosts=hosts, max_bytes=None if limit is None else max(limit, least)
    ).verify()
    with within(inline):
        assert_same_buffers(arrays(carried(made, held), bits), arrays(flat, bits))


@pytest.mark.parametrize(
    ("name", "target", "times"),
    [
        ("two hosts", "R", 2),  # 2 (H - 1): each half goes to the other host as a sum, and comes back as a value
        ("two hosts", "S0", 1),
        ("three hosts", "R", 4),
        ("rows of hosts", "R", 1),
        ("terms of hosts", "R", 2),
        ("every host has all", "R", 0),
        ("replicas inside", "R", 2),
        ("pairs of hosts have all", "R", None),
    ],
)
def test_sums_cross_once(name, target, times):
    source, per_host = source_of(name)
    made = plan(source, Layout.on_mesh(SHAPE, (len(source.owners()),), [target]), hosts=per_host).verify()
    if times is not None:
        assert crossing(made) == times * 240
    flat = plan(made.source, made.target)
    assert crossing(made) <= crossing(flat, made.hosts)


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3), (3, 2), (4, 2), (2, 2, 2), (3, 3, 3), (5, 5), (7, 7, 7, 7)])
@pytest.mark.parametrize("target", ["R", "S0"])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_hosts_never_make_more_bytes_cross(hosts, target, itemsize):
    """Sums of short floats are four bytes wide: terms cross as they are where that is less."""
    ranks, where = sum(hosts), dict(enumerate(host for host, count in enumerate(hosts) for _ in range(count)))
    source, to = f"420x16/P@{ranks}", f"420x16/{target}@{ranks}"
    made, flat = (plan(source, to, itemsize=itemsize, hosts=given) for given in (where, None))
    assert bytes_across(made, where) <= bytes_across(flat, where)


def bytes_across(made, where):
    """How many bytes go from one host to another."""
    host = np.array(list(where.values()))
    remote = host[made.copies.source] != host[made.copies.target]
    return int(made.copy_bytes[remote].sum())


def test_what_stays_on_its_host_takes_no_step_more():
    groups = plan("24x10/S0,P@4x2", "24x10/S0,R@4x2", hosts=2)
    assert [len(groups.legs), groups.rounds] == [1, plan("24x10/S0,P@4x2", "24x10/S0,R@4x2").rounds]


def test_terms_that_lie_on_hosts_in_turn_are_not_added_up_there():
    turns = Layout.on_mesh(SHAPE, Mesh.of((4,), ranks=[0, 2, 1, 3]), ["P"])
    hosts = Hosts.of(2, np.arange(4))
    assert host_sums(turns, hosts) is None
    assert host_sums(Layout.on_mesh(SHAPE, (4,), ["P"]), hosts).edges == (0, 2, 4)


def test_a_limit_that_sums_would_not_fit_is_kept_without_them():
    made = plan("24x10/P@8", "24x10/R@8", hosts=4, max_bytes=120)
    assert len(made.legs) == 1
    assert made.verify().peak_bytes <= 120
    roomy = plan("24x10/P@8", "24x10/R@8", hosts=4, max_bytes=720)
    assert len(roomy.legs) == 2
    assert roomy.verify().peak_bytes <= 720


@given(st.integers(1, 40), st.data())
def test_subtrees_are_the_largest_that_fit(count, data):
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    found = [*subtrees(first, last, count), last]

    def nodes(low, high):
        half = low + (1 << ((high - low - 1).bit_length() - 1)) if high - low > 1 else high
        return {(low, high)} | (nodes(low, half) | nodes(half, high) if high - low > 1 else set())

    inside = {(low, high) for low, high in nodes(0, count) if first <= low and high <= last}
    largest = {one for one in inside if not any(a <= one[0] and one[1] <= b and (a, b) != one for a, b in inside)}
    assert {*pairwise(found)} == largest
