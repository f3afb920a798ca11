"""What type checkers and editors see of the package: the public names and modules, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SRC = Path(__file__).parents[1] / "src"
MODULES = (
    "activation",
    "checkpoint",
    "engines",
    "publishing",
    "quantized",
    "report",
    "sharded_tensor",
    "state",
    "testing",
)
SNIPPET = """\
import shardwise as sw
from torch.distributed.device_mesh import DeviceMesh

reveal_type(sw.parse("8x6/S0@2"))
reveal_type(sw.plan("8x6/S0@2", "8x6/S1@2"))
reveal_type(sw.layout_of)
reveal_type(sw.checkpoint.open)
reveal_type(sw.report.draw)
reveal_type(sw.sharded_tensor.ChunkShardingSpec(0, ["rank:0/cpu"]))
sw.reshardd
sw.checkpoint.loadd
sw.importlib
def moves(x: sw.ShardedTensor, layout: sw.Layout, mesh: DeviceMesh, later: bool) -> None:
    reveal_type(sw.reshard(x, "8x6/S0@2"))
    reveal_type(sw.reshard(None, layout, verify=True, transport="group"))
    reveal_type(sw.reshard(x, (mesh, ["S0"])))
    reveal_type(sw.reshard(x, x))
    reveal_type(sw.reshard(x, out=x))
    reveal_type(sw.reshard(x, layout, async_op=True))
    reveal_type(sw.reshard(x, layout, async_op=later))
    sw.reshard(x, layout, verifi=True)
    sw.reshard(x, layout, max_bytes="much")
"""
CONFIG = """\
[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true
[mypy-numpy.*]
follow_imports = skip
follow_imports_for_stubs = true
"""
TORCH = {  # mypy checks src on its own, with the whole of torch; reading that takes 20 seconds
    "torch/__init__.pyi": """\
from typing import Any
class Tensor:
    def __getattr__(self, name: str) -> Any: ...
def __getattr__(name: str) -> Any: ...
""",
    "torch/distributed/__init__.pyi": "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n",
    "torch/distributed/device_mesh.pyi": "class DeviceMesh: ...\n",
    "torch/distributed/tensor/__init__.pyi": "import torch\nclass DTensor(torch.Tensor): ...\n",
}
REVEALED = {
    4: "shardwise.layout.layout.Layout",
    5: "shardwise.planning.plan.Plan",
    6: "-> shardwise.layout.layout.Layout",
    7: "Checkpoint",
    8: "-> str",
    9: "shardwise.sharded_tensor.sharding_spec.ChunkShardingSpec",
    14: '"shardwise.containers.sharded.ShardedTensor | None"',
    15: '"shardwise.containers.sharded.ShardedTensor | None"',
    16: '"torch.distributed.tensor.DTensor | None"',
    17: '"torch.Tensor | None"',
    18: '"torch.Tensor | None"',
    19: '"shardwise.tensor.resharding.Handle"',
    20: '"shardwise.tensor.resharding.Handle | torch.Tensor | None"',
}
ERRORS = {10: '"reshardd"', 11: '"loadd"', 12: '"importlib"', 21: '"reshard"', 22: '"reshard"'}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """What mypy says of each line of the snippet."""
    folder = tmp_path_factory.mktemp("typing")
    for name, text in {"snippet.py": SNIPPET, "mypy.ini": CONFIG, **TORCH}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
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
    return {int(line): (level, text) for line, level, text in reversed(lines)}  # notes follow an error


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
