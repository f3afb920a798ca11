"""The table of judged models in docs/engines.md, between two markers."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shardwise.engines import Explanation

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
START, END = "<!-- judged: written by make judges-table -->\n", "<!-- /judged -->\n"
HEAD = "| model | direct names | through the loader | bytes | as whole tensors | reason |\n|---|---|---|---|---|---|\n"


def rows(found: Mapping[str, Explanation]) -> str:
    """One line for each model."""
    return HEAD + "".join(_row(name, one) for name, one in found.items())


def _row(name: str, one: Explanation) -> str:
    through = one.through_loader
    reasons = "; ".join(f"{reason} ({count})" for reason, count in Counter(through.values()).items())
    cells = [name, len(one.direct), len(through), f"{one.bytes:,}", f"{one.bytes_whole:,}", reasons]
    return "| " + " | ".join(map(str, cells)).strip() + " |\n"


def written() -> str:
    """The table on the page."""
    return PAGE.read_text().split(START)[1].split(END)[0]


def write(table: str) -> None:
    """Put a table on the page."""
    page = PAGE.read_text()
    PAGE.write_text(page.replace(START + written() + END, START + table + END))
