"""What is wrong with a list of pieces, as rectangles with their owners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.geometry import Box, Boxes, Ints, distinct, gaps, ints, join, merge, tiles
from shardwise.layout.listing import Listing

SHOWN = 6  # rectangles of each kind that a message names; the error object carries all


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two owners both hold the cells of `box`, and their boxes are not the same."""

    box: Box
    owners: tuple[int, int]

    def __str__(self) -> str:
        first, second = self.owners
        if first == second:
            return f"owner {first} holds {self.box} twice"
        return f"owners {first} and {second} both hold {self.box}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every gap and every overlap that is not a whole replica."""

    gaps: tuple[Box, ...] = ()
    overlaps: tuple[Overlap, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.gaps or self.overlaps)

    def remedy(self) -> str:
        """What to do about it."""
        overlap = (
            "make overlapping boxes equal (replicas) or disjoint, or say\n"
            'overlap="replicas" (in the notation overlapping=) if overlapping cells hold equal values.'
        )
        words = ["give the cells without an owner to one"] * bool(self.gaps) + [overlap] * bool(self.overlaps)
        return "; ".join(words)

    def __str__(self) -> str:
        lines = [f"{box} has no owner" for box in self.gaps[:SHOWN]]
        lines += [f"... and {len(self.gaps) - SHOWN} more boxes without an owner"] * (len(self.gaps) > SHOWN)
        lines += [str(overlap) for overlap in self.overlaps[:SHOWN]]
        lines += [f"... and {len(self.overlaps) - SHOWN} more overlaps"] * (len(self.overlaps) > SHOWN)
        return "\n".join(f"  {line}" for line in lines)


def diagnose(listing: Listing) -> Diagnosis:
    """Gaps and overlaps; finding that there are none takes n log n, whatever the boxes look like."""
    if tiles(listing.boxes, listing.shape):
        return Diagnosis()
    first, number = distinct(listing.boxes, listing.shape)
    boxes = listing.boxes.take(first)
    twice = [] if listing.overlapping else _twice(listing, number)
    if not twice and tiles(boxes, listing.shape):
        return Diagnosis()
    left, right = join(boxes, boxes)
    left, right = left[left < right], right[left < right]
    clean = np.ones(boxes.count, dtype=np.bool_)
    clean[left] = clean[right] = False
    missing = gaps(boxes, Box.whole(listing.shape), clean)
    shared = [] if listing.overlapping else _overlaps(boxes, left, right, _first_owners(listing, number))
    return Diagnosis(tuple(missing), tuple(twice + shared))


def _first_owners(listing: Listing, number: Ints) -> Ints:
    """The first owner of each different box."""
    row = np.full(int(number.max(initial=-1)) + 1, len(number))
    np.minimum.at(row, number, np.arange(len(number)))
    return listing.piece_owner[row]


def _twice(listing: Listing, number: Ints) -> list[Overlap]:
    """Boxes that one owner holds more than once."""
    order = np.lexsort((listing.piece_owner, number))
    same = (np.diff(number[order]) == 0) & (np.diff(listing.piece_owner[order]) == 0)
    rows = order[1:][same].tolist()
    return [Overlap(listing.boxes.box(i), (int(listing.piece_owner[i]),) * 2) for i in rows]


def _overlaps(boxes: Boxes, left: Ints, right: Ints, owners: Ints) -> list[Overlap]:
    """The shared rectangles, merged where the same two owners meet, in the order of their place."""
    pair = np.sort(np.stack([owners[left], owners[right]], axis=1), axis=1)
    names, key = np.unique(pair, axis=0, return_inverse=True)
    merged, key = merge(boxes.take(left).overlap(boxes.take(right)), ints(key.reshape(-1)))
    overlaps = [Overlap(merged.box(i), (int(names[k, 0]), int(names[k, 1]))) for i, k in enumerate(key.tolist())]
    return sorted(overlaps, key=lambda o: (o.box.lo, o.box.hi, o.owners))
