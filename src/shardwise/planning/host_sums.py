"""What a host adds up before anything crosses to another: the layout between the source of a plan and its target.

A value of n terms is added up in a binary tree that n alone makes. Where a host holds all terms of a subtree, it can
add these up first, so that one sum crosses in place of many terms, and the bits stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardwise.geometry import Axis, Ints, Spans, different, ints
from shardwise.layout import Grid, Layout
from shardwise.planning.hosts import Hosts

EVEN = 32  # cells of a part along a dim, from which on it makes no difference that its pieces differ by one


@dataclass(frozen=True)
class HostSums:
    """Term n of `layout` is the sum of the terms edges[n] to edges[n + 1] of the source.

    It lies on those hosts that hold all of these terms; the owners of them on each host have a piece each.
    """

    layout: Layout
    edges: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many sums make a value."""
        return len(self.edges) - 1


@lru_cache(maxsize=256)
def host_sums(source: Layout, hosts: Hosts) -> HostSums | None:
    """None where no host has two terms that are neighbours in the tree, or where blocks of the source differ."""
    if not isinstance(source.form, Grid) or source.terms == 1 or not source.form.table.size:
        return None
    *parts, terms, replicas = source.form.table.shape
    owners = source.form.table.reshape(-1, terms, replicas)
    edges = _edges(hosts.host(owners), terms)
    if edges is None or len(edges) > terms:
        return None
    split = _all_on_hosts(owners, ints(edges), hosts)
    if split is None:
        return None
    count = min(alike.shape[3] for _, alike in split)  # owners that share a sum on a host
    dim = _dim_to_cut(source.form, count)
    count = 1 if dim is None else count
    table = np.empty((len(owners), len(edges) - 1, split[0][1].shape[2], count), dtype=np.int64)  # ..., host, piece
    for sums, alike in split:
        table[:, sums] = _spread(alike, count)
    spans = [Spans(axis.cuts[:-1], axis.cuts[1:], axis.part) for axis in source.form.axes]
    table = table.reshape(*parts, *table.shape[1:])
    if dim is not None:
        spans[dim] = spans[dim].chunk(count)
        table = np.moveaxis(table, -1, dim + 1)
        parts[dim] *= count
    form = Grid.build(spans, table.reshape(*parts, len(edges) - 1, -1))
    layout = Layout(source.shape, form, lambda: source.spelling, source.op if form.terms > 1 else None)
    return HostSums(layout, edges)


def _edges(host: Ints, terms: int) -> tuple[int, ...] | None:
    """Where neighbouring terms lie on the same hosts, the largest subtrees of them; None where blocks differ."""
    there = np.sort(host, axis=2)
    first = np.concatenate([np.ones_like(there[:, :, :1], dtype=np.bool_), there[:, :, 1:] > there[:, :, :-1]], axis=2)
    counts = first.sum(axis=2)
    if (counts != counts[0, 0]).any():
        return None
    sets = there[first].reshape(*counts.shape, -1)
    apart = (sets[:, 1:] != sets[:, :-1]).any(axis=2)
    if (apart != apart[0]).any():
        return None
    runs = [0, *(np.flatnonzero(apart[0]) + 1).tolist(), terms]
    return (*(node for first, last in pairwise(runs) for node in subtrees(first, last, terms)), terms)


def subtrees(first: int, last: int, terms: int) -> Iterator[int]:
    """Where the largest subtrees begin that lie in first:last, of the tree of so many terms.

    A subtree is a power of two of terms that begins at a multiple of it; or all terms from some place on, where those
    before it are such powers, the largest first.

    >>> list(subtrees(0, 3, 6)), list(subtrees(3, 6, 6))
    ([0, 2], [3, 4])
    """
    end = last
    if last == terms:
        end = 0
        while end < first:
            end += 1 << ((terms - end - 1).bit_length() - 1)
    while first < end:
        yield first
        fits = 1 << ((end - first).bit_length() - 1)
        first += min(first & -first or fits, fits)
    if end < last:
        yield end


def _all_on_hosts(owners: Ints, edges: Ints, hosts: Hosts) -> list[tuple[Ints, Ints]] | None:
    """Sums of as many terms each, and their owners by host: block, sum, host, owner. None where hosts differ."""
    found, sizes = list[tuple[Ints, Ints]](), np.diff(edges)
    for size in different(sizes).tolist():  # few: powers of two, and one more
        sums = np.flatnonzero(sizes == size)
        some = owners[:, edges[sums][:, None] + np.arange(size)]
        alike = _on_hosts(some.reshape(len(owners) * len(sums), -1), hosts)
        if alike is None:
            return None
        found.append((sums, alike.reshape(len(owners), len(sums), *alike.shape[1:])))
    return found if len({alike.shape[2] for _, alike in found}) == 1 else None


def _on_hosts(owners: Ints, hosts: Hosts) -> Ints | None:
    """The owners of each row by their hosts: row, host, owner. None where hosts have different numbers of them."""
    host = hosts.host(owners)
    order = np.lexsort((owners, host), axis=1)
    host = np.take_along_axis(host, order, axis=1)
    count = int(np.bincount(host[0])[host[0, 0]])
    by_host = host.reshape(len(host), -1, count) if host.shape[1] % count == 0 else host[:, :, None][:, :0]
    if not by_host.size or (by_host != by_host[:, :, :1]).any():
        return None
    return np.take_along_axis(owners, order, axis=1).reshape(by_host.shape)


def _spread(owners: Ints, count: int) -> Ints:
    """So many of the owners on each host, far from each other."""
    every = owners.shape[-1]
    return owners[..., ints(np.arange(count) * every // count)]


def _dim_to_cut(form: Grid, count: int) -> int | None:
    """The dim whose parts are cut into so many pieces: the first one that is long enough to do it evenly."""

    def length(axis: Axis) -> int:
        return min(int(axis.lengths.min(initial=2**62)) // count, EVEN)

    return max(range(len(form.axes)), key=lambda dim: (length(form.axes[dim]), -dim), default=None)
