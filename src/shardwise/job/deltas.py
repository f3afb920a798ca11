"""Deltas between two runs: which cells changed, what the last run sent, and whether the targets still hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args
from zlib import crc32

import numpy as np
import torch

from shardwise.errors import RefusedValueError
from shardwise.exchange import Delta
from shardwise.exchange.buffers import bytes_at, fresh, outside_inference
from shardwise.exchange.delta_round import PAYS, DeltaTraffic
from shardwise.exchange.deltas import WORDS
from shardwise.exchange.messages import Tensors
from shardwise.exchange.reduce import blocks
from shardwise.job.plan import ModelPlan

DeltaOption = bool | Literal["auto", "always"]
Changed = Callable[[str, torch.dtype], Tensors | None]  # by source name and travelling dtype; None: all may have
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
STEP = 2**18  # elements that are compared at a time: they stay in the cache until they are copied
SAMPLE, SAMPLED = 2**10, 16  # elements that are looked at, and in how many places of a tensor
PAUSE = 8  # runs without deltas after one that did not pay


def changed_cells(current: Tensors, base: Tensors, travels: torch.dtype, *, update: bool = False) -> Tensors:
    """Where two versions of the same tensors differ in a bit, once both are cast to the dtype that travels.

    Returns bool tensors of the same shapes. -0.0 differs from 0.0, and a NaN is equal to itself. With `update`, the
    base becomes the current values in the same pass.

    >>> current, base = torch.tensor([1.0, -0.0, torch.nan]), torch.tensor([1.0, 0.0, torch.nan])
    >>> changed_cells([current], [base], torch.float32)
    [tensor([False,  True, False])]
    """
    masks = list[torch.Tensor]()
    with torch.no_grad(), outside_inference():
        for ours, theirs in zip(current, base, strict=True):
            mask = fresh(ours.shape, torch.bool, ours.device)
            for now, before, changed in _blocks(ours.detach(), theirs.detach(), mask):
                sent = now.to(travels)
                _differ(sent, before.to(travels), changed)
                if update:
                    before.copy_(sent)
            masks.append(mask)
    return masks


def _blocks(*tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Views of the same elements of all tensors, in parts that fit the cache."""
    if tensors[0].device.type != "cpu":
        yield tensors
    elif all(tensor.is_contiguous() for tensor in tensors):
        flat = [tensor.view(-1) for tensor in tensors]
        for start in range(0, flat[0].numel(), STEP):
            yield [tensor[start : start + STEP] for tensor in flat]
    else:
        for at in blocks(tensors[0].shape):
            yield [tensor[at] for tensor in tensors]


def _differ(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    word = WORD[one.dtype.itemsize]
    if one.dtype == torch.complex128:  # wider than any whole number
        words = [torch.view_as_real(side).view(word) for side in (one, other)]
        out.copy_((words[0] != words[1]).any(dim=-1))
    elif all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (one, other, out)):
        ours, theirs = (bytes_at(side.data_ptr(), side.nbytes).view(WORDS[side.itemsize]) for side in (one, other))
        np.not_equal(ours, theirs, out=bytes_at(out.data_ptr(), out.nbytes).view(np.bool_))  # quicker than torch's
    else:
        torch.ne(one.view(word), other.view(word), out=out)


class Masks:
    """What has changed in the sources of one run: asked for once, and kept until the last link of the source."""

    def __init__(self, changed: Changed | None, asked: frozenset[int], plan: ModelPlan) -> None:
        self._changed, self._asked, self._links = changed, asked if changed else frozenset(), plan.links
        self._last = {self._key(at): at for at in sorted(self._asked)}
        self._masks = dict[tuple[str, torch.dtype], Tensors | None]()

    def _key(self, at: int) -> tuple[str, torch.dtype]:
        return self._links[at].link.source, self._links[at].dtype

    def of(self, at: int) -> Tensors | None:
        """For link number `at`."""
        if self._changed is None or at not in self._asked:
            return None
        key = self._key(at)
        if key not in self._masks:
            self._masks[key] = self._changed(*key)
        return self._masks[key]

    def drop(self, links: Sequence[int]) -> None:
        """These links are done."""
        for at in links:
            if at in self._asked and self._last[self._key(at)] == at:
                self._masks.pop(self._key(at), None)


class DeltaBase:
    """Copies of what this rank sent last, by source name and travelling dtype."""

    def __init__(self) -> None:
        self._copies = dict[tuple[str, torch.dtype], Tensors]()
        self._outdated = set[tuple[str, torch.dtype]]()

    @property
    def bytes(self) -> int:
        """Of all copies."""
        return sum(tensor.nbytes for tensors in self._copies.values() for tensor in tensors)

    def clear(self) -> None:
        """Forget all, and give the memory back."""
        self._copies.clear()
        self._outdated.clear()

    def take(self, name: str, dtype: torch.dtype, current: Tensors) -> None:
        """Copy what is sent now."""
        copies = self._copies.get((name, dtype), [])
        if [(t.shape, t.device) for t in copies] != [(t.shape, t.device) for t in current]:
            with outside_inference():
                copies = [fresh(t.shape, dtype, t.device) for t in current]
        for ours, theirs in zip(copies, current, strict=True):
            ours.copy_(theirs.detach())
        self._copies[name, dtype] = copies
        self._outdated.discard((name, dtype))

    def compare(self, name: str, dtype: torch.dtype, current: Tensors) -> Tensors | None:
        """What has changed since the copy, which becomes the current values; None if all may have.

        Where most has changed, no copy is made until the next time: it would take longer than the delta could save.
        """
        copies = self._copies.get((name, dtype), [])
        fits = [(t.shape, t.device) for t in copies] == [(t.shape, t.device) for t in current]
        if not fits or (name, dtype) in self._outdated:
            self.take(name, dtype, current)
            return None
        if mostly_changed(current, copies, dtype):
            self._outdated.add((name, dtype))
            return None
        return changed_cells(current, copies, dtype, update=True)


def mostly_changed(current: Tensors, base: Tensors, travels: torch.dtype) -> bool:
    """By a sample of large tensors: a delta would not pay, so that they need not be compared."""
    cells = changed = 0
    for ours, theirs in zip(current, base, strict=True):
        if ours.numel() >= SAMPLE * SAMPLED and ours.is_contiguous():
            step = ours.numel() // SAMPLED
            parts = [one.detach().view(-1)[: SAMPLED * step].view(SAMPLED, step)[:, :SAMPLE] for one in (ours, theirs)]
            (mask,) = changed_cells([parts[0]], [parts[1]], travels)
            cells, changed = cells + mask.numel(), changed + int(mask.count_nonzero())
    return changed * travels.itemsize + min(changed, cells / 8) > PAYS * cells * travels.itemsize


COLUMNS = 1021  # a prime: words that are moved within a tensor come into other columns, mostly


def checksum(tensors: Tensors) -> int:
    """A number that tells whether tensors still hold the same bits: it reads all of them, about as fast as memory is.

    It guards against accidents, not against an adversary.

    >>> x = torch.zeros(5)
    >>> before = checksum([x])
    >>> x.data[3] = -0.0
    >>> checksum([x]) == before
    False
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = data.numel() // (8 * COLUMNS) * (8 * COLUMNS)
        if data.data_ptr() % 8:  # a view that does not start where a word may
            data = data.clone()
        sums = data[:whole].view(torch.int64).view(-1, COLUMNS).sum(dim=0)
        for part in (sums.view(torch.uint8), data[whole:]):
            some = part.cpu()
            total = crc32(bytes_at(some.data_ptr(), some.numel()).tobytes() if some.numel() else b"", total)
    return total


def check_delta(option: object) -> None:
    """Refuse a value that delta= does not have."""
    if not isinstance(option, bool) and option not in get_args(get_args(DeltaOption)[1]):
        raise RefusedValueError(f'delta= must be True, False, "auto" or "always", not {option!r}')


class DeltaRuns:
    """Decides for each run whether it sends deltas: the same on all ranks.

    A run compares if on every rank the last run was completed and the targets still are as it left them. Any other run
    sends all, and copies what it sends.
    """

    def __init__(self, option: DeltaOption, total: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """`total` adds up the numbers of all ranks."""
        self._option, self._total, self.base = option, total, DeltaBase()
        self._written: int | None = None  # the checksum of the targets after the last run
        self._traffic = DeltaTraffic()
        self._pause = 0
        self._compares = False

    @property
    def compares(self) -> bool:
        """True if this run sends only what has changed."""
        return self._compares

    @property
    def mode(self) -> Delta:
        """What the exchanges of this run are told."""
        if not self._option or self._pause:
            return False
        return "always" if self._option == "always" else "between hosts"

    def start(self, targets: Tensors) -> None:
        """Before a run: `targets` is the memory that deltas would be written to. All ranks call."""
        self._compares = False
        self._pause = max(0, self._pause - 1)
        if not self._option or self._pause:
            return
        intact = self._written is not None and self._written == checksum(targets)
        self._written = None  # until the run is completed
        touched, sent, dense = self._total([not intact, *self._traffic])
        self._compares = not touched
        if self._compares and self._option == "auto" and sent >= PAYS * dense:
            self.pause()

    def pause(self) -> None:
        """Send all for some runs, without copies."""
        self._pause, self._compares, self._traffic = PAUSE + 1, False, DeltaTraffic()
        self.base.clear()

    def changed(self, name: str, dtype: torch.dtype, current: Tensors) -> Tensors | None:
        """What has changed in a source. It is asked once in a run."""
        if self._compares:
            return self.base.compare(name, dtype, current)
        self.base.take(name, dtype, current)
        return None

    def completed(self, targets: Tensors, traffic: DeltaTraffic) -> None:
        """After a run that did not fail."""
        if self.mode:
            self._written = checksum(targets)
            self._traffic = traffic if self._compares else DeltaTraffic(0, 1)  # what sends all has not failed to pay

    def failed(self) -> None:
        """After a run that did."""
        self._written, self._pause = None, 0
