"""Save the state of a step in memory, and on the disk from there."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from shardwise.checkpoint.async_saves import SaveHandle, SaveReport
from shardwise.checkpoint.formats.sharded import ShardedWriter
from shardwise.checkpoint.keeping import Keeping
from shardwise.checkpoint.save_options import PATIENCE, SaveOptions, as_text
from shardwise.checkpoint.saving import Saved, save_state
from shardwise.checkpoint.staging import StagedFolder
from shardwise.job.agree import Callers
from shardwise.job.names import Rename
from shardwise.job.remap import Remap
from shardwise.state.traverse import StateDict
from shardwise.storage.paths import PathLike


def save_kept(
    state: StateDict,
    path: PathLike,
    keeping: Keeping,
    *,
    format: str = "safetensors",
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    durable: bool = True,
    sums: bool = True,
    async_op: bool = False,
    in_flight: int = 1,
    incremental: bool | PathLike = False,
    patience: float = PATIENCE,
) -> SaveHandle | SaveReport | None:
    """As `save`. It is kept in memory; the files on the disk are written from there."""
    options = SaveOptions(format, str(path), sums, async_op, in_flight, patience, as_text(incremental))
    return save_state(state, path, options, group=group, rename=rename, remap=remap, durable=durable, keep=keeping)


def keep_state(callers: Callers, state: StateDict, keeping: Keeping, rename: Rename, remap: Iterable[Remap]) -> None:
    """Keep it in memory only."""
    options = SaveOptions("safetensors", "", sums=False, async_op=True, in_flight=1, patience=PATIENCE)
    saved = Saved.of(callers, state, options, rename, remap)

    def fits() -> str:
        ShardedWriter.fits(saved.contents)
        return StagedFolder(".").run

    writer = ShardedWriter(StagedFolder("."), callers.owners, callers.from_first(fits))
    keeping.keep(callers, saved, writer, lambda: None)
