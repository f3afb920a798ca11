"""Jobs on hosts of their own: what crosses the link between them, and what happens when it is cut."""

import time

import pytest
import torch

import shardwise as sw
from shardwise.errors import ExchangeError
from shardwise.testing import hosts, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=f"no hosts: {why_no_hosts()}")
SHAPE, TENSORS, KEY = (512, 1024), 4, "secret"
BYTES = TENSORS * SHAPE[0] * SHAPE[1] * 2
PATIENCE = 3.0


def weights():
    return {f"w{n}": torch.zeros(SHAPE, dtype=torch.bfloat16) for n in range(TENSORS)}


def change(state, version, fraction):
    """The same elements for the same version, wherever it is called."""
    random = torch.Generator().manual_seed(version)
    for tensor in state.values():
        tensor.view(torch.int16)[torch.rand(SHAPE, generator=random) < fraction] ^= 1


def train(at, folder, fractions, delta):
    torch.set_num_threads(1)
    state = weights()
    with sw.publish(state, at, "policy", key=KEY, delta=delta, patience=PATIENCE) as publisher:
        for version, fraction in enumerate(fractions):
            change(state, version, fraction)
            publisher.commit(version)
            wait_for(folder / f"pulled{version}")


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.01)


class Server:
    """Subscribes at once, and pulls when it is told to."""

    def __init__(self, host, at, folder, name):
        self.folder, self.name = folder, name
        self.process = host.fork(self.serve, at)

    def serve(self, at):
        torch.set_num_threads(1)
        state, wanted, version = weights(), weights(), -1
        with sw.subscribe(state, at, "policy", key=KEY, patience=PATIENCE) as subscriber:
            (self.folder / f"{self.name}.ready").touch()
            while not (self.folder / "end").exists():
                if (self.folder / f"{self.name}.pull{version + 1}").exists():
                    version += 1
                    change(wanted, version, float((self.folder / f"fraction{version}").read_text()))
                    subscriber.wait(newer_than=version - 1, timeout=60)
                    assert subscriber.pull() == version
                    for name, tensor in wanted.items():
                        assert torch.equal(state[name].view(torch.int16), tensor.view(torch.int16)), (version, name)
                    (self.folder / f"{self.name}.done{version}").touch()
                time.sleep(0.005)
        return version

    def pull(self, version):
        (self.folder / f"{self.name}.pull{version}").touch()

    def pulled(self, version):
        if (self.folder / f"{self.name}.done{version}").exists():
            return True
        assert self.process.process.is_alive(), self.process.result(1)
        return False


def crossed(tmp_path, fractions, *, servers, delta):
    """For every version, how many bytes the publisher's host sent while all servers pulled it."""
    for version, fraction in enumerate(fractions):
        (tmp_path / f"fraction{version}").write_text(str(fraction))
    found = []
    with hosts(2) as (here, there):
        at = f"{here.address}:29600"
        trainer = here.fork(train, at, tmp_path, fractions, delta)
        jobs = [Server(there, at, tmp_path, f"server{n}") for n in range(servers)]
        for job in jobs:
            wait_for(tmp_path / f"{job.name}.ready")
        for version in range(len(fractions)):
            before = here.sent_bytes()
            for job in jobs:
                job.pull(version)
            end = time.monotonic() + 60
            while not all(job.pulled(version) for job in jobs):
                assert time.monotonic() < end
                time.sleep(0.01)
            found.append(here.sent_bytes() - before)
            (tmp_path / f"pulled{version}").touch()
        (tmp_path / "end").touch()
        assert [job.process.result(30) for job in jobs] == [len(fractions) - 1] * servers
        trainer.result(30)
    return found


def test_a_version_crosses_the_link_once_for_all_servers_of_a_host(tmp_path):
    for sent in crossed(tmp_path, [1.0, 1.0], servers=3, delta=False):
        assert BYTES < sent < 1.1 * BYTES


def test_only_what_changed_crosses_the_link(tmp_path):
    first, *later = crossed(tmp_path, [1.0, 0.02, 0.05, 0.0, 1.0], servers=1, delta=True)
    assert first > BYTES
    cells = BYTES / 2
    beside = 150_000  # signs of life, orders, connections, headers of packets
    assert later[0] < 3.2 * 0.02 * cells + beside
    assert later[1] < 3.2 * 0.05 * cells + beside
    assert later[2] < beside
    assert later[3] < 1.1 * BYTES


def test_a_link_that_is_cut_leaves_the_last_whole_version_and_a_clear_error(tmp_path):
    def train_on(at):
        torch.set_num_threads(1)
        state = weights()
        with sw.publish(state, at, "policy", key=KEY, patience=PATIENCE) as publisher:
            publisher.commit(1)
            wait_for(tmp_path / "cut")
            for tensor in state.values():
                tensor.fill_(2)
            publisher.commit(2)
            wait_for(tmp_path / "end")

    def serve(at):
        torch.set_num_threads(1)
        state = {name: tensor + 7 for name, tensor in weights().items()}
        with sw.subscribe(state, at, "policy", key=KEY, patience=PATIENCE) as subscriber:
            subscriber.wait(timeout=60)
            assert subscriber.pull() == 1
            (tmp_path / "pulled").touch()
            wait_for(tmp_path / "cut")
            with pytest.raises(ExchangeError, match=r"policy|meeting point"):
                subscriber.pull()
            assert subscriber.version == 1
            assert all(not tensor.any() for tensor in state.values())
            (tmp_path / "failed").touch()
            wait_for(tmp_path / "mended")
            subscriber.wait(newer_than=1, timeout=60)
            assert subscriber.pull() == 2
            assert all((tensor == 2).all() for tensor in state.values())
        return True

    with hosts(2) as (here, there):
        at = f"{here.address}:29600"
        trainer, server = here.fork(train_on, at), there.fork(serve, at)
        wait_for(tmp_path / "pulled")
        there.link_down()
        (tmp_path / "cut").touch()
        wait_for(tmp_path / "failed")
        there.link_up()
        (tmp_path / "mended").touch()
        assert server.result(60)
        (tmp_path / "end").touch()
        trainer.result(30)
