"""The documentation is whole: all pages can be reached, parts are told alike, public names are in the reference."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import shardwise
from shardwise import activation, checkpoint, engines, publishing, quantized, report, sharded_tensor, state, testing
from shardwise.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECTIONS = {"Overview", "Usage", "Architecture", "Dependencies", "Performance", "Safety", "Testing"}
TYPES = {"OBJ_PATH", "PlacementSpec", "STATE_DICT_ITEM", "STATE_DICT_TYPE"}  # names for annotations
COMMANDS = get_command(app).commands


def navigation() -> dict[str, object]:
    """What mkdocs.yml lists, by title."""
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: found for entry in entries for title, found in entry.items()}


def pages(entry: object) -> Iterator[str]:
    """The pages of an entry of the navigation, at any depth."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict | list):
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(inner)


def headings(page: Path) -> list[str]:
    """The sections of a page, without what only looks like one in a block."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


def in_the_reference() -> set[str]:
    """The names that the reference shows, without their modules."""
    shown = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", shown, re.MULTILINE)}


@pytest.mark.parametrize("page", [*pages(navigation()["Parts"])])
def test_the_page_of_a_part_has_the_seven_sections_and_no_others(page):
    found = headings(DOCS / page)
    assert sorted(found) == sorted(SECTIONS)


def test_every_page_is_in_the_navigation():
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    missing = written - set(pages(navigation()))
    assert not missing, "add them to nav in mkdocs.yml"


def test_no_page_is_twice_in_the_navigation():
    listed = list(pages(navigation()))
    assert sorted(listed) == sorted(set(listed))


@pytest.mark.parametrize(
    "module",
    [shardwise, activation, checkpoint, engines, publishing, quantized, report, sharded_tensor, state, testing],
    ids=lambda m: m.__name__,
)
def test_every_public_name_is_in_the_reference(module):
    public = {name for name in module.__all__ if not name.startswith("_")}
    missing = public - in_the_reference() - TYPES
    assert not missing, "add them to a page of docs/reference/"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("sync.md", ["push_weights", "push_beside_training", "publish_trainer", "subscribe_server"]),
        ("resume.md", ["resume_training"]),
    ],
)
def test_scripts_on_a_page_are_the_examples(page, names):
    shown = re.findall(r"^```py\n(\"\"\".*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    examples = {path.read_text(): path.name for path in (ROOT / "examples").glob("*.py")}
    assert [examples.get(text) for text in shown] == [f"{name}.py" for name in names], "copy them there again"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_its_options_are_on_the_page_of_the_command_line(name):
    page = (DOCS / "reference" / "command-line.md").read_text()
    options = [
        param.opts[-1].removeprefix("--") for param in COMMANDS[name].params if param.param_type_name == "option"
    ]
    missing = [option for option in options if not re.search(rf"--(no-)?{option}(?![\w-])", page)]
    assert f"`shardwise {name}" in page
    assert not missing
