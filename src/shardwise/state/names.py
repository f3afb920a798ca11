"""Names of tensors: patterns, renaming, and what was meant by a name that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

Rename = Mapping[str, Any] | Sequence[tuple[str, Any]] | Callable[[str], Any] | None
SHOWN = 8


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern stand for in a name; None where it does not fit.

    >>> matched("layers.*.*.weight", "layers.3.q_proj.weight"), matched("layers.*", "head.weight")
    (('3', 'q_proj'), None)
    """
    found = _compiled(pattern).fullmatch(name)
    return found and found.groups()


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))))


def filled(pattern: str, stars: Sequence[str]) -> str:
    """A pattern with something for every star.

    >>> filled("model.*.w", ["3"])
    'model.3.w'
    """
    parts = pattern.split("*")
    if len(parts) != len(stars) + 1:
        raise ValueError(f"{pattern!r} has {len(parts) - 1} stars, but {len(stars)} were matched: {list(stars)}")
    return "".join(text for pair in zip(parts, [*stars, ""], strict=True) for text in pair)


def renamed(name: str, rename: Rename) -> list[str]:
    """The names that a tensor gets: by a mapping or rules (first one that fits; stars match anything), or a function.

    >>> renamed("model.embed.w", {"model.*": "*"}), renamed("embed.w", [("embed.*", ["embed.*", "head.*"])])
    (['embed.w'], ['embed.w', 'head.w'])
    """
    if rename is None:
        return [name]
    if callable(rename):
        found = rename(name)
    else:
        found = _by_rules(name, rename.items() if isinstance(rename, Mapping) else rename)
    return [found] if isinstance(found, str) else list(found)


def _by_rules(name: str, rules: Iterable[tuple[str, Any]]) -> list[str]:
    for pattern, becomes in rules:
        stars = matched(pattern, name)
        if stars is not None:
            return [filled(one, stars) for one in ([becomes] if isinstance(becomes, str) else becomes)]
    return [name]


def missing(what: str, names: Iterable[str], known: Iterable[str]) -> str:
    """Names that are not where they should be, each with the one that may have been meant.

    >>> missing("the target has no", ["q.weigth"], ["q.weight", "k.weight"])
    "the target has no 'q.weigth' (nearest: 'q.weight')"
    """
    listed, there = list(names), list(known)
    words = []
    for name in listed[:SHOWN]:
        near = get_close_matches(name, there, 1, 0.5)
        words.append(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{what} {', '.join(words)}{more}"
