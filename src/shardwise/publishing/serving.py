"""Serves pulls from this rank's memory, beside what the process does: one thread reads orders, one runs each pull."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.errors import ExchangeError, ShardwiseError
from shardwise.exchange.buffers import on_the_cpu
from shardwise.exchange.messages import Tensors
from shardwise.job.deltas import Changed
from shardwise.job.job import Job
from shardwise.job.plan import ModelPlan
from shardwise.job.side import Side
from shardwise.planning import Hosts
from shardwise.publishing.catalog import Infos, Subscription, checked
from shardwise.publishing.mailbox import MailboxThread
from shardwise.publishing.mapping import address_of_this_process, close_connections, send_memory
from shardwise.publishing.meeting import MeetingPoint
from shardwise.publishing.orders import Order, Paths
from shardwise.publishing.pair import PairTransport, cancel, join
from shardwise.publishing.presence import BEAT, Watch

log = logging.getLogger("shardwise")
OPERATION = "pull"
ENDING = 3  # beats that a server which stops waits for the pulls that it cancels, and for their connections
CLOSED = "the job that serves was closed"


class ReadVersion(NamedTuple):
    """The memory of the version that an order asks for, and what has changed since the version that it builds on."""

    side: Side
    changed: Changed | None = None


Reading = Callable[[Order], AbstractContextManager[ReadVersion]]


class NoSide:
    """The side of a job of which this rank holds nothing."""

    def memory(self, name: str) -> Tensors:
        """None."""
        return []

    def stamp(self) -> object:
        """Always the same."""
        return 0

    def sent(self, links: Sequence[int]) -> None:
        """Nothing is read."""

    def filled(self, names: Sequence[str]) -> None:
        """Nothing is written."""


class Subscriptions:
    """What subscribers want, by digest, and the plans for it: each is read and planned once."""

    def __init__(self, meeting: MeetingPoint, paths: Paths, catalog: Infos) -> None:
        self._meeting, self._paths, self._catalog = meeting, paths, catalog
        self._subscription, self._plan = lru_cache(64)(self._read), lru_cache(64)(self._planned)

    def replace_catalog(self, catalog: Infos) -> None:
        """A publisher that was restarted may have other layouts."""
        self._catalog = catalog
        self._plan.cache_clear()

    def subscription(self, digest: str) -> Subscription:
        """The subscription with this digest."""
        return self._subscription(digest)

    def _read(self, digest: str) -> Subscription:
        entry = checked(self._meeting.get(self._paths.subscription(digest)), f"subscription {digest}")
        return Subscription.from_json(entry)

    def sources(self, order: Order) -> Infos:
        """What the server of an order has."""
        return self._catalog if order.source is None else self.subscription(order.source).targets

    def plan(self, order: Order, hosts: Hosts | None = None) -> ModelPlan:
        """The plan of an order: the same on all ranks of both jobs."""
        return self._plan(order.subscription, order.source, order.server_rows, hosts)

    def _planned(self, subscription: str, source: str | None, rows: int, hosts: Hosts | None) -> ModelPlan:
        wanted = self.subscription(subscription)
        given, wanted = (
            (self._catalog, wanted) if source is None else (self.subscription(source).targets, wanted.passed_on())
        )
        return wanted.plan(given, rows, hosts)


def job_of(order: Order, transport: PairTransport, subscriptions: Subscriptions) -> Job:
    """The job of a pull, on one rank of either side."""
    wanted = subscriptions.subscription(order.subscription)
    return Job(transport, subscriptions.plan(order, transport.hosts), OPERATION, overflow=wanted.overflow)  # type: ignore[arg-type]


class Server:
    """One rank's part in serving. `reading` gives the memory of a version; other messages go to `other`."""

    def __init__(
        self,
        meeting: MeetingPoint,
        paths: Paths,
        party: str,
        row: int,
        subscriptions: Subscriptions,
        reading: Reading,
        *,
        patience: float,
        other: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> None:
        self._meeting, self._paths, self._party, self._row = meeting, paths, party, row
        self._subscriptions, self._reading, self._other, self._patience = subscriptions, reading, other, patience
        self._watch, self._lock = Watch(meeting), threading.Lock()
        self._addresses = dict[str, list[str]]()  # of subscribers that memory was sent to
        self._pulls = dict[str, tuple[Order, threading.Thread]]()  # that are served now, by their id
        self._stopped = threading.Event()
        self._orders = MailboxThread(meeting, paths.orders(party, row), self._handle, "shardwise orders")

    def _handle(self, message: dict[str, Any]) -> None:
        if message.get("kind") == "serve":
            order = Order.of(message["order"])
            thread = threading.Thread(target=self._serve, args=(order,), name="shardwise pull", daemon=True)
            self._pulls[order.id] = order, thread
            thread.start()
        elif message.get("kind") == "forget":
            self._forget(message["party"])
        else:
            self._other(message)

    def _forget(self, party: str) -> None:
        with self._lock:
            gone = self._addresses.pop(party, [])
            used = {address for others in self._addresses.values() for address in others}
        close_connections(address for address in gone if address not in used)

    def stop(self) -> None:
        """Take no more orders, and cancel the pulls that are served now.

        It waits for their threads: one that is inside torch when the interpreter ends would abort the process. One that
        connects to a subscriber which has died ends after `patience`: torch offers no way to end it before.
        """
        self._stopped.set()
        self._orders.stop()
        pulls, end = list(self._pulls.values()), time.monotonic() + self._patience + ENDING * BEAT
        for order, _ in pulls:
            cancel(self._meeting, self._paths.pull(order.id), order, CLOSED)
        for _, thread in pulls:
            thread.join(timeout=max(0.0, end - time.monotonic()))

    def _serve(self, order: Order) -> None:
        try:
            with torch.no_grad(), on_the_cpu(), self._reading(order) as version:
                addresses = self._admit(order)
                if order.mapped:
                    with self._lock:
                        self._addresses[order.subscriber] = addresses
                    send_memory(version.side, addresses, order.id, self._patience)
                else:
                    self._send(order, version)
        except Exception as error:
            known = isinstance(error, ShardwiseError)
            log.warning(
                "shardwise: a pull of subscriber %s was cancelled: %s", order.subscriber, error, exc_info=not known
            )
            cancel(self._meeting, self._paths.pull(order.id), order, f"{type(error).__name__}: {error}")
        finally:
            self._pulls.pop(order.id, None)

    def _send(self, order: Order, version: ReadVersion) -> None:
        path = self._paths.pull(order.id)
        with join(self._meeting, path, self._row, order, self._check(order), self._patience) as transport:
            job = job_of(order, transport, self._subscriptions)
            job.run(
                version.side,
                NoSide(),
                check=lambda: None,
                verify=self._verify(order),
                delta=order.delta,
                changed=version.changed,
            )
            if order.base is not None:
                told = "shardwise: sent a delta of %s bytes instead of %s to subscriber %s"
                log.info(told, *job.traffic, order.subscriber)

    def _verify(self, order: Order) -> bool:
        return self._subscriptions.subscription(order.subscription).verify

    def _check(self, order: Order) -> Callable[[], None]:
        """The first rank looks whether the subscriber lives; it tells the others through the group."""
        if self._row:
            return lambda: None
        beats = [self._paths.beat(order.subscriber, row) for row in range(order.subscriber_rows)]
        return lambda: self._watch.check(beats, self._patience, f"subscriber {order.subscriber}")

    def _check_open(self) -> None:
        if self._stopped.is_set():
            raise ExchangeError(CLOSED)

    def _admit(self, order: Order) -> list[str]:
        """Let the subscriber in once each of its ranks has shown that it knows the secret; their addresses."""
        path, addresses = self._paths.pull(order.id), list[str]()
        if self._row != 0 and not order.mapped:
            wait_until_admitted(self._meeting, path, order, self._patience, self._check_open)
            return []
        for row in range(order.subscriber_rows):
            answer: Any = self._meeting.wait(f"{path}/answer/{row}", self._patience, self._check_open)
            if (answer["challenge"], answer["row"]) != (order.challenge, row):
                raise ExchangeError(f"rank {row} of the subscriber answered another challenge than that of this pull")
            addresses.append(answer["address"])
        if self._row == 0:
            self._meeting.put(f"{path}/admitted", {"order": order.id, "why": None})
        return addresses


def answer_challenge(meeting: MeetingPoint, path: str, row: int, order: Order) -> None:
    """Show that this rank knows the secret: only who does can sign an entry."""
    address = address_of_this_process() if order.mapped else ""
    meeting.put(f"{path}/answer/{row}", {"challenge": order.challenge, "row": row, "address": address})


def wait_until_admitted(
    meeting: MeetingPoint, path: str, order: Order, patience: float, check: Callable[[], None]
) -> None:
    """Until the server lets all ranks in; raises if the pull was cancelled, or if `check` does."""
    told: Any = meeting.wait(f"{path}/admitted", 2 * patience, check)
    if told.get("order") != order.id or told.get("why") is not None:
        raise ExchangeError(f"the pull was cancelled: {told.get('why')}")
