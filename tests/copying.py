"""Plans looked at from outside: copies as plain rows, what they carry cell by cell, and all that a plan must hold."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, held, missing, numbered

from shardwise import plan
from shardwise.testing import gather, scatter, simulate, strategies

FULL = [kind for kind in strategies.KINDS if kind != "partial"]  # kinds whose cells are values, not terms


@st.composite
def hosted(draw, kinds=strategies.KINDS):
    """A pair of layouts and a host for every owner."""
    source, target = draw(strategies.pairs(kinds))
    owners = sorted({*source.owners(), *target.owners()})
    return source, target, {owner: draw(st.sampled_from("abc")) for owner in owners}


@st.composite
def limited(draw):
    """A plan under a byte limit that is hard to hold, with hosts or without."""
    source, target, hosts = draw(hosted())
    itemsize = draw(st.sampled_from([1, 2, 4]))
    least = 2 * len(hosts) - 1
    limit = draw(st.integers(least, least + 12)) * itemsize
    return plan(source, target, itemsize=itemsize, max_bytes=limit, hosts=draw(st.sampled_from([None, hosts])))


def rows(copies):
    """The copies as plain values, in their order."""
    return [(c.source, c.target, c.box.lo, c.box.hi, c.term, c.step, c.round) for c in copies]


def carried(copies, shape, chosen):
    """How often each cell is carried by the copies for which `chosen(copy)` holds."""
    count = np.zeros(shape, dtype=np.int64)
    for copy in copies:
        if chosen(copy):
            count[(*copy.box.slices, ...)] += 1
    return count


def staged(made):
    """Bytes that every owner sends and receives in each round of each step, added up from its own part."""
    found, widths = defaultdict(int), itemsizes(made)
    for owner in made.owners:
        part = made.for_owner(owner)
        for copy in [*part.sends, *part.receives]:
            found[owner, copy.step, copy.round] += copy.box.volume * widths[copy.step]
    return found


def itemsizes(made):
    """Bytes of an element in each step: sums of some of the terms have four at least."""
    *first, last = made.legs
    return [made.itemsize for _ in first] + [
        max(4, made.itemsize) if last.takes_sums else made.itemsize,
        *[made.itemsize] * 9,
    ]


def assert_right(made):
    """The plan proves itself, moves no byte too many and, carried out part by part, brings the values."""
    whole = numbered(made.source.shape)
    after = simulate(made.verify(), scatter(whole, made.source))
    np.testing.assert_array_equal(gather(after, made.target), whole)
    if made.target.op is None:
        assert_same_buffers(after, buffers(made.target, whole))
    if len(made.legs) == 1:
        assert made.bytes_moved == made.lower_bound
    else:  # what hosts add up first may go one more way inside them, so that less crosses
        assert crossing(made) <= crossing(replace(made, hosts=None, itemsize=made.itemsize), made.hosts)


def crossing(made, hosts=None):
    """How many cells go from one host to another."""
    source, target = ((hosts or made.hosts).host(side) for side in (made.copies.source, made.copies.target))
    return int(made.copies.volumes[source != target].sum())


def assert_parts_agree(made):
    """Every owner's part is its share of the whole plan, in the same order."""
    whole = rows(made.copies)
    for owner in made.owners:
        part = made.for_owner(owner)
        assert rows(part.copies) == [row for row in whole if owner in row[:2]]
        assert rows(part.sends) == [row for row in whole if row[0] == owner != row[1]]
        assert rows(part.receives) == [row for row in whole if row[1] == owner != row[0]]
        assert rows(part.local) == [row for row in whole if row[0] == row[1] == owner]


def assert_crosses_once(made, hosts):
    """Each host receives each cell that it lacks once from outside, and no other; what is handed on stays inside."""
    have, lacks, nothing = held(made.source), missing(made.source, made.target), np.zeros(made.source.shape, np.bool_)
    for host in set(hosts.values()):
        here = [owner for owner, where in hosts.items() if where == host]
        wanted = np.any([lacks.get(owner, nothing) for owner in here], axis=0)
        at_hand = np.any([have.get(owner, nothing) for owner in here], axis=0)
        arrived = carried(
            made.copies, made.source.shape, lambda c, h=host: hosts[c.target] == h and hosts[c.source] != h
        )
        np.testing.assert_array_equal(arrived, wanted & ~at_hand)
    assert all(hosts[c.source] == hosts[c.target] for c in made.copies if c.step)
