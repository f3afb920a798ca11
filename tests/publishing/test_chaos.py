"""Trainers, servers and the hub are killed, stopped and restarted at random, with and without deltas.

All ranks of the servers look at their cells meanwhile. It takes some 15 seconds each time. `make chaos` takes minutes,
of another course of events:

    make chaos SECONDS=300 SEED=7
"""

import os
import random
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from numbered import Sparse
from separate_jobs import LIMIT, PATIENCE, by_columns, by_rows, jobs, replicated  # noqa: F401
from small_deltas import of_few_cells

import shardwise as sw
from shardwise.publishing.meeting import Address, MeetingPoint

SECONDS = float(os.environ.get("SHARDWISE_CHAOS_SECONDS", "10"))
SEED = int(os.environ.get("SHARDWISE_CHAOS_SEED", time.time_ns() % 1000))
RUN = 10_000  # steps of a trainer before it is restarted, at most
DTYPES = {"w": torch.int32, "b": torch.int64, "norm": torch.bfloat16}
SERVERS = [(2, by_columns, None), (1, replicated, None), (2, by_rows, "b"), (2, replicated, "b"), (1, by_rows, "c")]


class Seventh(Sparse):
    """The last step has written cells of every column, so that every rank knows its own step."""

    EVERY = 7


def sparse(layouts):
    """What prepares a job of which a step changes few cells. Every message may be a delta."""

    def prepare(me):
        of_few_cells(me)
        me.weights = Seventh(me.rank, layouts)

    return prepare


def hold(me, at):
    me.meeting = MeetingPoint(Address.of(at), None)
    return me.meeting.hold()


def train(me, run, options):
    """Commit one version after the other, from 1 on, until the test says that it is enough."""
    me.publisher = sw.publish(me.weights.state, me.at, "policy", patience=PATIENCE, **options)
    for version in range(1, RUN):
        me.weights.fill(run * RUN + version)
        me.publisher.commit(version)
        enough = torch.tensor(int((me.folder / "enough").exists()))
        dist.all_reduce(enough)  # or one rank would stop, and the other wait for it
        if enough:
            return version
        time.sleep(0.01)
    return None


def serve(me, options):
    """Pull again and again, and look at all cells after each, until the last version has come.

    Returns what was seen: (version, step) after each pull, or ("failed", why).
    """
    me.subscriber = sw.subscribe(me.weights.state, me.at, "policy", patience=PATIENCE, timeout=LIMIT, **options)
    seen, newest, end = [], 0, None
    while True:
        try:
            version = me.subscriber.pull()
        except sw.ShardwiseError as error:
            version = None
            seen.append(("failed", str(error)[:200]))
            time.sleep(0.02)
        found = me.weights.step()  # raises if it is a mixture
        if version is not None and found is not None:
            assert found % RUN == version, (version, found)
            assert found >= newest, f"step {found} came after step {newest}"
            newest = found
            seen.append((version, found))
        if (me.folder / "last").exists():
            end = end or time.monotonic() + LIMIT / 2
            if version is not None and found in (None, wanted_step(me)):
                return seen
            assert time.monotonic() < end, f"the last version did not come: {seen[-3:]}"


def wanted_step(me):
    return int((me.folder / "last").read_text())


class Chaos:
    """The jobs, and what happens to them."""

    def __init__(self, jobs, seed, *, delta):  # noqa: F811
        self.delta = delta
        self.jobs, self.random, self.runs, self.happened = jobs, random.Random(seed), 0, Counter()
        self.stopped = []  # (when it goes on, job, rank)
        self.new_hub()
        self.trainer = self.new_trainer()
        self.servers = [self.new_server(number) for number in range(len(SERVERS))]

    def new_hub(self):
        self.hub = self.jobs.start()
        self.hub.call(hold, self.jobs.at)  # unless a trainer that has just started was faster

    def new_trainer(self):
        self.runs += 1
        self.lasts_until = time.monotonic() + 3 * PATIENCE  # the name is free after one, and it has to do something
        prepare = sparse(by_rows(2)) if self.delta else None
        trainer = self.jobs.trainer(2, by_rows(2), DTYPES, publish=False, prepare=prepare)
        keep = self.random.choice([2, 4] if self.delta else [1, 2])
        trainer.start(train, self.runs, {"keep": keep, "delta": self.delta})
        return trainer

    def new_server(self, number):
        size, layouts, host = SERVERS[number]
        prepare = sparse(layouts(size)) if self.delta else None
        server = self.jobs.server(size, layouts(size), DTYPES, host=host, subscribe=False, prepare=prepare)
        server.start(serve, self.random.choice([{}, {}, {"verify": True}]))
        return server

    def something(self):
        """One thing happens."""
        what = self.random.choice(
            [self.kill_server] * 3 + [self.stop_server] * 4 + [self.kill_trainer, self.stop_trainer, self.kill_hub]
        )
        self.happened[what.__name__] += 1
        what()

    def kill_server(self):
        number = self.random.randrange(len(self.servers))
        server = self.servers[number]
        server.kill(self.random.randrange(server.size))  # the others of that job find out, or are restarted with it
        time.sleep(self.random.choice([0, 0.3]))
        server.kill()
        self.servers[number] = self.new_server(number)

    def stop_server(self):
        self.stop(self.random.choice(self.servers))

    def stop_trainer(self):
        self.stop(self.trainer)

    def stop(self, job):
        rank = self.random.randrange(job.size)
        if all(one[1:] != (job, rank) for one in self.stopped):
            job.stop(rank)
            self.stopped.append((time.monotonic() + self.random.choice([0.1, 1, 5]), job, rank))

    def kill_trainer(self):
        if time.monotonic() > self.lasts_until:
            self.trainer.kill()
            self.trainer = self.new_trainer()

    def kill_hub(self):
        self.hub.kill()
        time.sleep(self.random.choice([0, 0.3]))
        self.new_hub()

    def wake(self, everybody=False):
        """Let those go on whose time has come."""
        for one in [one for one in self.stopped if everybody or one[0] < time.monotonic()]:
            self.stopped.remove(one)
            _, job, rank = one
            if job.processes[rank].is_alive():
                job.go_on(rank)

    def check(self):
        """No rank has seen a mixture, or anything else that is not an error of the library."""
        for server in self.servers:
            for rank in range(server.size):
                if not server.busy(rank):
                    server.results([rank])

    def finish(self):
        """All servers get the last version."""
        self.wake(everybody=True)
        enough = self.jobs.folder / "enough"
        enough.touch()
        found = self.trainer.outcomes()
        while any(error for _, error in found.values()):  # it had stood still, and another one had its name
            self.happened["lost trainer"] += 1
            self.trainer.kill()
            self.trainer = self.new_trainer()
            found = self.trainer.outcomes()
        aside = self.jobs.folder / "aside"
        aside.write_text(str(self.runs * RUN + found[0][0]))
        aside.rename(self.jobs.folder / "last")
        return [server.results() for server in self.servers]


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True], ids=["dense", "deltas"])
def test_nobody_ever_has_a_mixture(jobs, delta):  # noqa: F811
    chaos, end = Chaos(jobs, SEED, delta=delta), time.monotonic() + SECONDS
    print(f"SHARDWISE_CHAOS_SEED={SEED}")
    while time.monotonic() < end:
        chaos.something()
        time.sleep(chaos.random.random())
        chaos.wake()
        chaos.check()
    pulls = Counter()
    for server in chaos.finish():
        for seen in server:
            pulls.update("failed" if one[0] == "failed" else "pulled" for one in seen)
        assert len({seen[-1] for seen in server if seen}) == 1
    print(chaos.happened, pulls, "deltas", sum("sent a delta" in line for line in chaos.trainer.log()))
