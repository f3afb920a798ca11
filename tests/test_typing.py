"""What type checkers and editors see of the package: the public names and modules, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SRC = Path(__file__).parents[1] / "src"
MODULES = ("activation", "checkpoint", "report", "sharded_tensor", "state", "testing")
SNIPPET = """\
import shardwise as sw

reveal_type(sw.parse("8x6/S0@2"))
reveal_type(sw.plan("8x6/S0@2", "8x6/S1@2"))
reveal_type(sw.layout_of)
reveal_type(sw.checkpoint.open)
reveal_type(sw.report.draw)
reveal_type(sw.sharded_tensor.ChunkShardingSpec(0, ["rank:0/cpu"]))
sw.reshardd
sw.checkpoint.loadd
sw.importlib
"""
CONFIG = """\
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = true
"""  # mypy checks src on its own; reading torch takes 20 seconds
REVEALED = {
    3: "shardwise.layout.layout.Layout",
    4: "shardwise.planning.plan.Plan",
    5: "-> shardwise.layout.layout.Layout",
    6: "Checkpoint",
    7: "-> str",
    8: "shardwise.sharded_tensor.sharding_spec.ChunkShardingSpec",
}
ERRORS = {9: '"reshardd"', 10: '"loadd"', 11: '"importlib"'}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """What mypy says of each line of the snippet."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "snippet.py").write_text(SNIPPET)
    (folder / "mypy.ini").write_text(CONFIG)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "snippet.py"],
        cwd=folder,
        env={"MYPYPATH": str(SRC), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(r"^snippet\.py:(\d+): (\w+): (.*)$", run.stdout, re.MULTILINE)
    assert lines, run.stdout + run.stderr
    return {int(line): (level, text) for line, level, text in lines}


def test_names_and_modules_have_their_types(messages):
    for line, expected in REVEALED.items():
        level, text = messages[line]
        assert level == "note", text
        assert expected in text


def test_a_name_that_does_not_exist_is_an_error(messages):
    for line, name in ERRORS.items():
        level, text = messages[line]
        assert level == "error", text
        assert name in text
    assert len(messages) == len(REVEALED) + len(ERRORS)


def test_dir_lists_names_and_modules_alone():
    assert [name for name in dir(shardwise) if not name.startswith("_")] == sorted([*shardwise.__all__, *MODULES])


def test_modules_are_imported_when_they_are_used():
    code = f"""if True:
        import sys, shardwise as sw
        early = {{f"shardwise.{{name}}" for name in {MODULES}}} & set(sys.modules)
        assert not early, early
        assert all(getattr(sw, name).__name__ == f"shardwise.{{name}}" for name in {MODULES})
    """
    subprocess.run([sys.executable, "-c", code], check=True)
