"""Whole numbers in rules, as small expressions such as "expert % ep" over named numbers. They are never run as Python.

An expression has whole numbers, names, + - * // % and parentheses. // and % round down, as in Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.errors import LayoutError
from shardwise.quoting import brief

TOKEN = re.compile(r"\d+|[A-Za-z_]\w*|//|[-+*%()]", re.ASCII)
LONGEST, LARGEST = 200, 2**62  # characters of an expression; numbers in it and between its steps
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Expression:
    """A whole number that depends on others.

    >>> Expression("(expert + 1) % ep").value({"expert": 6, "ep": 4})
    3
    """

    text: str

    def __post_init__(self) -> None:
        _parsed(self.text)

    def __str__(self) -> str:
        return self.text

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the numbers that it needs."""
        return frozenset(node.id for node in ast.walk(_parsed(self.text)) if isinstance(node, ast.Name))

    def value(self, numbers: Mapping[str, int]) -> int:
        """Its value; refused where a number is missing, is divided by 0 or becomes too large."""
        missing = sorted(self.names - numbers.keys())
        if missing:
            raise LayoutError(f"{self.text!r} needs the number {missing[0]!r}, which is not known here")
        return _value(_parsed(self.text), numbers, self.text)

    def explained(self, numbers: Mapping[str, int]) -> str:
        """With its value, for messages.

        >>> Expression("heads * head_dim").explained({"heads": 8, "head_dim": 64}), Expression("64").explained({})
        ('heads * head_dim = 512', '64')
        """
        return f"{self.text} = {self.value(numbers)}" if self.names else self.text


def expression(given: object, what: str) -> Expression:
    """An expression from a string or a whole number. `what`: its key in the rules, for messages."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < LARGEST:
        return Expression(str(given))
    if not isinstance(given, str):
        raise LayoutError(f"{what} must be a whole number or an expression such as 'expert % ep', not {brief(given)}")
    try:
        return Expression(given)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    """The syntax tree of an expression that has nothing but numbers, names and the five operations."""
    if len(text) > LONGEST:
        raise LayoutError(f"{brief(text)} is too long for an expression: at most {LONGEST} characters")
    if TOKEN.sub("", text).strip(" "):
        raise _refused(text)
    try:  # tokens are set apart, so that '1if' is no warning of Python
        tree = ast.parse(" ".join(TOKEN.findall(text)), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text) from None
    if not all(_is_known(node) for node in ast.walk(tree)):
        raise _refused(text)
    return tree


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int and node.value < LARGEST
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load, ast.UnaryOp, ast.USub, *OPERATIONS))


def _refused(text: str) -> LayoutError:
    return LayoutError(f"{brief(text)} is not an expression: use whole numbers, names, + - * // % and parentheses")


def _value(node: ast.expr, numbers: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return numbers[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, numbers, text)
        case ast.BinOp(left=left, op=op, right=right):
            return _result(type(op), _value(left, numbers, text), _value(right, numbers, text), text)
    raise _refused(text)  # `_parsed` lets nothing else through


def _result(op: type[ast.operator], left: int, right: int, text: str) -> int:
    if not right and op in (ast.FloorDiv, ast.Mod):
        raise LayoutError(f"{text!r} divides {left} by 0")
    result = OPERATIONS[op](left, right)
    if abs(result) >= LARGEST:
        raise LayoutError(f"{text!r} becomes too large: numbers must be below 2**62")
    return result
