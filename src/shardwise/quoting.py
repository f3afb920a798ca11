"""Strings and values from files, made safe for messages and terminals: short, and without control characters.

All foreign strings pass through here before they are printed: errors do it automatically, tables and pages per cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
WIDTH, ITEMS, DEPTH = 100, 6, 3  # of a value in a message: characters, items of a container, levels of containers


def printable(text: str) -> str:
    """Text whose control characters, lone surrogates and the like are escaped; line breaks stay.

    >>> print(printable("w\\x1b[2J\\udc80"))
    w\\x1b[2J\\udc80
    """
    return text if text.isprintable() else "".join(map(_harmless, text))


def in_line(text: str) -> str:
    """The same with line breaks escaped, too: for a name, which could otherwise look like several.

    >>> in_line("w\\nequal")
    'w\\\\nequal'
    """
    return printable(text).replace("\n", "\\n")


def _harmless(character: str) -> str:
    return character if character.isprintable() or character == "\n" else repr(character)[1:-1]


def brief(value: object) -> str:
    """`repr` for messages: of any value at once, also of one that refers to itself or has a million digits.

    >>> brief({"a": [1, [2, [3, [4]]]], "b": 10**5000})
    "{'a': [1, [2, [...]]], 'b': <a number of 16610 bits>}"
    >>> brief("x" * 200)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = in_line(_brief(value, DEPTH))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _brief(value: object, depth: int) -> str:
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:WIDTH])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<a number of {value.bit_length()} bits>"
    if isinstance(value, Mapping):
        pairs = (f"{_brief(key, depth - 1)}: {_brief(item, depth - 1)}" for key, item in _few(value.items()))
        return f"{{{_joined(pairs, len(value), depth)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        items = (_brief(item, depth - 1) for item in _few(value))
        return f"{opening}{_joined(items, len(value), depth)}{',' * (closing == ')' and len(value) == 1)}{closing}"
    try:
        return repr(value)
    except Exception:  # whatever a foreign object does
        return f"<{type(value).__name__}>"


def _few(items: Iterable[T]) -> Iterable[T]:
    return islice(items, ITEMS)


def _joined(items: Iterable[str], count: int, depth: int) -> str:
    if count and not depth:
        return "..."
    return ", ".join([*items, *["..."] * (count > ITEMS)])
