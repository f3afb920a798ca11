"""Reads rules: a TOML file, the name of built-in ones, a TOML string, or a mapping as TOML would give it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.axis_rules import Owners, Segments, WholeHeads, Word
from shardwise.checkpoint.expressions import Expression, expression
from shardwise.checkpoint.model_config import CONFIG
from shardwise.checkpoint.model_facts import ModelFacts, Size
from shardwise.checkpoint.ready_rules import ready_file, ready_names, ready_table
from shardwise.checkpoint.sharding_rule import FIELD, ShardingRule, at
from shardwise.errors import LayoutError
from shardwise.layout import Mesh, Shard
from shardwise.layout.placements import placement
from shardwise.quoting import brief
from shardwise.storage.paths import readable

TomlTable = Mapping[str, Any]
KINDS = {str: "a string", list: "a list", Mapping: "a table", int: "a whole number", bool: "true or false"}


class RulesFile(NamedTuple):
    """The contents of a file of rules."""

    rules: tuple[ShardingRule, ...]
    mesh: Mesh | None
    pattern: str | None
    prefix: str
    where: str
    facts: ModelFacts


def read_file(source: str | os.PathLike[str] | TomlTable) -> RulesFile:
    """The contents of rules from any source."""
    if isinstance(source, Mapping):
        return _contents(source, "these rules")
    name = ready_file(source) if isinstance(source, str) else None
    if name is not None:
        return _contents(ready_table(name), _ready(str(source)))
    text, where = _text(source)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise LayoutError(f"{where}: not valid TOML: {error}") from None
    return _contents(table, where)


def _ready(name: str) -> str:
    return f"the built-in rules {name!r}"


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The text of rules, and their name in messages."""
    if isinstance(source, str) and ("\n" in source or "=" in source):
        return source, "these rules"
    file = Path(source)
    if isinstance(source, str) and file.suffix != ".toml" and not file.is_file():
        known = sorted(ready_names())
        raise LayoutError(
            f"no rules {source!r}: built-in are auto, {', '.join(known)}{_near(source, known)}; others must be files"
        )
    with readable(file):
        try:
            return file.read_text("utf-8"), str(file)
        except UnicodeDecodeError as error:
            raise LayoutError(f"{file}: not valid TOML: {error}") from None


# --- tables --------------------------------------------------------------------------------------------------------


def _contents(table: TomlTable, where: str) -> RulesFile:
    with at(where):
        _check_keys(table, ("base", "mesh", "rule", "files", "model", "numbers", "shapes", "counts"))
        base = _base(_typed(table, "base", str, None))
        rules = _typed(table, "rule", list, [])
        if not rules and base is None:
            raise LayoutError("it has no [[rule]]")
    with at(f"{where}, [files]"):
        files = _typed(table, "files", Mapping, {})
        _check_keys(files, ("pattern", "prefix"))
        pattern, prefix = _typed(files, "pattern", str, None), _typed(files, "prefix", str, "")
    with at(f"{where}, [mesh]"):
        sizes = _typed(table, "mesh", Mapping, None)
        mesh = None if sizes is None else Mesh.of(list(sizes.values()), list(sizes))
    facts, optional = _facts(table, where), _axes(table, where)
    own = [_rule(rule, f"{where}, rule {n + 1}", optional) for n, rule in enumerate(rules)]
    if base is not None:
        own, facts = [*own, *base.rules], _joined(facts, base.facts)
    return RulesFile(tuple(own), mesh, pattern, prefix, where, facts)


def _base(name: str | None) -> RulesFile | None:
    """The rules that others add to."""
    if name is None:
        return None
    file = ready_file(name)
    if file is None:
        known = sorted(ready_names())
        raise LayoutError(
            f"base = {brief(name)} are no built-in rules: those are {', '.join(known)}{_near(name, known)}"
        )
    return _contents(ready_table(file), _ready(name))


def _joined(facts: ModelFacts, base: ModelFacts) -> ModelFacts:
    """Facts with those of the rules that they add to."""
    return ModelFacts(
        {**base.numbers, **facts.numbers},
        {**facts.shapes, **{key: sizes for key, sizes in base.shapes.items() if key not in facts.shapes}},
        {**base.counts, **facts.counts},
        facts.experts or base.experts,
        facts.head if facts.head is not None else base.head,
        base.config_name,
    )


def _axes(table: TomlTable, where: str) -> tuple[str, ...]:
    """The axes that a mesh may lack."""
    with at(f"{where}, [model]"):
        axes = _typed(_typed(table, "model", Mapping, {}), "axes", list, [])
        if not all(isinstance(axis, str) for axis in axes):
            raise LayoutError(f"axes must be a list of names, not {brief(axes)}")
        return tuple(axes)


def _facts(table: TomlTable, where: str) -> ModelFacts:
    with at(f"{where}, [model]"):
        model = _typed(table, "model", Mapping, {})
        _check_keys(model, ("types", "aliases", "axes", "experts", "head", "config"))
        head, config_name = _typed(model, "head", str, None), _typed(model, "config", str, CONFIG)
        experts = expression(model["experts"], "experts") if "experts" in model else None
    with at(f"{where}, [numbers]"):
        numbers = {key: _choices(value, key) for key, value in _typed(table, "numbers", Mapping, {}).items()}
    with at(f"{where}, [shapes]"):
        shapes = {key: _sizes(value, key) for key, value in _typed(table, "shapes", Mapping, {}).items()}
    with at(f"{where}, [counts]"):
        counts = {key: expression(value, key) for key, value in _typed(table, "counts", Mapping, {}).items()}
        for pattern in counts:
            if len(_fields(pattern)) != 1:
                raise LayoutError(f"{pattern!r} needs one number in the name, such as '*.experts.{{expert}}.*'")
    return ModelFacts(numbers, shapes, counts, experts, head, config_name)


def _choices(value: object, key: str) -> tuple[Expression, ...]:
    choices = value if isinstance(value, list | tuple) else [value]
    return tuple(expression(one, key) for one in choices)


def _sizes(value: object, key: str) -> tuple[Size, ...]:
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{key} must be a list with a size for every dim, not {brief(value)}")
    return tuple(_size(one, key) for one in value)


def _size(value: object, key: str) -> Size:
    """A number, an expression, ">= expression" or "*"."""
    if value == "*":
        return Size(None)
    if isinstance(value, str) and value.startswith(">="):
        return Size(expression(value[2:].strip(), key), at_least=True)
    return Size(expression(value, key))


# --- one rule ------------------------------------------------------------------------------------------------------


def _rule(table: object, where: str, optional: tuple[str, ...]) -> ShardingRule:
    with at(where):
        if not isinstance(table, Mapping):
            raise LayoutError(f"a rule must be a table with name and placements, not {brief(table)}")
        patterns = _patterns(table)
    where = f"{where} ({brief(list(patterns))[1:-1]})"
    with at(where):
        _check_keys(table, ("name", "placements", "fused", "skip", "heads", "repeat", "owners", "dim", "axis", "when"))
        skip = _typed(table, "skip", bool, False)
        given = ("placements" in table or ("owners" in table and "fused" not in table)) + ("fused" in table) + skip
        if given != 1:
            raise LayoutError("it needs exactly one of placements, fused and skip = true; owners may stand beside them")
        words = _fused(table["fused"]) if "fused" in table else _placements(table.get("placements", "R"))
        words = _with_heads(words, table)
        owners, when = _owners(table), expression(table["when"], "when") if "when" in table else None
        return ShardingRule(patterns, words, skip, where, owners, _typed(table, "axis", str, None), when, optional)


def _patterns(table: TomlTable) -> tuple[str, ...]:
    name = _typed(table, "name", (str, list), None)
    patterns = [name] if isinstance(name, str) else name
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise LayoutError(f"name must be a pattern or a list of patterns, not {brief(name)}")
    for pattern in patterns:
        _fields(pattern)
    return tuple(patterns)


def _fields(pattern: str) -> list[str]:
    fields = FIELD.findall(pattern)
    if len(set(fields)) < len(fields):
        raise LayoutError(f"{brief(pattern)} has a field twice: give every number in a name a field of its own")
    return fields


def _placements(value: object) -> tuple[Word, ...] | Mapping[str, Word]:
    if isinstance(value, Mapping):
        return {str(axis): placement(word) for axis, word in value.items()}
    if value == "R":
        return {}  # for any number of axes
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise LayoutError(f'placements must be like ["S0", "R"], {{tp = "S0"}} or "R", not {brief(value)}')
    return tuple(map(placement, words))


Words = tuple[Word, ...] | Mapping[str, Word] | Segments


def _with_heads(words: Words, table: TomlTable) -> Words:
    """Shards that cut no head, where the rule says how many heads there are."""
    repeat = _typed(table, "repeat", bool, False)
    if "heads" not in table:
        if repeat:
            raise LayoutError("repeat = true replicates heads: heads must say how many there are")
        return words
    if isinstance(words, Segments):
        raise LayoutError("fused has heads of its own: fused = {dim = 0, heads = [...]}")
    count = expression(table["heads"], "heads")

    def whole(word: Word) -> Word:
        return WholeHeads(word.dim, count, repeat) if isinstance(word, Shard) else word

    if isinstance(words, Mapping):
        return {axis: whole(word) for axis, word in words.items()}
    return tuple(map(whole, words))


def _owners(table: TomlTable) -> Owners | None:
    if "owners" not in table:
        if stray := [key for key in ("dim", "axis") if key in table]:
            raise LayoutError(f"{stray[0]} belongs to owners, or inside fused = {{...}}")
        return None
    return Owners(expression(table["owners"], "owners"), _typed(table, "dim", int, None))


def _fused(table: object) -> Words:
    if not isinstance(table, Mapping):
        raise LayoutError(f"fused must be like {{dim = 0, segments = [4096, 1024, 1024]}}, not {brief(table)}")
    kinds = [kind for kind in ("segments", "ratio", "heads") if kind in table]
    _check_keys(table, ("dim", "segments", "ratio", "heads", "axis"))
    if len(kinds) != 1:
        raise LayoutError("fused needs exactly one of segments (sizes), ratio and heads (numbers of heads)")
    parts = table[kinds[0]]
    if not isinstance(parts, list | tuple) or not parts or any(part == 0 for part in parts):
        raise LayoutError(f"the {kinds[0]} of fused must be a list of whole numbers above 0, not {brief(parts)}")
    dim, axis = _typed(table, "dim", int, 0), _typed(table, "axis", str, None)
    every = tuple(expression(part, f"the {kinds[0]} of fused, whole numbers above 0,") for part in parts)
    segments = Segments(dim, every, kinds[0])  # type: ignore[arg-type]
    return segments if axis is None else {axis: segments}


# --- values --------------------------------------------------------------------------------------------------------


def _typed(table: TomlTable, key: str, kind: type | tuple[type, ...], default: object) -> Any:
    value = table.get(key, default)
    if value is default or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    raise LayoutError(f"{key} must be {' or '.join(KINDS[one] for one in kinds)}, not {brief(value)}")


def _check_keys(table: TomlTable, known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise LayoutError(f"unknown key {key!r}: known are {', '.join(known)}{_near(str(key), known)}")


def _near(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word[:100], known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
