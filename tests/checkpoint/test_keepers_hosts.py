"""Several hosts: each step is on two of them, one may be lost, and what a host lacks comes from another."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from kept import LEASE, ended_at_last, gone, keepers_of
from models import held, numbers, same
from test_keepers import is_step
from test_run import empty_state, sharded_state

from shardwise import checkpoint
from shardwise.checkpoint import assignment
from shardwise.checkpoint.kept_copies import holders
from shardwise.storage import keepers
from shardwise.storage.available_memory import available_memory
from shardwise.testing import on_ranks
from shardwise.testing.hosts import hosts, why_no_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # torch's own
]
NAMES = "abcd"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    with ended_at_last(path, NAMES):
        yield path


def on_hosts(names, work, **options):
    """Ranks that believe to be on hosts of these names."""

    def run(rank):
        keepers.host_name = lambda: names[rank]
        return work(rank)

    keeping = checkpoint.keeping
    real = keeping.host_name
    keeping.host_name = lambda: keepers.host_name()
    try:
        return on_ranks(len(names), run, **options)
    finally:
        keeping.host_name = real


def lose(folder, *names):
    """All keepers of hosts."""
    for address, process in keepers_of(folder, names).items():
        os.kill(process, signal.SIGKILL)
        os.unlink(address)


def killed_on(folder, names, *steps, keep=(), state=sharded_state):
    ranks = len(names)

    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        for step in sorted({*steps, *keep}):
            (run.save if step in steps else run.keep)(step, state(step, ranks))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    on_hosts(names, train, dying=range(ranks))


def resumed_on(folder, names, **options):
    def resume(rank):
        into = empty_state(len(names))
        with checkpoint.Run(folder, memory=2, lease=LEASE) as run:
            step = run.resume(into=into, **options)
            return step, run.resumed, into["step"], into["w"].local_tensor()

    return on_hosts(names, resume)


def test_a_whole_host_may_be_lost(folder):
    """Its ranks and keepers. The new job has a host that has nothing."""
    killed_on(folder, "aabb", keep=(3, 4))
    lose(folder, "b")
    found = resumed_on(folder, "acc")
    is_step(found, 4, 3)
    assert found[0][1].disk == 0
    assert found[0][1].memory + found[0][1].other_hosts == 128
    assert found[0][1].other_hosts > 0
    gone(folder, NAMES)


def test_what_no_host_has_any_more_comes_from_the_disk(folder):
    killed_on(folder, "abc", 4)
    lose(folder, "a", "b")
    found = resumed_on(folder, "cd")
    is_step(found, 4, 2)
    assert found[0][1].disk == 48
    gone(folder, NAMES)


def test_random_states_come_from_other_hosts_too(folder):
    def state(step, ranks):
        return {"random": checkpoint.random_state(), "w": held(numbers(8, 4, start=step), f"8x4/S0@{ranks}")}

    def train(rank):
        torch.manual_seed(rank)
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.keep(1, state(1, 4))
        drawn = torch.rand(3).tolist()
        dist.barrier()
        return drawn

    def resume(rank):
        with checkpoint.Run(folder, memory=2, lease=LEASE) as run:
            assert run.resume(into=state(0, 4)) == 1
        return torch.rand(3).tolist()

    drawn = on_hosts("aabb", train)
    lose(folder, "b")
    assert on_hosts("ccca", resume) == drawn
    gone(folder, NAMES)


def test_between_real_hosts_only_what_is_missing_crosses(folder):
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with hosts(2) as (a, b):
        names = []

        def train(rank):
            run = checkpoint.Run(folder, memory=2, lease=LEASE)
            run.keep(1, sharded_state(1, 4))
            dist.barrier()
            told = [None] * 4
            dist.all_gather_object(told, keepers.host_name())
            return told

        def resume(rank):
            into = empty_state(2)
            with checkpoint.Run(folder, memory=2, lease=LEASE) as run:
                step = run.resume(into=into)
                return step, run.resumed, into["step"], into["w"].local_tensor()

        names = sorted(set(on_ranks(4, train, hosts=[a, a, b, b])[0]))
        with ended_at_last(folder, names):
            assert len(names) == 2
            assert len(keepers_of(folder, names)) == 4
            found = on_ranks(2, resume, hosts=[a, b])
            is_step(found, 1, 2)
            assert found[0][1] == (1, 128, 0, 0), "both hosts have all of it"
            gone(folder, names)


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4], [1, 1], [2, 2], [3, 1], [1, 2, 3], [2, 2, 2, 2]])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_are_where_they_are_not_lost_together(sizes, copies):
    ranks = iter(range(sum(sizes)))
    there = [[next(ranks) for _ in range(size)] for size in sizes]
    host_of = {rank: at for at, some in enumerate(there) for rank in some}
    places = len(there) if len(there) > 1 else sum(sizes)
    for rank, others in holders(there, copies):
        assert len(others) == min(copies, places) - 1
        apart = {host_of[one] if len(there) > 1 else one for one in (rank, *others)}
        assert len(apart) == len(others) + 1


def test_files_that_some_ranks_read_are_shared_among_those(tmp_path):
    def save(rank):
        checkpoint.save({"w": held(numbers(8, 4), "8x4/S0@2"), "b": torch.arange(6.0)}, tmp_path / "m")

    on_ranks(2, save)
    there = checkpoint.open(tmp_path / "m")
    first, second = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    there.files.readers = {first: [(0, 1), (3,)], second: [(2, 3)]}
    layout = assignment.assign_readers([there["w"]], range(4))["w"]
    cells = {owner: sum(piece.box.volume for piece in layout.pieces(owner)) for owner in layout.owners()}
    assert cells == {0: 8, 1: 8, 2: 8, 3: 16 + 8}
    same(there["w"].read(), numbers(8, 4))


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/one\n0::/job/one\n")

    def room(group, *numbers, names=("memory.max", "memory.current"), stat="inactive_file 2048\n"):
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        for name, number in zip((*names, "memory.stat"), (*numbers, stat), strict=True):
            (tmp_path / "groups" / group / name).write_text(str(number))
        return available_memory(tmp_path / "proc", tmp_path / "groups")

    assert available_memory(tmp_path / "proc", tmp_path / "groups") == 500 * 1024
    assert room("job/one", "max\n", 4096) == 500 * 1024
    assert room("job", 300_000, 100_000) == 202_048
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    assert room("memory/job/one", 9000, 8000, names=old, stat="total_inactive_file 100\n") == 1100
