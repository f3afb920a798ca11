"""A store that does not answer keeps nobody waiting."""

from threading import Event

import pytest

from shardwise.transports.notice_board import NoticeBoard


class FarStore:
    """Answers once the link is up."""

    def __init__(self):
        self.up, self.asked = Event(), 0

    def check(self, keys):
        self.asked += 1
        self.up.wait()
        return True

    def get(self, key):
        return b"rank 1 has ended"

    def get_group_store(self):
        """It is its own group, too."""
        return self


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr("shardwise.transports.notice_board.LIMIT", 0.05)
    store = FarStore()
    yield store
    store.up.set()


def test_a_question_without_an_answer_ends_and_no_other_is_asked_meanwhile(store):
    board = NoticeBoard(store)
    assert board.cause(["all"]) is None
    assert not board.answers
    assert board.cause(["all"]) is None
    assert board.silent_ranks(0, [0, 1, 2], ["all"]) == [1, 2]
    assert store.asked == 1
    store.up.set()
    board._late.join()
    assert board.cause(["all"]) == "rank 1 has ended"
    assert board.answers


def test_a_store_that_is_gone_has_nothing_to_say():
    class Gone(FarStore):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    group = Gone()
    board = NoticeBoard(group)
    assert board.cause(["all"]) is None
    assert not board.answers
    assert board._late is None
