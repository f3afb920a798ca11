"""The layers hold: a file imports only from its own layer and the layers above it."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[1] / "src"
LAYERS = [
    "quoting",
    "errors",
    "storage",
    "geometry",
    "notation",
    "layout",
    "planning",
    "report",
    "exchange",
    "transports",
    "containers",
    "job",
    "tensor",
    "quantized",
    "sharded_tensor",
    "activation",
    "state",
    "checkpoint",
    "engines",
    "publishing",
    "testing",
    "bench",
    "demo",
    "doctor",
    "cli",
    "__main__",
    "__init__",
]
CORE = LAYERS[: LAYERS.index("exchange")]
MOVING = {"gather", "_compared"}  # methods of ShardedTensor
SHOWING = {"html", "figure", "_repr_html_"}  # methods by which a value shows itself: they may call report


def names(node, package):
    """The absolute names that a node imports: `from .layout import Mesh` gives shardwise.layout.Mesh."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else ()
        return [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return []


class Import(NamedTuple):
    layer: str
    name: list[str]
    function: str | None  # that it stands in
    where: str


def nodes(tree, function=None):
    """Every node, with the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        yield node, function
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from nodes(node, node.name if named else "TYPE_CHECKING" if typing else function)


def imports():
    """Every import under src, also those inside functions."""
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC)
        layer = file.with_suffix("").parts[1]
        assert layer in LAYERS, f"{file} belongs to no layer: add it to LAYERS"
        for node, function in nodes(ast.parse(path.read_text())):
            for name in names(node, file.parts[:-1]):
                where = f"{file}:{node.lineno}: {layer} imports {name}"
                yield Import(layer, name.split("."), function, where)


def depth(name):
    # a name that is no layer, as in `from shardwise import Box`, comes through the package, which imports all
    return LAYERS.index(name[1] if len(name) > 1 and name[1] in LAYERS else "__init__")


def shows_itself(found):
    """True for the one import that may climb: of report, when it is called, in a method that shows a value."""
    return found.name == ["shardwise", "report"] and found.function in SHOWING


def moves_itself(found):
    """True for methods of a container that need a move, which is made of containers."""
    return found.layer == "containers" and found.function in MOVING


def test_no_import_climbs_a_layer():
    climbs = (shows_itself, moves_itself)
    ours = [found for found in imports() if found.name[0] == "shardwise" and not any(may(found) for may in climbs)]
    climbing = [found.where for found in ours if depth(found.name) > LAYERS.index(found.layer)]
    assert not climbing, "\n".join(climbing)


def test_only_methods_that_show_a_value_may_climb_to_report():
    report, exchange = ["shardwise", "report"], ["shardwise", "exchange"]
    assert shows_itself(Import("planning", report, "html", ""))
    assert not any(shows_itself(Import("planning", report, function, "")) for function in (None, "explain"))
    assert not shows_itself(Import("planning", exchange, "html", ""))


def test_the_core_imports_numpy_at_most():
    light = {"shardwise", "numpy", *sys.stdlib_module_names}
    heavy = [found for found in imports() if found.layer in CORE and found.name[0] not in light]
    allowed = [
        found
        for found in heavy
        if (found.layer in ("planning", "report") and found.name[0] == "matplotlib" and found.function)
        or (found.layer == "storage" and found.name[0] in ("fsspec", "typing_extensions", "xxhash"))
    ]
    assert heavy == allowed, "\n".join(found.where for found in heavy if found not in allowed)


@pytest.mark.parametrize("module", ["shardwise", "shardwise.cli"])
def test_importing_it_leaves_torch_out(module):
    asked = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


PRIVATE = re.compile(
    r"\btorch(?:\.[a-z]\w*)*\._[a-z]\w*|from torch(?:\.\w+)*\._\w+"
    r"|\._(?:spec|cdata|share_fd_cpu_|get_backend|version|new_shared_fd_cpu)\b"
)
PEERS = {"bench", "demo"}  # they compare with torch's own ways, private ones too
USERS = {  # each use is behind a function or class of these files
    "containers/dispatch.py",
    "containers/dtensor.py",
    "containers/memory.py",
    "containers/operations.py",
    "containers/torch_private.py",
    "containers/torch_sharded.py",
    "exchange/buffers.py",
    "testing/device.py",
    "testing/ordered_group.py",
    "transports/torch_groups.py",
}


def test_private_names_of_torch_stand_in_a_few_files():
    package = SRC / "shardwise"
    users = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if PRIVATE.search(p.read_text())}
    outside = {name for name in users if name.split("/")[0] not in PEERS}
    assert outside <= USERS, f"move these uses to containers/torch_private.py: {sorted(outside - USERS)}"
    assert outside >= USERS, f"drop these from USERS: {sorted(USERS - outside)}"


FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros"}


def factories_without_a_device(path):
    """Lines that make tensors where torch.set_default_device says."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                yield f"{path.relative_to(SRC)}:{node.lineno}"


def test_new_tensors_are_on_a_device_that_is_named():
    """After torch.set_default_device("cuda") messages of the agreement would lie where nobody looks for them."""
    paths = [path for path in SRC.rglob("*.py") if not {"bench", "demo", "testing"} & set(path.parts)]
    assert [line for path in paths for line in factories_without_a_device(path)] == []
