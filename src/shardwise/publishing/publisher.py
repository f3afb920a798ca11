"""publish: versions of a model's weights, for jobs that were started separately."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import Exchange, Proposal
from shardwise.exchange.messages import Tensors
from shardwise.job.agree import Callers
from shardwise.job.deltas import Changed
from shardwise.job.plan import TensorInfo
from shardwise.job.side import LiveSide, Side, check_side
from shardwise.job.snapshot import Snapshot
from shardwise.publishing.catalog import infos_to_json, relabelled
from shardwise.publishing.dispatcher import Dispatcher
from shardwise.publishing.local_job import describe_job
from shardwise.publishing.mailbox import MailboxThread
from shardwise.publishing.mapping import address_of_this_process
from shardwise.publishing.meeting import At, MeetingLostError
from shardwise.publishing.orders import Claim, Order, check_number
from shardwise.publishing.pair import BACKENDS
from shardwise.publishing.presence import BEAT, Beat, EverySecond, Watch
from shardwise.publishing.sealing import Key
from shardwise.publishing.serving import ReadVersion, Server, Subscriptions
from shardwise.publishing.versions import HeldVersion, HeldVersions
from shardwise.state.traverse import StateDict

log = logging.getLogger("shardwise")
OPERATION = "publish"


def publish(
    state_dict: StateDict,
    at: At,
    name: str,
    *,
    group: dist.ProcessGroup | None = None,
    key: Key = None,
    keep: int | None = None,
    delta: bool = False,
    serving: int = 4,
    patience: float = 10.0,
    backend: Literal["gloo", "nccl"] = "gloo",
    warm: bool = True,
) -> Publisher:
    """Offer the weights of a model to jobs that were started separately. Every rank of the group calls.

    `at`: where the jobs meet, "host:port", or the path of a file for jobs of one host. The first rank opens the meeting
    point there, unless a process listens already (`shardwise hub`, which outlives both sides). `name`: what subscribers
    ask for; a second live publisher is refused. `key`: a secret that all jobs know, or a `Path` of a file with it;
    needed where other hosts can reach the meeting point. `keep`: versions that stay available, by default 1, or 2
    with `delta`; a version that is being read stays, too. `delta`: a subscriber on another host whose last version is
    still available is sent only the elements that changed since, bit-for-bit. `serving`: how many subscribers pull at a
    time; others wait. `patience`: seconds without a sign of life after which a job counts as gone. `backend`: what
    versions are sent over between hosts; "nccl" keeps device memory on the device, is untested, and may deadlock beside
    collectives of the training. `warm=False`: do not allocate memory now.

    Memory: `keep` + 1 copies of this rank's tensors, none of them with `commit(..., copy=False)` and `warm=False`; with
    `delta` one more byte for each element. While the meeting point is away, up to `keep` + `serving` copies.

    >>> import tempfile, torch
    >>> import shardwise as sw
    >>> at, trained, served = f"{tempfile.mkdtemp()}/meeting", {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    >>> with sw.publish(trained, at, "policy") as publisher, sw.subscribe(served, at, "policy") as subscriber:
    ...     publisher.commit(17)
    ...     subscriber.pull(), served["w"].tolist()
    (17, [1.0, 1.0])
    """
    return Publisher(
        state_dict,
        at,
        name,
        group=group,
        key=key,
        keep=(2 if delta else 1) if keep is None else keep,
        delta=delta,
        serving=serving,
        patience=patience,
        backend=backend,
        warm=warm,
    )


class Publisher:
    """Publishes versions of a model's weights. Made by `publish`, on every rank of the publishing job.

    A thread of every rank serves pulls while the job computes. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        state_dict: StateDict,
        at: At,
        name: str,
        *,
        group: dist.ProcessGroup | None,
        key: Key,
        keep: int,
        delta: bool,
        serving: int,
        patience: float,
        backend: str,
        warm: bool,
    ) -> None:
        self.name, self._patience, self._backend, self._delta = name, patience, backend, delta
        self._callers = callers = Callers(OPERATION, group)
        self._row, self._process = callers.owners.index(callers.me), os.getpid()

        same = {"keep": keep, "delta": delta, "serving": serving, "patience": patience, "backend": backend}
        check = partial(_check_options, keep, delta, serving, backend)
        job = describe_job(callers, state_dict, at, name, key, patience, side="state dict", check=check, same=same)
        self._meeting, self._paths, infos = job.meeting, job.paths, job.infos
        self._host = job.host if all(info.device == "cpu" for info in infos.values()) else None
        self._infos, self._side = infos, LiveSide(job.values, infos)
        catalog = relabelled(infos, callers.owners)
        self._closed, self._replaced = False, False
        self._versions, self._last, self._live = HeldVersions(keep, keep + serving), None, None

        def check_memory() -> None:
            memory = self._checked_memory()
            if warm:
                self._versions.warm_up(memory)

        callers.all_do(check_memory)
        self._dispatcher: Dispatcher | None = None
        self._claim = Claim.of(callers.by_first(lambda: self._open(catalog).to_json()))
        if callers.first:
            self._dispatcher = Dispatcher(
                self._meeting, self._paths, self._claim, catalog, keep=keep, delta=delta, serving=serving
            )
        subscriptions = Subscriptions(self._meeting, self._paths, catalog)
        beat = self._paths.beat(self._claim.token, self._row)
        self._beat = Beat(self._meeting, beat, address_of_this_process())
        self._server = Server(
            self._meeting, self._paths, self._claim.token, self._row, subscriptions, self._reading,
            patience=patience, other=self._other,
        )  # fmt: skip
        self._first_rank_threads = list[MailboxThread | EverySecond]()
        if self._dispatcher is not None:
            mailbox = self._paths.requests(self._claim.token)
            self._first_rank_threads = [
                EverySecond(partial(self._tick, self._dispatcher), "shardwise claim"),
                MailboxThread(self._meeting, mailbox, self._dispatcher.handle, "shardwise requests"),
            ]
        atexit.register(self.close)

    _last: int | None
    _live: int | None  # the version that is not a copy

    def __repr__(self) -> str:
        return f"Publisher({self.name!r}, versions={self.versions})"

    # --- the meeting point -------------------------------------------------------------------------------------------

    def _open(self, catalog: Mapping[str, TensorInfo]) -> Claim:
        """The first rank: open or find the meeting point, and claim the name."""
        if self._meeting.hold():
            log.info("shardwise: opened the meeting point %s", self._meeting.address)
        token = secrets.token_hex(8)
        self._meeting.put(self._paths.catalog(token), infos_to_json(catalog))
        claim = Claim(token, 1, len(self._callers.owners), self._patience, self._host, self._backend)
        end, watch = time.monotonic() + 2 * self._patience, Watch(self._meeting)
        while True:
            before: Any = self._meeting.get(self._paths.publisher)
            if before is None and self._meeting.has(self._paths.publisher):
                raise RefusedValueError(
                    f"{self.name!r} at {self._meeting.address} was published with another key=: give that one, or "
                    f"another name="
                )
            if before is not None:
                other = Claim.of(before)
                claim = replace(claim, incarnation=other.incarnation + 1)
                if watch.still(self._paths.beat(other.token, 0)) <= self._patience:
                    self._refuse_second(other, watch, end)
                    continue
            if self._meeting.replace(self._paths.publisher, before, claim.to_json()):
                return claim

    def _refuse_second(self, other: Claim, watch: Watch, end: float) -> None:
        """A name is free once the counter of its publisher has stood still for `patience`."""
        path = self._paths.beat(other.token, 0)
        before = self._meeting.get(path)
        time.sleep(BEAT / 4)
        if self._meeting.get(path) != before or time.monotonic() > end:
            raise RefusedValueError(
                f"{self.name!r} at {self._meeting.address} already has a live publisher: close it first, or give "
                f"another name="
            )

    def _tick(self, dispatcher: Dispatcher) -> None:
        """Every second: keep the claim, also where the meeting point has lost it."""
        claim, entry = dispatcher.claim, self._meeting.get(self._paths.publisher)
        self._replaced = entry is not None and Claim.of(entry).token != claim.token
        if entry is None and self._claim_again(claim):
            self._meeting.put(
                self._paths.catalog(claim.token), infos_to_json(relabelled(self._infos, self._callers.owners))
            )
            dispatcher.rewrite()
        dispatcher.tick()

    def _claim_again(self, claim: Claim) -> bool:
        """Write the claim where there is none; or where somebody without the key has written, who does not count."""
        if self._meeting.replace(self._paths.publisher, None, claim.to_json()):
            return True
        if self._meeting.get(self._paths.publisher) is not None:
            return False
        self._meeting.put(self._paths.publisher, claim.to_json())
        return True

    # --- versions ----------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """The versions that subscribers can pull now. On the first rank; on others, those that they hold."""
        if self._closed:
            return []
        return self._versions.numbers if self._dispatcher is None else self._dispatcher.held

    @property
    def bytes(self) -> int:
        """Memory of the copies that this rank holds, and of what has changed between two of them (`delta`)."""
        return self._versions.bytes

    def commit(self, version: int, *, copy: bool = True) -> None:
        """Make the current weights a version. After it returns, they may be changed. Every rank calls.

        `copy=False`: nothing is copied, and the weights must not be changed until `drained` has returned.
        """
        self._drop_live()
        prepared: tuple[dict[str, Tensors], Side] | None = None
        error: Exception | None = None
        try:
            prepared = self._prepare(version, copy=copy)
        except Exception as failure:  # the other ranks have to hear of it
            error = failure
        finish = self._agree(version, copy, error)  # while the others answer, the weights are copied
        held: HeldVersion | None = None
        try:
            if prepared is not None:
                held = self._take(version, *prepared)
            finish()
        except BaseException:
            if prepared is not None:
                self._versions.drop(version)
            raise
        assert held is not None, "or all have raised"
        self._versions.finish(held)  # not before: the others may have refused it
        self._last, self._live = version, None if copy else version
        if self._dispatcher is not None:
            self._dispatcher.announce(version, mapped=copy)

    def _prepare(self, version: int, *, copy: bool) -> tuple[dict[str, Tensors], Side]:
        """Everything that can fail, before any rank has committed."""
        if self._closed:
            raise ExchangeError("this publisher is closed")
        if self._process != os.getpid():
            raise ExchangeError("this publisher is of the process that this one was forked from: it publishes there")
        check_number(version)
        if version < 0:
            raise ValueError(f"a version is a whole number, 0 or more, not {version}")
        if self._last is not None and version <= self._last:
            raise ValueError(f"version {version} does not follow version {self._last}: give a larger number")
        if self._replaced:
            raise ExchangeError(
                f"another publisher has taken the name {self.name!r}: this one gave no sign of life for longer than "
                f"its patience. Close it and publish again"
            )
        memory = self._checked_memory()
        return memory, self._versions.new_memory(memory) if copy else self._side

    def _checked_memory(self) -> dict[str, Tensors]:
        memory = self._side.lasting()
        check_side("state dict", memory, self._infos, self._callers.me)
        return memory

    def _agree(self, version: int, copy: bool, error: Exception | None) -> Callable[[], object]:
        """Start to agree with the other ranks. What it returns waits for them; it raises an error of any rank."""
        transport = self._callers.transport
        if transport is not None:
            fields = {"operation": "commit", "version": version, "copy": copy, "publisher": self._claim.token}
            exchange = Exchange(transport, Proposal(fields, error=error)).start()
            return lambda: transport.queue.run(exchange.finish)
        if error is not None:
            raise error
        return lambda: None

    def _take(self, version: int, memory: dict[str, Tensors], side: Side) -> HeldVersion:
        held = self._versions.begin(version, side)
        if isinstance(side, Snapshot):
            side.take(memory)
        return held

    def drained(self, timeout: float | None = None) -> None:
        """Wait until all pulls of a version that was committed with `copy=False` have ended. Every rank calls.

        Then the version cannot be pulled any more, and the weights may be changed.
        """
        live = self._live
        if live is None:
            return

        def withdraw() -> None:
            if self._dispatcher is None:
                return
            self._dispatcher.withdraw(live)
            end = None if timeout is None else time.monotonic() + timeout
            while not self._dispatcher.idle(live):
                if end is not None and time.monotonic() > end:
                    raise ExchangeError(f"version {live} is still being pulled after {timeout:g} s: call drained again")
                time.sleep(0.002)

        def release() -> None:
            self._versions.drop(live)
            if not self._versions.wait_unread(live, self._patience):
                raise ExchangeError(
                    f"version {live} is still being read after {self._patience:g} s: call drained again"
                )

        self._callers.by_first(withdraw)
        self._callers.all_do(release)
        self._live = None

    def _drop_live(self) -> None:
        if self._live is not None:
            self.drained()

    @contextmanager
    def _reading(self, order: Order) -> Iterator[ReadVersion]:
        with ExitStack() as stack:
            number = order.version[1]
            side = stack.enter_context(self._versions.reading(number, self._patience, mapped=order.mapped))
            changed: Changed | None = None
            if order.base is not None:
                base = stack.enter_context(self._versions.reading(order.base[1], self._patience))
                ends, sides = (order.base[1], number), (base, side)
                changed = lambda name, dtype: self._versions.changed(ends, name, dtype, sides)  # noqa: E731
            yield ReadVersion(side, changed)

    def _other(self, message: dict[str, Any]) -> None:
        if message.get("kind") == "hold":
            held = message["held"]
            self._versions.hold(held, message["newest"], message["tainted"])
            if self._delta and len(held) > 1:
                self._versions.compare_ahead((held[-2], held[-1]))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop publishing: subscribers keep what they have. A rank may call it alone."""
        if self._closed or self._process != os.getpid():  # a forked process would end its parent's
            return
        self._closed = True
        atexit.unregister(self.close)
        self._server.stop()
        self._beat.stop()
        for thread in self._first_rank_threads:
            thread.stop()
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._wait_for_other_ranks()
            with suppress(MeetingLostError):
                if Claim.at(self._meeting, self._paths) == self._dispatcher.claim:
                    self._meeting.delete(self._paths.publisher)
                    self._meeting.delete(self._paths.versions)
                self._meeting.delete(self._paths.catalog(self._claim.token))
        self._versions.close()
        self._meeting.close()

    def _wait_for_other_ranks(self) -> None:
        """torch prints a page of text on a rank that still waits when the meeting point closes."""
        end, others = time.monotonic() + 2 * BEAT, range(1, len(self._callers.owners))
        beats = [self._paths.beat(self._claim.token, row) for row in others]
        with suppress(MeetingLostError):
            while any(self._meeting.get(beat) is not None for beat in beats) and time.monotonic() < end:
                time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_options(keep: object, delta: object, serving: object, backend: object) -> None:
    if backend not in BACKENDS:
        raise RefusedValueError(f"backend={backend!r}: give one of {', '.join(BACKENDS)}")
    for name, value in (("keep", keep), ("serving", serving)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedValueError(f"{name}={value!r}: give a whole number, 1 or more")
    if not isinstance(delta, bool):
        raise RefusedValueError(f"delta={delta!r}: give True or False")
    if delta and keep == 1:
        raise RefusedValueError(
            "keep=1 with delta=True: a delta needs the version before. Give keep=2 or more, or leave it out"
        )
