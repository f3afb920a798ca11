"""subscribe: pull the newest version of a model's weights from a job that was started separately."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedTypeError, RefusedValueError
from shardwise.exchange.buffers import on_the_cpu
from shardwise.exchange.overflow import Losses, Overflow, check_overflow, refuse_loss
from shardwise.job.agree import Callers
from shardwise.job.casts import Cast, TargetCasts
from shardwise.job.mapped import MappedJob
from shardwise.job.names import Rename, some
from shardwise.job.plan import ModelPlan
from shardwise.job.side import LiveSide
from shardwise.job.zeros import zeros_infos, zeros_memory
from shardwise.publishing.catalog import Subscription, checked, infos_from_json, relabelled
from shardwise.publishing.client import Client, Grant, LostError, Profile
from shardwise.publishing.local_job import describe_job
from shardwise.publishing.mapping import MappedVersion, address_of_this_process, receive_memory
from shardwise.publishing.meeting import At, MeetingLostError
from shardwise.publishing.news import NewVersions
from shardwise.publishing.orders import Claim, Order, Version, check_number
from shardwise.publishing.pair import join
from shardwise.publishing.presence import Beat, EverySecond, Watch
from shardwise.publishing.sealing import Key
from shardwise.publishing.serving import (
    ReadVersion,
    Server,
    Subscriptions,
    answer_challenge,
    job_of,
    wait_until_admitted,
)
from shardwise.publishing.target import PullTarget
from shardwise.quantized.moves import Rule, split_rules
from shardwise.state.sync_plan import coded_links_between
from shardwise.state.traverse import StateDict

log = logging.getLogger("shardwise")
OPERATION = "subscribe"
TRIES = 5  # of a pull whose server was lost, while the publisher lives
TORN = "The weights may be a mixture of versions"


def subscribe(
    into: StateDict,
    at: At,
    name: str,
    *,
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    cast: bool | Cast = False,
    overflow: Overflow = "refuse",
    strict: bool = True,
    max_bytes: int | None = None,
    verify: bool = False,
    atomic: bool = True,
    key: Key = None,
    patience: float = 10.0,
    timeout: float = 300.0,
    on_commit: Callable[[int], object] | None = None,
) -> Subscriber:
    """Pull the weights of a published model into the tensors of a state dict. Every rank of the group calls.

    The job may be started before or after the publisher, and have any number of ranks; a single process needs no
    process group. `at`, `name`, `key`: as given to `publish`. `rename`, `remap`, `cast`, `overflow`, `strict` and
    `max_bytes`: as in `Resharder`. `verify`: compare fingerprints of both sides before a version is taken over.
    `atomic=False`: receive into the tensors themselves, without a copy aside; if a pull fails, they are a mixture of
    versions, and the error says so. `patience`: seconds without a sign of life after which a job counts as gone.
    `timeout`: how long to wait for a publisher to appear. `on_commit`: called with the number of each new version, in a
    thread of its own that looks once a second, for the first time a second after the subscriber was made.
    """
    return Subscriber(
        into, at, name, group=group, rename=rename, remap=remap, cast=cast, overflow=overflow, strict=strict,
        max_bytes=max_bytes, verify=verify, atomic=atomic, key=key, patience=patience, timeout=timeout,
        on_commit=on_commit,
    )  # fmt: skip


class Subscriber:
    """Pulls versions of a model's weights. Made by `subscribe`, on every rank of the job.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        into: StateDict,
        at: At,
        name: str,
        *,
        group: dist.ProcessGroup | None,
        rename: Rename,
        remap: Iterable[Rule],
        cast: bool | Cast,
        overflow: Overflow,
        strict: bool,
        max_bytes: int | None,
        verify: bool,
        atomic: bool,
        key: Key,
        patience: float,
        timeout: float,
        on_commit: Callable[[int], object] | None,
    ) -> None:
        self.name, self._patience, self._atomic = name, patience, atomic
        self._callers = callers = Callers(OPERATION, group)
        self._row, rules = callers.owners.index(callers.me), split_rules(remap)

        same = {"cast": str(cast), "overflow": overflow, "strict": strict, "max_bytes": max_bytes, "verify": verify}
        same |= {"atomic": atomic, "quantized": str(rules[0])}

        def check() -> None:
            check_overflow(overflow)
            _check_options(timeout, on_commit)

        job = describe_job(callers, into, at, name, key, patience, side="target", check=check, same=same)
        self._meeting, self._paths = job.meeting, job.paths
        party = callers.by_first(lambda: secrets.token_hex(8))
        self._client, self._watch = Client(self._meeting, self._paths, party, patience), Watch(self._meeting)
        end = time.monotonic() + timeout
        claim, catalog = self._find(timeout, end)
        self._publisher, sources, self._losses = claim.token, infos_from_json(catalog), Losses()

        def make() -> tuple[Subscription, str]:
            coded, _, targets = coded_links_between(
                (sources, job.infos), rename, rules, TargetCasts.of(cast), strict=strict
            )
            if coded.quantized:
                raise RefusedValueError(
                    f"{next(iter(coded.quantized))!r} would have to be quantized during a pull, which is not "
                    f"supported: publish codes and scales, or pull the values and quantize them afterwards"
                )
            counted = self._losses if overflow == "refuse" else None
            buffers = coded.computed.buffers(job.values, callers.me, group, counted)
            self._may_lose = coded.computed.may_lose
            side = LiveSide({**job.values, **buffers}, [*targets, *coded.computed.names])
            self._target = PullTarget(side, job.infos, targets, coded.links, callers.me)
            self._target.check()
            plain = relabelled(targets, callers.owners)
            kinds = Subscription.kinds(coded.links, sources)
            subscription = Subscription(plain, tuple(coded.links), overflow, max_bytes, verify, kinds)
            return subscription, subscription.digest

        subscription = self._agree_on(make)
        self._subscriptions = Subscriptions(self._meeting, self._paths, sources)
        partial_sums = any(info.layout.op for info in (*sources.values(), *self._target.infos.values()))
        self._profile = Profile(subscription, len(callers.owners), job.host, maps=not verify and not partial_sums)
        self._map_failures = 0  # since the last version
        self._last_mapped: MappedJob | None = None
        self._process, self._pulling = os.getpid(), Lock()  # threads pull one after the other
        self._current: Version | None = None
        self._torn: str | None = None  # why the weights are of no version
        self._touched = set[str]()  # tensors that pulls in place may have written since the last whole version
        self._closed = False
        self._threads = list[EverySecond]()
        self._server: Server | None = None
        try:
            self._start(end)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)
        if on_commit is not None:  # last: it may use this subscriber
            self._threads.append(NewVersions(self._client, on_commit))

    def _find(self, timeout: float, end: float) -> tuple[Claim, object]:
        """Wait for a publisher, in pieces: the timeout of the group may be shorter."""
        transport = self._callers.transport
        piece = float("inf") if transport is None else transport.seconds / 3
        while True:
            found = self._callers.by_first(lambda: self._client.find(timeout, end, piece))
            if found is not None:
                return found

    def _agree_on(self, make: Callable[[], tuple[Subscription, str]]) -> Subscription:
        """What all ranks want; the publisher hears of it if one cannot have it."""
        try:
            subscription, digests = self._callers.tell(make)
        except Exception as error:
            if self._callers.first:
                self._client.refuse(str(error))
            raise
        with self._callers.refusals():
            if len(set(digests.values())) > 1:
                raise ValueError("the ranks give different rename=, remap= or cast=: give the same on all ranks")
        return subscription

    def _start(self, end: float) -> None:
        """Start to give signs of life and to serve, then register, until `end`."""
        party, client = self._client.party, self._client
        self._threads.append(Beat(self._meeting, self._paths.beat(party, self._row), address_of_this_process()))
        if self._profile.host is not None and self._atomic:
            self._server = Server(
                self._meeting, self._paths, party, self._row, self._subscriptions, self._reading,
                patience=self._patience,
            )  # fmt: skip
        self._callers.by_first(lambda: client.register_until(end, self._profile))
        if self._callers.first:
            restore = partial(client.restore_subscription, self._profile.subscription)
            self._threads.append(EverySecond(restore, "shardwise restore"))

    def __repr__(self) -> str:
        return f"Subscriber({self.name!r}, version={'unknown' if self._torn else self.version})"

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first. Raises if a pull failed halfway."""
        if self._torn is not None:
            raise ExchangeError(f"the weights are of no version: {self._torn}. Pull again to repair them")
        return None if self._current is None else self._current[1]

    # --- versions ----------------------------------------------------------------------------------------------------

    def wait(self, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Wait for a version that is newer than the given one, by default than the weights. A rank may call it alone.

        Returns its number. Raises a TimeoutError if none comes in time.
        """
        if self._closed:
            raise ExchangeError("this subscriber is closed")
        if newer_than is not None:
            check_number(newer_than)
        if timeout is not None:
            _check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with suppress(MeetingLostError):
                newest = self._client.newest()
                if newest is not None and self._is_newer(*newest, newer_than):
                    return newest[1][1]
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"no newer version of {self.name!r} within {timeout:g} s{self._client.why_none()}")
            time.sleep(0.02)

    def _is_newer(self, publisher: str, newest: Version, than: int | None) -> bool:
        if than is not None:
            return newest[1] > than
        if self._current is None or newest > self._current:
            return True
        # a restarted publisher learns from the next pull that it is a later one
        return publisher != self._publisher and newest[0] >= self._current[0]

    def pull(self, version: int | None = None) -> int | None:
        """Write the newest version, or the given one, to the weights of all ranks of this job. Every rank calls.

        Returns the version of the weights; None if none was committed yet. Does nothing if no version is newer. If it
        fails, all ranks raise, and the weights stay as they were (except with `atomic=False`, see `subscribe`).
        """
        with self._pulling, torch.no_grad(), on_the_cpu():
            for left in reversed(range(TRIES)):
                order = self._order(version)
                if order is None:
                    return self.version
                try:
                    self._take_over(order, self._mapped(order) if order.mapped else self._received(order))
                except LostError:
                    if not left:
                        raise
                    log.info("shardwise: pulls %s again: its server was lost", self.name)
                    continue
                return self.version
        raise AssertionError("the last try returns or raises")

    def _order(self, version: int | None) -> Order | None:
        """What to pull, and from whom: the same on all ranks. None if there is nothing newer."""

        def ask() -> Grant | None:
            if version is not None:
                check_number(version)
            have, base = (self._current, self._target.version_aside) if self._torn is None else (None, None)
            return self._client.request(version, self._profile, have=have, base=base)

        self._callers.all_do(self._check, version=version)
        grant = self._callers.by_first(ask)
        if grant is None:
            return None
        if grant.tainted:
            self._target.abandon_aside()
        if grant.publisher != self._publisher:  # all ranks plan
            self._callers.all_do(lambda: self._read_catalog(grant.publisher))
            self._publisher = grant.publisher
        return grant.order

    def _check(self) -> None:
        if self._closed:
            raise ExchangeError("this subscriber is closed")
        if self._process != os.getpid():
            raise ExchangeError("this subscriber is of the process that this one was forked from: pull there")
        self._target.check()

    def _read_catalog(self, token: str) -> None:
        """A publisher that was restarted may have other layouts."""
        entry = checked(self._meeting.get(self._paths.catalog(token)), "the catalog of the publisher")
        self._subscriptions.replace_catalog(infos_from_json(entry))

    # --- a pull ------------------------------------------------------------------------------------------------------

    def _mapped(self, order: Order) -> Callable[[], None]:
        """Map a version of this host. It stays as it is, whoever dies: all ranks can copy it once all have it."""
        copies = list[Callable[[], None]]()

        def receive() -> None:
            self._answer(order)
            senders = {row: self._address(order.server, row) for row in range(order.server_rows)}
            pieces = receive_memory(senders, order.id, self._check_of(order), self._patience)
            plan, me = self._subscriptions.plan(order), order.server_rows + self._row
            zeros = zeros_memory(zeros_infos((one.link for one in plan.links), plan.targets), me)
            sources = MappedVersion(self._subscriptions.sources(order), pieces)
            here = lambda owner, name: [zeros[name]] if owner == me else sources(owner, name)  # noqa: E731
            job = self._mapped_job(plan, me)
            if self._profile.subscription.overflow == "refuse":
                job.refuse_losses(here)
            copies.append(partial(job.run, here))

        try:
            self._callers.all_do(lambda: self._say_why(order, receive))
        except Exception as failure:
            self._after_failure(order, failure)
            raise
        return copies[0]

    def _mapped_job(self, plan: ModelPlan, me: int) -> MappedJob:
        """The last one, if it is of this plan: it knows where everything lies."""
        if self._last_mapped is None or self._last_mapped.plan is not plan:
            keep = not self._target.side.deliveries()  # which get new memory in every pull
            self._last_mapped = MappedJob(plan, me, self._target.side, keep=keep)
        return self._last_mapped

    def _address(self, party: str, row: int) -> str:
        _, address = checked(
            self._meeting.get(self._paths.beat(party, row)), f"the address of rank {row} of the server"
        )
        return str(address)

    def _received(self, order: Order) -> Callable[[], None]:
        """Receive a version, aside or in place. All ranks have it when this returns."""
        before = self._torn, self._client.weights
        if not self._atomic:  # unless it is taken over
            self._tear(f"a pull of version {order.version[1]} was broken off. {TORN}")
        try:
            self._callers.all_do(lambda: self._say_why(order, lambda: self._receive(order)))
            self._target.received(order.version)
            valid = self._callers.by_first(lambda: self._client.confirm(order, holds=self._serves_aside))
        except Exception as failure:
            self._after_failure(order, failure, before)
            raise
        if not valid:
            self._target.version_aside = None
            raise LostError("the publisher has cancelled the pull: this job gave no sign of life for too long")
        return self._target.copy_aside

    @property
    def _serves_aside(self) -> bool:
        partial_sums = any(info.layout.op for info in self._target.infos.values())  # of which others can copy nothing
        return self._target.version_aside is not None and self._server is not None and not partial_sums

    def _say_why(self, order: Order, receive: Callable[[], None]) -> None:
        """Ranks and groups of a pull mean nothing to users: say what was broken off, and what the weights are."""
        try:
            receive()
        except ExchangeError as error:
            if isinstance(error, RefusedValueError | RefusedTypeError):
                raise
            what = f"the pull of version {order.version[1]} of {self.name!r}"
            weights = f". {self._client.weights}" if self._atomic else ""  # in place, not before all ranks have told
            raise ExchangeError(f"{what} was broken off: {error}{weights}") from error

    def _receive(self, order: Order) -> None:
        target = self._target.memory_to_receive(aside=self._atomic)
        self._answer(order)
        row, path = order.server_rows + self._row, self._paths.pull(order.id)
        with join(self._meeting, path, row, order, self._check_of(order), self._patience) as transport:
            job = job_of(order, transport, self._subscriptions)
            zeros = zeros_memory(zeros_infos((one.link for one in job.plan.links), job.plan.targets), row)
            source, verify = LiveSide(zeros, job.plan.sources), self._profile.subscription.verify
            try:
                job.run(source, target, check=lambda: None, fresh=self._atomic, verify=verify, delta=order.delta)
            finally:
                self._touched.update(() if self._atomic else job.touched)

    def _answer(self, order: Order) -> None:
        path = self._paths.pull(order.id)
        answer_challenge(self._meeting, path, self._row, order)
        wait_until_admitted(self._meeting, path, order, self._patience, self._check_server(order))

    def _check_server(self, order: Order) -> Callable[[], None]:
        """Raise if the server is gone. Only the first rank looks; the others hear of it."""
        beats = [self._paths.beat(order.server, row) for row in range(order.server_rows if self._row == 0 else 0)]
        return lambda: self._watch.check(beats, self._patience, f"the server of {self.name!r}")

    def _check_of(self, order: Order) -> Callable[[], None]:
        """Raise if the pull was cancelled, or the server is gone."""
        path, check_server = self._paths.pull(order.id), self._check_server(order)

        def check() -> None:
            wait_until_admitted(self._meeting, path, order, self._patience, check_server)
            check_server()

        return check

    def _after_failure(self, order: Order, failure: Exception, before: tuple[str | None, str] | None = None) -> None:
        """On all ranks: tell the publisher; pull again if only the job that passes the version on was lost.

        `before`: why the weights were of no version, and what they were, before they were received in place.
        """
        why, lives = str(failure), self._tell_failure(order, str(failure))
        if before is not None and not self._touched:
            self._torn, self._client.weights = before
        elif before is not None:
            self._name_touched(order)
        said = why if self._atomic else f"{why}. {self._client.weights}"
        refused = isinstance(failure, RefusedValueError | RefusedTypeError)
        if self._torn is not None:
            failure.add_note(self._torn)
        elif lives and (order.source is not None or order.mapped) and not refused:
            if self._map_failures:  # the next time it is sent: it could not be mapped twice
                self._profile = replace(self._profile, maps=False)
            self._map_failures += order.mapped
            self._client.forget_registration()
            raise LostError(said) from failure
        if not (self._atomic or refused):
            raise ExchangeError(said) from failure

    def _tell_failure(self, order: Order, why: str) -> bool:
        """The publisher why, and the other ranks which tensors this one has touched. True if the publisher lives."""
        say = lambda: (None, (self._callers.first and self._client.give_up(order, why), self._touched))  # noqa: E731
        told = self._callers.tell(say)[1].values()
        self._touched = {name for _, touched in told for name in touched}
        return any(lives for lives, _ in told)

    def _name_touched(self, order: Order) -> None:
        names = [name for name in self._target.infos if name in self._touched]
        which = f"{len(names)} of {len(self._target.infos)} tensors may be written ({some(names)})"
        self._tear(f"a pull of version {order.version[1]} was broken off, and {which}", f"{TORN}: {which}")

    def _tear(self, why: str, weights: str = TORN) -> None:
        """From now on the weights are of no version, until one is taken over."""
        self._torn, self._client.weights = why, f"{weights}: pull again"

    def _take_over(self, order: Order, copy: Callable[[], None]) -> None:
        """All ranks have the whole version: one copy on each makes it that of the weights."""
        self._losses.clear()
        try:
            self._callers.all_do(copy)
            if self._may_lose:
                self._callers.all_do(lambda: refuse_loss(self._losses.per_tensor(), "All tensors were written"))
        except BaseException:
            self._tear(f"version {order.version[1]} was not taken over by all ranks")
            raise
        self._current, self._torn, self._map_failures = order.version, None, 0
        self._touched.clear()
        self._client.took_over(order.version)
        if order.mapped and self._callers.first:  # it was not written meanwhile, even if this job was given up
            with suppress(ExchangeError):
                self._client.confirm(order, holds=False)

    # --- beside pulls ------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, order: Order) -> Iterator[ReadVersion]:
        """Another job of this host reads what arrived here."""
        yield ReadVersion(self._target.wait_for_aside(order.version, self._patience))

    def close(self) -> None:
        """End the subscription. The weights do not change. A rank may call it alone."""
        if self._closed or self._process != os.getpid():  # a forked process would end its parent's
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._server is not None:
            self._server.stop()
        for thread in self._threads:
            thread.stop()
        if self._callers.first:
            self._client.leave()
        self._meeting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_timeout(timeout: object) -> None:
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise RefusedValueError(f"timeout={timeout!r}: give seconds, 0 or more")


def _check_options(timeout: object, on_commit: object) -> None:
    _check_timeout(timeout)
    if on_commit is not None and not callable(on_commit):
        raise RefusedTypeError(f"on_commit= is called with a version: give a function, not {on_commit!r}")
