"""How to save: options that must be the same on all ranks, and the formats that a save writes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import cast

from shardwise.checkpoint.formats import dcp_writing, sharded
from shardwise.checkpoint.formats.writers import Writer
from shardwise.storage.paths import PathLike

PATIENCE = 1800.0  # seconds to wait for the files of other ranks
WRITERS: dict[str, type[Writer]] = {"safetensors": sharded.ShardedWriter, "dcp": dcp_writing.DcpWriter}


@dataclass(frozen=True)
class SaveOptions:
    """How to save: what must be the same on all ranks."""

    format: str
    path: str
    sums: bool
    async_op: bool
    in_flight: int
    patience: float
    incremental: bool | str = False

    @property
    def staged(self) -> bool:
        """True if this rank's file is put together in memory first."""
        return self.async_op or self.incremental is not False

    def check(self) -> None:
        """Refuse invalid ones."""
        if self.format not in WRITERS:
            raise ValueError(f"format= must be one of {', '.join(map(repr, WRITERS))}, not {self.format!r}")
        in_flight, patience = cast("tuple[object, object]", (self.in_flight, self.patience))
        if type(in_flight) is not int or in_flight < 1:
            raise ValueError(f"in_flight={in_flight!r}: give the number of saves that may run at a time, at least 1")
        check_seconds("patience", patience)
        if self.incremental is not False and (self.format != "safetensors" or not self.sums):
            raise ValueError(
                f"incremental={self.incremental!r} with format={self.format!r}, sums={self.sums}: only checkpoints "
                f"with format='safetensors' and sums=True can be incremental. Remedy: save with these, or without "
                f"incremental="
            )


def as_text(incremental: bool | PathLike) -> bool | str:
    return incremental if isinstance(incremental, bool) else str(incremental)


def check_seconds(option: str, value: object) -> None:
    """Refuse what is no time to wait."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{option}={value!r}: give a finite number of seconds, more than 0")
