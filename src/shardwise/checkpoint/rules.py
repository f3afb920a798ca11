"""Rules: patterns of names, and the placements of matching tensors on a mesh. A TOML file, or a built-in one.

    [mesh]                      # names and sizes of the axes, in order; may be left out and given by `with_mesh`
    tp = 2

    [[rule]]                    # the first matching rule wins; * ? [abc] as in shells
    name = ["*.[qkv]_proj.weight", "*.gate_proj.weight"]    # a pattern, or several
    placements = {tp = "S0"}    # by axis, others replicate; or one per axis, ["S0"]; or "R": replicated on all

    [[rule]]
    name = "*.qkv_proj.weight"
    fused = {dim = 0, segments = [4096, 1024, 1024]}        # q|k|v: every segment is split over the axis

    [[rule]]
    name = "*.gate_up_proj.weight"
    fused = {dim = 0, ratio = [1, 1], axis = "tp"}          # of any size; `axis` where the mesh has several

    [[rule]]
    name = "*.k_proj.weight"
    placements = {tp = "S0"}
    heads = "num_key_value_heads"   # a number in the config.json beside the weights: no head may be cut

    [[rule]]
    name = "*._extra_state"
    skip = true                 # left out of the checkpoint

    [files]                     # the files of ranks; by default they are found by the number in their names
    pattern = "mp_rank_{tp:02d}_model_states.pt"            # axis names, or {rank}, as Python formats numbers
    prefix = "module."          # only tensors with this prefix; it is removed from their names

Built-in ones (in `ready/`, for Hugging Face names and an axis tp): llama, mistral, mixtral, qwen.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files as resources
from math import gcd, prod
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from shardwise.checkpoint.files import readable
from shardwise.errors import LayoutError
from shardwise.job.names import matched
from shardwise.layout import Layout, Mesh, Placement, Replicate, Shard
from shardwise.layout.placements import placement
from shardwise.quoting import brief

DIGITS = re.compile("(0?[0-9]{1,2})?d?")  # allowed format specs of numbers in file names
READY = ("llama", "mistral", "mixtral", "qwen")


@dataclass(frozen=True)
class Fused:
    """Several tensors stacked along `dim`, each split over a mesh axis. Segments are sizes, or only their ratio."""

    dim: int
    segments: tuple[int, ...]
    exact: bool = True
    axis: str | None = None  # None: the only one of the mesh

    def sizes(self, length: int) -> tuple[int, ...]:
        """The segments of a dim that is so long.

        >>> Fused(0, (32, 8, 8), exact=False).sizes(6144)
        (4096, 1024, 1024)
        """
        if self.exact:
            return self.segments  # Layout.fused refuses those that do not fill the dim
        reduced = [size // gcd(*self.segments) for size in self.segments]
        if length % sum(reduced):
            raise LayoutError(f"{length} cells of dim {self.dim} cannot be cut in the ratio {list(self.segments)}")
        return tuple(size * length // sum(reduced) for size in reduced)


Word = Placement | Fused
TomlTable = Mapping[str, Any]


@dataclass(frozen=True)
class ShardingRule:
    """The placements of tensors whose names match one of `patterns`. `where`: the file and the rule, for messages."""

    patterns: tuple[str, ...]
    placements: tuple[Placement, ...] | Mapping[str, Placement]  # of all axes in order, or of some by name
    fused: Fused | None
    skip: bool
    where: str
    heads: str | None = None  # the number in config.json that says how many heads a split dim has

    def matches(self, name: str) -> bool:
        """True for a name that matches a pattern."""
        return any(matched(pattern, name) is not None for pattern in self.patterns)

    def on(self, mesh: Mesh) -> tuple[Word, ...]:
        """The placement for every axis of a mesh."""
        with _at(self.where):
            if self.fused is None:
                return mesh.placements(self.placements)
            if self.fused.axis is None and len(mesh.names) > 1:
                raise LayoutError(f'{mesh} has several axes: fused needs axis = "...", one of {", ".join(mesh.names)}')
            axis = self.fused.axis or mesh.names[0]
            mesh.placements({axis: "R"})  # refuses an unknown axis
            return tuple(self.fused if name == axis else Replicate() for name in mesh.names)


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules, their mesh, and the names of its rank files."""

    rules: tuple[ShardingRule, ...]
    mesh: Mesh | None
    pattern: str | None
    prefix: str
    where: str
    config: Mapping[str, object] | None = None  # the config.json of the model

    def __post_init__(self) -> None:
        if self.mesh is not None:
            for rule in self.rules:
                rule.on(self.mesh)
            with _at(f"{self.where}, [files]"):
                file_name(self.pattern or "", axis_positions(self.mesh, 0))

    def with_mesh(self, /, **sizes: int) -> Rules:
        """The same rules on a mesh of these axes.

        >>> read_rules("llama").with_mesh(dp=2, tp=4).mesh
        Mesh(dp=2, tp=4)
        """
        return replace(self, mesh=Mesh.of(list(sizes.values()), list(sizes)))

    def with_config(self, config: Mapping[str, object]) -> Rules:
        """The same rules for a model with that config.json: layouts that cut its heads are refused.

        >>> rules = read_rules("llama").with_mesh(tp=4).with_config({"num_key_value_heads": 4})
        >>> print(rules.layout("model.layers.0.self_attn.k_proj.weight", (512, 4096)))
        512x4096/S0@tp=4
        """
        return replace(self, config=config)

    @property
    def needs_config(self) -> bool:
        """True if a rule names a number of heads."""
        return any(rule.heads for rule in self.rules)

    def rule(self, name: str) -> ShardingRule:
        """The first rule that matches a name."""
        for rule in self.rules:
            if rule.matches(name):
                return rule
        raise LayoutError(f"{self.where}: none of {len(self.rules)} rules matches {name!r}: add one that does")

    def skips(self, name: str) -> bool:
        """True for a name that the rules leave out."""
        return next((rule.skip for rule in self.rules if rule.matches(name)), False)

    def known_mesh(self) -> Mesh:
        """The mesh; refused if there is none."""
        if self.mesh is None:
            raise LayoutError(
                f"{self.where} has no [mesh]: give the sizes of its axes: with_mesh(tp=4), or --mesh tp=4"
            )
        return self.mesh

    def placements(self, name: str) -> tuple[Placement, ...]:
        """The placements of a tensor, one per axis of the mesh.

        >>> read_rules("llama").with_mesh(dp=2, tp=4).placements("model.layers.0.self_attn.o_proj.weight")
        (Replicate(), Shard(dim=1))
        """
        rule, words = self._rule_on_mesh(name)
        placements = tuple(word for word in words if not isinstance(word, Fused))
        if len(placements) < len(words):
            raise LayoutError(f"{rule.where}: {name!r} is fused, which has no placement: use layout(name, shape)")
        return placements

    def layout(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of a tensor; the owners are the ranks of the mesh.

        >>> print(read_rules("llama").with_mesh(tp=4).layout("model.embed_tokens.weight", (32000, 4096)))
        32000x4096/S0@tp=4
        """
        rule, words = self._rule_on_mesh(name)
        with _at(f"{rule.where}: {name!r}"):
            layout = layout_on(shape, self.known_mesh(), words)
            if rule.heads is not None and (count := _number(self.config or {}, rule.heads)):
                _check_heads(layout, words, count, f"{self.mesh} cuts {count} heads ({rule.heads} in config.json)")
            return layout

    def _rule_on_mesh(self, name: str) -> tuple[ShardingRule, tuple[Word, ...]]:
        rule = self.rule(name)
        if rule.skip:
            raise LayoutError(f"{rule.where}: {name!r} is left out (skip = true)")
        return rule, rule.on(self.known_mesh())


RulesSource = Rules | str | os.PathLike[str] | TomlTable  # what `read_rules` takes


def layout_on(shape: Sequence[int], mesh: Mesh, words: Sequence[Word]) -> Layout:
    """`Layout.on_mesh`, or a layout that is fused along one axis."""
    for axis, word in enumerate(words):
        if isinstance(word, Fused):
            if prod(mesh.shape) > mesh.shape[axis]:
                raise LayoutError(f"a fused layout has no replicas yet: {mesh} has more axes than {mesh.names[axis]!r}")
            length = shape[word.dim] if -len(shape) <= word.dim < len(shape) else 0  # Layout.fused refuses it
            return Layout.fused(shape, word.dim, word.sizes(length), mesh.ranks.reshape(-1).tolist())
    return Layout.on_mesh(shape, mesh, words)


def _number(config: Mapping[str, object], name: str) -> int | None:
    """A number of heads in a config.json; without grouped heads there are as many of k and v as of q."""
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            for key in (name, "num_attention_heads"):
                count = table.get(key)
                if type(count) is int and count > 0:
                    return count
    return None


def _check_heads(layout: Layout, words: Sequence[Word], count: int, what: str) -> None:
    """Refuse parts of heads. A split dim holds `count` heads of equal size."""
    for dim in {word.dim for word in words if isinstance(word, Shard)}:
        size = layout.shape[dim] // count
        edges = {edge[dim] for o in layout.owners() for p in layout.pieces(o) for edge in (p.box.lo, p.box.hi)}
        if layout.shape[dim] % count or any(edge % size for edge in edges):
            raise LayoutError(
                f"{what} of {layout.shape[dim] / count:g} cells along dim {dim}: "
                f"use at most {count} ranks that divide {count}, or rules that replicate heads"
            )


def axis_positions(mesh: Mesh, rank: int) -> dict[str, int]:
    """The fields of a file pattern: the rank, and its position along every axis.

    >>> axis_positions(Mesh(dp=2, tp=4), 6)
    {'rank': 6, 'dp': 1, 'tp': 2}
    """
    places = [int(place) for place in np.unravel_index(rank, mesh.shape)]
    return {"rank": rank} | dict(zip(mesh.names, places, strict=True))


def file_name(pattern: str, places: Mapping[str, int]) -> str:
    """The file of a rank.

    >>> file_name("d{dp}/model_{tp:02d}.pt", {"rank": 6, "dp": 1, "tp": 2})
    'd1/model_02.pt'
    """
    for _, field, form, conversion in _fields(pattern):
        if field is not None and field not in places:
            raise LayoutError(
                f"pattern {brief(pattern)} has the unknown field {{{field}}}: known are {', '.join(places)}"
            )
        if conversion or not DIGITS.fullmatch(form or ""):
            raise LayoutError(
                f"pattern {brief(pattern)} is not supported: write {{{field}}}, or with leading zeros {{{field}:02d}}"
            )
    return pattern.format(**places)


def _fields(pattern: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(Formatter().parse(pattern))
    except ValueError as error:
        raise LayoutError(f"pattern {brief(pattern)} cannot be read: {error}") from None


# --- reading -------------------------------------------------------------------------------------------------------


def read_rules(source: RulesSource) -> Rules:
    """Rules from a file, the name of built-in ones ("llama"), a TOML string, or a mapping as TOML would give it.

    >>> rules = read_rules('''
    ... [mesh]
    ... tp = 2
    ... [[rule]]
    ... name = "*.qkv.weight"
    ... fused = {dim = 0, segments = [8, 2, 2]}
    ... ''')
    >>> print(rules.layout("h.0.qkv.weight", (12, 4)))
    12x4/fused0=8,2,2@2
    """
    if isinstance(source, Rules):
        return source
    if isinstance(source, Mapping):
        return _rules(source, "these rules")
    if not isinstance(source, str | os.PathLike):
        raise LayoutError(
            f"rules must be a path, the name of built-in ones, a TOML string or a mapping, not {brief(source)}"
        )
    text, where = _text(source)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise LayoutError(f"{where}: not valid TOML: {error}") from None
    return _rules(table, where)


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The text of rules, and their name in messages."""
    if isinstance(source, str) and ("\n" in source or "=" in source):
        return source, "these rules"
    if source in READY:
        path = resources("shardwise.checkpoint") / "ready" / f"{source}.toml"
        return path.read_text("utf-8"), f"the built-in rules {source!r}"
    file = Path(source)
    if isinstance(source, str) and file.suffix != ".toml" and not file.is_file():
        raise LayoutError(
            f"no rules {source!r}: built-in are {', '.join(READY)}{_near(source, READY)}; others must be files"
        )
    with readable(file):
        try:
            return file.read_text("utf-8"), str(file)
        except UnicodeDecodeError as error:
            raise LayoutError(f"{file}: not valid TOML: {error}") from None


def _rules(table: TomlTable, where: str) -> Rules:
    with _at(where):
        _check_keys(table, ("mesh", "rule", "files"))
        rules = _typed(table, "rule", list, [])
        if not rules:
            raise LayoutError("it has no [[rule]]")
    with _at(f"{where}, [files]"):
        files = _typed(table, "files", Mapping, {})
        _check_keys(files, ("pattern", "prefix"))
        pattern, prefix = _typed(files, "pattern", str, None), _typed(files, "prefix", str, "")
    with _at(f"{where}, [mesh]"):
        sizes = _typed(table, "mesh", Mapping, None)
        mesh = None if sizes is None else Mesh.of(list(sizes.values()), list(sizes))
    return Rules(
        tuple(_rule(rule, f"{where}, rule {n + 1}") for n, rule in enumerate(rules)), mesh, pattern, prefix, where
    )


def _rule(table: object, where: str) -> ShardingRule:
    with _at(where):
        if not isinstance(table, Mapping):
            raise LayoutError(f"a rule must be a table with name and placements, not {brief(table)}")
        name = _typed(table, "name", (str, list), None)
        patterns = [name] if isinstance(name, str) else name
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise LayoutError(f"name must be a pattern or a list of patterns, not {brief(name)}")
    where = f"{where} ({brief(patterns)[1:-1]})"
    with _at(where):
        _check_keys(table, ("name", "placements", "fused", "skip", "heads"))
        skip = _typed(table, "skip", bool, False)
        if ("placements" in table) + ("fused" in table) + skip != 1:
            raise LayoutError("it needs exactly one of placements, fused and skip = true")
        heads = _typed(table, "heads", str, None)
        fused = _fused(table["fused"]) if "fused" in table else None
        return ShardingRule(tuple(patterns), _placements(table.get("placements", "R")), fused, skip, where, heads)


def _placements(value: object) -> tuple[Placement, ...] | Mapping[str, Placement]:
    if isinstance(value, Mapping):
        return {str(axis): placement(word) for axis, word in value.items()}
    if value == "R":
        return {}  # for any number of axes
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise LayoutError(f'placements must be like ["S0", "R"], {{tp = "S0"}} or "R", not {brief(value)}')
    return tuple(map(placement, words))


def _fused(table: object) -> Fused:
    if not isinstance(table, Mapping):
        raise LayoutError(f"fused must be like {{dim = 0, segments = [4096, 1024, 1024]}}, not {brief(table)}")
    _check_keys(table, ("dim", "segments", "ratio", "axis"))
    if ("segments" in table) + ("ratio" in table) != 1:
        raise LayoutError("fused needs exactly one of segments (sizes) and ratio")
    segments = table.get("segments", table.get("ratio"))
    if (
        not isinstance(segments, list | tuple)
        or not segments
        or not all(type(size) is int and 0 < size < 2**62 for size in segments)
    ):
        raise LayoutError(f"the segments of fused must be a list of whole numbers above 0, not {brief(segments)}")
    dim = _typed(table, "dim", int, 0)
    return Fused(dim, tuple(segments), "segments" in table, _typed(table, "axis", str, None))


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Adds the position in the rules to errors."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def _typed(table: TomlTable, key: str, kind: type | tuple[type, ...], default: object) -> Any:
    value = table.get(key, default)
    if value is default or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = {str: "a string", list: "a list", Mapping: "a table", int: "a whole number", bool: "true or false"}
    raise LayoutError(f"{key} must be {' or '.join(words[one] for one in kinds)}, not {brief(value)}")


def _check_keys(table: TomlTable, known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise LayoutError(f"unknown key {key!r}: known are {', '.join(known)}{_near(str(key), known)}")


def _near(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
