"""The demo, whole, at a small size: what it says and leaves behind is right, and it removes only what is its own."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwise import checkpoint, cli
from shardwise.demo import run
from shardwise.demo.folder import DemoFolder
from shardwise.demo.model import RENAME, Llama, planned
from shardwise.demo.publishing import publish_versions

SMALL = Llama(hidden=64, heads_kv=32, inner=96, words=128, layers=2)
KEPT = "of mine.txt"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run in the directory of an earlier one, which also has a file of somebody else: what it printed, and where."""
    earlier, words = DemoFolder.claim(tmp_path_factory.mktemp("demo") / "out"), io.StringIO()
    for path in earlier.dcp / "stale", earlier.hf / "stale", earlier.scratch / "stale", earlier.path / KEPT:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run(Console(file=words), earlier.path, model=SMALL)
    return words.getvalue(), earlier


@pytest.fixture
def shell(monkeypatch, capsys):
    """Runs a command: the exit code, and all that was printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", list(words))
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        return code, "".join(capsys.readouterr())

    return run


def test_seven_acts_are_told_in_plain_lines_that_fit(told):
    text, folder = told
    lines = text.splitlines()
    assert [line[0] for line in lines if re.match(r"\d  \w", line)] == list("1234567")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if len(line) > 80 and str(folder.path) not in line] == []
    rows = [line for line in lines if re.search(r"\d\.\dx  ", line)]
    assert len(rows) == 4, "figures beside torch's"


def test_a_server_that_was_killed_comes_back_with_a_later_version(told):
    rows = re.findall(
        r"^   (trainer|server A|server B).* (?:commits|pulls) (\d+) to (\d+) +(\d+)  ", told[0], re.MULTILINE
    )
    assert [name for name, *_ in rows] == ["trainer", "server A", "server B", "server B"]
    (first, newest, commits), (_, by_a, _), (_, killed, pulls), (again, _, _) = ([*map(int, row[1:])] for row in rows)
    assert (first, newest) == (1, commits)
    assert pulls >= 3
    assert killed < again <= newest
    assert by_a <= newest


def test_the_page_has_the_totals_of_the_plan(told):
    plan, page = planned(SMALL), told[1].report.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    said = json.loads(data)
    totals = said["together"]["totals"]
    assert (totals["moved"], totals["bound"]) == (plan.bytes_moved, plan.bytes_moved)
    norms = 64 * 2 * (2 * SMALL.layers + 1)
    assert plan.bytes_moved == SMALL.bytes + norms, "both servers have the norms, and every other cell has one"
    names = {row[0].partition(" ")[0] for row in said["rows"]}  # after it, which part of a tensor is meant
    assert names == set(plan.targets)
    assert sum(row[2] for row in said["rows"]) == SMALL.bytes


def test_both_checkpoints_hold_the_weights_by_our_reading_and_by_others(told, tmp_path):
    folder, weights = told[1], SMALL.weights()
    assert checkpoint.verify(folder.dcp, folder.hf, rename=RENAME) == []
    files = [load_file(path) for path in folder.hf.glob("*.safetensors")]
    dcp_to_torch_save(folder.dcp, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert len(files) > 1
    assert whole["step"] == 300
    for found in {name: x for file in files for name, x in file.items()}, whole["model"]:
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=0)


def test_the_files_of_torch_are_fully_sharded_over_four_ranks(told):
    found = checkpoint.open(told[1].dcp)
    assert {str(entry.layout).partition("/")[2] for entry in found.values()} == {"S0@4"}


def test_a_second_run_replaces_its_own_and_keeps_the_rest(told):
    folder = told[1]
    assert {path.name for path in folder.path.iterdir()} >= {".shardwise-demo", "dcp", "hf", "report.html", KEPT}
    assert not folder.scratch.exists()
    assert not list(folder.path.rglob("stale"))


def test_the_commands_that_it_names_work(told, shell):
    text, folder = told
    commands = [split(line) for line in text.splitlines() if line.startswith("   shardwise ")]
    assert [words[1] for words in commands] == ["inspect", "convert", "verify"]
    for words in commands:
        code, said = shell(*words)
        assert code == 0, said
    assert "equal, bit-for-bit" in said
    assert (folder.path / "dcp.html").is_file()
    parts = checkpoint.open(folder.path / "tp2")
    assert str(parts["model.layers.0.self_attn.q_proj.weight"].layout) == "64x64/S0@2"
    assert str(parts["model.layers.0.self_attn.o_proj.weight"].layout) == "64x64/S1@2"


@pytest.mark.parametrize("foreign", ["demo/thesis.tex", "demo"])
def test_what_a_demo_did_not_write_is_refused(shell, monkeypatch, tmp_path, foreign):
    monkeypatch.chdir(tmp_path)
    Path(foreign).parent.mkdir(exist_ok=True)
    Path(foreign).write_text("years of work")
    code, said = shell("shardwise", "demo")
    assert code == 2
    assert re.fullmatch(r"error: demo is .*: give a\w* .*directory, shardwise demo --out DIR\n", said)
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["years of work"]


def test_what_goes_wrong_on_a_rank_is_one_line(monkeypatch, tmp_path, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardwise.demo.saving.dcp_save", full)
    with pytest.raises(Exception, match=r"^rank \d of 4 failed first .*No space left on device$") as raised:
        run(Console(file=io.StringIO()), tmp_path / "out", model=SMALL)
    assert "\n" not in str(raised.value)


def test_what_goes_wrong_in_a_separate_job_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "equal", lambda ours, theirs: False)
    folder, console = DemoFolder.claim(tmp_path / "out"), Console(file=io.StringIO())
    with pytest.raises(Exception, match=r"^rank \d of the server [AB] failed: .* is not of version \d+$"):
        publish_versions(console, folder, SMALL, SMALL.weights())
    assert not folder.scratch.exists()


def children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def interrupted(process):
    """What it printed. Python ignores an interrupt inside the hooks of a fork, so it may take more than one."""
    for _ in range(6):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        try:
            return process.communicate(timeout=10)[0].decode()
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it does not end")


def test_an_interrupt_leaves_no_ranks(tmp_path):
    command = [sys.executable, "-m", "shardwise", "demo", "--out", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as demo:
        while len(children(demo)) < 4:
            assert demo.poll() is None
            time.sleep(0.05)
        said = interrupted(demo)
    assert demo.returncode not in (0, 2)
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)
