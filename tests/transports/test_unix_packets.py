"""Packets between processes of one host: they come whole and in order, from processes of the same user alone."""

import os
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest
from ranks import ranks  # noqa: F401
from wired import in_threads, open_files, raised, works

from shardwise.transports.segments import this_process
from shardwise.transports.unix_packets import (
    FAILED,
    HEADER,
    HELLO,
    IN_FILE,
    LARGE,
    PacketKey,
    PacketSocket,
    PeerEndedError,
    TransportFailedError,
    close_files,
)

GARBAGE = {
    "nothing": b"",
    "too short": b"abc",
    "no hello": HEADER.pack(7, 7, 3, 7) + b"payload",
    "a file that is not there": HEADER.pack(7, 7, 3, IN_FILE),
    "a file in the middle": HEADER.pack(7, 7, 3, IN_FILE) + HEADER.pack(7, 7, 3, 0),
    "less than it says": HEADER.pack(7, 7, 3, 9) + b"payload",
    "a name that is none": HEADER.pack(0, 0, HELLO, 2) + b"\xff\xfe",
    "too long": b"z" * 100_000,
}


@pytest.fixture
def posts():
    """Two addresses of this process, each of which can write to the other."""
    ours = PacketSocket(), PacketSocket()
    for post, other in (ours, ours[::-1]):
        assert post.connect(other.address) == os.getpid()
        post.send(other.address, key(post), b"first")
        assert taken(other, key(post))[0].payload == b"first"
    yield ours
    for post in ours:
        post.close()


def key(post, tag=0):
    return PacketKey(post.address, 5, 1, tag)


def taken(post, *keys, seconds=5.0, spin=False):
    """One packet of each key."""
    found = {}

    def ready():
        found.update({one: packet for one in keys if one not in found and (packet := post.take(one)) is not None})
        return len(found) == len(keys)

    post.wait(ready, transport=5, expected=lambda: [one.sender for one in keys], seconds=seconds, spin=spin)
    return [found[one] for one in keys]


def test_packets_of_a_key_come_in_order_and_others_whenever_they_are_asked_for(posts):
    a, b = posts
    for number in range(10):
        a.send(b.address, key(a, number % 2), bytes([number]))
    assert [taken(b, key(a, 1), spin=True)[0].payload[0] for _ in range(5)] == [1, 3, 5, 7, 9]
    assert [taken(b, key(a, 0))[0].payload[0] for _ in range(5)] == [0, 2, 4, 6, 8]
    assert b.take(key(a, 0)) is None


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, LARGE + 1, 10 * LARGE])
def test_payloads_of_every_size_come_whole(posts, size):
    a, b = posts
    before, text = open_files(), os.urandom(size)
    a.send(b.address, key(a), memoryview(text))
    (packet,) = taken(b, key(a))
    assert packet.payload == text
    assert open_files() == before


@pytest.mark.parametrize("sizes", [(0, 0), (1, 9), (LARGE, LARGE), (9, LARGE + 1), (LARGE + 1, 9)])
def test_two_packets_may_travel_as_one(posts, sizes):
    a, b = posts
    before, (one, two) = open_files(), map(os.urandom, sizes)
    a.send(b.address, key(a, 1), two, [0], first=(key(a), memoryview(one)))
    first, second = taken(b, key(a), key(a, 1))
    assert (first.payload, second.payload) == (one, two)
    assert (len(first.files), len(second.files)) == (0, 1)
    close_files(second.files)
    assert open_files() == before


def test_two_that_write_to_each_other_never_wait_for_each_other(posts):
    def write(mine, other):
        for number in range(1000):  # far more than a box holds
            mine.send(other.address, key(mine, number), b"x" * 100)
        assert len(taken(mine, *(key(other, number) for number in range(1000)), seconds=20)) == 1000

    a, b = posts
    assert [text for _, text, _ in in_threads(lambda: write(a, b), lambda: write(b, a))] == ["", ""]


def test_a_box_that_nobody_empties_ends_in_time(posts):
    a, b = posts

    def write():
        while True:
            a.send(b.address, key(a), b"x" * 1000, seconds=0.2)

    with pytest.raises(TimeoutError, match=r"nothing was taken within 0\.2 s"):
        write()


@pytest.mark.parametrize("transport", [None, 5])
def test_a_full_box_is_not_waited_at_for_a_transport_that_has_failed(posts, transport):
    a, b = posts
    b.send(a.address, PacketKey("", 5, FAILED, 0), b"it broke")

    def write():
        while True:
            a.send(b.address, PacketKey("", 0 if transport else 5, 1, 0), b"x" * 1000, seconds=20, transport=transport)

    began = time.monotonic()
    with pytest.raises(TransportFailedError, match="it broke"):
        write()
    assert time.monotonic() - began < 10
    a.try_to_send(b.address, key(a), b"")  # which does not mind


def test_what_is_not_wanted_any_more_is_closed(posts):
    a, b = posts
    before = open_files()
    for tag in (1, 2, 3):
        a.send(b.address, key(a, tag), files=[0])
    (packet,) = taken(b, key(a, 3))
    assert not os.get_inheritable(packet.files[0])  # by programs that are started meanwhile
    b.discard_all(lambda one: one.tag == 1)
    assert open_files() == before + 2  # that which was taken, and one that is still wanted
    assert b.take(key(a, 1)) is None
    close_files((*packet.files, *b.take(key(a, 2)).files))
    assert open_files() == before


def test_one_has_ended_when_all_that_it_sent_is_taken(posts):
    a, b = posts
    a.send(b.address, key(a), b"last words")
    a.close()
    with pytest.raises(PeerEndedError):
        taken(b, key(a, 1))
    assert not b.has_ended(a.address)
    assert b.take(key(a)) is not None
    assert b.has_ended(a.address)
    assert not b.has_ended(b.address)


def test_nothing_that_comes_ends_in_time(posts):
    a, b = posts
    with pytest.raises(TimeoutError, match=r"nothing came within 0\.1 s"):
        taken(b, key(a), seconds=0.1)


def test_one_that_has_gone_is_seen_after_what_it_sent(posts):
    a, b = posts
    a.send(b.address, key(a), b"last words")
    a.close()
    assert taken(b, key(a))[0].payload == b"last words"
    with pytest.raises(PeerEndedError, match=a.address):
        taken(b, key(a))
    with pytest.raises(PeerEndedError, match=a.address):
        b.send(a.address, key(b))
    b.try_to_send(a.address, key(b), b"")  # which does not mind


def test_a_transport_that_was_told_to_have_failed_is_not_waited_for(posts):
    a, b = posts
    a.send(b.address, PacketKey("", 5, -2, 0), "it broke \N{SNOWMAN}".encode())
    with pytest.raises(TransportFailedError, match="it broke \N{SNOWMAN}"):
        taken(b, key(a))


def test_threads_wait_for_different_packets_at_a_time(posts):
    a, b = posts
    waiting = [lambda number=number: taken(b, key(a, number)) for number in range(4)]

    def write():
        for number in range(4):
            time.sleep(0.02)
            a.send(b.address, key(a, number))

    assert [text for _, text, _ in in_threads(*waiting, write)] == [""] * 5


def test_threads_that_come_at_a_time_get_one_address(ranks):  # noqa: F811
    def run(_):
        found, start = [], threading.Barrier(8)
        in_threads(*[lambda: (start.wait(), found.append(this_process.packets))] * 8)
        return len(set(found)), len(found)

    assert ranks(1, run) == [(1, 8)]


def test_threads_that_connect_at_a_time_make_one_connection(posts):
    b = posts[1]
    for _ in range(5):
        a, start = PacketSocket(), threading.Barrier(8)
        in_threads(*[lambda a=a, start=start: (start.wait(), a.connect(b.address))] * 8)
        a.send(b.address, key(a), b"hello")
        assert taken(b, key(a))[0].payload == b"hello"
        with pytest.raises(TimeoutError):
            taken(b, key(a), seconds=0.05)  # and not that it has gone
        a.close()


def stranger(address):
    """A connection of somebody who knows the address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0" + address)
    return sock


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("files", [0, 1, 40])
def test_what_strangers_say_is_left_out(posts, text, files):
    a, b = posts
    before = open_files()
    with stranger(b.address) as sock:
        socket.send_fds(sock, [text or b"\0"], [0] * files)
        a.send(b.address, key(a), b"hello")
        assert taken(b, key(a))[0].payload == b"hello"
    for _ in range(3):  # until all that it said is read, and that it has left
        a.send(b.address, key(a), b"again")
        assert taken(b, key(a))[0].payload == b"again"
    assert open_files() == before


def test_a_stranger_does_not_disturb_an_exchange(ranks):  # noqa: F811
    def run(rank):
        works(rank)
        for text in GARBAGE.values():
            with stranger(this_process.packets.address) as sock:
                sock.send(text)
                works(rank)
        return True

    assert all(ranks(2, run))


def as_nobody(work):
    """What a child of another user wrote to its output."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(write, str(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        found = file.read()
    os.waitpid(child, 0)
    return found


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_a_process_of_another_user_is_neither_let_in_nor_written_to(posts):
    a, b = posts

    def knock():
        with pytest.raises(PermissionError, match="another user"):
            PacketSocket().connect(b.address)
        with stranger(b.address) as sock:
            sock.settimeout(5)
            closed = sock.recv(1)
            with suppress(BrokenPipeError):
                sock.send(HEADER.pack(0, 0, HELLO, len(a.address)) + a.address.encode())
            return closed

    waiting = threading.Thread(target=lambda: raised(lambda: taken(b, key(a), seconds=2)))
    waiting.start()
    assert as_nobody(knock) == "b''"
    a.send(b.address, key(a))
    waiting.join()
    assert not b._ended  # it was not taken for the one whose name it said


@needs_root
def test_more_descriptors_under_way_than_a_user_may_have():
    def write():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        a, b = PacketSocket(), PacketSocket()
        a.connect(b.address)

        def read():
            time.sleep(0.2)
            for _ in range(150):
                os.close(taken(b, key(a))[0].files[0])

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(150):
            a.send(b.address, key(a), files=[0])
        reader.join()
        return "all came"

    assert as_nobody(write) == "all came"


@needs_root
def test_memory_is_for_the_same_user_only():
    import torch

    import shardwise as sw
    from shardwise.transports.segments import SharedSegment

    moved, made = sw.share_(torch.zeros(10)), sw.empty("10/S0@1", shared=True).local_tensor()
    segments = [
        SharedSegment.allocate(10),
        *(this_process.shared_tensors.place(tensor).segment for tensor in (moved, made)),
    ]
    for segment in segments:
        assert os.fstat(segment.file).st_mode & 0o777 == 0o600
        path = f"/proc/{os.getpid()}/fd/{segment.file}"
        assert as_nobody(lambda path=path: raised(lambda: os.open(path, os.O_RDONLY))[0]) == "PermissionError"
