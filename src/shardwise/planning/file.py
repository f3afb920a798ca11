"""Plans as JSON. A plan is a function of its layouts and options, so that is what is written, with fingerprints."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import PlanError, ShardwiseError
from shardwise.layout import parse
from shardwise.quoting import brief

if TYPE_CHECKING:
    from shardwise.planning.copies import Copies
    from shardwise.planning.plan import Plan

VERSION = 1


def to_json(plan: Plan, *, copies: bool = False) -> str:
    """Layouts, options, fingerprints and totals; with `copies=True` every copy too, for other tools to read."""
    data: dict[str, object] = {
        "shardwise_plan": VERSION,
        "source": {"layout": str(plan.source), "fingerprint": plan.source.fingerprint},
        "target": {"layout": str(plan.target), "fingerprint": plan.target.fingerprint},
        "itemsize": plan.itemsize,
        "max_bytes": plan.max_bytes,
        "hosts": None if plan.hosts is None else [list(plan.hosts.owners), list(plan.hosts.numbers)],
        "bytes_moved": plan.bytes_moved,
        "messages": plan.messages,
        "peak_bytes": plan.peak_bytes,
        "copies_fingerprint": digest(plan.copies),
    }
    if copies:
        data["copies"] = _listed(plan.copies)
    return json.dumps(data)


def _listed(copies: Copies) -> list[dict[str, int | list[int]]]:
    return [
        {
            "source": c.source,
            "target": c.target,
            "lo": list(c.box.lo),
            "hi": list(c.box.hi),
            "term": c.term,
            "step": c.step,
            "round": c.round,
        }
        for c in copies
    ]


def from_json(text: str, make: Callable[..., Plan], most: int) -> Plan:
    """The plan of a file, made again and compared with what the file says; refused beyond `most` copies."""
    data = _read(text)
    try:
        source, target = (parse(str.strip(data[side]["layout"])) for side in ("source", "target"))
        hosts = _hosts(data["hosts"])
        plan = make(source, target, itemsize=data["itemsize"], max_bytes=data["max_bytes"], hosts=hosts)
        if plan.most_copies() > most:
            raise PlanError(
                f"the plan of this file can have {plan.most_copies()} copies, more than {most}: if the file is to be "
                f"trusted, give max_copies="
            )
        for side, layout in ("source", source), ("target", target):
            _same(f"the fingerprint of the {side}", data[side]["fingerprint"], layout.fingerprint)
        _same("the fingerprint of the copies", data["copies_fingerprint"], digest(plan.copies))
        if "copies" in data and data["copies"] != _listed(plan.copies):
            raise PlanError("the copies in the plan file are not those of its plan")
        for total in "bytes_moved", "messages", "peak_bytes":
            _same(total, data[total], getattr(plan, total))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        if isinstance(error, ShardwiseError):
            raise
        raise PlanError(f"this is not a whole plan file: {type(error).__name__} at {brief(str(error))}") from None
    return plan


def _hosts(given: object) -> dict[int, Hashable] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(side, list) for side in given):
        raise PlanError(
            f"this is not a whole plan file: hosts are two lists, owners and their hosts, not {brief(given)}"
        )
    return dict(zip(*given, strict=True))


def digest(copies: Copies) -> str:
    """32 hex digits that tell apart different lists of copies."""
    columns = (*copies.boxes, copies.source, copies.target, copies.term, copies.step, copies.round)
    return blake2b(
        b"".join(np.ascontiguousarray(c, dtype="<i8").tobytes() for c in columns), digest_size=16
    ).hexdigest()


def _read(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise PlanError(f"this is not a plan file: {error}") from None
    if not isinstance(data, dict) or brief(data.get("shardwise_plan")) != repr(VERSION):
        version = data.get("shardwise_plan") if isinstance(data, dict) else None
        raise PlanError(f"this is not a plan file of version {VERSION}: it says {brief(version)}")
    return data


def _same(what: str, written: object, actual: object) -> None:
    if written != actual:
        raise PlanError(
            f"{what} is {brief(written)} in the plan file, but {brief(actual)} when made again: the file is of another "
            f"plan"
        )
