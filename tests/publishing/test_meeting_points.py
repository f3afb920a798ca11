"""Where jobs meet: files and ports, held by the publisher or by others, taken by strangers, lost and found again."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from moments import pull
from separate_jobs import LIMIT, PATIENCE, JobError, by_columns, free_port, jobs, until  # noqa: F401

import shardwise as sw
import shardwise.publishing.meeting as meeting
from shardwise.publishing.meeting import Address, MeetingPoint


def hold(me, at):
    """Hold a meeting point, as `shardwise hub` does."""
    me.meeting = MeetingPoint(Address.of(at), None)
    return me.meeting.hold()


def hub(jobs):  # noqa: F811
    """A job that holds the meeting point."""
    job = jobs.start()
    assert job.call(hold, jobs.at) == [True]
    return job


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "{folder}/meeting", "file:{folder}/meeting"]
)
def test_jobs_meet_at_ports_and_in_files(jobs, at):  # noqa: F811
    jobs.at = at.format(port=free_port(), folder=jobs.folder)
    server = jobs.server(2, by_columns(2), subscribe=False)
    server.start(subscribe_and_wait)  # before there is a publisher
    time.sleep(0.2)
    assert server.busy(0)
    assert server.busy(1)
    jobs.trainer(2).commit(5)
    assert server.results() == [5, 5]
    server.has(5)


def subscribe_and_wait(me):
    me.subscriber = sw.subscribe(me.weights.state, me.at, "policy", patience=PATIENCE, timeout=20)
    me.subscriber.wait()
    return me.subscriber.pull()


def test_the_path_of_a_file_may_be_a_path(jobs):  # noqa: F811
    jobs.at = Path(jobs.at)
    jobs.trainer().commit(1)
    assert jobs.server(2).pull() == 1


def test_clocks_may_differ(jobs):  # noqa: F811
    def another_clock(me):
        real, wall = time.monotonic, time.time
        time.monotonic, time.time = lambda: real() + 1e6, lambda: wall() - 1e8

    jobs.trainer(2).commit(1)
    for host in None, "b":
        assert jobs.server(2, prepare=another_clock, host=host).pull() == 1


# --- held by somebody else -------------------------------------------------------------------------------------------


def test_a_restarted_publisher_goes_on_where_the_meeting_point_outlives_it(jobs):  # noqa: F811
    hub(jobs)
    first, server, other = jobs.trainer(2), jobs.server(2), jobs.server(host="b")
    first.commit(7)
    assert [server.pull(), other.pull()] == [7, 7]
    first.kill()
    again = jobs.trainer(1)  # once the name is free
    assert server.pull() == 7  # nothing was committed yet
    again.commit(3, step=5)  # an earlier number of a later publisher
    assert [server.pull(step=5), other.pull(step=5)] == [3, 3]
    assert server.pull(step=5) == 3
    assert jobs.server().pull(step=5) == 3


def test_the_hub_command_outlives_both_sides(jobs):  # noqa: F811
    port, key = free_port(), jobs.folder / "key"
    jobs.at = f"127.0.0.1:{port}"
    key.write_text("a secret\n")
    command = [sys.executable, "-m", "shardwise", "hub", "--port", str(port), "--key-file", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout.readline() == f"meeting point {jobs.at}: interrupt to end it\n"
            trainer, server = jobs.trainer(2, key="a secret"), jobs.server(2, key="a secret")
            trainer.commit(1)
            assert server.pull() == 1
            trainer.close()
            jobs.trainer(1, key="a secret").commit(1, step=5)
            assert server.pull(step=5) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0
        finally:
            process.kill()


def test_a_restarted_publisher_learns_from_its_subscribers_where_the_meeting_point_was_its_own(jobs):  # noqa: F811
    first, server, other = jobs.trainer(2), jobs.server(2), jobs.server(host="b")
    first.commit(7)
    assert [server.pull(), other.pull()] == [7, 7]
    first.kill()
    for cells, error in [(cells, error) for _, cells, error in other.call(pull)]:
        assert cells == 7
        assert "meeting point" in error
    again = jobs.trainer(1)
    again.commit(3, step=5)  # an earlier number of a later publisher
    assert [server.pull(step=5), other.pull(step=5)] == [3, 3]
    third = jobs.server()
    assert third.pull(step=5) == 3
    again.commit(4)
    assert [server.pull(), other.pull(), third.pull()] == [4, 4, 4]


def test_a_meeting_point_that_disappears_and_returns(jobs):  # noqa: F811
    jobs.at = f"127.0.0.1:{free_port()}"
    before = hub(jobs)
    trainer, server, other = jobs.trainer(2), jobs.server(2), jobs.server(host="b")
    trainer.commit(1)
    assert [server.pull(), other.pull()] == [1, 1]
    before.kill()
    began = time.monotonic()
    trainer.commit(2)  # the training does not notice
    trainer.commit(3)
    assert time.monotonic() < began + 1
    server.start(pull)
    for version, cells, error in server.results():
        assert (version, cells) == (None, 1)
        assert "meeting point" in error
    assert server.version == 1
    hub(jobs)
    trainer.commit(4)
    until(lambda: server.call(pull)[0][0] == 4)
    until(lambda: other.call(pull)[0][0] == 4)
    assert [server.pull(), other.pull()] == [4, 4]
    assert trainer.versions == [4]
    assert jobs.server(2).pull() == 4


def test_a_publisher_that_stands_still_and_holds_the_meeting_point_holds_up_nobody_for_ever(jobs):  # noqa: F811
    trainer, server = jobs.trainer(2), jobs.server(2, prepare=hurry)
    trainer.commit(1)
    assert server.pull() == 1
    trainer.stop()
    server.start(pull)
    for version, cells, error in server.results(limit=20):
        assert (version, cells) == (None, 1), error
    assert server.version == 1
    trainer.go_on()
    trainer.commit(2)
    assert server.pull() == 2


# --- strangers at the port -------------------------------------------------------------------------------------------


@contextmanager
def another_program(*, answers):
    """Something that listens at a port, and either never says anything or ends every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if answers:
                    connection.close()
                else:
                    kept.append(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def hurry(me):
    """Give the store up soon."""
    meeting.CONNECTING = timedelta(seconds=2)


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "closing"])
def test_a_port_that_belongs_to_another_program_is_reported(jobs, answers):  # noqa: F811
    trainer, server = jobs.trainer(2, prepare=hurry, publish=False), jobs.server(2, prepare=hurry, subscribe=False)
    with another_program(answers=answers) as port:
        jobs_at = f"127.0.0.1:{port}"
        trainer.start(publish_at, jobs_at)
        server.start(subscribe_at, jobs_at)
        for job in trainer, server:
            with pytest.raises(JobError, match=f"meeting point {jobs_at}") as error:
                job.results(limit=15)
            assert len(error.value.errors) == 2


def publish_at(me, at):
    sw.publish(me.weights.state, at, "policy")


def subscribe_at(me, at):
    sw.subscribe(me.weights.state, at, "policy", timeout=1)


def test_an_address_of_another_host_cannot_be_opened_here(jobs):  # noqa: F811
    trainer = jobs.trainer(2, prepare=hurry, publish=False)
    with pytest.raises(JobError, match="shardwise hub --port 29600"):
        trainer.publish(at="192.0.2.1:29600", key="a secret")


def test_a_file_that_is_not_a_meeting_point_is_opened_anew(jobs):  # noqa: F811
    Path(jobs.at).write_text("something else")
    jobs.trainer().commit(1)
    assert jobs.server().pull() == 1
