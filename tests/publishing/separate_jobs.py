"""Jobs that are started separately: forked processes that do what a test tells them, and can be stopped and killed."""

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy.random  # noqa: F401  # once
import pytest
import torch
import torch.distributed as dist
from numbered import GARBAGE, Weights

import shardwise as sw
from shardwise import Layout
from shardwise.publishing import local_job, serving, subscriber  # with all that they import, once before the forks
from shardwise.testing.ranks import end_with

NAME = "policy"
PATIENCE = 3.0  # the least that is taken
LIMIT = 40.0  # seconds that anything may take


class JobError(Exception):
    """What went wrong on the ranks of a job: `errors` by rank, as (type, message)."""

    def __init__(self, errors):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text, _) in sorted(errors.items())))
        self.add_note(next(trace for _, _, trace in errors.values()))

    @property
    def kinds(self):
        """The names of the types of the errors."""
        return {kind for kind, *_ in self.errors.values()}


class Job:
    """`size` processes, with a default group of their own if there are several, or if `grouped`.

    `prepare(me)` is called on every rank first. Then the ranks call functions as they are told: `function(me, ...)`,
    where `me` is a namespace that lasts, with `rank`, `size` and `folder`.
    """

    def __init__(self, folder, name, size=1, *, grouped=None, prepare=None):
        self.name, self.size, self._waiting = name, size, set()
        fork = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            args = (rank, size, folder, name, size > 1 if grouped is None else grouped, prepare, theirs, os.getpid())
            process = fork.Process(target=_live, args=args, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    # --- calls -------------------------------------------------------------------------------------------------------

    def start(self, function, *args, ranks=None, **kwargs):
        """Let ranks call a function of a module; do not wait for the results."""
        for rank in self._ranks(ranks):
            assert rank not in self._waiting, f"rank {rank} of {self.name} is still busy"
            self.pipes[rank].send_bytes(pickle.dumps((function, args, kwargs)))
            self._waiting.add(rank)

    def outcomes(self, ranks=None, limit=LIMIT):
        """What came of it, by rank: (result, None), or (None, (type, message, traceback)). A dead rank has "died"."""
        end, found = time.monotonic() + limit, {}
        for rank in self._ranks(ranks):
            if not self.pipes[rank].poll(max(end - time.monotonic(), 0)):
                self._print_stacks()
                raise TimeoutError(f"rank {rank} of {self.name} did not answer within {limit:g} s")
            try:
                found[rank] = pickle.loads(self.pipes[rank].recv_bytes())
            except (EOFError, ConnectionError):
                found[rank] = None, ("died", "the process has died", "")
            self._waiting.discard(rank)
        return found

    def results(self, ranks=None, limit=LIMIT):
        """The results by rank, once all ranks have one. Raises a JobError if a rank failed."""
        found = self.outcomes(ranks, limit)
        errors = {rank: error for rank, (_, error) in found.items() if error}
        if errors:
            raise JobError(errors)
        return [result for result, _ in found.values()]

    def call(self, function, *args, ranks=None, limit=LIMIT, **kwargs):
        """Let ranks call a function, and wait for the results."""
        self.start(function, *args, ranks=ranks, **kwargs)
        return self.results(ranks, limit)

    def busy(self, rank=0):
        """True as long as a rank has not answered."""
        return rank in self._waiting and not self.pipes[rank].poll(0)

    def _ranks(self, ranks):
        return range(self.size) if ranks is None else ranks

    def _print_stacks(self):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.3)  # or they would be mixed

    # --- what happens to processes -----------------------------------------------------------------------------------

    def kill(self, rank=None):
        """End ranks at once, or all of them."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.kill()
            process.join()

    def stop(self, rank=None):
        """Let ranks do nothing, as if the system had forgotten them."""
        ranks = range(self.size) if rank is None else [rank]
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGSTOP)
        for rank in ranks:
            self.wait_stopped(rank)

    def go_on(self, rank=None):
        """End a stop."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            os.kill(process.pid, signal.SIGCONT)

    def wait_stopped(self, rank=0, limit=LIMIT):
        """Wait until a rank has stopped itself."""
        end = time.monotonic() + limit
        while _states(self.processes[rank].pid) != {"T"}:
            assert time.monotonic() < end, f"rank {rank} of {self.name} did not stop"
            time.sleep(0.005)

    def wait_dead(self, rank=0, limit=LIMIT):
        """Wait until a rank has ended."""
        self.processes[rank].join(limit)
        assert not self.processes[rank].is_alive(), f"rank {rank} of {self.name} has not died"

    # --- what they tell ----------------------------------------------------------------------------------------------

    def log(self, rank=0):
        """What shardwise has logged on a rank so far."""
        return self.call(_log, ranks=[rank])[0]


class Trainer(Job):
    """A job that publishes numbered weights."""

    def publish(self, **options):
        """On all ranks."""
        self.call(_publish, **options)
        return self

    def commit(self, version, step=None, **options):
        """Write a step into the weights, commit it, and write garbage into the weights unless they are not copied."""
        self.call(_commit, version, step, **options)

    @property
    def versions(self):
        """Those that can be pulled now."""
        return self.call(_versions, ranks=[0])[0]

    def close(self):
        """Stop publishing, on all ranks."""
        self.call(_close, "publisher")


class Server(Job):
    """A job that subscribes, and looks at all cells after each pull, whether it failed or not."""

    def subscribe(self, **options):
        """On all ranks."""
        self.call(_subscribe, **options)
        return self

    def pull(self, version=None, *, step=None):
        """Pull on all ranks. Returns the version, which all ranks have, whole. `step`: if it is not its number."""
        self.start(_pull, version)
        return self.pulled(step=step)

    def pulled(self, *, step=None, limit=LIMIT):
        """What a pull that was started came to."""
        found = self.results(limit=limit)
        versions, steps = {version for version, _ in found}, {one for _, one in found} - {None}
        assert len(versions) == 1, f"the ranks have different versions: {found}"
        version = versions.pop()
        wanted = (version or 0) if step is None else step
        assert steps <= {wanted}, f"the ranks have the steps {steps}, not {wanted} of version {version}"
        return version

    def fail(self, version=None, *, keeps):
        """Pull on all ranks, which all must raise an error and keep the weights of a step. Returns the JobError."""
        self.start(_pull, version)
        return self.failed(keeps=keeps)

    def failed(self, *, keeps, ranks=None, limit=LIMIT):
        """What a pull that was started came to."""
        found = self.outcomes(ranks, limit)
        errors = {rank: error for rank, (_, error) in found.items() if error}
        assert len(errors) == len(found), f"ranks did not fail: {found}"
        self.has(keeps, ranks)
        return JobError(errors)

    def has(self, step, ranks=None):
        """Assert that all cells of all ranks are of a step."""
        found = set(self.call(_step, ranks=ranks)) - {None}
        assert found <= {step}, f"the ranks have the steps {found}, not {step}"

    @property
    def version(self):
        """Of the subscriber: the same on all ranks."""
        (version,) = set(self.call(_version))
        return version

    def close(self):
        """Leave, on all ranks."""
        self.call(_close, "subscriber")


class Jobs:
    """The jobs of a test, with one meeting point: a file, unless `at` is set to something else."""

    def __init__(self, folder):
        self.folder, self.at, self._started = folder, str(folder / "meeting"), []

    def start(self, size=1, *, kind=Job, prepare=None, grouped=None):
        """A job of any kind."""
        job = kind(self.folder, f"job {len(self._started)}", size, grouped=grouped, prepare=prepare)
        self._started.append(job)
        return job

    def trainer(self, size=1, layouts=None, dtypes=None, **options):
        """A job that publishes. Options go to `publish`; `publish=False` leaves that to the test."""
        return self._with_weights(Trainer, size, layouts, dtypes, **options)

    def server(self, size=1, layouts=None, dtypes=None, **options):
        """A job that subscribes. Options go to `subscribe`; `subscribe=False` leaves that to the test."""
        return self._with_weights(Server, size, layouts, dtypes, **options)

    def _with_weights(
        self, job, size, layouts, dtypes, *, prepare=None, grouped=None, kind="sharded", host=None, **options
    ):
        """`host`: pretend that the job is on a host of that name, where no memory of other hosts can be mapped."""

        def make(me):
            me.at = self.at
            pretend_host(host)
            me.weights = Weights(me.rank, layouts or by_rows(size), dtypes or DTYPES, kind=kind)
            if prepare is not None:
                prepare(me)

        made = self.start(size, kind=job, prepare=make, grouped=grouped)
        if job is Trainer:
            return made.publish(**options) if options.pop("publish", True) else made
        return made.subscribe(**options) if options.pop("subscribe", True) else made

    def close(self):
        """End all processes."""
        for job in self._started:
            for process in job.processes:
                process.kill()
        for job in self._started:
            for process in job.processes:
                process.join()
            for pipe in job.pipes:
                pipe.close()

    def errors(self):
        """Errors that threads of the jobs have met and nobody was told of."""
        path = self.folder / "errors"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def jobs(tmp_path):
    """Jobs that end with the test. No thread of theirs may meet an error that nobody expected."""
    threads, made = torch.get_num_threads(), Jobs(tmp_path)
    torch.set_num_threads(1)  # a forked child of one that runs several would wait for threads that it does not have
    try:
        yield made
    finally:
        made.close()
        torch.set_num_threads(threads)
    assert made.errors() == ""


def free_port():
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until(true, limit=LIMIT):
    """Wait until something is true."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, f"it was not true within {limit:g} s"
        time.sleep(0.02)


SHAPES = {"w": (12, 10), "b": (7,), "norm": (5, 4, 3)}
DTYPES = {"w": torch.int32, "b": torch.float32, "norm": torch.bfloat16}


def by_rows(owners):
    """A small model, cut along its first dim."""
    return {name: Layout.chunk(shape, 0, owners) for name, shape in SHAPES.items()}


def by_columns(owners):
    """A small model, cut along its last dim."""
    return {name: Layout.chunk(shape, len(shape) - 1, owners) for name, shape in SHAPES.items()}


def replicated(owners):
    """A small model, whole on every rank."""
    return {name: Layout.replicated(shape, owners) for name, shape in SHAPES.items()}


def pretend_host(name):
    """This process is on a host of that name, as far as publishers and subscribers know; by default on its own."""
    real = serving.job_of

    def job_of(*args):
        job = real(*args)
        job._choice = "group"
        return job

    for module in serving, subscriber:  # on all jobs: what is sent at all goes as messages, as between hosts
        module.job_of = job_of
    if name is not None:
        local_job.host_of_this_process = lambda: name


# --- on the ranks ----------------------------------------------------------------------------------------------------


def _live(rank, size, folder, name, grouped, prepare, pipe, parent):
    """The life of a process: calls what it is told, until the parent ends."""
    torch.set_num_threads(1)  # torch makes its pool anew after a fork; threads that ask for it first, together, abort
    gc.freeze()  # the collector would visit, and so copy, all that the parent has
    end_with(parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    me = SimpleNamespace(rank=rank, size=size, folder=folder, lines=[])
    _keep_log(me, name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if grouped:
            store = dist.FileStore(str(folder / name), size)
            limit = timedelta(seconds=LIMIT)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        if prepare is not None:
            prepare(me)
        failed = None
    except BaseException as error:
        failed = error  # told at the first call
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            if failed is not None:
                raise failed
            told = function(me, *args, **kwargs), None
        except BaseException as error:
            told = None, (type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(told))


class _Log(logging.Handler):
    """Keeps what is logged, and writes errors into a file."""

    def __init__(self, me, name):
        super().__init__()
        self._me, self._name = me, name

    def emit(self, record):
        self._me.lines.append(f"{record.levelname}: {record.getMessage()}")
        if record.levelno >= logging.ERROR:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            write_error(self._me, f"{self._name}: {record.getMessage()}\n{trace}")


def write_error(me, text):
    """For the test: an error that nobody was told of."""
    with open(me.folder / "errors", "a") as file:
        file.write(f"rank {me.rank}: {text}\n")


def _keep_log(me, name):
    logger = logging.getLogger("shardwise")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Log(me, name))
    logger.propagate = False

    def failed(args):
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        write_error(me, f"{name}: a thread has failed\n{trace}")

    threading.excepthook = failed


def _log(me):
    return list(me.lines)


def _publish(me, **options):
    at = options.pop("at", me.at)
    me.publisher = sw.publish(me.weights.state, at, options.pop("name", NAME), **{"patience": PATIENCE, **options})


def _commit(me, version, step=None, **options):
    me.weights.fill(version if step is None else step)
    me.publisher.commit(version, **options)
    if options.get("copy", True):
        me.weights.fill(GARBAGE)


def _versions(me):
    return me.publisher.versions


def _subscribe(me, **options):
    at = options.pop("at", me.at)
    given = {"patience": PATIENCE, "timeout": LIMIT / 2, **options}
    me.subscriber = sw.subscribe(me.weights.state, at, given.pop("name", NAME), **given)


def _pull(me, version=None):
    return me.subscriber.pull(version), me.weights.step()


def _step(me):
    return me.weights.step()


def _version(me):
    return me.subscriber.version


def _close(me, what):
    getattr(me, what).close()


def _states(pid):
    """Of its threads, as the system says it: R(uns), S(leeps), T (stopped)."""
    files = Path(f"/proc/{pid}/task").glob("*/stat")
    return {file.read_text().rpartition(")")[2].split()[0] for file in files}
