"""One self-contained HTML page: a template, its style and its scripts, and the data as JSON inside."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from secrets import token_hex

from shardwise.layout import Layout
from shardwise.planning import Plan
from shardwise.quoting import printable
from shardwise.report.pictures import Limits, Picture, picture, together
from shardwise.report.rows import Row, rows

START = b"<!doctype html>"
Shown = Layout | Plan | Row | Mapping[str, Layout | Plan] | Iterable["Shown"]
SCRIPTS = ("basics.js", "parts.js", "tiles.js", "cells.js", "charts.js", "map.js", "tensors.js", "page.js")


def page(
    *what: Shown,
    title: str | None = None,
    facts: Mapping[str, str] | None = None,
    owner: str = "rank",
    names: Sequence[str] = (),
) -> str:
    """A page of a Layout, of a Plan, or of many by name (a mapping, or `Row`s): HTML that needs nothing else.

    `facts` are shown at its top. Owners are called `owner`, and by `names` where these are given.

    >>> from shardwise.planning import plan
    >>> text = page(plan("8x6/S0@4", "8x6/S1@3"), title="rows to columns")
    >>> text.startswith("<!doctype html>"), "://" in text
    (True, False)
    """
    shown = rows(what)
    if len(shown) > 1:
        shown = [row if row.name else replace(row, name=_notation(row)) for row in shown]
    head = {"title": title or _title(shown), "plain": title is None and len(shown) == 1 and not shown[0].name}
    about = {"facts": dict(facts or {}), "owner": owner, "names": list(names)}
    return _filled({**head, **about, **contents(shown)})


def contents(rows: Sequence[Row]) -> Picture:
    """The pictures of all kinds of rows, and the rows by their kind; what they are together, where they are plans."""
    kinds = Counter[Layout | Plan](row.shown for row in rows)
    number, limits = {kind: at for at, kind in enumerate(kinds)}, Limits.of(len(kinds))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    pictures = [picture(kind, limits) for kind in kinds]
    plans = [
        (kind, times, made)
        for (kind, times), made in zip(kinds.items(), pictures, strict=True)
        if isinstance(kind, Plan)
    ]
    return {
        "unit": "cells" if any(row.counts_cells for row in rows) else "bytes",
        "pictures": pictures,
        "dtypes": dtypes,
        "rows": [[row.name, number[row.shown], row.size, dtypes.index(row.dtype), row.note] for row in rows],
        "together": together(plans, limits) if plans and len(rows) > 1 else None,
    }


def _title(rows: Sequence[Row]) -> str:
    return rows[0].name or _notation(rows[0]) if len(rows) == 1 else f"{len(rows):,} tensors"


def _notation(row: Row) -> str:
    layouts = [row.shown.source, row.shown.target] if isinstance(row.shown, Plan) else [row.shown]
    return " → ".join(layout.brief(60) for layout in layouts)


def _filled(data: Picture) -> str:
    """The template with style, scripts and data in it."""
    folder = files("shardwise.report") / "assets"
    text = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    script = "\n".join(text[name] for name in SCRIPTS)
    places = {"title": _escaped(data["title"]), "style": text["page.css"], "data": _json(data), "script": script}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], text["page.html"])


def _escaped(text: str) -> str:
    """The text, escaped for HTML."""
    return escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _json(data: Picture) -> str:
    """JSON for a script element: no name of a tensor can end the script or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write(path: str | os.PathLike[str], text: str) -> Path:
    """Write a page or another text atomically: to a temporary file that is then renamed.

    A page replaces only pages. Links, pipes and devices such as /dev/stdout are written to directly.
    """
    goal = Path(path)
    if _is_page(text[:100].encode()) and goal.is_file() and not _is_page(_start(goal)):
        raise FileExistsError(f"{goal} exists and is not a page: choose another path")
    if goal.is_symlink() or (goal.exists() and not goal.is_file()):
        goal.write_text(text, encoding="utf-8")
        return goal
    aside = goal.with_name(f".{goal.name}.{token_hex(8)}.part")
    try:
        with aside.open("x", encoding="utf-8") as file:  # never a file that another process made
            file.write(text)
        aside.replace(goal)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(goal)) from error  # not the temporary name
    finally:
        with suppress(OSError):
            aside.unlink()
    return goal


def _is_page(data: bytes) -> bool:
    return data[: len(START)].lower() == START


def _start(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(START))
