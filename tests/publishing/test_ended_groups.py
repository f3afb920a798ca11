"""The group of a pull ends when the pull does, and nobody waits for it."""

import threading

from shardwise.publishing.pair import PairTransport


class Group:
    """Tells which thread drops the last reference, and holds it up."""

    def __init__(self):
        self.dropped, self.seen, self.go_on = list[threading.Thread](), threading.Event(), threading.Event()


class Reference:
    """The last one."""

    def __init__(self, group):
        self.group = group

    def __del__(self):
        self.group.dropped.append(threading.current_thread())
        self.group.seen.set()
        self.group.go_on.wait(10)


def test_a_pull_does_not_wait_until_its_group_has_ended():
    group, transport = Group(), object.__new__(PairTransport)
    transport._alive = Reference(group)
    transport.leave()
    assert group.seen.wait(10)
    assert group.dropped[0] is not threading.current_thread()
    assert group.dropped[0].is_alive()
    assert not group.dropped[0].daemon  # the interpreter would abort if it ended in the middle of torch
    group.go_on.set()
    group.dropped[0].join(10)
    transport.leave()  # again, as after a failure
