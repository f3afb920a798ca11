"""The exceptions of the library, one tree.

ShardwiseError
├── LayoutError (also ValueError)      an impossible layout, or one that does not cover its tensor
│   └── NotationError                  a string that is not a layout: knows the position
├── PlanError (also ValueError)        a move that cannot be planned, or a plan used on other layouts
├── ExchangeError (also RuntimeError)  ranks that disagree or cannot take part, or a transport that broke
│   ├── RefusedValueError (also ValueError)  a rank cannot take part because of a value that it was given
│   └── RefusedTypeError (also TypeError)    the same, of a type
├── UnsupportedError (also NotImplementedError, and so RuntimeError)  an operation that sharded tensors do not have
├── EngineError (also RuntimeError)          an engine whose loader cannot be recorded, or whose parameters changed
└── CheckpointError (also RuntimeError)      files that are not a checkpoint, are damaged, or cannot be read or written
    └── RefusedCastError (also ValueError)   a cast that would change what values mean, or lose some of them
"""

from __future__ import annotations

from shardwise.quoting import printable


class ShardwiseError(Exception):
    """The base of all errors that the library raises on purpose. Messages never have control characters.

    >>> import shardwise as sw
    >>> try:
    ...     sw.Layout.chunk((8, 6), 2, owners=4)
    ... except sw.ShardwiseError as error:
    ...     print(error)
    no dim 2 in a tensor of shape (8, 6): dims are 0..1 (or -2..-1)
    """

    def __str__(self) -> str:
        return printable(super().__str__())

    def add_note(self, note: str, /) -> None:
        """Add a note, without control characters."""
        super().add_note(printable(note))


class LayoutError(ShardwiseError, ValueError):
    """An impossible layout, or one that does not cover its tensor exactly."""


class NotationError(LayoutError):
    """A string that is not a layout. `position` is where reading stopped.

    >>> from shardwise import parse
    >>> parse("8x6/S0@four")
    Traceback (most recent call last):
    shardwise.errors.NotationError: expected how many owners, such as 4 or 4x2 or fsdp=4,tp=2
      8x6/S0@four
             ^
    """

    def __init__(self, text: str, position: int, expected: str) -> None:
        self.text, self.position, self.expected = text, position, expected
        shown, caret = _window(text, position)
        super().__init__(f"expected {expected}\n  {shown}\n  {caret}^")

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.text, self.position, self.expected)


class PlanError(ShardwiseError, ValueError):
    """A move that cannot be planned, or a plan that is used on layouts it was not made for."""


class ExchangeError(ShardwiseError, RuntimeError):
    """Ranks disagree, a rank cannot take part, or a transport broke. Every rank of the group raises it."""


class RefusedValueError(ExchangeError, ValueError):
    """A rank cannot take part because of a value that it was given. Every rank of the group raises it."""


class RefusedTypeError(ExchangeError, TypeError):
    """A rank cannot take part because of the type of what it was given. Every rank of the group raises it."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """An operation that sharded tensors do not have. Says what to use instead."""


class EngineError(ShardwiseError, RuntimeError):
    """The loader of an inference engine cannot be recorded, or its parameters differ from the recorded ones."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A path is not a checkpoint, is damaged, or cannot be read or written. Names the file, tensor and bytes."""


class RefusedCastError(CheckpointError, ValueError):
    """A cast that needs an explicit option: of quantized codes, or beyond the range of a dtype."""


def _window(text: str, position: int, width: int = 76) -> tuple[str, str]:
    """The part of a long string around `position`, and the blanks before a caret under it."""
    start = max(0, position - width // 2) if len(text) > width else 0
    return text[start : start + width], " " * (position - start)
