"""Target owners permuted so that the most cells stay where they are: an assignment problem."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.geometry import Ints, ints, totals
from shardwise.layout import Layout
from shardwise.planning.regions import all_regions

EXACT = 256  # owners up to which the best permutation is found; above, a greedy one that is never worse than none


def fewest_bytes(source: Layout, target: Layout) -> dict[int, int]:
    """Target owner -> the owner to take its place, so that the fewest bytes move.

    The best there is for up to 256 owners, unless terms are reduced for several takers: there what one owner saves
    depends on the others.

    >>> rows = Layout.chunk((8, 2), 0, owners=4)
    >>> fewest_bytes(rows, rows.relabel({0: 3, 3: 0}))
    {0: 3, 1: 1, 2: 2, 3: 0}
    """
    owners = target.form.owners
    block, holder, cells = _cells_in_place(source, target, owners)
    same = np.arange(len(owners))
    if len(owners) <= EXACT:
        kept = np.zeros((len(owners), len(owners)), dtype=np.int64)
        kept[block, holder] = cells
        best = _assign(kept)
    else:
        best = _greedy(len(owners), block, holder, cells)
    stays, kept_best = cells[block == holder].sum(), cells[best[block] == holder].sum()
    return dict(zip(owners.tolist(), owners[best if kept_best > stays else same].tolist(), strict=True))


def _cells_in_place(source: Layout, target: Layout, owners: Ints) -> tuple[Ints, Ints, Ints]:
    """Cells of the block of target owner i that owner j holds already: i, j (numbers in `owners`) and how many."""
    regions = all_regions(source, target)
    volume, keys, cells = regions.boxes.volumes(), [ints([])], [ints([])]
    same = (source.op, source.terms) == (target.op, target.terms)
    first_only = not same and target.op in ("sum", "product", "bxor")  # the other terms start neutral
    for here in range(source.terms):
        region, holder = source.form.holders.expand(regions.source * source.terms + here)
        mine = np.isin(holder, owners)
        region, holder = region[mine], holder[mine]
        for there in [here] if same else range(1 if first_only else target.terms):
            rows, taker = target.form.holders.expand(regions.target[region] * target.terms + there)
            keys.append(owners.searchsorted(taker) * len(owners) + owners.searchsorted(holder[rows]))
            cells.append(volume[region[rows]])
    key, place = np.unique(np.concatenate(keys), return_inverse=True)
    return *np.divmod(key, len(owners)), totals(np.concatenate(cells), place, len(key))


def _greedy(count: int, row: Ints, column: Ints, gain: Ints) -> Ints:
    """The largest gain first; owners without one keep their place where it is free."""
    best, taken = np.full(count, -1), np.zeros(count, dtype=np.bool_)
    for n in np.lexsort((column, row, -gain)).tolist():
        if best[row[n]] < 0 and not taken[column[n]]:
            best[row[n]], taken[column[n]] = column[n], True
    stay = np.flatnonzero((best < 0) & ~taken)
    best[stay], taken[stay] = stay, True
    best[best < 0] = np.flatnonzero(~taken)
    return ints(best)


def _assign(gain: Ints) -> Ints:
    """For each row a column of its own, the sum of gains largest: shortest augmenting paths with dual prices.

    >>> _assign(ints([[1, 5, 0], [4, 6, 0], [0, 9, 2]])).tolist()
    [2, 0, 1]
    """
    count = len(gain)
    cost: npt.NDArray[np.int64] = gain.max(initial=0) - gain
    row_price, column_price = np.zeros((2, count + 1), dtype=np.int64)
    row_of = np.full(count + 1, -1)  # the row that a column is given to; the last column is where a new row begins
    for row in range(count):
        row_of[count], column = row, count
        slack, previous = np.full(count, np.iinfo(np.int64).max), np.full(count, count)
        seen = np.zeros(count + 1, dtype=np.bool_)
        while row_of[column] >= 0:
            seen[column] = True
            free = ~seen[:count]
            offer = cost[row_of[column]] - row_price[row_of[column]] - column_price[:count]
            closer = free & (offer < slack)
            slack[closer], previous[closer] = offer[closer], column
            following = int(np.where(free, slack, np.iinfo(np.int64).max).argmin())
            step = slack[following]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            slack[free] -= step
            column = following
        while column != count:
            row_of[column] = row_of[previous[column]]
            column = int(previous[column])
    assignment = np.empty(count, dtype=np.int64)
    assignment[row_of[:count]] = np.arange(count)
    return assignment
