"""Runs whose steps are kept in memory: jobs that are killed, and which keepers live."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from test_run import empty_state, sharded_state

from shardwise import checkpoint
from shardwise.storage import keepers
from shardwise.testing import on_ranks

LEASE = 30.0  # longer than a test


def names_of(folder, hosts=(None,)):
    """How the addresses of the keepers of a run begin, on hosts of these names."""
    line = Path(folder, ".run.line")
    run = f"{os.path.realpath(folder)}\n{line.read_text().split()[0]}" if line.exists() else ""
    real = keepers.host_name
    try:
        found = []
        for host in hosts:
            if host is not None:
                keepers.host_name = lambda host=host: host
            found.append(keepers.name_on_this_host(run))
        return found
    finally:
        keepers.host_name = real


def keepers_of(folder, hosts=(None,)):
    """The processes of the keepers of a run, by address."""
    names, found = names_of(folder, hosts), {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = (process / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if keepers.keeper_process.__file__ in words:
                address = words[words.index(keepers.keeper_process.__file__) + 2]
                if any(Path(address).name.startswith(name) for name in names):
                    found[address] = int(process.name)
    return found


def soon(true, seconds=20.0):
    """Wait until it is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it is not so yet"
        time.sleep(0.02)


def gone(folder, hosts=(None,)):
    """No process and no address is left."""
    names = names_of(folder, hosts)
    soon(lambda: not keepers_of(folder, hosts))
    assert not [path for path in keepers.directory().iterdir() if any(name in path.name for name in names)]


@contextmanager
def ended_at_last(folder, hosts=(None,)):
    """Whatever happens, no keeper is left to other tests."""
    try:
        yield
    finally:
        for address, process in keepers_of(folder, hosts).items():
            os.kill(process, signal.SIGKILL)
            Path(address).unlink(missing_ok=True)


def killed_after(folder, ranks, *steps, keep=(), dead_keepers=(), state=sharded_state, **options):
    """A job saves steps, keeps others in memory only, and is killed, with the keepers of some ranks."""

    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE, **options)
        for step in sorted({*steps, *keep}):
            (run.save if step in steps else run.keep)(step, state(step, ranks))
        dist.barrier()
        if rank in dead_keepers:
            os.kill(run._keeping._keeper._process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(ranks, train, dying=range(ranks))


def resumed(folder, ranks, *, close=True, empty=empty_state, **options):
    """For every rank: the step, from where it came, and the state."""

    def resume(rank):
        into = empty(ranks)
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        step = run.resume(into=into, **options)
        if close:
            run.close()
        w = into["w"]
        return step, run.resumed, into["step"], w.local_tensor() if ranks > 1 else w

    return on_ranks(ranks, resume, dying=() if close else range(ranks))
