"""python -m benchmarks.against REVISION [subject ...]: this tree beside another revision of it, taking turns.

Each side runs the subject's cases in a process of its own, one side after the other, several rounds; which side starts
alternates. A case is compared by the medians of its rounds. Noise hits single rounds, so the spread is shown as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from shardwise.bench.table import seconds

HERE = Path(__file__).resolve().parent.parent
SUBJECTS = (
    "planning",
    "loading",
    "validation",
    "tensor",
    "model",
    "engines",
    "checkpoint",
    "activation",
    "sync",
)  # those that have rows
NOTABLE = 1.05  # a ratio beyond this stands out
MEASURE = """
import json, sys
from importlib import import_module
from benchmarks.measure import FULL, QUICK
rows = import_module(f"benchmarks.{sys.argv[1]}").rows(QUICK if sys.argv[2] == "quick" else FULL)
measured = [(row.case, row.ours) for row in rows]
print(json.dumps(measured), file=sys.stderr)
"""

Times = dict[str, list[float]]


def main(arguments: Sequence[str]) -> None:
    """Measure both sides and show the ratios."""
    parser = ArgumentParser(prog="python -m benchmarks.against", description="This tree beside another revision.")
    parser.add_argument("revision", help="what to compare with: anything that git knows")
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"one of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs")
    parser.add_argument("--full", action="store_true", help="as many repeats inside a round as the page has")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.subjects if name not in SUBJECTS]:
        parser.error(f"no subject {unknown[0]!r}: there are {', '.join(SUBJECTS)}")
    with _checked_out(asked.revision) as before:
        for subject in asked.subjects or SUBJECTS:
            sides = _rounds(before, subject, asked.rounds, "full" if asked.full else "quick")
            _show(subject, asked.revision, *sides)


@contextmanager
def _checked_out(revision: str) -> Iterator[Path]:
    """The other revision in a directory of its own."""
    with TemporaryDirectory() as folder:
        tree = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=HERE, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE, check=True)


def _rounds(before: Path, subject: str, rounds: int, effort: str) -> tuple[Times, Times]:
    """What each case took in each round, before and now."""
    times: dict[Path, Times] = {before: defaultdict(list), HERE: defaultdict(list)}
    for turn in range(rounds):
        for tree in (before, HERE) if turn % 2 == 0 else (HERE, before):
            for case, took in _measured(tree, subject, effort):
                times[tree][case].append(took)
    return times[before], times[HERE]


def _measured(tree: Path, subject: str, effort: str) -> list[tuple[str, float]]:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, subject, effort],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{subject} failed in {tree}:\n{run.stderr}")
    measured: list[tuple[str, float]] = json.loads(run.stderr.strip().splitlines()[-1])
    return measured


def _show(subject: str, revision: str, before: Times, now: Times) -> None:
    table = Table(title=subject, title_justify="left")
    for name in ("case", revision[:12], "now", "now / before", "spread of the rounds"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case in (case for case in now if case in before):
        ratio = median(now[case]) / median(before[case])
        spread = max(max(side[case]) / min(side[case]) for side in (before, now))
        row = (case, seconds(median(before[case])), seconds(median(now[case])), f"{ratio:.2f}", f"{spread:.2f}")
        table.add_row(*row, style="red" if ratio > NOTABLE else None)
    Console(width=max(Console().width, 140)).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
