"""Receipts: the names, shapes, dtypes and fingerprints of a model, live or in files, to compare with another day."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.adapters import with_adapter
from shardwise.checkpoint.comparing import Difference
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.selection import Select, Selection
from shardwise.checkpoint.streams import (
    CHUNK,
    Stream,
    check_jobs,
    check_losses,
    map_in_order,
    stream_of,
    streams_of,
)
from shardwise.containers.description import Descriptions, describe_all, memory_of
from shardwise.errors import CheckpointError
from shardwise.exchange.overflow import Overflow
from shardwise.geometry import starts
from shardwise.job.agree import Callers
from shardwise.job.casts import Cast
from shardwise.job.names import Rename
from shardwise.job.plan import TensorInfo
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.job.session import check_owners
from shardwise.job.side import check_side, combine_descriptions, refuse_several_jobs
from shardwise.job.sums import LANES, box_sums
from shardwise.quantized.moves import Rule
from shardwise.quoting import brief
from shardwise.state.traverse import StateDict, flatten_state_dict
from shardwise.storage.paths import PathLike
from shardwise.tensor.fingerprints import VERSION, digits, fingerprint, own_sums

MARK = "shardwise_receipt"  # the key of a receipt file that has its version
FIELDS = {"shape": list, "dtype": str, "fingerprint": str, "layout": str}


@dataclass(frozen=True)
class TensorReceipt:
    """A tensor of a receipt. The layout tells where the values lay; the fingerprint is the same under every layout."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: str
    layout: str


@dataclass(frozen=True, repr=False)
class Receipt:
    """The state of a model at one time: its tensors by name. Equal values have equal fingerprints under every sharding.

    Made by `receipt`. `version` is the number that was given there; `time` is when it was made, in UTC.
    """

    tensors: Mapping[str, TensorReceipt]
    version: int | None
    time: str

    def matches(self, other: Receipt) -> bool:
        """True if names, shapes, dtypes and values are the same. Layouts, versions and times may differ."""
        return not self.differences(other)

    def differences(self, other: Receipt) -> list[Difference]:
        """What differs, one for each tensor, in the order of the names here."""
        absent = [
            Difference(name, "is missing from the other receipt") for name in self.tensors if name not in other.tensors
        ]
        more = [Difference(name, "is only in the other receipt") for name in other.tensors if name not in self.tensors]
        pairs = {name: (one, other.tensors[name]) for name, one in self.tensors.items() if name in other.tensors}
        return absent + more + [Difference(name, what) for name, pair in pairs.items() if (what := _differ(*pair))]

    def to_json(self) -> str:
        """As text, for `from_json` and `shardwise verify --receipt`."""
        head = {MARK: VERSION, "version": self.version, "time": self.time}
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(one))}" for name, one in self.tensors.items())
        return f'{json.dumps(head)[:-1]}, "tensors": {{\n{rows}\n}}}}\n'

    def __repr__(self) -> str:
        return f"Receipt({len(self.tensors)} tensors, version={self.version}, time={self.time!r})"

    def _repr_html_(self) -> str:
        """A row for every tensor, in notebooks."""
        from shardwise import report

        titles = "name", "shape", "dtype", "fingerprint", "layout"
        rows = (
            (name, str(list(one.shape)), one.dtype, one.fingerprint, one.layout) for name, one in self.tensors.items()
        )
        return report.listed(repr(self), titles, rows)

    @staticmethod
    def from_json(text: str) -> Receipt:
        """The receipt of a text; refused unless it is one of this version of fingerprints."""
        data = _read(text)
        tensors = {name: _tensor(name, known) for name, known in data["tensors"].items()}
        return Receipt(tensors, data["version"], data["time"])


def receipt(
    x: StateDict | torch.nn.Module | Checkpoint | None,
    *,
    group: dist.ProcessGroup | None = None,
    version: int | None = None,
    jobs: int = 1,
    progress: Progress = None,
) -> Receipt:
    """The receipt of a state dict, a module or an open checkpoint. Values other than tensors are not in it.

    A state dict or module: every rank of the group calls, and gets the same receipt; a rank that holds nothing of it
    passes None. A process without any group is alone. The terms of partial tensors are reduced first. A checkpoint is
    read in chunks, by this process alone, in `jobs` threads; `progress` is as in `checkpoint.load`. `version`: a number
    to keep in it, as that of a publisher.

    >>> import torch
    >>> state = {"w": torch.arange(6.0).reshape(2, 3)}
    >>> before = receipt(state)
    >>> state["w"][1, 2] = -5
    >>> print(*before.differences(receipt(state)))
    w: has other values
    """
    if not isinstance(x, Checkpoint):
        return _live(x.state_dict() if isinstance(x, torch.nn.Module) else x, Callers("receipt", group), version)
    if group is not None:
        raise ValueError("receipt: a checkpoint is read by one process: leave out group=, and call it on one rank")
    return stored({name: stream_of(entry) for name, entry in x.items()}, version=version, jobs=jobs, progress=progress)


# --- of live tensors --------------------------------------------------------------------------------------------------


def _live(state_dict: StateDict | None, callers: Callers, version: int | None) -> Receipt:
    def say() -> tuple[dict[str, Any], tuple[Descriptions | None, str]]:
        if state_dict is None:
            return {}, (None, _now())
        flat, _ = flatten_state_dict(state_dict)
        return flat, (describe_all(flat, callers.transport), _now())

    flat, by_rank = callers.tell(say, {"version": version})
    with callers.refusals():
        descriptions = {rank: known for rank, (known, _) in by_rank.items()}
        refuse_several_jobs(descriptions, callers.transport)
        tensors = combine_descriptions(descriptions, "state dict")
        check_owners(callers.owners, {f"{name!r} of the state dict,": one.layout for name, one in tensors.items()})
    found = _fingerprints(flat, tensors, callers)
    rows = {name: _row(one.shape, one.dtype, found[name], str(one.layout)) for name, one in tensors.items()}
    return Receipt(rows, version, next(time for _, time in by_rank.values()))


def _fingerprints(flat: Mapping[str, Any], tensors: Mapping[str, TensorInfo], callers: Callers) -> dict[str, str]:
    """By all ranks together: the sums of all tensors in one exchange, then partial tensors one after the other."""
    whole = {name: one for name, one in tensors.items() if one.layout.op is None}

    def say() -> tuple[torch.Tensor, None]:
        memory = {name: [t.resolve_conj().resolve_neg() for t in memory_of(flat.get(name))] for name in whole}
        check_side("state dict", memory, tensors, callers.me)
        rows = [own_sums(one.layout, memory[name], callers.me) for name, one in whole.items()]
        return torch.stack(rows) if rows else torch.zeros(0, LANES, dtype=torch.int64, device="cpu"), None

    own, _ = callers.tell(say)
    totals = dict(zip(whole, callers.total(own).numpy(), strict=True))
    return {
        name: digits(totals[name], one.shape, one.dtype) if name in whole else _reduced(flat.get(name), callers)
        for name, one in tensors.items()
    }


def _reduced(value: Any, callers: Callers) -> str:
    found = fingerprint(value, group=callers.group)
    assert found is not None, "every caller is in the group"
    return found


# --- of tensors in files ----------------------------------------------------------------------------------------------


def stored(
    streams: Mapping[str, Stream], *, version: int | None = None, jobs: int = 1, progress: Progress = None
) -> Receipt:
    """Of what files become, read in chunks."""
    check_jobs(jobs)
    check_progress(progress)
    total, done, rows = sum(stream.size for stream in streams.values()), 0, dict[str, TensorReceipt]()
    with reporter(progress, total, "receipt", here=True) as tell:
        for stream, row in map_in_order(streams.values(), _stored_row, jobs):
            rows[stream.name] = row
            done += stream.size
            if tell is not None:
                tell(done, total)
    return Receipt(rows, version, _now())


def compare(
    opened: Checkpoint,
    wanted: Receipt,
    *,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    select: Select = None,
    exclude: Select = None,
    merge: PathLike | None = None,
    cast: Cast = None,
    overflow: Overflow = "refuse",
    jobs: int = 1,
    progress: Progress = None,
) -> list[Difference]:
    """What differs between a receipt and what `convert` would make of a checkpoint; with `select` it may have more."""
    opened, chosen = opened if merge is None else with_adapter(opened, merge), Selection(select, exclude)
    streams = streams_of(opened, rename=rename, remap=remap, selection=chosen, cast=cast)
    check_losses(streams, overflow, "Nothing was compared", jobs=jobs)
    found = stored(streams, jobs=jobs, progress=progress)
    known = {name: one for name, one in wanted.tensors.items() if chosen.everything or name in streams}
    return found.differences(replace(wanted, tensors=known))


def _stored_row(stream: Stream) -> TensorReceipt:
    stream.check()
    total = torch.zeros(LANES, dtype=torch.int64, device="cpu")
    for boxes, buffer in stream.chunks(stream.whole, CHUNK):
        stream.fill(boxes, buffer)
        for number, start in enumerate(starts(boxes.volumes())[:-1].tolist()):
            box = boxes.box(number)
            total += box_sums(buffer[start : start + box.volume].view(box.shape), box.lo, stream.shape)
    layouts = {str(entry.layout): None for _, entry in stream.sources}
    return _row(stream.shape, stream.dtype, digits(total.numpy(), stream.shape, stream.dtype), "; ".join(layouts))


# --- text -------------------------------------------------------------------------------------------------------------


def _row(shape: Iterable[int], dtype: torch.dtype, found: str, layout: str) -> TensorReceipt:
    return TensorReceipt(tuple(shape), str(dtype).removeprefix("torch."), found, layout)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _differ(one: TensorReceipt, other: TensorReceipt) -> str | None:
    for what in "shape", "dtype":
        here, there = getattr(one, what), getattr(other, what)
        if here != there:
            return f"{what} {here} and {there}"
    return None if one.fingerprint == other.fingerprint else "has other values"


def _read(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is not a receipt: {error}") from None
    if not isinstance(data, dict) or MARK not in data:
        raise CheckpointError(f"this is not a receipt: it has no {MARK!r}")
    if data[MARK] != VERSION:
        raise CheckpointError(
            f"this receipt has fingerprints of version {brief(data[MARK])}, which cannot be compared with those of "
            f"version {VERSION}, that this shardwise makes: make both receipts with one version of shardwise"
        )
    version, time, tensors = (data.get(name) for name in ("version", "time", "tensors"))
    if not (version is None or type(version) is int) or not isinstance(time, str) or not isinstance(tensors, dict):
        raise CheckpointError("this is not a whole receipt: it needs a version or null, a time, and tensors by name")
    return data


def _tensor(name: str, known: object) -> TensorReceipt:
    good = isinstance(known, dict) and all(isinstance(known.get(field), kind) for field, kind in FIELDS.items())
    if not isinstance(known, dict) or not good or not all(type(size) is int and size >= 0 for size in known["shape"]):
        raise CheckpointError(
            f"this is not a whole receipt: {brief(name)} needs {', '.join(FIELDS)}, and has {brief(known)}"
        )
    return TensorReceipt(tuple(known["shape"]), known["dtype"], known["fingerprint"], known["layout"])
