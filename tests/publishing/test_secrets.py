"""Who does not know the secret sees no publisher, and is ignored. Nothing that comes from another job is unpickled."""

import json
import os
import pickle
import stat
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import separate_jobs
import torch.distributed as dist
from separate_jobs import JobError, free_port, jobs, until  # noqa: F401

from shardwise.publishing import subscriber
from shardwise.publishing.orders import Paths
from shardwise.publishing.sealing import Seal

PATHS = Paths.of("policy")


def stranger(port):
    """Somebody who can reach the meeting point, and does not know the secret."""
    limit = timedelta(seconds=5)
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)


def keys(store):
    return [key for key in store.list_keys() if key.startswith("shardwise/")]


def test_another_key_finds_no_publisher(jobs):  # noqa: F811
    jobs.at = f"127.0.0.1:{free_port()}"
    trainer = jobs.trainer(key="a secret")
    trainer.commit(1)
    server = jobs.server(2, subscribe=False)
    for wrong in {"key": "another secret"}, {}:
        with pytest.raises(JobError, match="nobody publishes under that name there, or with another key="):
            server.subscribe(timeout=0.3, **wrong)
    (jobs.folder / "key").write_text("a secret\n")
    assert server.subscribe(key=jobs.folder / "key").pull() == 1
    assert trainer.log()[1:] == []


def test_a_second_publisher_with_another_key_does_not_take_the_name(jobs):  # noqa: F811
    jobs.at = f"127.0.0.1:{free_port()}"
    trainer, server = jobs.trainer(key="a secret"), jobs.server(key="a secret")
    trainer.commit(1)
    assert server.pull() == 1
    with pytest.raises(JobError, match="was published with another key=: give that one, or another name="):
        jobs.trainer(key="another secret")
    trainer.commit(2)
    assert server.pull() == 2


def test_a_file_of_one_host_is_readable_by_its_owner_alone(jobs):  # noqa: F811
    jobs.trainer()
    assert stat.S_IMODE(os.stat(jobs.at).st_mode) == 0o600
    assert [name for name in os.listdir(jobs.folder) if name.startswith(".meeting")] == []
    assert len(json.loads((jobs.folder / "meeting").read_text())["key"]) == 64


def test_an_address_that_other_hosts_can_reach_needs_a_key(jobs):  # noqa: F811
    trainer, server = jobs.trainer(publish=False), jobs.server(subscribe=False)
    for at in "0.0.0.0", "192.0.2.1", "[::]", "example.invalid":
        for call in trainer.publish, server.subscribe:
            with pytest.raises(JobError, match="can be reached from other hosts: give key=") as error:
                call(at=f"{at}:29600")
            assert error.value.kinds == {"RefusedValueError"}


def test_garbage_at_the_meeting_point_is_ignored(jobs):  # noqa: F811
    port = free_port()
    jobs.at = f"127.0.0.1:{port}"
    trainer, server, far = (
        make(2, key="a secret", **more)
        for make, more in ((jobs.trainer, {}), (jobs.server, {}), (jobs.server, {"host": "b"}))
    )
    trainer.commit(1)
    assert [server.pull(), far.pull()] == [1, 1]
    store = stranger(port)
    claim = json.loads(bytes(store.get(PATHS.publisher)).partition(b"|")[2][64:])
    parties = {key.split("/")[3] for key in keys(store) if "/beat/" in key}
    assert len(parties) == 3
    boxes = [PATHS.requests(claim["token"]), *(PATHS.orders(party, row) for party in parties for row in (0, 1))]
    bomb = pickle.dumps(Bomb(str(jobs.folder / "exploded")))
    forged = Seal(b"").close
    for garbage in b"", b"\x00\xff" * 50, b"{}", bomb, b"0" * 64 + b'{"kind":"leave"}':
        for box in boxes:
            store.queue_push(box, garbage)
    for box in boxes:
        store.queue_push(box, forged(box, {"kind": "serve", "order": {}}))
        store.queue_push(box, forged(box, {"kind": "hold", "held": [], "newest": 99, "tainted": []}))
        for party in parties:
            store.queue_push(box, forged(box, {"kind": "leave", "from": party}))
    trainer.commit(2)
    assert [server.pull(), far.pull()] == [2, 2]
    trainer.commit(3)
    for place in PATHS.versions, PATHS.publisher, PATHS.beat(claim["token"], 0):
        entry = "1|" + forged(place, {"token": "", "incarnation": 99, "held": [77]}).decode()
        for garbage in entry, "x", "99999|x", "9" * 5000 + "|":
            store.set(place, garbage)
            assert server.call(newest, ranks=[0])[0] in (None, (1, 3))
    until(lambda: b"incarnation" in bytes(store.get(PATHS.publisher)))
    assert [server.pull(), far.pull()] == [3, 3]
    assert trainer.versions == [3]
    assert not (jobs.folder / "exploded").exists()


def newest(me):
    newest = me.subscriber._client.newest()
    return newest and newest[1]


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("host", [None, "b"], ids=["mapped", "sent"])
def test_nothing_is_unpickled_in_a_pull(jobs, host):  # noqa: F811
    trainer, server = jobs.trainer(), jobs.server(host=host)
    trainer.commit(1)
    for job in trainer, server:
        job.call(refuse_to_unpickle)
    assert server.pull() == 1
    trainer.commit(2)
    assert server.pull() == 2


def refuse_to_unpickle(me):
    """From here on only the test itself unpickles: the threads of the library, and calls out of it, do not."""
    real = pickle.loads

    def loads(data, **kwargs):
        caller = sys._getframe(1).f_code.co_filename
        assert caller == separate_jobs.__file__, f"something was unpickled in {caller}"
        return real(data, **kwargs)

    pickle.loads = pickle.load = pickle.Unpickler = loads


def answers_another_challenge(me):
    """The second rank does, as one that repeats the answer to an earlier pull."""
    real = subscriber.answer_challenge

    def answer(meeting, path, row, order):
        real(meeting, path, row, replace(order, challenge="0" * len(order.challenge)) if row else order)

    subscriber.answer_challenge = answer


@pytest.mark.parametrize("host", [None, "b"], ids=["mapped", "sent"])
def test_a_rank_that_answers_another_challenge_is_not_let_in(jobs, host):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server(2, prepare=answers_another_challenge, host=host)
    trainer.commit(1)
    assert "answered another challenge" in str(server.fail(keeps=0))
    assert any("rank 1 of the subscriber answered another challenge" in line for line in trainer.log())
    assert jobs.server(2, host=host).pull() == 1
