"""Load the newest step of a run that is whole on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint.damage import DamagedBlocksError
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.structure import structural_damage
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers
from shardwise.quoting import brief

log = logging.getLogger("shardwise")


class Resuming(NamedTuple):
    """What all ranks load into, and from which run; `options` are those of `load`."""

    callers: Callers
    folders: StepFolders
    into: dict[Any, Any] | torch.nn.Module
    options: Mapping[str, Any]

    def newest(self) -> int | None:
        """Load the newest step that is whole; None if there is none. All damaged is an error."""
        problems, below = list[str](), None
        while (step := self.callers.by_first(partial(self._candidate, below))) is not None:
            problem = self.problem(step)
            if problem is None:
                return step
            problems.append(f"step {step} is not whole: {problem}")
            if self.callers.first:
                log.warning("%s: %s", self.folders.run.path, problems[-1])
            below = step
        if problems:
            raise CheckpointError(
                f"{self.folders.run.path} has no step that is whole. {'; '.join(problems)}. To start anew, give "
                f"another folder, or remove these steps and the file latest"
            )
        return None

    def one(self, step: int) -> int:
        """Load this step, or raise; returns its number."""
        self.callers.by_first(lambda: self._check_saved(step))
        problem = self.problem(step)
        if problem is not None:
            raise CheckpointError(f"{self.folders.run.path}: step {step} is not whole: {problem}")
        return step

    def _check_saved(self, step: int) -> None:
        if not self.folders.is_saved(step):
            saved = [other for other in self.folders.all() if self.folders.is_saved(other)]
            raise CheckpointError(f"{self.folders.run.path} has no step {step}: it has {brief(saved)}")

    def _candidate(self, below: int | None) -> int | None:
        """The next step to load: the newest that was saved, or that `latest` names though it was lost."""
        latest, there = self.folders.latest(), self.folders.all()
        steps = sorted({*there, *([] if latest is None else [latest])}, reverse=True)
        older = (step for step in steps if below is None or step < below)
        return next((step for step in older if step == latest or self.folders.is_saved(step)), None)

    def problem(self, step: int) -> str | None:
        """Load it. Returns why it is not whole on all ranks, if that is why it cannot be loaded."""
        return self._difference(step) or self._load(step)

    def _difference(self, step: int) -> str | None:
        """Why ranks cannot load a step together: not all of them see the same index, or the first one lacks files."""

        def look() -> tuple[None, tuple[str | None, str | None]]:
            damage = self.folders.damage(step) if self.callers.first else None
            return None, (damage, _digest(self.folders.index_bytes(step)))

        _, seen = self.callers.tell(look)
        (first, (damage, digest)), *others = seen.items()
        if damage is not None:
            return damage
        for rank, (_, other) in others:
            if other != digest:
                return f"rank {rank} does not see it" if other is None else f"ranks {first} and {rank} see others"
        return None

    def _load(self, step: int) -> str | None:
        path = self.folders.path_of(step)

        def attempt() -> tuple[Exception | None, str | None]:
            try:
                load(path, self.into, group=_given(self.callers.group), **self.options)
            except Exception as error:  # raised on all ranks, unless the step is damaged
                return error, f"{type(error).__name__}: {error}"
            return None, None

        error, by_rank = self.callers.tell(attempt)
        failed = {rank: text for rank, text in by_rank.items() if text is not None}
        if not failed:
            return None
        damage = str(error) if isinstance(error, DamagedBlocksError) else structural_damage(path, self.callers)
        if damage is None or self.options.get("strict") is False:  # an earlier step may lack what was filled already
            raise error or CheckpointError(f"rank {min(failed)}: {failed[min(failed)]}")
        return damage


def _digest(data: bytes | None) -> str | None:
    return None if data is None else blake2b(data, digest_size=16).hexdigest()


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to load with: the default one if there is one."""
    return group if group is not None or not dist.is_initialized() else dist.group.WORLD
