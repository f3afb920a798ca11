"""What commands print: text without control characters, and errors with the options of the shell."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

from shardwise.quoting import printable

SHELL = {  # options as errors of the library name them, and as the shell does
    r"\boverflow=['\"]allow['\"]": "--allow-overflow",
    r"\bwith_config=, or give the folder that has them": "--with-config, or give --config-from FOLDER",
    r"\bwith_config=": "--with-config",
    r"\bkey='([^']*)'": r"--key-file \1",
    r"give key=, .* a file with it": "give --key-file FILE, with a secret that all jobs know",
    r"\bcast=\[\('([^']+)', torch\.(\w+)\)\]": r"--cast '\1=\2'",
}
KEYWORDS = re.compile(
    r"\b(cast|exclude|format|hosts|itemsize|jobs|max_bytes|max_shard_size|merge|objects|other_rules|parameters|rename"
    r"|rules|select|source_rules)=(?:'([\w./*-]+)'|\"([\w./*-]+)\"|(\d+)\b)?(?![\w\[])"
)


def say(text: str, *, err: bool = False) -> None:
    """Print text without control characters: names from files may have some."""
    typer.echo(printable(text), err=err)


def list_first(found: Sequence[object], what: str, *, all: bool) -> None:
    """The first differences, or all of them."""
    listed = found if all else found[:20]
    for one in listed:
        say(in_shell(str(one)))
    if len(listed) < len(found):
        say(f"... and {len(found) - len(listed)} more {what}: --all lists them")


def in_shell(text: str) -> str:
    """With the options of the shell in place of those of Python."""
    for python, shell in SHELL.items():
        text = re.sub(python, shell, text)
    return KEYWORDS.sub(lambda match: _option(*match.groups()), text)


def _option(keyword: str, *values: str | None) -> str:
    """
    >>> _option("max_bytes", "4096"), _option("rules", None)
    ('--max-bytes 4096', '--rules')
    """
    return " ".join([f"--{keyword.replace('_', '-')}", *filter(None, values)])
