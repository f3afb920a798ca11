"""The layers hold: a file imports only from its own layer and the layers above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
LAYERS = [
    "errors",
    "geometry",
    "notation",
    "layout",
    "planning",
    "report",
    "exchange",
    "wires",
    "dtensor",
    "tensor",
    "sharded_tensor",
    "activation",
    "state",
    "checkpoint",
    "testing",
    "demo",
    "bench",
    "cli",
    "__main__",
    "__init__",
]
CORE = LAYERS[: LAYERS.index("exchange")]


def names(node, package):
    """The absolute names that a node imports: `from .layout import Mesh` gives shardwise.layout.Mesh."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else ()
        return [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return []


def imports():
    """(layer, where, imported name as parts) for every import under src, also for those inside functions."""
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC)
        layer = file.with_suffix("").parts[1]
        assert layer in LAYERS, f"{file} belongs to no layer: add it to LAYERS"
        for node in ast.walk(ast.parse(path.read_text())):
            for name in names(node, file.parts[:-1]):
                yield layer, f"{file}:{node.lineno}: {layer} imports {name}", name.split(".")


def depth(name):
    # a name that is no layer, as in `from shardwise import Box`, comes through the package, which imports all
    return LAYERS.index(name[1] if len(name) > 1 and name[1] in LAYERS else "__init__")


def test_no_import_climbs_a_layer():
    ours = [(layer, where, name) for layer, where, name in imports() if name[0] == "shardwise"]
    climbing = [where for layer, where, name in ours if depth(name) > LAYERS.index(layer)]
    assert not climbing, "\n".join(climbing)


def test_the_core_imports_numpy_at_most():
    light = {"shardwise", "numpy", *sys.stdlib_module_names}
    heavy = [where for layer, where, name in imports() if layer in CORE and name[0] not in light]
    assert not heavy, "\n".join(heavy)


@pytest.mark.parametrize("module", ["shardwise", "shardwise.cli"])
def test_importing_it_leaves_torch_out(module):
    asked = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
