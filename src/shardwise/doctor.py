"""What this machine and this job can do, and what to change where they cannot (shardwise doctor)."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from shardwise.exchange import in_words
from shardwise.job.session import group_transport
from shardwise.planning import size
from shardwise.storage.available_memory import available_memory
from shardwise.transports import GroupTransport

TESTED = (2, 13)  # the newest torch that the tests ran with
DESCRIPTORS = 4096  # enough for a rank of 2,000 that exchanges with all
WAITING = timedelta(seconds=60)  # for the other ranks
NOT_REAL = {"undefined", "fake"}  # names in torch's list of backends
MEMORY = 2**20  # bytes of shared memory to try


class Finding(NamedTuple):
    """Something that was looked at. `fix`: what to change; without it all is well, or a matter of taste."""

    what: str
    fix: str = ""

    @property
    def verdict(self) -> Literal["ok", "fix"]:
        """In a word."""
        return "fix" if self.fix else "ok"


def examine() -> Iterator[Finding]:
    """This machine; then, under torchrun, the ranks of this job, which all call."""
    yield Finding(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    yield torch_version(torch.__version__)
    yield backends()
    yield devices()
    yield descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield memory()
    if sys.platform == "linux":
        yield attempt("shared memory between ranks of this host", share)
    else:
        yield Finding("shared memory between ranks needs Linux: messages go over the process group")
    if "RANK" in os.environ:
        yield from ranks()
    else:
        yield Finding("one process; to look at the ranks of a job: torchrun ... -m shardwise doctor")


def torch_version(version: str) -> Finding:
    """
    >>> torch_version("2.13.0").verdict
    'ok'
    >>> torch_version("3.0.1+cu130")
    Finding(what='torch 3.0.1+cu130', fix='the newest that was tested is 2.13: run the tests, or install that')
    """
    newer = tuple(map(int, version.split("+")[0].split(".")[:2])) > TESTED
    tested = ".".join(map(str, TESTED))
    return Finding(
        f"torch {version}", f"the newest that was tested is {tested}: run the tests, or install that" * newer
    )


def backends() -> Finding:
    """Of process groups."""
    if not dist.is_available():
        return Finding("torch was built without torch.distributed", "install a torch that has it, to use several ranks")
    there = [name for name in dist.Backend.backend_list if name not in NOT_REAL and dist.is_backend_available(name)]
    missing = torch.cuda.is_available() and "nccl" not in there
    return Finding(f"process groups: {', '.join(there)}", "install a torch with nccl, for messages of GPUs" * missing)


def devices() -> Finding:
    """Accelerators."""
    if torch.cuda.is_available():
        return Finding(f"{torch.cuda.device_count()} GPUs: {torch.cuda.get_device_name()}")
    return Finding("no GPU: tensors are on the CPU")


def descriptors(soft: int, hard: int) -> Finding:
    """
    >>> descriptors(256, 4096)
    Finding(what='at most 256 open files', fix='run `ulimit -n 4096` before the job: gloo needs one for every rank ...
    """
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS:
        return Finding(f"open files: at most {soft:,}" if soft != resource.RLIM_INFINITY else "open files: no limit")
    raised = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    how = f"run `ulimit -n {raised}`" if raised > soft else "raise the hard limit (docker run --ulimit nofile=65536)"
    need = "gloo needs one for every rank of the group, shardwise one for each rank that it exchanges with"
    return Finding(f"at most {soft:,} open files", f"{how} before the job: {need}")


def memory() -> Finding:
    """What processes may still take."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding(f"memory: {size(available_memory())} available of {size(total)}")


def attempt(what: str, work: Callable[[], str]) -> Finding:
    """Try it. `work` returns what to change if it does not work."""
    fix = work()
    return Finding(f"{what}: {'does not work' if fix else 'works'}", fix)


def share() -> str:
    """Allocate shared memory."""
    from shardwise.transports.segments import SharedMemoryError, SharedSegment

    try:
        SharedSegment.allocate(MEMORY)
    except SharedMemoryError as error:
        return f"{error}. Until then messages go over the process group"
    return ""


# --- the ranks of a job -----------------------------------------------------------------------------------------------


def ranks() -> Iterator[Finding]:
    """How the ranks of this job reach each other. Every rank calls; a group is made and destroyed."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=WAITING)
    with closing(_Leaving()):
        transport = group_transport(None)
        names = _names()
        yield Finding(f"{dist.get_world_size()} ranks, over {backend}")
        yield from hosts_of(transport, names)


class _Leaving:
    """The end of the group: gloo may abort ranks whose peers leave first."""

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def _names() -> list[str]:
    """The host names of all ranks."""
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return [str(name) for name in names]


def hosts_of(transport: GroupTransport, names: list[str]) -> Iterator[Finding]:
    """Which ranks share memory, by host; those that do not although their hosts have one name."""
    if transport.on_one_host:
        yield Finding("all ranks share memory: a move between them is a copy")
        return
    hosts = transport.hosts
    teams = [] if hosts is None else [hosts.on(number).tolist() for number in range(hosts.count)]
    for team in teams:
        shared = "share memory" if len(team) > 1 else "shares no memory with others"
        yield Finding(f"{in_words(team)} on {names[team[0]]}: {shared}")
    for name in dict.fromkeys(names):
        if names.count(name) > max((len(team) for team in teams if names[team[0]] == name), default=1):
            fix = "run them in one container and as one user; until then messages go over the process group"
            yield Finding(f"not all ranks on {name} share memory", fix)
