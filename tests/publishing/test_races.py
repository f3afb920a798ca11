"""Without other processes: what threads of one job do at the same time, and what is left when something fails."""

import sys
import threading
import time
from collections import defaultdict, deque
from queue import SimpleQueue

import pytest
import torch

import shardwise as sw
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import links
from shardwise.job.side import LiveSide
from shardwise.publishing.catalog import Subscription
from shardwise.publishing.client import Client
from shardwise.publishing.dispatcher import Dispatcher
from shardwise.publishing.mailbox import MailboxThread
from shardwise.publishing.meeting import MeetingLostError, MeetingPoint
from shardwise.publishing.orders import Claim, Paths
from shardwise.publishing.target import PullTarget
from shardwise.publishing.versions import HeldVersions

INFOS = {"w": TensorInfo((4,), torch.float32, sw.parse("4/R@1"), "cpu")}
SUBSCRIPTION = Subscription(INFOS, tuple(links({"w": (4,)}, {"w": (4,)})))


def test_no_delta_builds_on_memory_that_was_abandoned():
    target = PullTarget(LiveSide({"w": torch.zeros(4)}, ["w"]), INFOS, INFOS, [], 0)
    target.memory_to_receive(aside=True)
    target.received((1, 7))
    target.abandon_aside()
    assert target.version_aside is None


def test_versions_are_compared_while_others_are_dropped():
    """Masks are added by those who pull, and removed by those who drop."""
    held, failures, done = HeldVersions(keep=2), list[Exception](), threading.Event()
    side = LiveSide({"w": torch.zeros(4)}, ["w"])

    def compare(thread):
        try:
            number = 0
            while not done.is_set():
                number += 1
                held.changed((number, thread), "w", torch.float32, (side, side))
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=compare, args=(thread,)) for thread in (-1, -2)]
        for thread in threads:
            thread.start()
        end, number = time.monotonic() + 0.5, 0
        while time.monotonic() < end:
            number += 1
            held.finish(held.begin(number, side))
            held.drop(number)
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert failures == []


class QueueMeeting:
    """A mailbox without a meeting point."""

    def __init__(self):
        self.messages = SimpleQueue()

    def take_or_wait(self, mailbox):
        message = self.messages.get(timeout=10)
        if isinstance(message, Exception):
            raise message
        return message

    def post(self, mailbox, message):
        self.messages.put(message)


def test_a_mailbox_is_read_on_after_a_message_that_cannot_be_handled(caplog):
    meeting, handled, last = QueueMeeting(), [], threading.Event()

    def handle(message):
        if message["kind"] == "bad":
            raise KeyError("order")
        handled.append(message)
        last.set()

    thread = MailboxThread(meeting, "box", handle, "reads")
    for kind in ("bad", "good"):
        meeting.post("box", {"kind": kind})
    assert last.wait(10)
    thread.stop()
    assert handled == [{"kind": "good"}]
    assert "a message could not be handled" in caplog.text


class FakeMeeting:
    """Entries and mailboxes in a dict. `lost`: mailboxes that cannot be posted to the next time."""

    def __init__(self):
        self.entries, self.boxes, self.lost = {}, defaultdict(deque), set()

    def post(self, mailbox, message):
        if mailbox in self.lost:
            self.lost.discard(mailbox)
            raise MeetingLostError("it is away")
        self.boxes[mailbox].append(message)

    def put(self, path, value):
        self.entries[path] = value

    write_plain = put

    def get(self, path):
        return self.entries.get(path)

    def delete_all(self, prefix):
        pass


@pytest.fixture
def dispatcher():
    """With one version and one subscriber."""
    meeting, paths = FakeMeeting(), Paths.of("policy")
    made = Dispatcher(meeting, paths, Claim("token", 1, 1, 10.0, None), INFOS, keep=1, delta=False, serving=1)
    meeting.put(paths.subscription(SUBSCRIPTION.digest), SUBSCRIPTION.to_json())
    registration = {
        "kind": "subscribe",
        "from": "s",
        "reply": "r0",
        "question": 0,
        "rows": 1,
        "host": None,
        "maps": False,
    }
    registration |= {"subscription": SUBSCRIPTION.digest, "values": SUBSCRIPTION.values, "seen": None, "token": ""}
    made.handle(registration)
    assert meeting.boxes["r0"].pop() == {"kind": "accepted", "question": 0}
    made.announce(1, mapped=True)
    until(lambda: meeting.get("shardwise/policy/versions"))  # another thread tells
    yield made, meeting
    made.close()


def until(done):
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_whose_answer_was_lost_is_answered_later(dispatcher):
    made, meeting = dispatcher
    meeting.lost.add("r1")
    with pytest.raises(MeetingLostError):
        made.handle(
            {"kind": "pull", "from": "s", "reply": "r1", "question": 1, "version": None, "have": None, "base": None}
        )
    made.tick()
    until(lambda: meeting.boxes["r1"])
    assert meeting.boxes["r1"].pop()["kind"] == "go"


def test_a_request_that_cannot_be_handled_is_answered(dispatcher):
    made, meeting = dispatcher
    with pytest.raises(KeyError):
        made.handle({"kind": "pull", "from": "s", "reply": "r1", "question": 1})
    assert meeting.boxes["r1"].pop() == {"kind": "error", "why": "KeyError: 'version'", "question": 1}


def test_a_version_that_was_withdrawn_before_it_was_told_is_not_held(dispatcher):
    made, meeting = dispatcher
    with made._lock:  # nobody tells anything
        made.announce(2, mapped=False)
        made.withdraw(2)
        assert made.held == [1]
    until(lambda: not made._wake.is_set())
    assert made.held == [1]
    assert meeting.entries["shardwise/policy/versions"]["held"] == [1]


def test_a_publisher_that_was_replaced_does_not_tell_of_versions_any_more(dispatcher):
    """It stood still, and commits before it has seen that another one has its name."""
    made, meeting = dispatcher
    assert meeting.entries["shardwise/policy/versions"]["held"] == [1]
    meeting.put("shardwise/policy/publisher", Claim("another", 2, 1, 10.0, None).to_json())
    meeting.put("shardwise/policy/versions", {"token": "another", "incarnation": 2, "held": [7]})
    made.announce(3, mapped=True)
    until(lambda: any(one["held"] == [3] for one in meeting.boxes["shardwise/policy/orders/token/0"]))
    assert meeting.entries["shardwise/policy/versions"]["held"] == [7]


def test_answers_come_into_one_mailbox_and_those_to_earlier_questions_are_ignored(tmp_path, monkeypatch):
    at, posted, post = tmp_path / "meeting", set[str](), MeetingPoint.post

    def remember(meeting, mailbox, message):
        posted.add(mailbox)
        post(meeting, mailbox, message)

    monkeypatch.setattr(MeetingPoint, "post", remember)
    with sw.publish({"w": torch.ones(2)}, at, "policy") as publisher:
        with sw.subscribe({"w": torch.zeros(2)}, at, "policy", verify=True) as subscriber:
            reply = Paths.of("policy").reply(subscriber._client.party)
            for version in range(4):
                publisher.commit(version)
                post(subscriber._meeting, reply, {"kind": "unchanged", "question": -1})
                assert subscriber.pull() == version
        assert [mailbox for mailbox in posted if "/reply/" in mailbox] == [reply]


def test_a_subscriber_that_is_closed_pulls_no_more(tmp_path):
    with sw.publish({"w": torch.ones(2)}, tmp_path / "meeting", "policy"):
        subscriber = sw.subscribe({"w": torch.zeros(2)}, tmp_path / "meeting", "policy")
        subscriber.close()
        with pytest.raises(sw.ExchangeError, match="this subscriber is closed"):
            subscriber.pull()


def names():
    """Of threads that stay: those that connect end by themselves."""
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise")]
    return [name for name in found if name != "shardwise connects"]


def test_a_subscriber_that_is_refused_leaves_no_thread(tmp_path, monkeypatch):
    def refuse(self, profile, claim=None):
        raise ValueError("no")

    monkeypatch.setattr(Client, "register", refuse)
    with sw.publish({"w": torch.ones(2)}, tmp_path / "meeting", "policy"):
        before = names()
        with pytest.raises(ValueError, match="no"):
            sw.subscribe({"w": torch.zeros(2)}, tmp_path / "meeting", "policy")
        assert sorted(names()) == sorted(before)


def test_a_function_that_takes_long_does_not_stop_the_signs_of_life(tmp_path):
    entered, leave, at = threading.Event(), threading.Event(), tmp_path / "meeting"

    def on_commit(version):
        entered.set()
        leave.wait(30)

    publisher = sw.publish({"w": torch.ones(2)}, at, "policy")
    with publisher, sw.subscribe({"w": torch.zeros(2)}, at, "policy", on_commit=on_commit) as subscriber:
        publisher.commit(1)
        assert entered.wait(10)
        path = Paths.of("policy").beat(subscriber._client.party, 0)
        before = subscriber._meeting.get(path)
        until(lambda: subscriber._meeting.get(path) != before)
        leave.set()
