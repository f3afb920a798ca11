"""The script that trains under FSDP2 and serves in vLLM, as it is."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "train_and_serve.py"


def test_a_model_that_learns_to_count_counts_in_vllm():
    run = subprocess.run([sys.executable, SCRIPT], text=True, capture_output=True, timeout=400)
    assert run.returncode == 0, run.stderr
    _, untrained, *_, last = run.stdout.splitlines()
    assert untrained != "untrained: 10 11 12 13 14"
    assert last == "after 24 steps: 10 11 12 13 14"
