"""Several hosts on one machine: network namespaces on a switch, and links with a rate. Linux only, as root."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from shardwise.errors import ShardwiseError
from shardwise.testing.links import SlowSwitch
from shardwise.testing.ranks import end_with

T = TypeVar("T")
INTERFACE = "eth0"  # of every host: a namespace has names of its own
NETWORK = "10.213.0"  # inside the namespaces only, so that all sets of hosts may have the same addresses
MOST = 4  # hosts
CLONE_NEWNET = 0x40000000  # of Linux
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
BURST = 2e-3  # seconds at the full rate; the shaper must be woken more often than that
LEAST_BURST = 64 * 1024  # bytes: one packet as TCP hands it to a link that segments it
LATENCY = "50ms"  # of a full queue: room enough that TCP loses nothing
PREFIX = "shardwise"
ADMIN = ("/usr/sbin", "/sbin")  # where ip and tc may be without being in PATH

_numbers = itertools.count()


class HostError(ShardwiseError, RuntimeError):
    """Hosts cannot be made here, or a process on one of them failed."""


class HostProcess(Generic[T]):
    """A function that runs on a host, in a forked process."""

    def __init__(self, host: Host, process: BaseProcess, pipe: Connection) -> None:
        self.host, self.process, self._pipe = host, process, pipe

    def result(self, timeout: float = 60.0) -> T:
        """Wait for what the function returns. Its error is raised as a HostError. Call once."""
        where = f"process {self.process.pid} on {self.host.name}"
        if not self._pipe.poll(timeout):
            raise HostError(f"{where} did not end within {timeout:g} s")
        try:
            error, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            raise HostError(f"{where} died without a result") from None
        self.process.join()
        if error:
            raise HostError(f"{where} failed:\n{error}")
        return value

    def kill(self) -> None:
        """End it now, if it still runs."""
        self.process.kill()
        self.process.join()


class Host:
    """A network namespace with a loopback device, and a link to the switch with an address.

    Processes on different hosts reach each other by address only. Files, /dev/shm and process numbers are common.
    """

    interface = INTERFACE

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._switch: SlowSwitch | None = None
        self._forked = list[HostProcess[Any]]()
        self._started = list[subprocess.Popen[Any]]()

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address!r})"

    def popen(
        self, args: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host, as `subprocess.Popen` does. gloo finds the link by its environment."""
        environment = {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": INTERFACE}
        words = [_program("ip"), "netns", "exec", self.name, *args]
        self._started.append(subprocess.Popen(words, env=environment, **options))
        return self._started[-1]

    def run(self, args: Sequence[str], *, timeout: float = 60.0) -> str:
        """Run a program on this host; what it printed. A HostError if it fails."""
        with self.popen(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                output: str = process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                raise HostError(f"{' '.join(args)!r} on {self.name} did not end within {timeout:g} s") from None
        if process.returncode:
            raise HostError(f"{' '.join(args)!r} on {self.name} exits with {process.returncode}: {output.strip()}")
        return output

    def fork(self, work: Callable[..., T], *args: object) -> HostProcess[T]:
        """Call a function on this host, in a fork of this process: modules are imported already.

        Its torch has one thread. It ends with this process at the latest. For ranks of a process group see `on_ranks`.
        """
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_forked, args=(self, work, args, ours, theirs, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            process.start()
        theirs.close()
        self._forked.append(HostProcess(self, process, ours))
        return self._forked[-1]

    def enter(self) -> None:
        """Move the calling thread to this host for good, and tell gloo about the link. For processes just forked."""
        _enter(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # the machine's name may resolve to the loopback device

    def sent_bytes(self) -> int:
        """Bytes that left over the link since the host was made, headers of packets included."""
        return self._counter("tx")

    def received_bytes(self) -> int:
        """Bytes that arrived over the link since the host was made, headers of packets included."""
        return self._counter("rx")

    def link_down(self) -> None:
        """Cut the link: connections hang, and new ones fail."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")

    def link_up(self) -> None:
        """Mend the link."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up")

    def lose(self, share: float) -> None:
        """Lose this share of the packets of all hosts from now on. Only with `delay`; any process may call."""
        if self._switch is None:
            raise HostError("only hosts(..., delay=) lose packets: the kernel's own switch loses none")
        self._switch.lose(share)

    def _counter(self, way: str) -> int:
        (link,) = json.loads(_ip("-n", self.name, "-s", "-j", "link", "show", "dev", INTERFACE))
        return int(link["stats64"][way]["bytes"])

    def _end_processes(self) -> None:
        for forked in self._forked:
            forked.kill()
        for started in self._started:
            with started:  # waits, and closes its pipes
                started.kill()


@contextmanager
def hosts(count: int, *, rate: str | None = None, delay: float | None = None) -> Iterator[tuple[Host, ...]]:
    """So many hosts on this machine, each with a link to one switch. `rate` limits what each host sends: "1gbit".

    `delay`: so many seconds pass until a packet of one host reaches another. Such a switch is a process of its own, for
    some 10,000 packets a second, and can lose some (`Host.lose`).

    >>> if why_no_hosts() is None:
    ...     from shardwise.testing import on_ranks
    ...     with hosts(2, rate="1gbit") as (a, b):
    ...         assert on_ranks(2, lambda rank: 10 * rank, hosts=[a, b]) == [0, 10]

    At the end all their processes are ended and everything is removed, also what a run that was killed has left.
    Nothing connects the hosts to the machine's own network.
    """
    if not 1 <= count <= MOST:
        raise HostError(f"hosts({count}): there can be 1 to {MOST}")
    shaped = None if rate is None else _shaped(rate)
    if missing := _missing():
        raise HostError(missing)
    _remove_leftovers()
    prefix = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"
    switch = f"{prefix}-switch"
    made, slow = [Host(f"{prefix}-{n}", f"{NETWORK}.{n + 1}") for n in range(count)], None
    try:
        _ip("netns", "add", switch)
        for host in made:
            _connect(host, switch, shaped)
        if delay is None:
            _bridge(switch, made)
        else:
            slow = _slow_switch(switch, made, delay)
        yield tuple(made)
    finally:
        for host in made:
            host._end_processes()
        if slow is not None:
            slow.end()
        for name in {switch, *(host.name for host in made)} & _namespaces():
            _remove(name)


@cache
def why_no_hosts() -> str | None:
    """Why `hosts` cannot work here; None if it can. For tests that are skipped then."""
    try:
        with hosts(2, rate="1gbit"):
            return None
    except HostError as error:
        return str(error)


# --- namespaces and links --------------------------------------------------------------------------------------------


def _bridge(switch: str, made: Sequence[Host]) -> None:
    """Connect all ports of a namespace, in which the machine's own network has no part."""
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host in made:
        _ip("-n", switch, "link", "set", _port(host), "master", "bridge")


def _slow_switch(switch: str, made: Sequence[Host], delay: float) -> SlowSwitch:
    """The same by a process, that sees every packet alone."""
    for host in made:
        _ip("-n", host.name, "link", "set", INTERFACE, "gso_max_segs", "1")
    slow = SlowSwitch(lambda: _enter(switch), list(map(_port, made)), delay)
    for host in made:
        host._switch = slow
    return slow


def _enter(namespace: str) -> None:
    """Move the calling thread there for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):  # os.setns comes with Python 3.12
            raise HostError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")


def _port(host: Host) -> str:
    """The end of a host's link at the switch."""
    return f"port{host.address.rpartition('.')[2]}"


def _connect(host: Host, switch: str, shaped: Sequence[str] | None) -> None:
    _ip("netns", "add", host.name)
    _ip("-n", host.name, "link", "add", INTERFACE, "type", "veth", "peer", "name", _port(host), "netns", switch)
    _ip("-n", switch, "link", "set", _port(host), "up")
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    if shaped is not None:
        _run(_program("tc"), "-n", host.name, "qdisc", "add", "dev", INTERFACE, "root", *shaped)
    _ip("-n", host.name, "link", "set", INTERFACE, "up")


def _shaped(rate: str) -> list[str]:
    """The words for tc.

    >>> _shaped("1gbit")
    ['tbf', 'rate', '1gbit', 'burst', '250000', 'latency', '50ms']
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if match is None or not float(match[1]):
        raise HostError(f"rate={rate!r} is not a rate: expected a number with kbit, mbit or gbit, such as '1gbit'")
    burst = max(LEAST_BURST, int(float(match[1]) * UNITS[match[2]] / 8 * BURST))
    return ["tbf", "rate", rate, "burst", str(burst), "latency", LATENCY]


def _namespaces() -> set[str]:
    """The names of those that this module made, in any process."""
    try:
        return {name for name in os.listdir("/run/netns") if name.startswith(f"{PREFIX}-")}
    except FileNotFoundError:
        return set()


def _remove_leftovers() -> None:
    """Namespaces of processes that have ended without removing them."""
    for name in _namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
        if match and _start_of(int(match[1])) != int(match[2]):
            with suppress(HostError):  # another process may be removing it
                _remove(name)


def _remove(name: str) -> None:
    """The namespace, with the processes that are still in it."""
    for pid in _ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none. A number may be used again."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return None


# --- commands and processes ------------------------------------------------------------------------------------------


def _missing() -> str | None:
    if sys.platform != "linux":
        return "hosts need network namespaces of Linux"
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces"
    absent = [name for name in ("ip", "tc") if _find(name) is None]
    return f"hosts need the program {absent[0]} of iproute2" if absent else None


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN]))


@cache
def _program(name: str) -> str:
    return _find(name) or name


def _ip(*words: str) -> str:
    return _run(_program("ip"), *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"hosts cannot be made or reached: {' '.join(words)!r} failed: {done.stderr.strip()}")
    return done.stdout


def _forked(
    host: Host, work: Callable[..., object], args: Sequence[object], ours: Connection, pipe: Connection, parent: int
) -> None:
    """The life of a forked process: enter, work, report."""
    end_with(parent)
    gc.freeze()  # the collector would visit, and so copy, all that the parent has
    ours.close()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a fork has none of its parent's threads
    try:
        host.enter()
        report = None, work(*args)
        pipe.send_bytes(pickle.dumps(report))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        pipe.close()
        os._exit(0)  # no handler of the parent runs here
