"""Which steps of a run are kept, and which are removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from shardwise.checkpoint.step_folders import StepFolders
from shardwise.quoting import brief


class Retention:
    """The newest `keep` steps are kept, None for all, and those that `keep_every` divides."""

    def __init__(self, keep: int | None, keep_every: int | None) -> None:
        for name, number in (("keep", keep), ("keep_every", keep_every)):
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name}= must be a positive whole number or None, not {brief(number)}")
        self._keep, self._keep_every = keep, keep_every
        self._settled = set[int]()  # steps that have nothing to remove: their folders need not be listed again

    def remove_old(self, folders: StepFolders, saved: int, in_use: Collection[str] = ()) -> None:
        """Remove old steps, and what is left of dead saves and removals. The step `saved` is whole since now.

        `in_use`: paths of steps that saves which are running may need.
        """
        folders.forget(saved)
        there = folders.all()
        old = [step for step in self._old(folders, there) if folders.path_of(step) not in in_use]
        for step in old:
            folders.set_aside(step)
        self._settled -= {*old, saved}
        self._settled |= {step for step in there if step not in self._settled and folders.sweep(step)}

    def _old(self, folders: StepFolders, there: Sequence[int]) -> list[int]:
        """Those before the newest ones that are whole."""
        if self._keep is None:
            return []
        whole = (step for step in reversed(there) if folders.damage(step) is None)
        kept = list(islice(whole, self._keep))
        return [step for step in there if kept and step < kept[-1] and not self._for_good(step)]

    def _for_good(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0
