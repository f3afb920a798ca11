"""The scripts in examples/ that take more than one command."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TORCH_ABORTS, TRIES = "terminate called without an active exception", 4  # as in test_readme.py
LIMIT = 90.0  # seconds that anything may take


class Job:
    """A script under a torchrun of its own. What it prints goes to files."""

    def __init__(self, folder, script, ranks, *args):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, str(ROOT / "examples" / script), *map(str, args)]
        folder.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self._out, "w") as out, open(self._err, "w") as err:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=err)

    @property
    def lines(self):
        """What was printed so far."""
        return self._out.read_text().splitlines()

    @property
    def errors(self):
        """What was printed there, for a message."""
        return self._err.read_text()

    def _workers(self):
        """The processes that torchrun has started. They do not end with it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in children.read_text().split()] if children.exists() else []

    def kill(self):
        """End it at once, without a word to anybody."""
        workers = self._workers()
        self.process.kill()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        self.process.wait()

    def versions(self):
        """The numbers of the versions in what it printed."""
        return [int(line.split()[1].rstrip(":")) for line in self.lines if re.fullmatch(r"version \d+: \w+", line)]

    def wait_for_line(self, pattern):
        """Until it has printed a line like this."""
        self._wait(lambda: any(re.fullmatch(pattern, line) for line in self.lines), pattern)

    def wait_for(self, version):
        """Until it has printed this version, or a later one."""
        self._wait(lambda: any(found >= version for found in self.versions()), f"version {version}")

    def _wait(self, condition, what):
        end = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < end, f"no {what}: {self.lines}\n{self.errors}"
            time.sleep(0.05)


@contextmanager
def jobs(folder):
    """A function that starts jobs, which end with the test."""
    started = []

    def start(script, ranks, *args):
        started.append(Job(folder / f"job{len(started)}", script, ranks, *args))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.kill()


def test_separate_jobs_have_the_same_weights_after_every_step(tmp_path):
    with jobs(tmp_path) as start:
        both = [start("separate_jobs.py", n, job, tmp_path / "meeting") for n, job in ((2, "trainer"), (3, "server"))]
        ended = [job.process.wait(LIMIT) for job in both]
        trained, served = (job.lines for job in both)
    assert ended == [0, 0], both[0].errors + both[1].errors
    assert trained == served
    assert len(set(trained)) == 3


def killed_and_started_again(start, folder):
    """A trainer and two servers. The trainer and one server are killed and come back. Returns trainers and servers."""
    meeting, checkpoint = folder / "meeting", folder / "checkpoint"
    trainers = [start("publish_trainer.py", 2, meeting, checkpoint)]
    servers = [start("subscribe_server.py", ranks, meeting) for ranks in (1, 3)]
    for server in servers:
        server.wait_for(3)
    trainers[0].kill()
    servers[1].kill()
    last = trainers[0].versions()[-1]
    trainers.append(start("publish_trainer.py", 2, meeting, checkpoint))
    servers.append(start("subscribe_server.py", 3, meeting))
    for server in (servers[0], servers[2]):
        server.wait_for(last + 3)
    return trainers, servers


def test_servers_have_whole_versions_of_a_trainer_that_is_killed_and_comes_back(tmp_path):
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            with jobs(folder) as start:
                trainers, servers = killed_and_started_again(start, folder)
            break
        except AssertionError as error:
            if TORCH_ABORTS not in str(error):
                raise
    resumed = trainers[1].versions()[0] - trainers[0].versions()[-1]
    assert resumed in (1, 2), "from the checkpoint: of the last version, or of one that was saved and not yet printed"
    committed = {line for trainer in trainers for line in trainer.lines}
    for server in servers:
        assert {line for line in server.lines if line.startswith("version")} <= committed
        assert server.versions() == sorted(server.versions())


def stopped_and_resumed(start, folder):
    """A training on four ranks that is stopped by SIGTERM, and goes on with two, which are killed, and with three."""
    trained = [start("resume_training.py", 4, folder / "run")]
    trained[0].wait_for_line(r"saved (40|60) .*")
    trained[0].process.terminate()
    trained[0].process.wait(LIMIT)
    trained.append(start("resume_training.py", 2, folder / "run"))
    trained[1].wait_for_line(r"saved .*")
    trained[1].kill()
    trained.append(start("resume_training.py", 3, folder / "run"))
    trained[2].wait_for_line(r"saved .*")
    return trained


def test_a_training_that_is_stopped_or_killed_resumes_on_another_number_of_ranks(tmp_path):
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            with jobs(folder) as start:
                said = [[line.split() for line in job.lines] for job in stopped_and_resumed(start, folder)]
            break
        except AssertionError as error:
            if TORCH_ABORTS not in str(error):
                raise
    stopped, killed, last = ([(int(step), int(ranks), value) for _, step, _, ranks, _, value in one] for one in said)
    assert (stopped[0][:2], killed[0][1], last[0][1]) == ((0, 4), 2, 3)
    assert killed[0] == (stopped[-1][0], 2, stopped[-1][2]), "what was saved when it was told to stop"
    assert last[0][0] - killed[-1][0] in (0, 20), "the last one saved, or one that was saved and not yet printed"
    assert last[0][2] in [value for *_, value in killed] or last[0][0] > killed[-1][0]
