"""python -m benchmarks [subject ...] [--quick] [--write docs/performance.md]"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    activation,
    checkpoint,
    engines,
    fingerprints,
    hosts,
    loading,
    model,
    planning,
    quantized,
    saving,
    sizes,
    sums,
    sync,
    tensor,
    validation,
)
from benchmarks.measure import FULL, QUICK, Effort
from benchmarks.table import Section, compared, draw, page, show, updated

SUBJECTS = {
    "planning": planning,
    "loading": loading,
    "validation": validation,
    "tensor": tensor,
    "sizes": sizes,
    "model": model,
    "engines": engines,
    "checkpoint": checkpoint,
    "saving": saving,
    "sums": sums,
    "activation": activation,
    "quantized": quantized,
    "fingerprints": fingerprints,
    "sync": sync,
    "hosts": hosts,
}


def main(arguments: Sequence[str]) -> None:
    """Measure, show, and write the page if asked to."""
    parser = ArgumentParser(prog="python -m benchmarks", description="What shardwise costs, next to what others cost.")
    parser.add_argument(
        "subjects", nargs="*", metavar="subject", help=f"one of {', '.join(SUBJECTS)}; all unless given"
    )
    parser.add_argument("--quick", action="store_true", help="the same cases with fewer repeats")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables to this markdown page, too")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.subjects if name not in SUBJECTS]:
        parser.error(f"no subject {unknown[0]!r}: there are {', '.join(SUBJECTS)}")
    sections = _run(asked.subjects or list(SUBJECTS), QUICK if asked.quick else FULL)
    if asked.write:
        draw(sections, asked.write.parent)
    if asked.write and asked.subjects:
        asked.write.write_text(updated(asked.write.read_text(), sections))
    elif asked.write:
        asked.write.write_text(page(sections, " ".join(["python -m benchmarks", *arguments])))


def _run(subjects: Sequence[str], effort: Effort) -> list[Section]:
    found = list[Section]()
    for subject in (SUBJECTS[name] for name in subjects):
        sheet = subject.sheet(effort) if hasattr(subject, "sheet") else compared(list(subject.rows(effort)))
        found.append(Section(subject.TITLE, subject.ABOUT, sheet))
        show(found[-1])
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
