"""Rules: patterns of names, and for each how the tensors that fit it lie on a mesh. A file in TOML, or a ready one.

    [mesh]                      # names and sizes of the axes, in order; may be left out and given by `with_mesh`
    tp = 2

    [[rule]]                    # the first rule that fits a name counts; * ? [abc] as in shells
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

    [files]                     # of directories with a file per rank; without it they are found by the number in them
    pattern = "mp_rank_{tp:02d}_model_states.pt"            # by names of axes, or {rank}; as Python formats numbers
    prefix = "module."          # only tensors whose names begin so are meant, and are called by the rest of the name

Ready ones (in `ready/`, for Hugging Face names and an axis tp): llama, mistral, mixtral, qwen.
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
from shardwise.layout.mesh import placement
from shardwise.quoting import brief

DIGITS = re.compile("(0?[0-9]{1,2})?d?")  # how numbers are written in names of files
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


@dataclass(frozen=True)
class Rule:
    """How the tensors lie whose names fit one of `patterns`. `where` names the file and the rule."""

    patterns: tuple[str, ...]
    placements: tuple[Placement, ...] | Mapping[str, Placement]  # of all axes in order, or of some by name
    fused: Fused | None
    skip: bool
    where: str
    heads: str | None = None  # the number in config.json that says how many heads a split dim has

    def fits(self, name: str) -> bool:
        """True for a name that it speaks of."""
        return any(matched(pattern, name) is not None for pattern in self.patterns)

    def on(self, mesh: Mesh) -> tuple[Word, ...]:
        """What it says of every axis of a mesh."""
        with _at(self.where):
            if self.fused is None:
                return mesh.placements(self.placements)
            if self.fused.axis is None and len(mesh.names) > 1:
                raise LayoutError(f'{mesh} has several axes: fused needs axis = "...", one of {", ".join(mesh.names)}')
            axis = self.fused.axis or mesh.names[0]
            mesh.placements({axis: "R"})  # refuses one that is not there
            return tuple(self.fused if name == axis else Replicate() for name in mesh.names)


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules, the mesh that they speak of, and how the files of its ranks are called."""

    rules: tuple[Rule, ...]
    mesh: Mesh | None
    pattern: str | None
    prefix: str
    where: str
    config: Mapping[str, Any] | None = None  # of the model: its config.json

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

    def with_config(self, config: Mapping[str, Any]) -> Rules:
        """The same rules for a model with that config.json: layouts that cut its heads are refused.

        >>> rules = read_rules("llama").with_mesh(tp=4).with_config({"num_key_value_heads": 4})
        >>> print(rules.layout("model.layers.0.self_attn.k_proj.weight", (512, 4096)))
        512x4096/S0@tp=4
        """
        return replace(self, config=config)

    @property
    def needs_config(self) -> bool:
        """True where rules name numbers of heads."""
        return any(rule.heads for rule in self.rules)

    def rule(self, name: str) -> Rule:
        """The first rule that fits a name."""
        for rule in self.rules:
            if rule.fits(name):
                return rule
        raise LayoutError(f"{self.where}: none of {len(self.rules)} rules fits {name!r}: add one that does")

    def skips(self, name: str) -> bool:
        """True for a name that is left out. One that no rule fits is not."""
        return next((rule.skip for rule in self.rules if rule.fits(name)), False)

    def known_mesh(self) -> Mesh:
        """The mesh, where there is one."""
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
        rule, words = self._said(name)
        found = tuple(word for word in words if not isinstance(word, Fused))
        if len(found) < len(words):
            raise LayoutError(f"{rule.where}: {name!r} is fused, for which there is no placement: ask for its layout")
        return found

    def layout(self, name: str, shape: Sequence[int]) -> Layout:
        """Where the cells of a tensor live; the owners are the ranks of the mesh.

        >>> print(read_rules("llama").with_mesh(tp=4).layout("model.embed_tokens.weight", (32000, 4096)))
        32000x4096/S0@tp=4
        """
        rule, words = self._said(name)
        with _at(f"{rule.where}: {name!r}"):
            found = layout_on(shape, self.known_mesh(), words)
            if rule.heads is not None and (count := _number(self.config or {}, rule.heads)):
                _check_heads(found, words, count, f"{self.mesh} cuts {count} heads ({rule.heads} in config.json)")
            return found

    def _said(self, name: str) -> tuple[Rule, tuple[Word, ...]]:
        rule = self.rule(name)
        if rule.skip:
            raise LayoutError(f"{rule.where}: {name!r} is left out (skip = true)")
        return rule, rule.on(self.known_mesh())


def layout_on(shape: Sequence[int], mesh: Mesh, words: Sequence[Word]) -> Layout:
    """`Layout.on_mesh`, which may be fused along one axis."""
    for axis, word in enumerate(words):
        if isinstance(word, Fused):
            if prod(mesh.shape) > mesh.shape[axis]:
                raise LayoutError(f"a fused layout has no replicas yet: {mesh} has more axes than {mesh.names[axis]!r}")
            length = shape[word.dim] if -len(shape) <= word.dim < len(shape) else 0  # which Layout.fused refuses
            return Layout.fused(shape, word.dim, word.sizes(length), mesh.ranks.reshape(-1).tolist())
    return Layout.on_mesh(shape, mesh, words)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    """A number of heads in a config.json; models without grouped heads have as many of k and v as of q."""
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            for key in (name, "num_attention_heads"):
                if type(found := table.get(key)) is int and found > 0:
                    return found
    return None


def _check_heads(layout: Layout, words: Sequence[Word], count: int, what: str) -> None:
    """Refuse parts of heads. A dim that is split holds `count` heads of one size."""
    for dim in {word.dim for word in words if isinstance(word, Shard)}:
        size = layout.shape[dim] // count
        edges = {edge[dim] for o in layout.owners() for p in layout.pieces(o) for edge in (p.box.lo, p.box.hi)}
        if layout.shape[dim] % count or any(edge % size for edge in edges):
            raise LayoutError(
                f"{what} of {layout.shape[dim] / count:g} cells along dim {dim}: "
                f"use at most {count} ranks that divide {count}, or rules that replicate heads"
            )


def axis_positions(mesh: Mesh, rank: int) -> dict[str, int]:
    """What the pattern of files can ask for: the rank, and its place along every axis.

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
            raise LayoutError(f"pattern {brief(pattern)} asks for {{{field}}}: known are {', '.join(places)}")
        if conversion or not DIGITS.fullmatch(form or ""):
            raise LayoutError(
                f"pattern {brief(pattern)} cannot be filled in: {{{field}}} is written as it is, or with leading zeros "
                f"as in {{{field}:02d}}"
            )
    return pattern.format(**places)


def _fields(pattern: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(Formatter().parse(pattern))
    except ValueError as error:
        raise LayoutError(f"pattern {brief(pattern)} cannot be read: {error}") from None


# --- reading -------------------------------------------------------------------------------------------------------


def read_rules(source: Any) -> Rules:
    """Rules from a file, from the name of ready ones ("llama"), from a text in TOML, or from what it would say.

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
        raise LayoutError(f"rules are a path, the name of ready ones, a text or a mapping, not {brief(source)}")
    text, where = _text(source)
    try:
        said = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise LayoutError(f"{where}: this is not TOML: {error}") from None
    return _rules(said, where)


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The text of rules, and what to call them in errors."""
    if isinstance(source, str) and ("\n" in source or "=" in source):
        return source, "these rules"
    if source in READY:
        found = resources("shardwise.checkpoint") / "ready" / f"{source}.toml"
        return found.read_text("utf-8"), f"the ready rules {source!r}"
    path = Path(source)
    if isinstance(source, str) and path.suffix != ".toml" and not path.is_file():
        raise LayoutError(f"no rules {source!r}: ready are {', '.join(READY)}{_near(source, READY)}; others are files")
    with readable(str(path)):
        try:
            return path.read_text("utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise LayoutError(f"{path}: this is not TOML: {error}") from None


def _rules(said: Mapping[str, Any], where: str) -> Rules:
    with _at(where):
        _check_keys(said, ("mesh", "rule", "files"))
        rules = _typed(said, "rule", list, [])
        if not rules:
            raise LayoutError("there is no [[rule]]")
    with _at(f"{where}, [files]"):
        files = _typed(said, "files", Mapping, {})
        _check_keys(files, ("pattern", "prefix"))
        pattern, prefix = _typed(files, "pattern", str, None), _typed(files, "prefix", str, "")
    with _at(f"{where}, [mesh]"):
        sizes = _typed(said, "mesh", Mapping, None)
        mesh = None if sizes is None else Mesh.of(list(sizes.values()), list(sizes))
    return Rules(
        tuple(_rule(rule, f"{where}, rule {n + 1}") for n, rule in enumerate(rules)), mesh, pattern, prefix, where
    )


def _rule(said: Any, where: str) -> Rule:
    with _at(where):
        if not isinstance(said, Mapping):
            raise LayoutError(f"a rule is a table with name and placements, not {brief(said)}")
        name = _typed(said, "name", (str, list), None)
        patterns = [name] if isinstance(name, str) else name
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise LayoutError(f"name must be a pattern of names or a list of them, not {brief(name)}")
    where = f"{where} ({brief(patterns)[1:-1]})"
    with _at(where):
        _check_keys(said, ("name", "placements", "fused", "skip", "heads"))
        skip = _typed(said, "skip", bool, False)
        if ("placements" in said) + ("fused" in said) + skip != 1:
            raise LayoutError("it needs placements, or fused, or skip = true, and only one of them")
        heads = _typed(said, "heads", str, None)
        fused = _fused(said["fused"]) if "fused" in said else None
        return Rule(tuple(patterns), _placements(said.get("placements", "R")), fused, skip, where, heads)


def _placements(said: Any) -> tuple[Placement, ...] | Mapping[str, Placement]:
    if isinstance(said, Mapping):
        return {str(axis): placement(word) for axis, word in said.items()}
    if said == "R":
        return {}  # however many axes there are
    words = said.split(",") if isinstance(said, str) else said
    if not isinstance(words, list | tuple):
        raise LayoutError(f'placements must be like ["S0", "R"], {{tp = "S0"}} or "R", not {brief(said)}')
    return tuple(map(placement, words))


def _fused(said: Any) -> Fused:
    if not isinstance(said, Mapping):
        raise LayoutError(f"fused must be like {{dim = 0, segments = [4096, 1024, 1024]}}, not {brief(said)}")
    _check_keys(said, ("dim", "segments", "ratio", "axis"))
    if ("segments" in said) + ("ratio" in said) != 1:
        raise LayoutError("fused needs segments (their sizes) or ratio, and only one of them")
    found = said.get("segments", said.get("ratio"))
    if (
        not isinstance(found, list | tuple)
        or not found
        or not all(type(size) is int and 0 < size < 2**62 for size in found)
    ):
        raise LayoutError(f"the segments of fused must be a list of whole numbers above 0, not {brief(found)}")
    dim = _typed(said, "dim", int, 0)
    return Fused(dim, tuple(found), "segments" in said, _typed(said, "axis", str, None))


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Errors that say where in the rules they are."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def _typed(said: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    found = said.get(key, default)
    if found is default or (isinstance(found, kind) and (kind is bool or not isinstance(found, bool))):
        return found
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = {str: "a text", list: "a list", Mapping: "a table", int: "a whole number", bool: "true or false"}
    raise LayoutError(f"{key} must be {' or '.join(words[one] for one in kinds)}, not {brief(found)}")


def _check_keys(said: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in said:
        if key not in known:
            raise LayoutError(f"unknown key {key!r}: known are {', '.join(known)}{_near(str(key), known)}")


def _near(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
