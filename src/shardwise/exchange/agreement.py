"""Agreement before the first byte: every rank brings a short header, and all of them reach the same verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from shardwise.errors import (
    CheckpointError,
    ExchangeError,
    RefusedCastError,
    RefusedTypeError,
    RefusedValueError,
    ShardwiseError,
)
from shardwise.geometry import Ints
from shardwise.layout import Layout

WORDS = 16  # of 8 bytes: the status, and a digest of every field
LOWEST = np.iinfo(np.int64).min
REFUSALS: dict[type[Exception], type[ShardwiseError]] = {  # errors that stay of their kind
    RefusedCastError: RefusedCastError,
    CheckpointError: CheckpointError,
    ValueError: RefusedValueError,
    TypeError: RefusedTypeError,
}


class Status(IntEnum):
    """What a rank knows about the exchange that it takes part in."""

    KNOWS = 0
    LACKS = 1  # it holds nothing of the source, and does not know what it is
    FAILED = 2


class Verdict(IntEnum):
    """What everybody does next."""

    GO = 0
    LEARN = 1  # some ranks do not know what the source is: those who know tell them
    REFUSE = 2


@dataclass(frozen=True)
class Proposal:
    """What one rank takes the exchange to be, by fields in the order in which differences are reported.

    What it does not know is `unknown`: the values of these fields do not count.
    """

    fields: Mapping[str, Any]
    unknown: frozenset[str] = field(default=frozenset())
    error: Exception | None = None

    @property
    def status(self) -> Status:
        """How much this rank knows."""
        if self.error is not None:
            return Status.FAILED
        return Status.LACKS if self.unknown else Status.KNOWS

    def header(self) -> Ints:
        """The words that the others get."""
        words = np.zeros(WORDS, dtype=np.int64)
        words[0] = self.status | _bits(self.unknown, self.fields) << 8
        words[1 : len(self.fields) + 1] = [_digest(value) for value in self.fields.values()]
        return words

    def explanation(self) -> dict[str, Any]:
        """All that is needed to explain a refusal."""
        known = isinstance(self.error, ShardwiseError | ValueError | TypeError)  # which say all in their words
        error = self.error and (str(self.error) if known else f"{type(self.error).__name__}: {self.error}")
        shown = {name: _shown(value) for name, value in self.fields.items() if name not in self.unknown}
        digests = {name: _digest(self.fields[name]) for name in shown}
        raises = next((raised for kind, raised in REFUSALS.items() if isinstance(self.error, kind)), ExchangeError)
        return {"error": error, "raises": raises.__name__, "fields": shown, "digests": digests}


def weigh(headers: Ints) -> Ints:
    """For every header numbers of which only the largest over all ranks matter, whoever had them.

    Two of them are equal but for the sign exactly where a digest is the same everywhere.
    """
    status, unknown, digest = headers[:, :1] & 0xFF, headers[:, :1] >> 8, headers[:, 1:]
    sure = (status != Status.FAILED) & ((unknown >> np.arange(digest.shape[1])) & 1 == 0)
    return np.concatenate([status, -status, *(np.where(sure, d, LOWEST) for d in (digest, -digest))], axis=1)


def judge(weights: Ints) -> Verdict:
    """The verdict on the largest weights of all ranks."""
    most, least = weights[0], -weights[1]
    digest, minus_digest = weights[2:].reshape(2, -1)
    differ = (digest != -minus_digest) & (digest != LOWEST)
    if most == Status.FAILED or differ.any() or least == Status.LACKS:
        return Verdict.REFUSE
    return Verdict.LEARN if most == Status.LACKS else Verdict.GO


def refusal(explanations: Sequence[Mapping[str, Any]], owners: Sequence[int]) -> ShardwiseError:
    """The error that every rank raises, from the explanations of all: naming ranks and the first difference."""
    operation = next((t["fields"]["operation"] for t in explanations if "operation" in t["fields"]), "exchange")
    errors = _grouped([t["error"] for t in explanations], owners)
    kinds = {t["raises"] for t in explanations if t["error"] is not None}
    names = {kind.__name__: kind for kind in REFUSALS.values()}
    raised = names.get(kinds.pop(), ExchangeError) if len(kinds) == 1 else ExchangeError
    if errors.pop(None, None) is None and len(errors) == 1:
        return raised(f"{operation}: {next(iter(errors))}")
    if errors:
        lines = [f"{in_words(whose)} cannot take part in this {operation}: {error}" for error, whose in errors.items()]
        return raised("\n".join(lines))
    for name in {name: None for t in explanations for name in t["fields"]}:
        values = _grouped([t["digests"].get(name) for t in explanations], owners)
        values.pop(None, None)
        if len(values) > 1:
            shown = {t["digests"].get(name): t["fields"].get(name) for t in explanations}
            who_says = "; ".join(f"{in_words(whose)}: {shown[digest]}" for digest, whose in values.items())
            return RefusedValueError(
                f"the ranks disagree on the {name} of this {operation}: {who_says}. "
                f"Every rank of the group must ask for the same"
            )
    return ExchangeError(
        f"none of {in_words(owners)} holds a part of the source of this {operation}: at least one must know it"
    )


def in_words(numbers: Sequence[int]) -> str:
    """Ranks in words.

    >>> in_words([0, 1, 2, 5]), in_words([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs = list[list[int]]()
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(shown)}"


def _grouped(values: Sequence[Any], owners: Sequence[int]) -> dict[Any, list[int]]:
    groups = defaultdict[Any, list[int]](list)
    for value, owner in zip(values, owners, strict=True):
        groups[value].append(owner)
    return groups


def _bits(names: frozenset[str], fields: Mapping[str, Any]) -> int:
    return sum(1 << at for at, name in enumerate(fields) if name in names)


@lru_cache(maxsize=4096, typed=True)
def _digest(value: Hashable) -> int:
    """62 bits of the value, so that the sign may turn."""
    text = value.fingerprint if isinstance(value, Layout) else str(value)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _shown(value: Any) -> str:
    return value.brief() if isinstance(value, Layout) else str(value)
