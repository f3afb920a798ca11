"""Command line options of conversions, as the values that functions take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from shardwise.checkpoint.rules import Rules, read_rules
from shardwise.job.remap import Concat, Remap, Stack, Transposed

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
CastRule = torch.dtype | tuple[str, torch.dtype | None]


class Changes(TypedDict):
    """Keyword arguments of `convert` and `verify`."""

    rename: list[tuple[str, str]] | None
    select: Sequence[str] | None
    cast: list[CastRule] | None
    remap: list[Remap]


def size_in_bytes(text: int | str) -> int:
    """
    >>> size_in_bytes("5GB"), size_in_bytes("0.5 MiB"), size_in_bytes(4096)
    (5000000000, 524288, 4096)
    """
    number = str(text).strip().upper()
    unit = next((unit for unit in UNITS if number.endswith(unit)), "")
    try:
        size = float(number.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**62:
        raise ValueError(f"{text!r} is not a size: write 5GB, 512MiB, or a number of bytes")
    return int(size)


def pairs(texts: Sequence[str], option: str, form: str = "pattern=new") -> list[tuple[str, str]]:
    """
    >>> pairs(["model.*=*"], "--rename")
    [('model.*', '*')]
    """
    parts = [text.partition("=") for text in texts]
    for text, (left, equals, right) in zip(texts, parts, strict=True):
        if not (left and equals and right):
            raise ValueError(f"{option} {text!r} is not a pair: write '{form}'")
    return [(left, right) for left, _, right in parts]


def casts(texts: Sequence[str]) -> list[CastRule] | None:
    """Rules, and a dtype for the rest.

    >>> casts(["bfloat16", "*.norm.*=float32", "*_scale=keep"])
    [torch.bfloat16, ('*.norm.*', torch.float32), ('*_scale', None)]
    """
    return [_dtype(text) if "=" not in text else _rule(text) for text in texts] or None


def _rule(text: str) -> CastRule:
    ((pattern, becomes),) = pairs([text], "--cast")
    return pattern, None if becomes == "keep" else _dtype(becomes)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, SHORT.get(name, name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype: write bfloat16 or float32, for example")
    return dtype


def remaps(concat: Sequence[str], stack: Sequence[str], transpose: Sequence[str]) -> list[Remap]:
    """
    >>> remaps(["*.qkv=*.q,*.k,*.v@0:64,32,32"], ["*.w=*.{}.w@1"], ["*.t"])
    [Concat(whole='*.qkv', parts=('*.q', '*.k', '*.v'), dim=0, sizes=(64, 32, 32)), Stack(whole='*.w', ...
    """
    made = list[Remap]()
    for whole, rest in pairs(concat, "--concat", "whole=a,b,c"):
        parts, dim, sizes = _along(rest, "--concat")
        made.append(Concat(whole, tuple(parts.split(",")), dim, sizes))
    for whole, rest in pairs(stack, "--stack", "whole=part.{}"):
        part, dim, _ = _along(rest, "--stack")
        made.append(Stack(whole, part, dim))
    return [*made, *map(Transposed, transpose)]


def _count(text: str, axis: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--mesh '{axis}={text}': write a whole number, as in tp=2")
    return int(text)


def _along(text: str, option: str) -> tuple[str, int, tuple[int, ...] | None]:
    """'a,b@1:4,2' as the names, the dim and the sizes."""
    rest, _, sizes = text.partition(":")
    names, _, dim = rest.partition("@")
    try:
        return names, int(dim or 0), tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError:
        raise ValueError(f"{option} {text!r}: write whole numbers for dim and sizes, as in 'a,b@1:4,2'") from None


def changes(
    rename: Sequence[str] | None,
    select: Sequence[str] | None,
    cast: Sequence[str] | None,
    concat: Sequence[str] | None,
    stack: Sequence[str] | None,
    transpose: Sequence[str] | None,
) -> Changes:
    """The options of `convert` and `verify` that say what a checkpoint becomes."""
    return {
        "rename": pairs(rename or (), "--rename") or None,
        "select": select,
        "cast": casts(cast or ()),
        "remap": remaps(concat or (), stack or (), transpose or ()),
    }


def rules_on(rules: str | None, mesh: Sequence[str]) -> Rules | None:
    """Rules by name or file, on a mesh such as ["tp=2"]."""
    if rules is None:
        if mesh:
            raise ValueError("--mesh needs --rules")
        return None
    parsed = read_rules(rules)
    sizes = {axis: _count(count, axis) for axis, count in pairs(mesh, "--mesh", "tp=2")}
    return parsed.with_mesh(**sizes) if sizes else parsed
