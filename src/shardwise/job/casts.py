"""What `cast=` asks for: a dtype for plain floating point tensors, rules by name, or the dtypes of the target."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardwise.job.casting import Change, Tensors, check_change, check_dtype
from shardwise.job.names import matched

Cast = torch.dtype | Sequence[tuple[str, torch.dtype | None] | torch.dtype] | None


class Asked(NamedTuple):
    """The dtype that a tensor is to have; `named` where a rule has its name in full."""

    dtype: torch.dtype
    named: bool


@dataclass(frozen=True)
class Casts:
    """Rules of which the first match wins, and a dtype for all other floating point tensors.

    >>> Casts.of([("norm", torch.float32), torch.bfloat16]).asked("norm", torch.float16)
    Asked(dtype=torch.float32, named=True)
    """

    rules: tuple[tuple[str, torch.dtype | None], ...] = ()
    rest: torch.dtype | None = None
    names: Container[str] = field(default=(), compare=False)  # of all tensors, which patterns can be spelled like

    @staticmethod
    def of(cast: Any, option: str = "cast=") -> Casts:
        """From what a user gave."""
        listed = [] if cast is None else [cast] if isinstance(cast, torch.dtype) else cast
        if not isinstance(listed, list | tuple):
            raise TypeError(f"{option} must be a torch.dtype, or rules [(pattern, dtype), ...], not {cast!r}")
        rest = [rule for rule in listed if isinstance(rule, torch.dtype)]
        rules: list[Any] = [rule for rule in listed if not isinstance(rule, torch.dtype)]
        if len(rest) > 1 or not all(isinstance(rule, list | tuple) and len(rule) == 2 for rule in rules):
            raise TypeError(
                f"{option} must be rules [(pattern, dtype), ...] and at most one dtype for the rest, not {cast!r}"
            )
        for _, becomes in rules:
            check_dtype(becomes)
        if rest and not rest[0].is_floating_point:
            raise TypeError(
                f"{option} to {rest[0]} for all floating point numbers would cut them: give a pattern with it"
            )
        return Casts(tuple((str(pattern), becomes) for pattern, becomes in rules), rest[0] if rest else None)

    def among(self, names: Container[str]) -> Casts:
        """The same for tensors of these names."""
        return replace(self, names=names) if self.rules else self

    def asked(self, name: str, dtype: torch.dtype) -> Asked | None:
        """What a tensor is to become; None where nothing is asked for."""
        for pattern, becomes in self.rules:
            if self._fits(pattern, name):
                return Asked(dtype if becomes is None else becomes, pattern == name)
        return Asked(self.rest, named=False) if self.rest is not None and dtype.is_floating_point else None

    def unused(self, names: Iterable[str]) -> list[str]:
        """The patterns that fit no name."""
        there = list(names)
        return [pattern for pattern, _ in self.rules if not any(self._fits(pattern, name) for name in there)]

    def _fits(self, pattern: str, name: str) -> bool:
        return pattern == name or matched(pattern, name, self.names) is not None


@dataclass(frozen=True)
class Into:
    """Casts to the dtypes of targets that are there already: of plain floating point numbers, and of what is named."""

    casts: Casts
    allowed: bool = True

    @staticmethod
    def of(cast: Any) -> Into:
        """From what a user gave: True, False, or what a conversion takes."""
        return Into(Casts(), cast) if isinstance(cast, bool) else Into(Casts.of(cast))

    def check(self, change: Change, sources: Tensors, targets: Tensors) -> None:
        """Refuse what is not asked for."""
        asked = self.casts.among(targets).asked(change.target, change.dtype)
        if asked is not None and asked.dtype != change.becomes:
            raise ValueError(f"cast= makes {change.target!r} {asked.dtype}, but the target is {change.becomes}")
        check_change(change, sources, targets, named=asked is not None and asked.named)
        if change.dtype != change.becomes and not self.allowed:
            raise ValueError(f"{change}: cast=True casts")

    def check_used(self, names: Iterable[str]) -> None:
        """Refuse a rule that fits nothing: it was meant to."""
        unused = self.casts.unused(names)
        if unused:
            raise ValueError(f"cast= has {unused[0]!r}, which fits no name of the target")
