"""What README.md and docs/ show is what happens: their `python` and `console` blocks run here."""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(number of lines before it, text) of each fenced block."""
    text = page.read_text()
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)), match[1]


def check_examples(text: str, page: Path, line: int, namespace: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), line)
    test.globs = namespace  # the parser would copy it
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, the output shown below it) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.replace("\\\n", "").partition("\n")
        yield command, output


# torch aborts a process of FSDP2 over gloo now and then, also in a script that only trains and imports nothing else
TORCH_ABORTS, TRIES = "terminate called without an active exception", 4


def run(command: str, cwd: Path) -> str:
    """What the command prints; again where torch itself has aborted it."""
    outputs = (run_once(command, cwd) for _ in range(TRIES))
    return next((output for output in outputs if TORCH_ABORTS not in output), TORCH_ABORTS)


def run_once(command: str, cwd: Path) -> str:
    # nothing of the caller's environment: a width or a colour setting there would change the output
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    env = {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, shell=True, cwd=cwd, env=env, encoding="utf-8", timeout=60, **streams).stdout


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


@every_page
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, text in blocks(page, "python"):
        if ">>>" in text:
            check_examples(text, page, line, namespace)
        else:
            # padded, so that a traceback names the line of the page
            exec(compile("\n" * line + text, page, "exec"), namespace)


@every_page
def test_console_blocks_print_what_they_show(page, tmp_path):
    for _, text in blocks(page, "console"):
        for command, output in commands(text):
            if command.split()[0] in ("shardwise", "torchrun"):
                where = ROOT if "examples/" in command else tmp_path
                assert stripped(run(command, where)) == stripped(output), command
