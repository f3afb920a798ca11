"""Cases of `benchmarks.sync` for jobs that were started separately: commits, pulls, deltas."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import shardwise as sw
from benchmarks.link import bytes_on_the_link, plain_socket
from benchmarks.measure import Effort, Row, Target
from benchmarks.model import Shapes, model, placement, tensor_of
from benchmarks.table import size
from shardwise.bench.clock import Interval, every_repeat, together
from shardwise.bench.limit import strided_copies
from shardwise.bench.moves import Way, meet, silence
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import links
from shardwise.testing import Host, on_ranks

RANKS = 2  # of trainers, and of servers
COMMIT, ASYNC, COPY = "commit", "run(async_op=True)", "copy_ into warm memory"
PULL, WHOLE, SOCKET, LIMIT = "pull", "gather, broadcast, cut", "plain socket", "strided copies"
DENSE, DELTA = "pull without delta", "pull with delta"
State = dict[str, DTensor]
KEY = "benchmark"


class Times(NamedTuple):
    """What a rank found, by the names of ways: when every repeat ran, and bytes on the link."""

    spans: dict[str, list[Interval]]
    crossed: dict[str, int]


def took(found: list[Times]) -> dict[str, float]:
    """Seconds of all ranks together, by the names of ways."""
    return {way: together(rank.spans[way] for rank in found) for way in found[0].spans}


def bytes_of(shapes: Shapes) -> int:
    """In bfloat16."""
    return 2 * sum(map(prod, shapes.values()))


# --- what a trainer waits for ----------------------------------------------------------------------------------------


def stalls(effort: Effort) -> Iterator[Row]:
    """`commit` and `run(async_op=True)`, against a plain copy; and what training beside a transfer loses."""
    with tempfile.TemporaryDirectory() as folder:
        at = str(Path(folder) / "meeting")
        found = on_ranks(2 * RANKS, lambda _: _stalls(at, model(), effort.ours), timeout=600)
    trainers = [rank for rank in found if rank.spans]
    seconds = took(trainers)
    for way in (COMMIT, ASYNC):
        case = f"{way}, {size(bytes_of(model()) // RANKS)} per trainer"
        yield Row(case, seconds[way], seconds[COPY], COPY, Target(1.15, most=True))
    alone, beside = seconds["steps alone"], seconds["steps beside a pull"]
    note = "four processes on two cores: steps also wait for the servers' own copies"
    yield Row("training steps beside a pull on one host", beside, alone, "alone", None, note)
    whole = alone + seconds[ASYNC]
    note = f"{ASYNC} and the steps after it, until the steps end; on two cores"
    yield Row(f"training steps beside {ASYNC}", seconds["steps beside a run"], whole, "one after the other", None, note)


def _stalls(at: str, shapes: Shapes, repeats: int) -> Times:
    silence()
    trains = dist.get_rank() < RANKS
    groups = [dist.new_group(list(range(first, first + RANKS))) for first in (0, RANKS)]
    mesh = _meshes()[0 if trains else 1]
    place: Callable[[str], Placement] = (lambda _: Shard(0)) if trains else placement
    state = {name: tensor_of(shape, mesh, place(name)) for name, shape in shapes.items()}
    group = groups[0 if trains else 1]
    sync = sw.Resharder(state if trains else None, None if trains else state)
    sync.run(async_op=True).wait()
    warm = [x.to_local().clone() for x in state.values()] if trains else []
    publisher = sw.publish(state, at, "model", group=group) if trains else None
    dist.barrier()
    subscriber = None if trains else sw.subscribe(state, at, "model", group=group)
    numbers = count(1)
    train = _training() if trains else lambda: None

    def commit(_: object) -> None:
        if publisher:
            publisher.commit(next(numbers))

    def copy(_: object) -> None:
        for ours, theirs in zip(warm, state.values(), strict=False):
            ours.copy_(theirs.to_local())

    def moved(handle: object) -> None:
        waiting.append(sync.run(async_op=True))

    waiting = list[sw.RunHandle]()

    def waited() -> None:
        while waiting:
            waiting.pop().wait()

    def steps(_: object) -> None:
        for _step in range(STEPS):
            train()

    def steps_beside_run(_: object) -> None:
        moved(None)
        steps(None)

    def steps_beside(_: object) -> None:
        if trains:
            steps(None)
        elif subscriber:
            subscriber.pull()

    def prepare() -> None:
        waited()
        commit(None)
        meet()

    ways = {
        COMMIT: Way(commit),
        COPY: Way(copy),
        ASYNC: Way(moved, waited),
        "steps alone": Way(steps, waited),
        "steps beside a pull": Way(steps_beside, prepare),
        "steps beside a run": Way(steps_beside_run, waited),
    }
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    waited()
    dist.barrier()
    for one in (subscriber, publisher):
        if one:
            one.close()
    dist.barrier()
    return Times(dict(zip(ways, spans, strict=True)) if trains else {}, {})


STEPS = 20


def _training() -> Callable[[], object]:
    """A step of training: forward, backward and AdamW of a small model."""
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    module, batch = torch.nn.Sequential(*layers), torch.randn(64, 512)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_over_the_link(effort: Effort, trainers: Host, servers: Host) -> Iterator[Row]:
    """What training loses while servers of another host pull, with and without deltas."""
    places = [trainers] * RANKS + [servers] * RANKS
    for number, delta in enumerate((False, True)):
        work = partial(_beside, f"{trainers.address}:{29620 + number}", model(4), effort.large, delta)
        found = on_ranks(len(places), lambda _, work=work: work(), hosts=places, timeout=900)
        seconds, pulled = took(found[:RANKS]), took(found[RANKS:])["beside"]
        case = f"training steps beside {'a pull of a delta of 2 %' if delta else 'a pull'} over 1 Gbit/s"
        note = f"the pull took {pulled:.2f} s beside the steps"
        yield Row(case, seconds["beside"], seconds["alone"], "alone", None, note)


def _beside(at: str, shapes: Shapes, repeats: int, delta: bool) -> Times:
    silence()
    job = _Jobs(at, shapes, delta=delta)
    train = _training() if job.trains else lambda: None

    def steps(_: object) -> None:
        for _step in range(STEPS * (1 if delta else 4)):  # about as many as fit into a pull
            train()

    def beside(_: object) -> None:
        steps(None)
        job.pull()

    for _ in range(2):
        job.step(0.02)
        job.pull()
    ways = {"alone": Way(steps), "beside": Way(beside, lambda: job.step(0.02))}
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    job.close()
    return Times(dict(zip(ways, spans, strict=True)), {})


# --- pulls -----------------------------------------------------------------------------------------------------------


def pulls_on_one_host(effort: Effort) -> Iterator[Row]:
    """Against plain copies of the same cells, and against whole tensors."""
    with tempfile.TemporaryDirectory() as folder:
        at = str(Path(folder) / "meeting")
        found = on_ranks(2 * RANKS, lambda _: _pulls(at, model(), effort.medium, None), timeout=600)
    seconds, servers = took(found), found[RANKS:]
    limit = together(rank.spans[LIMIT] for rank in servers)
    ours = together(rank.spans[PULL] for rank in servers)
    case = f"{PULL} on one host, {size(bytes_of(model()))}"
    yield Row(f"{case}, against the limit", ours, limit, LIMIT, Target(0.6, percent=True))
    yield Row(case, ours, seconds[WHOLE], WHOLE, Target(5), "", limit)


def pulls_over_the_link(effort: Effort, trainers: Host, servers: Host) -> Iterator[Row]:
    """Against the link itself."""
    shapes, places = model(4), [trainers] * RANKS + [servers] * RANKS
    at = f"{trainers.address}:29600"
    work = lambda _: _pulls(at, shapes, effort.medium, (trainers, servers))  # noqa: E731
    found = on_ranks(len(places), work, hosts=places, timeout=900)
    seconds, crossed = took(found), found[0].crossed
    case = f"{PULL}, {size(bytes_of(shapes))} over 1 Gbit/s"
    note = f"bytes on the link: {size(crossed[PULL])}, {SOCKET} {size(crossed[SOCKET])}"
    ours = together(rank.spans[PULL] for rank in found[RANKS:])
    yield Row(f"{case}, against the link", ours, seconds[SOCKET], SOCKET, Target(0.9, percent=True), note)
    yield Row(case, ours, seconds[WHOLE], WHOLE, None)


def _pulls(at: str, shapes: Shapes, repeats: int, ends: tuple[Host, Host] | None) -> Times:
    silence()
    job = _Jobs(at, shapes, delta=False)
    ways = {PULL: Way(lambda _: job.pull(), job.commit), WHOLE: Way(lambda _: job.whole())}
    crossed = dict[str, int]()
    job.commit()
    if ends is None:
        copies = strided_copies(dist.get_rank(), [(one.plan, one.dtype, None) for one in job.plan().links])
        ways[LIMIT] = Way(lambda _: copies() if copies else None)
        job.pull()
    else:
        socket = plain_socket(job.plan().bytes_moved, 0, RANKS, ends[1].address)
        ways[SOCKET] = Way(lambda _: socket())
        crossed[PULL] = bytes_on_the_link(ends[0], job.pull)
        crossed[SOCKET] = bytes_on_the_link(ends[0], lambda: ways[SOCKET].run(None))
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    job.close()
    return Times(dict(zip(ways, spans, strict=True)), crossed)


def _meshes() -> list[DeviceMesh]:
    """Of trainers and servers; all ranks make both."""
    return [DeviceMesh("cpu", list(range(first, first + RANKS))) for first in (0, RANKS)]


class _Jobs:
    """This rank's part: of the trainers, or of the servers."""

    def __init__(self, at: str, shapes: Shapes, *, delta: bool) -> None:
        self.shapes, self.trains, self._numbers = shapes, dist.get_rank() < RANKS, count(1)
        groups = [dist.new_group(list(range(first, first + RANKS))) for first in (0, RANKS)]
        mesh = _meshes()[0 if self.trains else 1]
        place: Callable[[str], Placement] = (lambda _: Shard(0)) if self.trains else placement
        self.state = {name: tensor_of(shape, mesh, place(name)) for name, shape in shapes.items()}
        group, self._whole_group = groups[0 if self.trains else 1], dist.new_group([0, *range(RANKS, 2 * RANKS)])
        self.publisher = sw.publish(self.state, at, "model", group=group, key=KEY, delta=delta) if self.trains else None
        dist.barrier()
        self.subscriber = None if self.trains else sw.subscribe(self.state, at, "model", group=group, key=KEY)

    def plan(self) -> ModelPlan:
        """From the trainers to the servers."""

        def infos(mesh: str, word: Callable[[str], str]) -> dict[str, TensorInfo]:
            found = dict[str, TensorInfo]()
            for name, shape in self.shapes.items():
                layout = sw.parse(f"{'x'.join(map(str, shape))}/{word(name)}@{mesh}")
                found[name] = TensorInfo(shape, torch.bfloat16, layout, "cpu")
            return found

        trainers, servers = infos("trainers=2:0,1", lambda _: "S0"), infos("servers=2:2,3", _word)
        return ModelPlan.of(links(self.shapes, self.shapes), trainers, servers)

    def commit(self) -> None:
        """A new version; all ranks meet when it can be pulled."""
        dist.barrier()  # servers have pulled the last one
        if self.publisher:
            self.publisher.commit(next(self._numbers))
        dist.barrier()
        if self.subscriber:
            self.subscriber.wait(timeout=60)

    def step(self, fraction: float) -> int:
        """Change so many elements, and commit. How many this rank has changed."""
        changed = 0
        for x in self.state.values() if self.trains else ():
            words = x.to_local().view(torch.int16)
            mask = torch.rand(words.shape) < fraction
            words ^= mask.to(torch.int16)
            changed += int(mask.count_nonzero())
        self.commit()
        return changed

    def pull(self) -> None:
        """By the servers."""
        if self.subscriber:
            self.subscriber.pull()

    def whole(self) -> None:
        """Every tensor gathered on the trainers, broadcast by the first of them, and cut by every server."""
        for name, x in self.state.items():
            whole = x.full_tensor() if self.trains else torch.empty(self.shapes[name], dtype=x.dtype)
            if dist.get_rank() in (0, *range(RANKS, 2 * RANKS)):
                dist.broadcast(whole, 0, self._whole_group)
            if not self.trains:
                place = placement(name)
                mine = whole.chunk(RANKS, place.dim)[dist.get_rank() - RANKS] if isinstance(place, Shard) else whole
                x.to_local().copy_(mine)

    def close(self) -> None:
        """Servers first."""
        if self.subscriber:
            self.subscriber.close()
        dist.barrier()
        if self.publisher:
            self.publisher.close()
        dist.barrier()


def _word(name: str) -> str:
    place = placement(name)
    return f"S{place.dim}" if isinstance(place, Shard) else "R"


# --- servers of one host ---------------------------------------------------------------------------------------------


def servers_of_one_host(effort: Effort, trainers: Host, servers: Host) -> Iterator[Row]:
    """Four servers, each a job of its own: a version crosses the link once."""
    shapes = model(2)
    at = f"{trainers.address}:29601"
    places = [trainers] + [servers] * 4
    found = on_ranks(5, lambda _: _several(at, shapes, effort.slow_peer + 1, trainers), hosts=places, timeout=600)
    crossed, whole = found[0].crossed[PULL], bytes_of(shapes)
    case = f"bytes on the trainers' link, 4 servers of one host, {size(whole)}"
    note = f"{size(crossed)} for a version of {size(whole)}; pulled by all four in {took(found[1:])[PULL]:.2f} s"
    yield Row(case, crossed, whole, "one version", Target(1.05, most=True), note, unit="bytes")


def _several(at: str, shapes: Shapes, repeats: int, trainers: Host) -> Times:
    silence()
    trains = dist.get_rank() == 0
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    publisher = sw.publish(state, at, "model", group=alone, key=KEY) if trains else None
    dist.barrier()
    subscriber = None if trains else sw.subscribe(state, at, "model", group=alone, key=KEY)
    numbers, crossed, spans = count(1), list[int](), list[Interval]()
    for _ in range(repeats):
        dist.barrier()
        if publisher:
            publisher.commit(next(numbers))
        dist.barrier()

        def pull() -> None:
            start = perf_counter()
            if subscriber:
                subscriber.wait(timeout=60)
                subscriber.pull()
            spans.append(Interval(start, perf_counter()))

        crossed.append(bytes_on_the_link(trainers, pull))
    for one in (subscriber, publisher):
        if one:
            one.close()
        dist.barrier()
    return Times({PULL: spans[1:]}, {PULL: sorted(crossed)[len(crossed) // 2]})


# --- deltas ----------------------------------------------------------------------------------------------------------

FRACTIONS = {0.02: 6.0, 0.05: 6.0, 0.13: 4.0, 0.55: None, 1.0: None}  # and how many times faster than dense is wanted
CHANGED, SENT = "changed elements", "bytes of deltas"  # on one rank


def deltas_over_the_link(effort: Effort, trainers: Host, servers: Host) -> Iterator[Row]:
    """Versions of which some elements changed, with and without deltas."""
    shapes = model(4)
    for number, (fraction, wanted) in enumerate(FRACTIONS.items()):
        ports = [29602 + 2 * number, 29603 + 2 * number]
        ats = [f"{trainers.address}:{port}" for port in ports]
        places = [trainers] * RANKS + [servers] * RANKS
        work = lambda _, ats=ats, fraction=fraction: _deltas(ats, shapes, effort.large, fraction, trainers)  # noqa: E731
        found = on_ranks(len(places), work, hosts=places, timeout=900)
        seconds = {way: together(rank.spans[way] for rank in found[RANKS:]) for way in (DELTA, DENSE)}
        crossed = found[0].crossed
        changed, sent = (sum(rank.crossed[what] for rank in found[:RANKS]) for what in (CHANGED, SENT))
        case = f"deltas, {100 * fraction:g} % of {size(bytes_of(shapes))} changed, over 1 Gbit/s"
        note = f"{size(crossed[DELTA])} on the link against {size(crossed[DENSE])}"
        target = Target(wanted) if wanted else Target(1.03, most=True)
        yield Row(case, seconds[DELTA], seconds[DENSE], DENSE, target, note)
        yield from _bytes_of_deltas(f"bytes of deltas, {100 * fraction:g} % changed", fraction, changed, sent, shapes)


def _bytes_of_deltas(case: str, fraction: float, changed: int, sent: int, shapes: Shapes) -> Iterator[Row]:
    """Without headers of packets, against what is promised. Headers of blocks are a ten-thousandth."""
    note = f"{sent / changed:.2f} bytes for each of {changed:,} changed elements"
    if fraction <= 0.05:
        yield Row(case, sent, 3.2 * changed, "3.2 bytes per element", Target(1, most=True), note, unit="bytes")
    least = 2 * changed + bytes_of(shapes) / 16
    yield Row(case, sent, least, "elements and a bit per cell", Target(1.001, most=True), note, unit="bytes")


class _Deltas(logging.Handler):
    """Adds up what this rank's publisher logs of the deltas that it sends."""

    def __init__(self) -> None:
        super().__init__()
        self._sent, self._logger = 0, logging.getLogger("shardwise")
        self._before = self._logger.level, logging.root.manager.disable
        logging.disable(logging.NOTSET)
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Of each pull."""
        if "sent a delta" in record.msg and isinstance(record.args, tuple):
            self._sent += int(str(record.args[0]))

    def end(self) -> int:
        """The sum."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        logging.disable(self._before[1])
        return self._sent


def _deltas(ats: list[str], shapes: Shapes, repeats: int, fraction: float, trainers: Host) -> Times:
    silence()
    jobs = {DELTA: _Jobs(ats[0], shapes, delta=True), DENSE: _Jobs(ats[1], shapes, delta=False)}

    for job in jobs.values():
        for _ in range(2):
            job.step(fraction)
            job.pull()
    crossed, told = dict[str, int](), _Deltas()
    for way, job in jobs.items():
        crossed[CHANGED] = job.step(fraction)
        crossed[way] = bytes_on_the_link(trainers, job.pull)
    crossed[SENT] = told.end()
    ways = {way: Way(lambda _, job=job: job.pull(), lambda job=job: job.step(fraction)) for way, job in jobs.items()}
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    for job in jobs.values():
        job.close()
    return Times(dict(zip(ways, spans, strict=True)), crossed)
