"""The dispatcher: one thread of a publisher decides who pulls which version, from whom, and when.

Subscribers of one host that want the same values get them from each other: the publisher's link carries a version once
per host. A subscriber that gives no sign of life is dropped, and costs the others nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.publishing.catalog import Infos, Subscription
from shardwise.publishing.meeting import MeetingLostError, MeetingPoint
from shardwise.publishing.orders import Claim, Order, Paths, Version
from shardwise.publishing.pair import cancel
from shardwise.publishing.presence import BEAT, Watch
from shardwise.publishing.schedule import Active, Holder, Message, PullSchedule, Registration

SOME = 16  # subscribers that do nothing, of which `tick` looks whether they live
log = logging.getLogger("shardwise")


class Dispatcher:
    """Carries out what the schedule decides. `keep`, `serving`: see there. `delta`: send deltas between hosts."""

    def __init__(
        self,
        meeting: MeetingPoint,
        paths: Paths,
        claim: Claim,
        catalog: Infos,
        *,
        keep: int,
        delta: bool,
        serving: int,
    ) -> None:
        self._meeting, self._paths, self._claim, self._catalog = meeting, paths, claim, catalog
        self._schedule = PullSchedule(Holder(claim.token, claim.rows, None), claim.host, keep, serving)
        self._delta, self._lock, self._watch = delta, threading.RLock(), Watch(meeting)
        self._committed, self._wake, self._closed = deque[tuple[int, bool]](), threading.Event(), False
        self._told: Message | None = None  # to the ranks of this job, the last time
        self._looked_at = 0  # the subscriber that `tick` looks at next
        self._untold = False  # something could not be told: the meeting point was lost
        self._announcer = threading.Thread(target=self._announce_committed, name="shardwise commits", daemon=True)
        self._announcer.start()
        self._handlers: Mapping[str, Callable[[Message], None]] = {
            "subscribe": self._subscribe,
            "pull": self._pull,
            "received": self._received,
            "failed": self._failed,
            "leave": self._leave,
            "refused": self._refused,
        }

    @property
    def claim(self) -> Claim:
        """With the incarnation that is larger than all that subscribers have seen."""
        return self._claim

    @property
    def held(self) -> list[int]:
        """The versions that can be pulled."""
        committed = [number for number, _ in list(self._committed)]
        return self._schedule.kept(sorted({*self._schedule.held, *committed}))

    @property
    def subscribers(self) -> list[str]:
        """Those that are known now."""
        with self._lock:
            return list(self._schedule.subscribers)

    # --- versions ----------------------------------------------------------------------------------------------------

    def announce(self, number: int, *, mapped: bool) -> None:
        """A version was committed on all ranks. `mapped`: others of this host can map it.

        It is told in another thread: a meeting point that hangs must not stop the training.
        """
        self._committed.append((number, mapped))
        self._wake.set()

    def _announce_committed(self) -> None:
        """The thread that tells of versions. What could not be told is told by `tick`."""
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            try:
                with self._lock:
                    self._take_committed()
                    self._drop_old()
                    self._start_waiting()
            except MeetingLostError:
                pass  # `tick` tries again
            except Exception:
                log.exception("shardwise: a version could not be announced")

    def _take_committed(self) -> None:
        """Who pulls after a commit gets it, whether others were told of it or not."""
        while self._committed:
            number, mapped = self._committed[0]
            self._schedule.held = [*self._schedule.held, number]  # not changed in place: `held` reads it without a lock
            self._schedule.sent |= set() if mapped else {number}
            self._committed.popleft()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._announcer.join(timeout=2 * BEAT)

    def withdraw(self, number: int) -> None:
        """Let nobody pull a version any more. Pulls that have started may finish."""
        with suppress(MeetingLostError), self._lock:
            self._take_committed()  # it may be so new that nobody was told of it
            self._schedule.held = [one for one in self._schedule.held if one != number]
            self._tell_held()

    def idle(self, number: int) -> bool:
        """True if nobody pulls a version from the publisher now."""
        with self._lock:
            return number not in self._schedule.in_use()

    def _drop_old(self) -> None:
        schedule = self._schedule
        schedule.held = schedule.kept(schedule.held)
        schedule.newest = max([schedule.newest, *schedule.held])
        self._tell_held()

    def _tell_held(self) -> None:
        """To subscribers, and to the ranks of this job, which drop the others.

        In the same mailboxes as orders: a rank sees it after all orders that read a version which is dropped.
        """
        self._untold, schedule = True, self._schedule
        told = {"token": self._claim.token, "incarnation": self._claim.incarnation, "held": schedule.held}
        now = Claim.at(self._meeting, self._paths)
        if now is None or now.token == self._claim.token:  # or another has taken the name: this process stood still
            self._meeting.put(self._paths.versions, told)
        message = {"kind": "hold", "held": schedule.held, "newest": schedule.newest}
        message["tainted"] = sorted(schedule.tainted)
        if message != self._told:
            self._to_all(self._claim.token, self._claim.rows, message)
        schedule.tainted.intersection_update(schedule.held)
        schedule.sent.intersection_update(schedule.held)
        self._told, self._untold = message, False

    def _to_all(self, party: str, rows: int, message: Message) -> None:
        for row in range(rows):
            self._meeting.post(self._paths.orders(party, row), message)

    def rewrite(self) -> None:
        """Write all entries again: the meeting point has lost them."""
        with self._lock:
            self._told = None
            self._tell_held()

    # --- messages ----------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """A message of a subscriber."""
        handler = self._handlers.get(message.get("kind", ""))
        if handler is None:
            return
        try:
            with self._lock:
                self._take_committed()
                handler(message)
        except MeetingLostError:
            raise
        except Exception as error:  # who waits for an answer would wait for ever
            if "reply" in message:
                self._answer(message, kind="error", why=f"{type(error).__name__}: {error}")
            raise

    def _answer(self, message: Message, **answer: object) -> None:
        self._meeting.post(message["reply"], {**answer, "question": message["question"]})

    def _subscribe(self, message: Message) -> None:
        seen = message["seen"]
        if seen is not None and message["token"] != self._claim.token and seen[0] >= self._claim.incarnation:
            self._outlive(seen[0])
        entry = self._meeting.get(self._paths.subscription(message["subscription"]))
        if entry is None:  # it was removed just now, with the last subscriber that wanted the same
            self._answer(message, kind="absent", why="what it wants is not at the meeting point")
            return
        try:
            subscription = Subscription.from_json(entry)
            subscription.check(self._catalog)
            subscription.plan(self._catalog, self._claim.rows, None)
        except (ShardwiseError, ValueError, TypeError, KeyError) as error:
            log.warning("shardwise: subscriber %s of %s is refused: %s", message["from"], self._paths.name, error)
            self._answer(message, kind="refused", why=str(error))
            return
        fields = "from", "rows", "subscription", "values", "host", "maps"
        self._schedule.subscribers[message["from"]] = Registration(*(message[name] for name in fields))
        self._answer(message, kind="accepted")

    def _outlive(self, incarnation: int) -> None:
        """A subscriber knows a later publisher than the meeting point did: be later than that one."""
        before, self._claim = self._claim, replace(self._claim, incarnation=incarnation + 1)
        self._meeting.replace(self._paths.publisher, before.to_json(), self._claim.to_json())
        self._tell_held()

    def _refused(self, message: Message) -> None:
        log.warning(
            "shardwise: subscriber %s of %s does not fit: %s", message["from"], self._paths.name, message["why"]
        )

    def _pull(self, message: Message) -> None:
        asking = message["from"]
        for order in self._schedule.orders(asking):
            if order.subscriber == asking:
                self._break_off(order, "the subscriber pulls again")  # it has lost the meeting point meanwhile
                self._end(order.id)
        self._schedule.waiting = [other for other in self._schedule.waiting if other["from"] != asking]
        self._schedule.waiting.append(message)
        self._start_waiting()

    def _received(self, message: Message) -> None:
        active = self._end(message["order"])
        self._answer(message, kind="cancelled" if active is None else "valid")
        subscriber = self._schedule.subscribers.get(message["from"])
        if active is not None and subscriber is not None and message["holds"]:
            subscriber.holds = active.order.version
        self._start_waiting()

    def _failed(self, message: Message) -> None:
        active = self._schedule.active.get(message["order"])
        if active is not None:
            log.warning("shardwise: a pull by %s failed: %s", message["from"], message["why"])
            self._break_off(active.order, "the pull failed on another rank")
            self._end(active.order.id)
        self._start_waiting()

    def _leave(self, message: Message) -> None:
        self._drop_subscriber(message["from"], None)
        self._start_waiting()

    def _end(self, order: str) -> Active | None:
        active = self._schedule.active.pop(order, None)
        if active is not None:
            self._schedule.ended.append((time.monotonic(), order))
            self._drop_old()
        return active

    def _break_off(self, order: Order, why: str) -> None:
        """A pull has failed. The subscriber may still read what it has mapped: that memory is not written again."""
        if order.server == self._claim.token:
            self._schedule.tainted.add(order.version[1])
        elif order.server in self._schedule.subscribers:  # it is not asked again for this version
            server = self._schedule.subscribers[order.server]
            server.holds, server.tainted = None, True
        cancel(self._meeting, self._paths.pull(order.id), order, why)

    # --- who pulls from whom -----------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        for message in list(self._schedule.waiting):  # one by one: the meeting point may be lost in between
            if self._start(message):
                self._schedule.waiting.remove(message)

    def _start(self, message: Message) -> bool:
        """True if the request was answered; otherwise it has to wait."""
        subscriber = self._schedule.subscribers.get(message["from"])
        if subscriber is None:
            self._answer(message, kind="unknown")
            return True
        number = message["version"]
        if number is None and not self._schedule.held:
            self._answer(message, kind="unchanged")
            return True
        number = self._schedule.held[-1] if number is None else number
        version = (self._claim.incarnation, number)
        have = message["have"] and tuple(message["have"])
        if have == version or (message["version"] is None and have is not None and have > version):
            self._answer(message, kind="unchanged")
            return True
        if number not in self._schedule.held:
            self._answer(message, kind="gone", held=self._schedule.held)
            return True
        server = self._schedule.server_for(subscriber, version)
        if server is None:
            return False
        self._order(message, subscriber, server, version)
        return True

    def _order(self, message: Message, subscriber: Registration, server: Holder, version: Version) -> None:
        mapped = self._schedule.maps(subscriber, server, version)
        order = Order(
            id=secrets.token_hex(8),
            challenge=secrets.token_hex(16),
            server=server.party,
            server_rows=server.rows,
            subscriber=subscriber.id,
            subscriber_rows=subscriber.rows,
            subscription=subscriber.subscription,
            source=server.subscription,
            version=version,
            mapped=mapped,
            backend=self._claim.backend,
            base=None if mapped or subscriber.tainted else self._base(message, version),
        )
        subscriber.holds = None
        self._schedule.active[order.id] = Active(order, subscriber.alike)
        try:
            self._to_all(order.server, order.server_rows, {"kind": "serve", "order": order.to_json()})
            self._answer(message, kind="go", order=order.to_json(), tainted=subscriber.tainted)
        except MeetingLostError:  # nobody knows who has heard of it: the request goes on waiting
            self._break_off(order, "the publisher has lost the meeting point")
            self._end(order.id)
            raise
        subscriber.tainted = False

    def _base(self, message: Message, version: Version) -> Version | None:
        """The version that a delta can build on: the subscriber has it, and it is still held here."""
        base = message["base"] and tuple(message["base"])
        if not self._delta or not base or base == version:
            return None
        return base if base[0] == self._claim.incarnation and base[1] in self._schedule.held else None

    # --- every second ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Drop subscribers that give no sign of life, and remove the entries of old pulls."""
        patience = self._claim.patience
        if self._committed or self._untold or self._schedule.waiting:  # also what could not be told the last time
            self._wake.set()
        with self._lock:
            parties = {party: rows for order in self._schedule.orders() for party, rows in order.parties.items()}
            parties |= {one.id: one.rows for one in self._some_idle()}
        for party, rows in parties.items():
            still = [row for row in range(rows) if self._watch.still(self._paths.beat(party, row)) > patience]
            if still and party != self._claim.token:
                with self._lock:
                    self._drop_subscriber(party, f"its rank {still[0]} gave no sign of life for {patience:g} s")
                    self._start_waiting()
        with self._lock:
            old = [order for when, order in self._schedule.ended if when < time.monotonic() - 2 * patience]
            self._schedule.ended = [one for one in self._schedule.ended if one[1] not in old]
        for order in old:
            self._meeting.delete_all(self._paths.pull(order))

    def _some_idle(self) -> list[Registration]:
        """A few subscribers, in turn."""
        known = list(self._schedule.subscribers.values())
        start = self._looked_at % max(len(known), 1)
        self._looked_at = start + SOME
        return (known + known)[start : start + min(SOME, len(known))]

    def _drop_subscriber(self, party: str, why: str | None) -> None:
        gone = self._schedule.subscribers.pop(party, None)
        if gone is not None:
            for other, rows in self._schedule.neighbours(gone):
                self._to_all(other, rows, {"kind": "forget", "party": party})
        if gone is not None and why is not None:
            log.warning("shardwise: subscriber %s of %s is dropped: %s", party, self._paths.name, why)
        self._watch.forget(self._paths.beat(party, row) for row in range(gone.rows if gone else 0))
        for order in self._schedule.orders(party):
            self._break_off(order, why or "the subscriber has left")
            self._end(order.id)
            if order.server == party:
                log.warning("shardwise: subscriber %s pulls again: its server %s was lost", order.subscriber, party)
        self._schedule.waiting = [message for message in self._schedule.waiting if message["from"] != party]
        alike = [one for one in self._schedule.subscribers.values() if gone and one.subscription == gone.subscription]
        if gone is not None and not alike:
            with suppress(MeetingLostError):
                self._meeting.delete(self._paths.subscription(gone.subscription))
