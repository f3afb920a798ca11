"""Options of `convert` and `verify` as the values that these functions take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch

from shardwise.checkpoint import Checkpoint, Rules, read_rules
from shardwise.checkpoint.megatron_names import translation
from shardwise.exchange.overflow import Overflow
from shardwise.job.progress import Progress
from shardwise.job.remap import Concat, Interleaved, Padded, Remap, Rotary, Stack, Transposed
from shardwise.job.remap_rules import ROTARY_ORDERS
from shardwise.quantized.moves import Rule
from shardwise.quantized.recognition import Quantized

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
CastRule = torch.dtype | tuple[str, torch.dtype | None]


class Changes(TypedDict):
    """Keyword arguments of `convert` and `verify`."""

    rename: list[tuple[str, str]] | None
    select: Sequence[str] | None
    exclude: Sequence[str] | None
    merge: str | None
    cast: list[CastRule] | None
    remap: list[Rule]


class Effort(TypedDict):
    """How `verify` works, as keyword arguments."""

    overflow: Overflow
    jobs: int
    progress: Progress


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


RemapOptions = Mapping[str, Sequence[str] | None]  # the texts of every option


def remaps(options: RemapOptions) -> list[Rule]:
    """
    >>> remaps({"concat": ["*.qkv=*.q,*.k,*.v@0:64,32,32"], "stack": ["*.w=*.{}.w@1"]})
    [Concat(whole='*.qkv', parts=('*.q', '*.k', '*.v'), dim=0, sizes=(64, 32, 32)), Stack(whole='*.w', ...
    >>> remaps({"rotary": ["*.q=halves:128"], "pad": ["embed=multiple:64"]})
    [Rotary(name='*.q', head_dim=128, to='halves', ...), Padded(name='embed', size=None, multiple=64, ...)]
    """
    return [_READ[option](text) for option, texts in options.items() for text in texts or ()]


def _concat(text: str) -> Remap:
    whole, (parts, dim, sizes) = _pair_along(text, "--concat", "whole=a,b,c")
    return Concat(whole, tuple(parts.split(",")), dim, sizes)


def _interleave(text: str) -> Remap:
    whole, (parts, dim, sizes) = _pair_along(text, "--interleave", "whole=a,b:1,1")
    if sizes is None:
        raise ValueError(
            f"--interleave {text!r} has no sizes: add those that the parts have in one group, such as one head: "
            f"'*.qkv=*.q,*.k,*.v:64,64,64'"
        )
    return Interleaved(whole, tuple(parts.split(",")), sizes, dim)


def _stack(text: str) -> Remap:
    whole, (part, dim, _) = _pair_along(text, "--stack", "whole=part.{}")
    return Stack(whole, part, dim)


def _rotary(text: str) -> Remap:
    name, (to, dim, sizes) = _pair_along(text, "--rotary", "name=halves:128")
    order = next((one for one in ROTARY_ORDERS if one == to), None)
    if order is None or sizes is None or len(sizes) != 1:
        raise ValueError(f"--rotary {text!r}: write 'name=halves:128' or 'name=pairs:128', with the size of a head")
    return Rotary(name, sizes[0], order, dim=dim)


def _pad(text: str) -> Remap:
    name, (size, dim, multiple) = _pair_along(text, "--pad", "name=1024")
    if size == "multiple" and multiple is not None and len(multiple) == 1:
        return Padded(name, multiple=multiple[0], dim=dim)
    if not size.isdecimal():
        raise ValueError(f"--pad {text!r}: write 'name=1024', or 'name=multiple:64'")
    return Padded(name, int(size), dim=dim)


def _quantized(text: str) -> Quantized:
    names, _, format = text.partition("@")
    codes, _, scales = names.partition(",")
    if text != "auto" and not (codes and scales and format):
        raise ValueError(f"--quantized {text!r}: write 'auto', or CODES,SCALES@FORMAT as in '*.w,*.w_scale@fp8-row'")
    return Quantized() if text == "auto" else Quantized(codes, scales, format=format)


_READ: dict[str, Callable[[str], Rule]] = {
    "concat": _concat,
    "interleave": _interleave,
    "stack": _stack,
    "transpose": Transposed,
    "rotary": _rotary,
    "pad": _pad,
    "quantized": _quantized,
}


def _pair_along(text: str, option: str, form: str) -> tuple[str, tuple[str, int, tuple[int, ...] | None]]:
    ((left, right),) = pairs([text], option, form)
    return left, _along(right, option)


def _count(text: str, axis: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--mesh '{axis}={text}': write one axis and a whole number, as in --mesh tp=2 --mesh dp=4")
    return int(text)


def _along(text: str, option: str) -> tuple[str, int, tuple[int, ...] | None]:
    """'a,b@1:4,2' as the names, the dim and the sizes."""
    rest, _, sizes = text.partition(":")
    names, _, dim = rest.partition("@")
    try:
        return names, int(dim or 0), tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError:
        raise ValueError(f"{option} {text!r}: write whole numbers for dim and sizes, as in 'a,b@1:4,2'") from None


def changes_of(
    rename: Sequence[str] | None,
    select: Sequence[str] | None,
    exclude: Sequence[str] | None,
    merge: str | None,
    cast: Sequence[str] | None,
    remap: RemapOptions,
) -> Changes:
    """The options of `convert` and `verify` that say what a checkpoint becomes."""
    return {
        "rename": pairs(rename or (), "--rename") or None,
        "select": select,
        "exclude": exclude,
        "merge": merge,
        "cast": casts(cast or ()),
        "remap": remaps(remap),
    }


def translated(changes: Changes, opened: Checkpoint, names: str | None) -> Changes:
    """The same, with the names of another framework."""
    if names is None:
        return changes
    if changes["rename"]:
        raise ValueError("--names and --rename cannot be combined: rename in a separate conversion")
    found = translation(opened, names)
    return {
        **changes,
        "select": changes["select"] or found["select"],
        "remap": [*found["remap"], *changes["remap"]],
    }


def rules_on(rules: str | None, mesh: Sequence[str] | None) -> Rules | None:
    """Rules by name or file, on a mesh such as ["tp=2"]."""
    if rules is None:
        if mesh:
            raise ValueError("--mesh needs --rules")
        return None
    parsed = read_rules(rules)
    sizes = {axis: _count(count, axis) for axis, count in pairs(mesh or (), "--mesh", "tp=2")}
    return parsed.with_mesh(**sizes) if sizes else parsed


def overflow(allowed: bool) -> Overflow:
    """`--allow-overflow`."""
    return "allow" if allowed else "refuse"
