"""The notation of layouts: string <-> Spelling. Syntax only; `Layout` gives it meaning.

    4096x1024/S0@8                        rows over owners 0..7, by torch.chunk's rule
    4096x1024/S0,R@fsdp=4,tp=2            one placement per mesh axis: S<dim>, S<dim>:<split factor>, R, P, Pmax, ...
    4096x1024/R,S1@2x4:8-15               the same without names, on owners 8..15
    10x6/split0=3,5,2@3                   chosen sizes along dim 0
    96x64/fused0=64,16,16@4               q|k|v: every segment is split over all owners
    96x64/R,fused0=64,16,16:8,2,2@2x4     by whole heads: k and v heads are replicated on two ranks each
    16x64/heads0=2@tp=4                   two heads, each on two ranks
    100x6/cyclic0=8@4                     blocks of 8 rows, dealt out in turn
    8x64/experts0=0,1,2,1+3,0,1,2,3@4     expert 0 on owner 0, ..., expert 3 on owners 1 and 3, ...
    100x6/zigzag0@4                       eight chunks: owner 0 has the first and the last, owner 1 the next, ...
    8x6/boxes=0:4,0:6+4:8,0:6@2           rectangles; `overlapping=` where they may overlap
    8x6/flat=0-20,20-48@2                 ranges of the flattened tensor
    scalar/R@4                            a 0-d tensor

Owners follow the @: how many (`8`, `4x2`, `fsdp=4,tp=2`), then after a colon which ones, where they are not 0, 1, ...:
numbers, ranges `8-15` and stepped ranges `0-14/2`, in the order of the mesh, of the boxes or of the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import NoReturn, TypeVar

from shardwise.errors import NotationError

KINDS = ("split", "boxes", "overlapping", "flat")
SPLITS = {  # placements that are words with a dim, and what follows them
    "fused": "the size of a segment",
    "heads": "the number of heads",
    "experts": "the rank of an expert",
    "zigzag": "",
    "cyclic": "the block size",
}
MORE = {"fused": ",:", "experts": ",+"}  # what stands between the numbers of splits that have several
OPERATIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
NUMBER = r"\d{1,19}"
NUMBERS = rf"{NUMBER}(?:,{NUMBER})*"
PLACEMENT = re.compile(rf"R|S(?P<dim>-?{NUMBER})(:(?P<factor>{NUMBER}))?|P(?P<op>{'|'.join(OPERATIONS)})?")
SPLIT = re.compile(
    rf"(?P<kind>{'|'.join(SPLITS)})(?P<dim>-?{NUMBER})(=(?P<numbers>{NUMBERS}))?(:(?P<heads>{NUMBERS}))?"
)
EXPERTS = re.compile(rf"experts(?P<dim>-?{NUMBER})=(?P<ranks>{NUMBER}(?:[,+]{NUMBER})*)")
NEXT_PLACEMENT = re.compile(r",(?!\d)")  # before a digit, a comma stands between the numbers of one placement
MOST_AXES = 32  # of a mesh
LONGEST = 40  # characters of a reduction, or of a placement that may have been meant
MOST_OWNERS = 2**18  # far above any world, and still little memory
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Numbers = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The parsed notation of a layout: a shape, a kind with its dim and items, and owners arranged in a mesh.

    `kind` is "mesh" (items are placement words) or one of KINDS (items are tuples of numbers).
    """

    shape: Numbers
    kind: str
    dim: int | None
    items: tuple[str, ...] | tuple[Numbers, ...]
    mesh: Numbers
    names: tuple[str, ...] | None = None
    owners: Numbers | None = None  # None: 0, 1, 2, ...

    def __str__(self) -> str:
        return f"{_write_shape(self.shape)}/{self._body()}@{self._mesh()}"

    def _body(self) -> str:
        if self.kind == "mesh":
            return ",".join(map(str, self.items))
        dim = "" if self.dim is None else self.dim
        return f"{self.kind}{dim}={_write_items(self.kind, self.items)}"

    def _mesh(self) -> str:
        if self.names:
            sizes = ",".join(f"{n}={s}" for n, s in zip(self.names, self.mesh, strict=True))
        else:
            sizes = "x".join(map(str, self.mesh))
        return sizes if self.owners is None else f"{sizes}:{write_ranges(self.owners)}"


def _write_shape(shape: Numbers) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _write_items(kind: str, items: Sequence[object]) -> str:
    rows: Sequence[Numbers] = items  # type: ignore[assignment]
    if kind == "flat":
        return ",".join(f"{a}-{b}" for a, b in rows)
    if kind in ("boxes", "overlapping"):
        return "+".join(",".join(f"{a}:{b}" for a, b in zip(r[::2], r[1::2], strict=True)) or "." for r in rows)
    return ",".join(str(r[0]) for r in rows)


def write_ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges, short where they run evenly.

    >>> write_ranges([0, 1, 2, 3, 8, 10, 12, 14, 5])
    '0-3,8-14/2,5'
    """
    words, at = list[str](), 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and step > 0 and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at < 3:
            words.append(str(numbers[at]))
            at += 1
        else:
            words.append(f"{numbers[at]}-{numbers[end - 1]}" + (f"/{step}" if step > 1 else ""))
            at = end
    return ",".join(words)


def read(text: str) -> Spelling:
    """The inverse of str(spelling).

    >>> read("4096x1024/S0,R@fsdp=4,tp=2").items
    ('S0', 'R')
    >>> str(read("8x6/flat=0-20,20-48@2:5,7"))
    '8x6/flat=0-20,20-48@2:5,7'
    """
    return _Reader(text).layout()


class _Reader:
    """A cursor over the string; every expectation that fails raises with its position."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def layout(self) -> Spelling:
        shape = self._shape()
        self._literal("/", "'/' after the shape, then how it is laid out, such as S0 or R or split0=3,5")
        kind, dim, items = self._body(shape)
        self._literal("@", "'@' and the owners, such as @4 or @4x2 or @fsdp=4,tp=2")
        names, mesh = self._mesh()
        if len(mesh) > MOST_AXES:
            self._fail(f"at most {MOST_AXES} mesh axes, not {len(mesh)}")
        if prod(mesh) > MOST_OWNERS:
            self._fail(f"at most 2**18 owners, not {prod(mesh)}")
        owners = self._owners(prod(mesh)) if self._accept(":") else None
        if self.at < len(self.text):
            self._fail("the end of the layout")
        if kind == "mesh" and len(items) != len(mesh):
            self._fail(f"one placement for each of the {len(mesh)} mesh axes, not {len(items)}")
        if kind in ("split", "boxes", "overlapping", "flat") and len(items) != prod(mesh):
            self._fail(f"one owner for each of the {len(items)} items of {kind}, not {prod(mesh)}")
        return Spelling(shape, kind, dim, items, mesh, names, owners)

    def _shape(self) -> Numbers:
        if self._accept("scalar"):
            return ()
        return self._numbers("x", "a shape, such as 4096x1024 (or scalar)")

    def _body(self, shape: Numbers) -> tuple[str, int | None, tuple[str, ...] | tuple[Numbers, ...]]:
        word = self._ahead(r"[a-z]+")
        if word is None or word.group() not in KINDS:
            return "mesh", None, self._list(",", self._placement)
        kind = self._match(r"[a-z]+", "")
        dim = self._number(f"the dim, such as {kind}0=...") if kind == "split" else None
        self._literal("=", f"'=' and what follows {kind}")
        return kind, dim, self._items(kind, len(shape))

    def _items(self, kind: str, ndim: int) -> tuple[Numbers, ...]:
        if kind == "flat":
            return self._list(",", lambda: self._pair("-", "a range of the flattened tensor, such as 0-20"))
        if kind in ("boxes", "overlapping"):
            return self._list("+", lambda: self._box(ndim))
        return self._list(",", lambda: (self._number("a size"),))

    def _box(self, ndim: int) -> Numbers:
        if ndim == 0:
            self._literal(".", "'.', the box of a 0-d tensor")
            return ()
        start = self.at
        sides = self._list(",", lambda: self._pair(":", f"{ndim} ranges such as 0:4, one per dim"))
        if len(sides) != ndim:
            self.at = start
            self._fail(f"{ndim} ranges such as 0:4, one per dim, not {len(sides)}")
        return tuple(x for side in sides for x in side)

    def _pair(self, between: str, expected: str) -> Numbers:
        first = self._number(expected)
        self._literal(between, expected)
        return first, self._number(expected)

    def _placement(self) -> str:
        if self._ahead("[a-z]"):
            return self._split()
        if self._ahead(r"P[a-z]+") and not self._ahead(rf"P({'|'.join(OPERATIONS)})\b"):
            self.at += 1
            self._fail(f"a reduction: {', '.join(OPERATIONS)}")
        return self._match(
            PLACEMENT.pattern, "a placement: S0 (shard dim 0), S0:2 (strided), R (replicate), P or Pmax (partial)"
        )

    def _split(self) -> str:
        """A placement that is a word, with its dim and numbers: as it stands in the text."""
        start, word = self.at, self._match(r"[a-z]+", "")
        if word not in SPLITS:
            self.at = start
            self._fail_word(word)
        self._accept("-")
        self._number(f"the dim, such as {word}0")
        if word != "zigzag":
            self._literal("=", f"'=' and {SPLITS[word]}")
            self._number(SPLITS[word])
        if word in MORE:
            self._more_numbers(MORE[word], SPLITS[word])
        elif self._ahead(r",\d"):
            self._fail("'@' and the owners: no more numbers")
        return self.text[start : self.at]

    def _more_numbers(self, between: str, expected: str) -> None:
        """The other segments of a fused dim, with their heads after a colon; or the ranks of the other experts."""
        while self._ahead(rf"[{between}]\d"):
            self.at += 1
            self._number(expected)

    def _fail_word(self, word: str) -> NoReturn:
        upper = PLACEMENT.match(self.text[self.at : self.at + LONGEST].upper())
        near = get_close_matches(word, [*KINDS, *SPLITS], 1) or ([upper.group()] if upper else [])
        hint = f"; did you mean {near[0]}?" if near else ""
        self._fail(f"a placement (S0, R, P) or one of {', '.join([*KINDS, *SPLITS])}{hint}")

    def _mesh(self) -> tuple[tuple[str, ...] | None, Numbers]:
        expected = "how many owners, such as 4 or 4x2 or fsdp=4,tp=2"
        if not self._ahead(NAME.pattern + "="):
            return None, self._numbers("x", expected)
        axes = self._list(",", lambda: (self._match(NAME.pattern, expected), self._after_equals(expected)))
        if len({name for name, _ in axes}) < len(axes):
            self._fail("different names for the mesh axes")
        return tuple(n for n, _ in axes), tuple(s for _, s in axes)

    def _after_equals(self, expected: str) -> int:
        self._literal("=", expected)
        return self._number(expected)

    def _owners(self, count: int) -> Numbers:
        start = self.at
        owners = tuple(x for run in self._list(",", lambda: self._range(count)) for x in run)
        if len(owners) != count:
            self.at = start
            self._fail(f"{count} owners, not {len(owners)}")
        return owners

    def _range(self, count: int) -> range:
        start = self.at
        first = self._number("an owner, or a range such as 8-15")
        last = self._number("the end of the range") if self._accept("-") else first
        step = self._number("the step of the range") if self._accept("/") else 1
        if step < 1 or last < first or (last - first) // step >= count:
            self.at = start
            self._fail(f"a rising range of at most {count} owners")
        return range(first, last + 1, step)

    def _numbers(self, between: str, expected: str) -> Numbers:
        return self._list(between, lambda: self._number(expected))

    def _list(self, between: str, item: Callable[[], T]) -> tuple[T, ...]:
        items = [item()]
        while self._accept(between):
            items.append(item())
        return tuple(items)

    def _number(self, expected: str) -> int:
        digits = self._match(r"[0-9]+", expected)
        if len(digits) > 19:
            self.at -= len(digits)
            self._fail(f"{expected}; this number is absurdly large")
        return int(digits)

    def _literal(self, word: str, expected: str) -> None:
        if not self._accept(word):
            self._fail(expected)

    def _accept(self, word: str) -> bool:
        accepted = self.text.startswith(word, self.at)
        self.at += len(word) * accepted
        return accepted

    def _ahead(self, pattern: str) -> re.Match[str] | None:
        return re.compile(pattern, re.ASCII).match(self.text, self.at)

    def _match(self, pattern: str, expected: str) -> str:
        match = self._ahead(pattern)
        if not match:
            self._fail(expected)
        self.at = match.end()
        return match.group()

    def _fail(self, expected: str) -> NoReturn:
        raise NotationError(self.text, self.at, expected)
