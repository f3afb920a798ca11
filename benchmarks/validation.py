"""Is a list of rectangles a layout? Ours against torch's."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import peers
from benchmarks.measure import Effort, Row, Target
from benchmarks.tilings import Tiling, grid, guillotine
from shardwise import Layout, sharded_tensor
from shardwise.bench.clock import Task, interleaved
from shardwise.bench.table import seconds

TITLE = "Validation"
ABOUT = """
`Layout.boxes(shape, (owners, lo, hi)).validate()` against torch's `validate_non_overlapping_shards_metadata`. Ours
includes making the layout, in its normal form, from three arrays, and finds gaps as well as overlaps. torch's
`ShardMetadata` objects are made before its clock starts, and it looks for overlaps only. The notes say what both take
from lists of plain Python numbers.

`sharded_tensor.build_global_metadata` is torch's function of that name, here and there: the metadata of 10,000 ranks
with one shard each, checked across ranks, for overlaps and for cells that nobody has.
"""
SHAPE = (100_000, 100_000)


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    yield _row("10,000 random rectangles", guillotine(SHAPE, 10_000, seed=1), 15, effort.ours, effort.peer)
    yield _row("grid of 100 x 100", grid(SHAPE, 100, 100), 40, effort.ours, effort.peer)
    yield _row("2 x 5,000 tall blocks", grid(SHAPE, 2, 5_000), 1000, effort.ours, effort.slow_peer)
    yield _metadata("build_global_metadata, 2 x 5,000 tall blocks", grid(SHAPE, 2, 5_000), 20, effort)
    yield _metadata("build_global_metadata, grid of 100 x 100", grid(SHAPE, 100, 100), None, effort)
    yield _row("10,000 row strips", grid(SHAPE, 10_000, 1), 1, effort.ours, effort.ours)


def _row(case: str, tiling: Tiling, bound: float, repeats: int, peer_repeats: int) -> Row:
    objects = peers.shards(tiling.corners())
    ours, peer, plain, building = interleaved(
        Task(lambda _: tiling.layout().validate(), repeats=repeats, calls=5),
        Task(lambda _: peers.validate(objects), repeats=peer_repeats),
        Task(lambda pieces: Layout.boxes(SHAPE, pieces).validate(), tiling.pieces, repeats),
        Task(peers.shards, tiling.corners, repeats),
    )
    note = f"from plain numbers {seconds(plain.seconds)}, torch {seconds(building.seconds + peer.seconds)}"
    return Row(case, ours.seconds, peer.seconds, "torch", Target(bound), note)


def _metadata(case: str, tiling: Tiling, bound: float | None, effort: Effort) -> Row:
    theirs = peers.gathered(SHAPE, tiling.corners())
    mine = [sharded_tensor.ShardedTensorMetadata.of(metadata) for metadata in theirs]
    ours, peer = interleaved(
        Task(lambda _: sharded_tensor.build_global_metadata(mine), repeats=effort.ours),
        Task(lambda _: peers.global_metadata(theirs), repeats=effort.slow_peer),
    )
    return Row(case, ours.seconds, peer.seconds, "torch", Target(bound) if bound else None, "")
