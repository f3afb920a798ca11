"""Calls as they are by default between hosts: what crosses the links, counted there, and the bits."""

import pytest
import torch
import torch.distributed as dist
from devices import device_type
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw
from shardwise.job.session import group_transport
from shardwise.testing import hosts, on_ranks, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=f"no hosts: {why_no_hosts()}")
ROWS, COLUMNS = 1024, 512
WHOLE = 4 * ROWS * COLUMNS  # bytes
ROOM = 0.25  # times the tensor: headers of packets, agreement, and what is sent twice


@pytest.fixture(scope="module")
def two_hosts():
    """Two hosts with two ranks each."""
    with hosts(2) as both:
        yield both


def crossed(both, call):
    """The bytes that both hosts send while all ranks call, and the result of the call."""
    dist.barrier()
    before = sum(host.sent_bytes() for host in both)
    dist.barrier()
    result = call()
    dist.barrier()
    after = sum(host.sent_bytes() for host in both)
    dist.barrier()
    return after - before, result


@pytest.mark.devices
def test_values_and_sums_cross_once_by_default(two_hosts):
    def work(rank):
        mesh = DeviceMesh(device_type(), list(range(4)))
        torch.manual_seed(rank)
        rows = DTensor.from_local(torch.randn(ROWS // 4, COLUMNS), mesh, [Shard(0)], run_check=False)
        terms = DTensor.from_local(torch.randn(ROWS, COLUMNS), mesh, [Partial()], run_check=False)
        found = {}
        for name, x, to in ("rows", rows, Replicate()), ("terms", terms, Replicate()), ("scattered", terms, Shard(0)):
            flat = sw.reshard(x, (mesh, [to]), hosts=None).to_local()
            sw.reshard(x, (mesh, [to]))
            size, moved = crossed(two_hosts, lambda x=x, to=to: sw.reshard(x, (mesh, [to])))
            torch.testing.assert_close(moved.to_local(), flat, rtol=0, atol=0)
            found[name] = size / WHOLE
        return found

    found = on_ranks(4, work, hosts=[host for host in two_hosts for _ in range(2)])
    wanted = {"rows": 1, "terms": 2, "scattered": 1}
    for name, times in wanted.items():
        assert times <= found[0][name] <= times + ROOM, name


def test_sums_cross_once_too_where_values_are_compared(two_hosts):
    def work(rank):
        mesh = DeviceMesh(device_type(), list(range(4)))
        terms = DTensor.from_local(torch.full((ROWS, COLUMNS), 1.0 + rank), mesh, [Partial()], run_check=False)
        digits = sw.fingerprint(terms)
        assert digits == sw.fingerprint(sw.reshard(terms, (mesh, [Shard(0)]), hosts=None))
        size, same = crossed(two_hosts, lambda: sw.fingerprint(terms))
        assert same == digits
        sw.reshard(terms, (mesh, [Shard(0)]), verify=True)
        checked, _ = crossed(two_hosts, lambda: sw.reshard(terms, (mesh, [Shard(0)]), verify=True))
        return size / WHOLE, checked / WHOLE

    compared, verified = on_ranks(4, work, hosts=[host for host in two_hosts for _ in range(2)])[0]
    assert 1 <= compared <= 1 + ROOM
    assert 2 <= verified <= 2 + 2 * ROOM  # once to move it, once to compare


def test_a_sync_to_replicas_of_another_host_crosses_once(two_hosts):
    def work(rank):
        trainers, servers = DeviceMesh(device_type(), [0, 1]), [2, 3]
        value = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        source = target = None
        if rank < 2:
            source = {"w": DTensor.from_local(value.chunk(2)[rank].clone(), trainers, [Shard(0)], run_check=False)}
        else:
            target = {"w": sw.empty(sw.Layout.replicated((ROWS, COLUMNS), servers))}
        sync = sw.Resharder(source, target)
        size, _ = crossed(two_hosts, sync.run)
        if target:
            torch.testing.assert_close(target["w"].local_tensor(), value, rtol=0, atol=0)
        return size / WHOLE

    times, *_ = on_ranks(4, work, hosts=[host for host in two_hosts for _ in range(2)])
    assert 1 <= times <= 1 + ROOM


def test_small_moves_take_no_step_more(two_hosts):
    def work(rank):
        x = sw.ShardedTensor(torch.full((16, 64), float(rank)), "64x64/S0@4")
        small = sw.Resharder({"w": x}, {"w": sw.empty("64x64/R@4")}).plan.links[0].plan
        slow = sw.Network(latency=20e-3, bandwidth=125e6)
        large = sw.ShardedTensor(torch.zeros(ROWS // 4, COLUMNS), f"{ROWS}x{COLUMNS}/S0@4")
        to = {"w": sw.empty(f"{ROWS}x{COLUMNS}/R@4")}
        plans = [sw.Resharder({"w": large}, to, hosts=option).plan.links[0].plan for option in ("auto", slow, None)]
        known = group_transport(None).hosts
        return small.hosts, [plan.hosts == known for plan in plans], known is None

    hosts_of_small, heeded, unknown = on_ranks(4, work, hosts=[host for host in two_hosts for _ in range(2)])[3]
    assert hosts_of_small is None
    assert heeded == [True, False, False]
    assert not unknown


def test_one_host_plans_as_without_hosts():
    def work(rank):
        x = sw.ShardedTensor(torch.zeros(ROWS // 2, COLUMNS), f"{ROWS}x{COLUMNS}/S0@2")
        plan = sw.Resharder({"w": x}, {"w": sw.empty(f"{ROWS}x{COLUMNS}/R@2")}).plan.links[0].plan
        return plan.hosts, group_transport(None).hosts

    assert on_ranks(2, work)[0] == (None, None)


def test_a_word_that_means_no_hosts_is_refused_on_all_ranks():
    def work(rank):
        x = sw.ShardedTensor(torch.zeros(2, 4), "4x4/S0@2")
        with pytest.raises(sw.ExchangeError, match='hosts= must be "auto", Network') as caught:
            sw.reshard(x, "4x4/S1@2", hosts="all" if rank else "auto")
        return str(caught.value)[:40]

    assert len({*on_ranks(2, work)}) == 1
