"""An extension of griffe, for mkdocs.yml: examples in docstrings are code. As bare Markdown they are quotes."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(>>> .*(?:\n.+)*)", re.MULTILINE)  # to the next empty line


class Doctests(griffe.Extension):
    """Puts fences around examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with each run of examples as a block."""
    return EXAMPLE.sub(r"\n```pycon\n\1\n```", text)
