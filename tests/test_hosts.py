"""Hosts out of network namespaces: what crosses their links, and what is left of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from shardwise.testing import HostError, RankError, hosts, on_ranks, why_no_hosts
from shardwise.transports.local_peers import host_id

MODULE = sys.modules["shardwise.testing.hosts"]  # its function has the same name
needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
PAYLOAD = 20_000_000
PORT = 4000


def ours():
    """The namespaces of this process."""
    return [name for name in os.listdir("/run/netns") if name.startswith(f"shardwise-{os.getpid()}-")]


def runs(pid):
    """True for a process that lives, and is not only waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def receive(address, size):
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        buffer, done = bytearray(2**20), 0
        with connection:
            while done < size and (count := connection.recv_into(buffer)):
                done += count
            connection.sendall(b"!")
    return done


def send(address, size):
    with dial(address) as connection:
        connection.sendall(bytes(size))
        return connection.recv(1)


def dial(address):
    """Connect to a host whose server may not have started."""
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


@needs_hosts
def test_the_counters_of_both_links_say_what_a_socket_sent():
    with hosts(2) as (a, b):
        receiver, sender = b.fork(receive, b.address, PAYLOAD), a.fork(send, b.address, PAYLOAD)
        assert (receiver.result(), sender.result()) == (PAYLOAD, b"!")
        for crossed in (a.sent_bytes(), b.received_bytes()):
            assert PAYLOAD <= crossed <= 1.1 * PAYLOAD
        for back in (b.sent_bytes(), a.received_bytes()):
            assert 0 < back <= 0.1 * PAYLOAD


@needs_hosts
def test_a_rate_shapes_what_every_host_sends():
    with hosts(3, rate="1gbit") as three:
        for host in three:
            said = host.run(["tc", "qdisc", "show", "dev", host.interface])
            assert said.startswith("qdisc tbf")
            assert "rate 1Gbit burst 250000b lat 50ms" in said
    with hosts(1) as (alone,):
        assert "tbf" not in alone.run(["tc", "qdisc", "show", "dev", alone.interface])


@needs_hosts
def test_programs_run_on_their_host():
    with hosts(4) as four:
        found = [host.run(["ip", "-4", "-o", "address", "show", "dev", host.interface]) for host in four]
        assert all(f" {host.address}/24 " in said for host, said in zip(four, found, strict=True))
        child = four[0].popen(["printenv", "GLOO_SOCKET_IFNAME"], stdout=subprocess.PIPE, text=True)
        assert child.communicate(timeout=20)[0].strip() == four[0].interface
        with pytest.raises(HostError, match=r"'false' on shardwise-\S+ exits with 1"):
            four[0].run(["false"])
        with pytest.raises(HostError, match="did not end within"):
            four[0].run(["sleep", "60"], timeout=0.1)


@needs_hosts
def test_a_fork_returns_its_result_or_its_error():
    def fail():
        raise ValueError("this is why")

    with hosts(1) as (host,):
        assert host.fork(lambda x: 2 * x, 21).result() == 42
        with pytest.raises(HostError, match=r"(?s)on shardwise-\S+ failed:.*ValueError: this is why"):
            host.fork(fail).result()
        with pytest.raises(HostError, match="died without a result"):
            host.fork(os._exit, 3).result()
        with pytest.raises(HostError, match="did not end within"):
            host.fork(time.sleep, 60).result(timeout=0.1)


@needs_hosts
def test_ranks_on_two_hosts_reshard_over_the_link_and_see_two_hosts():
    import torch

    import shardwise as sw

    def work(rank):
        whole = torch.arange(2**22, dtype=torch.float32).reshape(2048, 2048)
        x = sw.ShardedTensor(whole[1024 * rank : 1024 * rank + 1024], "2048x2048/S0@2")
        found = sw.reshard(x, "2048x2048/S1@2", verify=True).local_tensor()
        torch.testing.assert_close(found, whole[:, 1024 * rank : 1024 * rank + 1024], rtol=0, atol=0)
        with pytest.raises(sw.ExchangeError, match="not all ranks can share memory"):
            sw.reshard(x, "2048x2048/S1@2", transport="shared")
        return host_id()

    with hosts(2) as (a, b):
        first, second = on_ranks(2, work, hosts=[a, b])
        assert first != second
        for crossed in (a.sent_bytes(), b.sent_bytes()):
            assert 2**22 <= crossed <= 1.25 * 2**22  # a quarter of the tensor each way; some packets may be sent twice
        assert len({*on_ranks(2, lambda _: host_id(), hosts=[a, a])}) == 1


@needs_hosts
def test_a_host_whose_link_is_down_cannot_be_reached_until_it_is_up():
    def reach(address):
        with socket.socket() as connection:
            connection.settimeout(20)
            return connection.connect_ex((address, PORT))

    with hosts(2) as (a, b):
        a.link_down()
        assert os.strerror(a.fork(reach, b.address).result()) == "Network is unreachable"
        a.link_up()
        assert os.strerror(a.fork(reach, b.address).result()) == "Connection refused"  # by b itself


@needs_hosts
def test_packets_of_slow_hosts_take_their_time_and_can_be_lost():
    def reach(address):
        start = time.monotonic()
        with socket.socket() as connection:
            connection.settimeout(2)
            return connection.connect_ex((address, PORT)), time.monotonic() - start

    with hosts(2, delay=0.1) as (a, b):
        error, took = a.fork(reach, b.address).result()
        assert os.strerror(error) == "Connection refused"
        assert took >= 0.2
        b.lose(1.0)
        assert os.strerror(a.fork(reach, b.address).result()[0]) == "Resource temporarily unavailable"
        b.lose(0.0)
        assert os.strerror(a.fork(reach, b.address).result()[0]) == "Connection refused"
    with hosts(1) as (host,), pytest.raises(HostError, match=r"only hosts\(\.\.\., delay=\) lose packets"):
        host.lose(0.1)


@needs_hosts
def test_hosts_have_no_way_out():
    with hosts(1) as (host,):
        routes = host.run(["ip", "route"]).splitlines()
        assert [route.split()[0] for route in routes] == ["10.213.0.0/24"]


@needs_hosts
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_afterwards(error):
    def use():
        with hosts(2, rate="1gbit") as (a, b):
            assert len(ours()) == 3
            left.extend([a.popen(["sleep", "60"]).pid, b.fork(time.sleep, 60).process.pid])
            left.append(int(a.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"])))  # whose parent has ended
            assert all(map(runs, left))
            if error is not None:
                raise error

    left = []
    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert ours() == []
    until = time.monotonic() + 20
    while any(map(runs, left)):
        assert time.monotonic() < until
        time.sleep(0.01)


@needs_hosts
def test_what_a_killed_run_left_is_removed_and_nothing_else():
    def start(pipe):
        with hosts(1) as (host,):
            pipe.send(host.name)
            time.sleep(60)

    fork = get_context("fork")
    killed, alive = fork.Pipe(duplex=False), fork.Pipe(duplex=False)
    started = [fork.Process(target=start, args=(end,)) for _, end in (killed, alive)]
    for run in started:
        run.start()
    names = [pipe.recv() for pipe, _ in (killed, alive)]
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].join()
    subprocess.run(["ip", "netns", "add", "shardwise-of-somebody"], check=True)
    try:
        assert {*names} <= {*os.listdir("/run/netns")}
        with hosts(1):
            pass
        assert {names[1], "shardwise-of-somebody"} <= {*os.listdir("/run/netns")}
        assert names[0] not in os.listdir("/run/netns")
    finally:
        subprocess.run(["ip", "netns", "delete", "shardwise-of-somebody"], check=True)
        started[1].kill()
        started[1].join()
        MODULE._remove_leftovers()
    assert names[1] not in os.listdir("/run/netns")


@needs_hosts
def test_every_rank_needs_a_host():
    with hosts(2) as two, pytest.raises(RankError, match="3 ranks need a host each, not 2 hosts"):
        on_ranks(3, lambda rank: rank, hosts=two)


@pytest.mark.parametrize("count", [0, 5])
def test_the_number_of_hosts_is_limited(count):
    with pytest.raises(HostError, match="1 to 4"), hosts(count):
        pass


@pytest.mark.parametrize("rate", ["fast", "0mbit", "1 gbit", "-1gbit", "1gbps"])
def test_a_rate_is_a_number_with_a_unit(rate):
    with pytest.raises(HostError, match="expected a number with kbit, mbit or gbit"), hosts(2, rate=rate):
        pass


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [("sys.platform", "darwin", "Linux"), ("os.geteuid", lambda: 1000, "root"), ("_find", lambda _: None, "iproute2")],
)
def test_where_hosts_cannot_be_made_one_error_says_what_is_missing(monkeypatch, what, value, why):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    target, _, name = what.rpartition(".")
    monkeypatch.setattr({"sys": sys, "os": os}.get(target, MODULE), name, value)
    assert why in why_no_hosts.__wrapped__()
    with pytest.raises(HostError, match=why), hosts(2):
        pass


def test_a_command_that_fails_is_the_reason(monkeypatch):
    monkeypatch.setattr(MODULE, "_missing", lambda: None)
    monkeypatch.setattr(MODULE, "_program", lambda name: "false")
    assert "hosts cannot be made or reached: 'false netns add" in why_no_hosts.__wrapped__()
