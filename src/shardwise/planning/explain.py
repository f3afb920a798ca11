"""A plan in words and a small table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan

MOST_ROWS = 16


def explain(plan: Plan) -> str:
    """What moves, against the lower bound, and who sends how much to whom."""
    moved, total = plan.bytes_moved, plan.bytes_moved + plan.bytes_local
    lines = [
        f"from  {plan.source.brief()}",
        f"to    {plan.target.brief()}",
        "",
        f"moves {size(moved)} of {size(total)} between owners; {size(plan.bytes_local)} stay where they are",
        *_between_hosts(plan),
        *[f"no plan can move less than {size(plan.lower_bound)}"] * (plan.carrying or plan.target.terms == 1),
        f"{count(plan.messages, 'message')} in {count(plan.rounds, 'round')}; "
        f"an owner stages at most {size(plan.peak_bytes)} at a time",
    ]
    return "\n".join([*lines, *_steps(plan), "", *_table(plan)])


def _between_hosts(plan: Plan) -> list[str]:
    """What crosses, where hosts are known."""
    if plan.hosts is None:
        return []
    return [f"{size(plan.bytes_across)} of them between {count(plan.hosts.count, 'host')}"]


def _steps(plan: Plan) -> list[str]:
    """What happens in which order, where that is more than one exchange."""
    reduces = f"{plan.source.op} of {plan.source.terms} terms"
    first = [f"reduces on arrival: {reduces}"] if plan.reducing else []
    if len(plan.legs) > 1:
        first = [f"each host reduces the terms that it holds, then what crosses: {reduces}"]
    return first + ["then hands on, in a later step, what arrived"] * bool(plan.copies.step.any())


def _table(plan: Plan) -> list[str]:
    """Owners with what they keep, send and receive; of many the first and the last."""
    kept, sent, received = plan.kept, plan.sent, plan.received
    rows = [["owner", "keeps", "sends", "receives"]]
    rows += [[str(o), size(kept[o]), size(sent[o]), size(received[o])] for o in plan.owners]
    half = MOST_ROWS // 2
    lines = columns(rows if len(rows) <= MOST_ROWS + 1 else [*rows[: half + 1], ["..."] * 4, *rows[-half:]])
    more = len(plan.owners) - MOST_ROWS
    return lines + [f"{more:,} more owners between; the mean load is {plan.balance:.0%} of the busiest"] * (more > 0)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of words in columns, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows]


def size(amount: int) -> str:
    """Bytes for people.

    >>> size(96), size(1536), size(3 * 2**30)
    ('96 B', '1.50 KiB', '3.00 GiB')
    """
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007
        if value < 1024:
            break
        value /= 1024
    return f"{amount} B" if unit == "B" else f"{value:.2f} {unit}"


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(text: int | str) -> int:
    """The inverse, for what people write.

    >>> size_in_bytes("5GB"), size_in_bytes("0.5 MiB"), size_in_bytes(4096)
    (5000000000, 524288, 4096)
    """
    number = str(text).strip().upper()
    unit = next((unit for unit in UNITS if number.endswith(unit)), "")
    try:
        amount = float(number.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        amount = 0.0
    if not 1 <= amount < 2**62:
        raise ValueError(f"{text!r} is not a size: write 5GB, 512MiB, or a number of bytes")
    return int(amount)


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
