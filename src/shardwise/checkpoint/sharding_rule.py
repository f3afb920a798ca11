"""One rule: patterns of names, and where the tensors with such names lie on a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise.checkpoint.axis_rules import Known, Owners, Segments, WholeHeads, Word, check_experts
from shardwise.checkpoint.expressions import Expression
from shardwise.errors import LayoutError
from shardwise.job.names import filled, matched
from shardwise.layout import Layout, Mesh, Placement, Replicate, Shard

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)  # a number in a name: {expert}
DIGITS = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, eq=False)
class ShardingRule:
    """Where tensors lie whose names match one of `patterns`. `where`: the file and the rule, for messages."""

    patterns: tuple[str, ...]
    words: tuple[Word, ...] | Mapping[str, Word] | Segments  # of all axes in order, of some by name, or of the only one
    skip: bool
    where: str
    owners: Owners | None = None
    axis: str | None = None  # of the owners; None: the only one that their expression names
    when: Expression | None = None  # the rule counts only if this is not 0
    optional: tuple[str, ...] = ()  # axes that a mesh may lack

    def match(self, name: str) -> Mapping[str, int] | None:
        """The numbers in a name that matches; None for one that does not."""
        return next((found for pattern in self.patterns if (found := numbers_in(pattern, name)) is not None), None)

    def applies(self, known: Known) -> bool:
        """False for a rule that is meant for another kind of model."""
        with at(self.where):
            return self.when is None or known.value(self.when) != 0

    def on(self, mesh: Mesh) -> tuple[Word, ...]:
        """What it says of every axis of a mesh."""
        return _on(self, mesh).words

    def _on(self, mesh: Mesh) -> RuleOnMesh:
        with at(self.where):
            words, axis = self._words(mesh), self._owner_axis(mesh)
            if axis is not None:
                number = mesh.names.index(axis)
                if not isinstance(words[number], Replicate):
                    raise LayoutError(f"owners and placements both speak of axis {axis!r}: one of them must not")
                if self.owners is not None and self.owners.dim is not None:
                    words[number] = self.owners
            return RuleOnMesh(tuple(words), axis)

    def _words(self, mesh: Mesh) -> list[Word]:
        """Without owners. Axes that the rule does not name replicate."""
        if isinstance(self.words, tuple):
            mesh.placements([Replicate()] * len(self.words))  # refuses any other number than that of the axes
            return list(self.words)
        if isinstance(self.words, Segments) and len(mesh.names) > 1:
            raise LayoutError(f'{mesh} has several axes: fused needs axis = "...", one of {", ".join(mesh.names)}')
        words = {mesh.names[0]: self.words} if isinstance(self.words, Segments) else dict(self.words)
        there = {axis: word for axis, word in words.items() if axis in mesh.names or axis not in self.optional}
        mesh.placements(dict.fromkeys(there, "R"))  # refuses axes that the mesh does not have
        return [there.get(axis, Replicate()) for axis in mesh.names]

    def _owner_axis(self, mesh: Mesh) -> str | None:
        """The axis that the owners are positions of; None without owners, or if the mesh lacks an optional one."""
        if self.owners is None:
            return None
        names = self.owners.position.names & {*mesh.names, *self.optional}
        axes = [self.axis] if self.axis is not None else sorted(names)
        if len(axes) != 1:
            several = f"several axes of {mesh}: {', '.join(axes)}" if axes else f"no axis of {mesh}"
            raise LayoutError(f'owners = "{self.owners.position}" names {several}; axis = "..." says which is meant')
        if axes[0] in self.optional and axes[0] not in mesh.names:
            return None
        mesh.placements({axes[0]: "R"})  # refuses an axis that the mesh does not have
        return axes[0]

    @property
    def counted_names(self) -> frozenset[str]:
        """The numbers that say how many heads there are."""
        given = self.words.values() if isinstance(self.words, Mapping) else self.words
        words = [given] if isinstance(given, Segments) else list(given)
        parts = [word.count for word in words if isinstance(word, WholeHeads)]
        parts += [part for word in words if isinstance(word, Segments) for part in word.parts]
        parts += [self.when] if self.when is not None else []
        return frozenset(name for part in parts for name in part.names)

    @property
    def needs_config(self) -> bool:
        """True if it may name numbers of a config.json."""
        return bool(self.counted_names) or self.owners is not None

    def check(self, mesh: Mesh, known: Known, experts: Expression | None = None) -> None:
        """Refuse a mesh that would cut heads, or has more ranks for experts than there are."""
        words, axis = _on(self, mesh)
        with at(f"{self.where}: {mesh}"):
            if axis is not None and experts is not None and not experts.names - known.numbers.keys():
                check_experts(known.count(experts, "the number of experts"), mesh, axis, known.explained(experts))
            for word in words:
                if isinstance(word, WholeHeads | Segments):
                    word.check(ranks_of(word, words, mesh), known)

    def placements(self, mesh: Mesh, known: Known) -> tuple[Placement, ...] | None:
        """The placement on every axis, if it is the same for all shapes."""
        words, axis = _on(self, mesh)
        if axis is not None or any(isinstance(word, Segments) for word in words):
            return None
        return tuple(
            word.for_any_shape(ranks_of(word, words, mesh), known) if isinstance(word, WholeHeads) else word
            for word in words
            if not isinstance(word, Segments | Owners)
        )

    def layout(self, shape: Sequence[int], mesh: Mesh, known: Known) -> Layout:
        """The layout of a tensor of that shape."""
        return layout_on(shape, self.submesh(mesh, known), self.on(mesh), known)

    def submesh(self, mesh: Mesh, known: Known) -> Mesh:
        """The part of a mesh that has the tensor."""
        axis = _on(self, mesh).owner_axis
        if self.owners is None or self.owners.dim is not None or axis is None:
            return mesh
        return self.owners.submesh(mesh, axis, known)


class RuleOnMesh(NamedTuple):
    """What a rule says of every axis of a mesh, and the axis of its owners."""

    words: tuple[Word, ...]
    owner_axis: str | None


@lru_cache(maxsize=1024)
def _on(rule: ShardingRule, mesh: Mesh) -> RuleOnMesh:
    return rule._on(mesh)


def layout_on(shape: Sequence[int], mesh: Mesh, words: Sequence[Word], known: Known) -> Layout:
    """The layout of a tensor of that shape, by what rules say of every axis of the mesh."""
    placements = tuple(
        word.placement(tuple(shape), ranks_of(word, words, mesh), known)
        if isinstance(word, WholeHeads | Segments | Owners)
        else word
        for word in words
    )
    return _on_mesh(tuple(shape), mesh, placements)


@lru_cache(maxsize=4096)
def _on_mesh(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Layout:
    """Cached: a model has many tensors of few kinds."""
    return Layout.on_mesh(shape, mesh, placements)


def without_heads(words: Sequence[Word], mesh: Mesh, known: Known) -> list[Word]:
    """The same with plain shards where no head lies on several ranks."""
    plain = [
        word.for_any_shape(ranks_of(word, words, mesh), known) if isinstance(word, WholeHeads) else word
        for word in words
    ]
    return [one if isinstance(one, Shard) else word for one, word in zip(plain, words, strict=True)]


def ranks_of(word: Word, words: Sequence[Word], mesh: Mesh) -> int:
    """The number of parts that all axes with the same word make."""
    return prod(size for other, size in zip(words, mesh.shape, strict=True) if other == word)


# --- names ---------------------------------------------------------------------------------------------------------


def numbers_in(pattern: str, name: str) -> dict[str, int] | None:
    """The numbers that stand for the fields of a pattern in a name that matches it; None for one that does not.

    >>> numbers_in("*.experts.{expert}.w[13]", "layers.2.experts.7.w1"), numbers_in("*.experts.{expert}.w2", "a.w2")
    ({'expert': 7}, None)
    """
    stars, fields = _starred(pattern)
    found = matched(stars, name)
    if found is None:
        return None
    texts = {field: text for field, text in zip(fields, found, strict=True) if field is not None}
    return {field: int(text) for field, text in texts.items()} if all(map(DIGITS.fullmatch, texts.values())) else None


def numbers_by_prefix(pattern: str, names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers that stand for the first field of a pattern, by the part of the name before it.

    >>> numbers_by_prefix("*.experts.{expert}.*", ["a.experts.0.w", "a.experts.1.w", "b.experts.0.w", "c.w"])
    {'a.experts.': {0, 1}, 'b.experts.': {0}}
    """
    before, field, *_ = FIELD.split(pattern)
    groups = dict[str, set[int]]()
    for name in names:
        found = numbers_in(pattern, name)
        if found is not None:
            stars = matched(_starred(pattern)[0], name) or ()
            groups.setdefault(filled(before, stars[: before.count("*")]), set()).add(found[field])
    return groups


@lru_cache(maxsize=1024)
def _starred(pattern: str) -> tuple[str, tuple[str | None, ...]]:
    """The pattern with a star for every field, and the field of every star."""
    fields = tuple(field[1] for field in re.finditer(rf"\*|{FIELD.pattern}", pattern, re.ASCII))
    return FIELD.sub("*", pattern), fields


@contextmanager
def at(where: str) -> Iterator[None]:
    """Adds the position in the rules to errors."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None
