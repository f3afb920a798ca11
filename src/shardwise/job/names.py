"""Names of tensors: patterns, renaming, and suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

Names = str | Sequence[str]
Rename = Mapping[str, Names] | Sequence[tuple[str, Names]] | Callable[[str], Names] | None
SHOWN = 8
LIKELY = 200  # characters of a name that is compared with others: to compare takes their square
ONE = re.compile(r"\[!?+\]?+[^\]]*+\]|.", re.DOTALL)  # what stands for one character: ?, [abc], or itself


def matched(pattern: str, name: str, names: Container[str] = ()) -> tuple[str, ...] | None:
    """The strings that the stars of a pattern match in a name; None if it does not match. ? and [abc]: one character.

    A pattern without stars matches the equal name; if that is one of `names`, only that one.

    >>> matched("layers.*.*.weight", "layers.3.q_proj.weight"), matched("layers.*", "head.weight")
    (('3', 'q_proj'), None)
    >>> matched("*.[qkv]_proj", "3.k_proj"), matched("*.[qkv]_proj", "3.o_proj")
    (('3',), None)
    >>> matched("a[0]", "a0"), matched("a[0]", "a[0]"), matched("a[0]", "a0", ["a0", "a[0]"])
    ((), (), None)
    """
    if "*" not in pattern and (pattern == name or pattern in names):
        return () if pattern == name else None
    parts = _parts(pattern)
    last, at, stars = parts[-1], 0, list[str]()
    end = len(name) - last.width
    for number, part in enumerate(parts[:-1]):  # each as early as possible: a later match never helps
        match = part.text.search(name, at) if number else part.text.match(name)
        if match is None:
            return None
        stars += [name[at : match.start()]] * bool(number)
        at = match.end()
    if end < at or (len(parts) == 1 and end) or not last.text.fullmatch(name, end):
        return None
    return (*stars, name[at:end]) if len(parts) > 1 else ()


class _Part(NamedTuple):
    """The part of a pattern between two stars, and how many characters it matches."""

    text: re.Pattern[str]
    width: int


@lru_cache(maxsize=1024)
def _parts(pattern: str) -> tuple[_Part, ...]:
    """Stars are not part of the regular expression: it would backtrack through all ways to split a name."""
    return tuple(_Part(re.compile(translate(part)[:-2]), len(ONE.findall(part))) for part in pattern.split("*"))


def filled(pattern: str, stars: Sequence[str]) -> str:
    """A pattern with its stars replaced.

    >>> filled("model.*.w", ["3"])
    'model.3.w'
    """
    parts = pattern.split("*")
    if len(parts) != len(stars) + 1:
        raise ValueError(f"{pattern!r} has {len(parts) - 1} stars, but {len(stars)} were matched: {list(stars)}")
    return "".join(text for pair in zip(parts, [*stars, ""], strict=True) for text in pair)


def renamed(name: str, rename: Rename, names: Container[str] = ()) -> list[str]:
    """The new names of a tensor: by a mapping or rules (the first match wins; stars match anything), or by a function.

    `names`: all names. A pattern without stars that equals one of them matches only that one.

    >>> renamed("model.embed.w", {"model.*": "*"}), renamed("embed.w", [("embed.*", ["embed.*", "head.*"])])
    (['embed.w'], ['embed.w', 'head.w'])
    """
    if rename is None:
        return [name]
    try:
        becomes = rename(name) if callable(rename) else _by_rules(name, rename, names)
    except Exception as error:
        raise ValueError(f"rename= failed for {name!r}: {type(error).__name__}: {error}") from error
    several = [becomes] if isinstance(becomes, str) else becomes
    if not isinstance(several, list | tuple) or not all(isinstance(one, str) for one in several):
        raise ValueError(f"rename= must give a name or a list of names for {name!r}, not {becomes!r}")
    return list(several)


def rename_patterns(rename: Rename) -> list[str]:
    """The patterns of a mapping or of rules; a function has none. What is not a rule is refused by `renamed`.

    >>> rename_patterns([("model.*", "*"), ("head", "lm_head")])
    ['model.*', 'head']
    """
    rules = rename.items() if isinstance(rename, Mapping) else rename if isinstance(rename, list | tuple) else []
    return [rule[0] for rule in rules if isinstance(rule, list | tuple) and rule and isinstance(rule[0], str)]


def _by_rules(name: str, rename: object, names: Container[str]) -> object:
    if not isinstance(rename, Mapping | list | tuple):
        raise TypeError(f"it must be a mapping, rules [(pattern, name), ...] or a function, not {rename!r}")
    for rule in rename.items() if isinstance(rename, Mapping) else rename:
        if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(f"a rule is a pair of a pattern and the new name, not {rule!r}")
        pattern, becomes = rule
        stars = matched(pattern, name, names)
        if stars is not None:
            several = becomes if isinstance(becomes, list | tuple) else [becomes]
            return [filled(one, stars) if isinstance(one, str) else one for one in several]
    return name


def missing(what: str, names: Iterable[str], known: Iterable[str]) -> str:
    """An error text for missing names, each with the nearest known name.

    >>> missing("the target has no", ["q.weigth"], ["q.weight", "k.weight"])
    "the target has no 'q.weigth' (nearest: 'q.weight')"
    """
    absent, likely = list(names), [name for name in known if len(name) <= LIKELY]
    words = []
    for name in absent[:SHOWN]:
        near = get_close_matches(name, likely, 1, 0.5) if len(name) <= LIKELY else []
        words.append(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    return f"{what} {_and_more(words, len(absent))}"


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are.

    >>> some("abcdefghij")
    "'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' and 2 more"
    """
    several = list(names)
    return _and_more(list(map(repr, several[:SHOWN])), len(several))


def _and_more(shown: list[str], count: int) -> str:
    return ", ".join(shown) + (f" and {count - SHOWN} more" if count > SHOWN else "")
