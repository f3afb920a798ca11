"""Deltas of pulls bring the same values as whole messages, whatever happens to them on the way."""

import subprocess
import sys

import pytest
import torch
from numbered import Derived
from separate_jobs import jobs  # noqa: F401
from small_deltas import Filled, of_few_cells
from test_pulled_values import EngineWeights, RecordedEngine

from shardwise import Concat, Layout, Transposed
from shardwise.publishing import versions

SHAPES = {"w": (12, 10), "v": (12, 10), "t": (6, 5)}
STEPS = 6


def trained(step):
    """Whole tensors, of which a step changes every seventh cell."""
    found = {}
    for name, shape in SHAPES.items():
        numbers = torch.arange(shape[0] * shape[1]).reshape(shape) % 7
        found[name] = torch.clamp(step - (step - numbers) % 7, min=0).to(torch.float64) + 1
    return found


def fused(step):
    given = trained(step)
    whole = {"wv": torch.cat([given["w"], given["v"]]).to(torch.bfloat16)}
    return {**whole, "t": given["t"].T.contiguous().to(torch.float32)}


def trains(me):
    of_few_cells(me)
    me.weights = Filled(me.rank, {name: Layout.chunk(one, 0, me.size) for name, one in SHAPES.items()}, trained)


def serves(layouts, whole):
    def prepare(me):
        of_few_cells(me)
        me.weights = Derived(me.rank, layouts, whole, steps=STEPS)

    return prepare


def deltas(trainer):
    return sum("sent a delta" in line for line in trainer.log())


@pytest.mark.parametrize("verify", [False, True])
def test_deltas_are_cast_joined_and_transposed_for_cyclic_and_replicated_targets(jobs, verify):  # noqa: F811
    trainer = jobs.trainer(2, prepare=trains, host="a", delta=True)
    options = {"remap": [Concat("wv", ["w", "v"]), Transposed("t")], "cast": True, "overflow": "allow"}
    cyclic = {"wv": Layout.cyclic((24, 10), 1, 1, range(3)), "t": Layout.replicated((5, 6), 3)}
    chunks = {"wv": Layout.chunk((24, 10), 1, 2), "t": Layout.chunk((5, 6), 0, 2)}
    servers = [
        jobs.server(3, prepare=serves(cyclic, fused), host="b", verify=verify, **options),
        jobs.server(2, prepare=serves(chunks, fused), host="c", verify=verify, **options),
    ]
    for version in range(1, STEPS):
        trainer.commit(version)
        for server in servers:
            assert server.pull() == version
    assert deltas(trainer) == 2 * (STEPS - 2)  # all but the first of each


def test_deltas_fill_engines_through_a_recording_of_their_own_loader(jobs):  # noqa: F811
    def trains(me):
        of_few_cells(me)
        me.weights = EngineWeights()

    def serves(me):
        of_few_cells(me)
        me.weights = RecordedEngine(me.rank, me.size)

    RecordedEngine(0, 1)  # imports much: once here, and not on every rank
    trainer = jobs.trainer(1, prepare=trains, host="a", delta=True)
    server = jobs.server(2, prepare=serves, cast=True, overflow="allow", host="b")
    for version in 1, 2, 3:
        trainer.commit(version)
        assert server.pull() == version
    assert deltas(trainer) == 2


# --- comparisons -----------------------------------------------------------------------------------------------------


def counts_comparisons(me):
    trains(me)
    real, me.compared = versions.changed_cells, []

    def changed_cells(current, base, dtype):
        me.compared.append(dtype)
        return real(current, base, dtype)

    versions.changed_cells = changed_cells


def compared(me):
    return me.compared


def test_versions_are_compared_once_per_commit_and_dtype_for_all_subscribers(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=counts_comparisons, host="a", delta=True)
    layouts = {name: Layout.chunk(shape, 1, 2) for name, shape in SHAPES.items()}

    def halved(step):
        return {name: value.to(torch.bfloat16) for name, value in trained(step).items()}

    servers = [jobs.server(2, prepare=serves(layouts, trained), host=host) for host in "bc"]
    servers += [jobs.server(2, prepare=serves(layouts, halved), host=host, cast=True) for host in "de"]
    for version in 1, 2, 3:
        trainer.commit(version)
        for server in servers:
            assert server.pull() == version
    for dtypes in trainer.call(compared):  # the same three tensors in each, for two pairs of versions
        assert sorted(dtypes, key=str) == [torch.bfloat16] * 6 + [torch.float64] * 6


# The last commit starts a comparison of a quarter of a GB, and the script ends meanwhile.
ENDS_WHILE_VERSIONS_ARE_COMPARED = """
import sys, threading, torch
import shardwise as sw
from shardwise.publishing import local_job, versions
from shardwise.publishing.orders import Order
local_job.host_of_this_process = lambda: None
Order.delta = property(lambda order: False if order.base is None else "always")
source, target = ({"w": torch.zeros(2**25, dtype=torch.float64)} for _ in range(2))
publisher = sw.publish(source, sys.argv[1], "policy", delta=True, warm=False)
subscriber = sw.subscribe(target, sys.argv[1], "policy")
for version in range(2):
    source["w"][::50] = version + 1
    publisher.commit(version)
    subscriber.pull()
real, begun = versions.changed_cells, threading.Event()
versions.changed_cells = lambda *args: begun.set() or real(*args)
source["w"][::50] = 9
publisher.commit(9)
assert begun.wait(20)
print("end", flush=True)
"""


@pytest.mark.slow
def test_an_interpreter_may_end_while_versions_are_compared(tmp_path):
    command = [sys.executable, "-c", ENDS_WHILE_VERSIONS_ARE_COMPARED, str(tmp_path / "at")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stdout, made.stderr) == (0, "end\n", "")
