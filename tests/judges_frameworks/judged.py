"""What judges compare, as a table in docs/compatibility.md: a row for each mark `judged` whose tests all pass."""

from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
START, END = "<!-- judged: written by make judges-table -->\n", "<!-- /judged -->\n"
HEAD = "| framework | version | what | | compared with |\n|---|---|---|---|---|\n"
NAMES = {"deepspeed": "DeepSpeed", "lightning": "Lightning", "megatron-core": "Megatron", "peft": "PEFT"}


def table(marks):
    """Of the arguments of marks whose tests passed, in the order of frameworks."""
    cells = ([NAMES.get(package, package), version(package), *rest] for package, *rest in sorted(marks))
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def written():
    """The table on the page."""
    return PAGE.read_text().split(START)[1].split(END)[0]


def write(text):
    """Put a table on the page."""
    page = PAGE.read_text()
    PAGE.write_text(page.replace(START + written() + END, START + text + END))
