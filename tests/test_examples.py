"""The scripts in examples/ that take more than one command."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def start(job, ranks, meeting):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, str(ROOT / "examples" / "separate_jobs.py"), job, str(meeting)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_separate_jobs_have_the_same_weights_after_every_step(tmp_path):
    jobs = [start("trainer", 2, tmp_path / "meeting"), start("server", 3, tmp_path / "meeting")]
    try:
        (trained, errors), (served, others) = (job.communicate(timeout=120) for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], errors + others
    assert trained == served
    assert len(set(trained.splitlines())) == 3
