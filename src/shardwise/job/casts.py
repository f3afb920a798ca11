"""Casts on the way: what a user asks for, which happen by default, which have to be named, and what travels."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.exchange.reduce import check as check_reduction
from shardwise.job.names import matched
from shardwise.layout import Layout
from shardwise.planning import reduces

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # cast into each other without being named
NO_CODES = (*PLAIN, torch.bool, torch.int64)  # masks, counters and indices have no scales
ONLY_PLAIN = "only float64, float32, float16 and bfloat16 are cast into each other without being named"
SHOWN = 4

# What the world calls the tensors without which codes mean nothing, and the codes that belong to them: fp8 has
# w_scale_inv or w_scale, mxfp4 w_blocks and w_scales, GPTQ and AWQ qweight and scales, bitsandbytes SCB or w.absmax.
SCALE = re.compile(
    r"(?:(?P<codes>.*?)[._]_?)?(?:(?:input|output|global|nested)_)*(?:scales?|scale_inv|scale_\d|scale_weight|"
    r"scale_input|SCB|absmax|quant_map|quant_state\..+|q?zeros?|zero_point|g_idx)"
)
CODES = ("", "_packed", "_blocks", "._data")  # endings
CODES_ONLY = ", which gives codes, not weights; for weights dequantize: remap=[Quantized()] or --quantized auto"
CODES_OF_A_MODULE = ("weight", "qweight", "weight_packed", "W_q", "w")


class Typed(Protocol):
    """What has a dtype: a tensor of a state dict, or one of a checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""


TypedTensors = Mapping[str, Typed]


@dataclass(frozen=True)
class Change:
    """The values of tensor `source`, to be written to tensor `target` in its dtype."""

    source: str
    target: str
    dtype: torch.dtype
    becomes: torch.dtype

    def __str__(self) -> str:
        if self.source == self.target:
            return f"{self.source!r} is {self.dtype} in the source and {self.becomes} in the target"
        return f"{self.source!r} is {self.dtype}, but {self.target!r} is to be {self.becomes}"


def travels_as(source: Layout, target: Layout, dtype: torch.dtype, becomes: torch.dtype) -> torch.dtype:
    """The dtype of messages: cast before they travel where that is shorter, unless they are terms to be reduced."""
    check_dtype(becomes)
    check_cast(dtype, becomes)
    if source.op is not None and reduces(source, target):
        check_reduction(source.op or "", dtype)
        return dtype
    return becomes if becomes.itemsize < dtype.itemsize else dtype


def check_dtype(dtype: object) -> None:
    """Refuse anything but a torch.dtype or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise RefusedTypeError(f"dtype= must be a torch.dtype, not {dtype!r}")


@lru_cache(maxsize=1024)
def check_cast(dtype: torch.dtype, becomes: torch.dtype) -> None:
    """Refuse casts that cannot be, even where they are named."""
    if dtype == becomes:
        return
    if dtype.is_complex and not becomes.is_complex:
        raise RefusedValueError(f"{dtype} cannot be cast to {becomes}: the imaginary part would be lost")
    try:
        torch.zeros(1, dtype=becomes, device="cpu").copy_(torch.zeros(1, dtype=dtype, device="cpu"))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RefusedValueError(f"{dtype} cannot be cast to {becomes}: {reason}") from None


def check_changes(changes: Iterable[Change], check: Callable[[Change], None]) -> None:
    """Check all. The error is that of the first refused cast, and lists the others."""
    refused = dict[str, ValueError]()
    for change in changes:
        try:
            check(change)
        except ValueError as error:
            refused.setdefault(change.target, error)
    first, others = next(iter(refused.values()), None), list(refused)[1:]
    if first is not None and others:
        shown = ", ".join(map(repr, others[:SHOWN])) + (" ..." if len(others) > SHOWN else "")
        raise type(first)(f"{first}. {len(others)} more cast{'s' * (len(others) > 1)} refused: {shown}") from first
    if first is not None:
        raise first


def check_change(change: Change, sources: TypedTensors, targets: TypedTensors | None = None, *, named: bool) -> None:
    """Refuse a cast between other dtypes than plain floating point numbers, unless it is `named` for this tensor.

    Scales of quantized codes are not plain numbers either: they define what the codes mean. `sources` and `targets` are
    all tensors of both sides.
    """
    if change.dtype == change.becomes:
        return
    check_cast(change.dtype, change.becomes)
    if named:
        return
    codes = codes_of(change.source, sources)
    if codes is not None:
        reason = f"it is a scale of {codes!r}, whose values are quantized codes ({sources[codes].dtype})"
        raise RefusedValueError(f"{change}: {reason}. {_keep(change)}, or {_by_name(change)}")
    if change.dtype in PLAIN and change.becomes in PLAIN:
        return
    scales = scales_of(change.source, sources) or scales_of(change.target, targets or {})
    if scales:
        raise RefusedValueError(f"{change}: {_beside(scales)}. {_keep(change)}, or {_by_name(change)}{CODES_ONLY}")
    raise RefusedValueError(f"{change}: {ONLY_PLAIN}; {_by_name(change)}")


def _beside(scales: list[str]) -> str:
    listed = ", ".join(map(repr, scales[:SHOWN])) + (" ..." if len(scales) > SHOWN else "")
    stand = "stands" if len(scales) == 1 else "stand"
    return f"{listed} {stand} beside it, so the values are quantized codes, which mean nothing without their scales"


def _keep(change: Change) -> str:
    pattern = f"{change.target}*"
    return f"Keep {change.dtype} (in a conversion by the rule ({pattern!r}, None) or --cast {pattern + '=keep'!r})"


def _by_name(change: Change) -> str:
    short = str(change.becomes).removeprefix("torch.")
    return (
        f"name the tensor to cast it: cast=[({change.target!r}, {change.becomes})] or "
        f"--cast {change.target + '=' + short!r}"
    )


def codes_of(name: str, tensors: TypedTensors) -> str | None:
    """The quantized tensor that a scale belongs to; None if the name is not that of a scale."""
    match = SCALE.fullmatch(name)
    if match is None:
        return None
    base = match["codes"]
    own = [f"{base}{ending}" for ending in CODES]
    module = [leaf if base is None else f"{base}.{leaf}" for leaf in CODES_OF_A_MODULE]
    near = [one for one in own if one in tensors] or [one for one in module if one in tensors and one != name]
    return next((one for one in near if tensors[one].dtype not in NO_CODES), None)


def scales_of(name: str, tensors: TypedTensors) -> list[str]:
    """The scales that stand beside a quantized tensor."""
    if name not in tensors or tensors[name].dtype in NO_CODES:
        return []
    module = name.rpartition(".")[0]  # what all of them begin with: many names are passed over quickly
    return [other for other in tensors if other.startswith(module) and codes_of(other, tensors) == name]


Cast = torch.dtype | Sequence[tuple[str, torch.dtype | None] | torch.dtype] | None


class CastRequest(NamedTuple):
    """The dtype that a tensor is to have; `named` where a rule has its name in full."""

    dtype: torch.dtype
    named: bool


@dataclass(frozen=True)
class Casts:
    """Rules of which the first match wins, and a dtype for all other floating point tensors.

    >>> Casts.of([("norm", torch.float32), torch.bfloat16]).request("norm", torch.float16)
    CastRequest(dtype=torch.float32, named=True)
    """

    rules: tuple[tuple[str, torch.dtype | None], ...] = ()
    rest: torch.dtype | None = None
    names: Container[str] = field(default=(), compare=False)  # of all tensors, which patterns can be spelled like

    @staticmethod
    def of(cast: object, option: str = "cast=") -> Casts:
        """From the user's option."""
        given = [] if cast is None else [cast] if isinstance(cast, torch.dtype) else cast
        if not isinstance(given, list | tuple):
            raise TypeError(f"{option} must be a torch.dtype, or rules [(pattern, dtype), ...], not {cast!r}")
        rest = [rule for rule in given if isinstance(rule, torch.dtype)]
        rules = [rule for rule in given if not isinstance(rule, torch.dtype)]
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

    def request(self, name: str, dtype: torch.dtype) -> CastRequest | None:
        """The cast of a tensor; None if no rule applies."""
        for pattern, becomes in self.rules:
            if self._fits(pattern, name):
                return CastRequest(dtype if becomes is None else becomes, pattern == name)
        return CastRequest(self.rest, named=False) if self.rest is not None and dtype.is_floating_point else None

    def unused(self, names: Iterable[str]) -> list[str]:
        """The patterns that match no name."""
        there = list(names)
        return [pattern for pattern, _ in self.rules if not any(self._fits(pattern, name) for name in there)]

    def _fits(self, pattern: str, name: str) -> bool:
        return pattern == name or matched(pattern, name, self.names) is not None


@dataclass(frozen=True)
class TargetCasts:
    """Casts to the dtypes of targets that are there already: of plain floating point numbers, and of what is named."""

    casts: Casts
    allowed: bool = True

    @staticmethod
    def of(cast: object) -> TargetCasts:
        """From the user's option: True, False, or what a conversion takes."""
        return TargetCasts(Casts(), cast) if isinstance(cast, bool) else TargetCasts(Casts.of(cast))

    def check(self, change: Change, sources: TypedTensors, targets: TypedTensors) -> None:
        """Refuse a cast that the options do not allow."""
        request = self.casts.among(targets).request(change.target, change.dtype)
        if request is not None and request.dtype != change.becomes:
            raise ValueError(f"cast= makes {change.target!r} {request.dtype}, but the target is {change.becomes}")
        check_change(change, sources, targets, named=request is not None and request.named)
        if change.dtype != change.becomes and not self.allowed:
            raise ValueError(f"{change}: cast=True casts")

    def check_used(self, names: Iterable[str]) -> None:
        """Refuse a rule that matches no name."""
        unused = self.casts.unused(names)
        if unused:
            raise ValueError(f"cast= has {unused[0]!r}, which matches no name of the target")
