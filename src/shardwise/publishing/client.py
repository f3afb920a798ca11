"""What a subscriber says to its publisher at the meeting point: what it wants, what to pull next, what has arrived."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.publishing.catalog import Subscription
from shardwise.publishing.meeting import SHORTEST, MeetingLostError, MeetingPoint
from shardwise.publishing.orders import Claim, Order, Paths, Version
from shardwise.publishing.presence import BEAT, Watch

log = logging.getLogger("shardwise")
TRIES = 5  # to tell what is wanted
LONGEST = 500  # characters of an error that is told to the publisher


class LostError(ExchangeError):
    """The job that should serve a pull is gone, or another one has taken its place."""


@dataclass(frozen=True)
class Profile:
    """What a publisher has to know of a subscriber: what it wants, how many ranks it has, and their host if it is one.

    `maps`: it can map the memory of a server on that host.
    """

    subscription: Subscription
    rows: int
    host: str | None
    maps: bool


class Grant(NamedTuple):
    """A pull that the publisher allows. `tainted`: a job that was lost may still read what arrived here last."""

    order: Order
    publisher: str
    tainted: bool


class Client:
    """One job's side of the conversation. Its first rank speaks; all ranks look for versions.

    `party`: the name of this job at the meeting point. `version`: the last one it took over. `weights`: what they
    are, as errors say it.
    """

    def __init__(self, meeting: MeetingPoint, paths: Paths, party: str, patience: float) -> None:
        self.party, self.version, self.weights = party, None, "No version was pulled yet"
        self._meeting, self._paths, self._patience = meeting, paths, patience
        self._watch, self._numbers = Watch(meeting), count()
        self._claim: Claim | None = None  # of the publisher that answered last
        self._registered = ""  # the publisher that knows this job
        self._version_from = ""  # the publisher of `version`
        self._readers_unknown = False  # a publisher that did not know this job cannot say who reads from it

    version: Version | None

    # --- the publisher -----------------------------------------------------------------------------------------------

    def find(self, timeout: float, end: float, piece: float) -> tuple[Claim, object] | None:
        """Wait for a publisher until `end`: its claim and its catalog. None if it has not come within a `piece`."""
        start, why = time.monotonic(), ""
        while True:
            try:
                claim = Claim.at(self._meeting, self._paths)
                entry = claim and self._meeting.get(self._paths.catalog(claim.token))
                if claim is not None and entry is not None:
                    self._claim = claim
                    return claim, entry
                why = "nobody publishes under that name there, or with another key="
            except MeetingLostError as error:
                why = str(error)
            if time.monotonic() > end:
                raise ExchangeError(f"no publisher of {self._paths.name!r} within {timeout:g} s: {why}")
            if time.monotonic() > start + piece:
                return None
            time.sleep(0.05)

    def newest(self) -> tuple[str, Version] | None:
        """The newest version, and its publisher."""
        told: Any = self._meeting.get(self._paths.versions)
        return (told["token"], (told["incarnation"], told["held"][-1])) if told and told["held"] else None

    def why_none(self) -> str:
        """Why no version comes, if that can be seen."""
        try:
            away = Claim.at(self._meeting, self._paths) is None
        except MeetingLostError as error:
            return f": {error}"
        return ": it has no publisher now" if away else ""

    def _check_alive(self, claim: Claim) -> None:
        if self._watch.still(self._paths.beat(claim.token, 0)) > self._patience:
            raise ExchangeError(
                f"the publisher of {self._paths.name!r} at {self._meeting.address} gave no sign of life for "
                f"{self._patience:g} s. {self.weights}"
            )

    def _publisher_now(self, end: float) -> Claim:
        """The claim of the name; waits until `end` for a publisher that is being restarted."""
        while True:
            claim = Claim.at(self._meeting, self._paths)
            if claim is not None:
                self._check_alive(claim)
                return claim
            if time.monotonic() > end:
                name, address = self._paths.name, self._meeting.address
                raise ExchangeError(f"{name!r} has no publisher at {address} now. {self.weights}")
            time.sleep(0.05)

    # --- questions ---------------------------------------------------------------------------------------------------

    def _ask(self, claim: Claim, **message: object) -> dict[str, Any]:
        """Send a message to the publisher, and wait for its answer as long as it lives."""
        reply, question = self._paths.reply(self.party), next(self._numbers)
        self._tell(claim, **message, reply=reply, question=question)
        pause, looked = SHORTEST, time.monotonic()
        while True:
            answer: Any = self._meeting.take(reply)
            if answer is not None and answer["question"] == question:
                return _checked(answer)
            if answer is not None:  # to an earlier question, for which nobody waits any more
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            if time.monotonic() > looked + BEAT / 2:
                looked = time.monotonic()
                now = Claim.at(self._meeting, self._paths)
                if now is not None and now.token != claim.token:
                    raise LostError(f"the publisher of {self._paths.name!r} was replaced by another")
                self._check_alive(claim)

    def _tell(self, claim: Claim, **message: object) -> None:
        self._meeting.post(self._paths.requests(claim.token), {"from": self.party, **message})

    def register(self, profile: Profile, claim: Claim | None = None) -> None:
        """Tell a publisher what this job wants; by default the one that was found."""
        claim = claim or self._claim
        assert claim is not None, "found before"
        for _ in range(TRIES):
            self._meeting.put(self._paths.subscription(profile.subscription.digest), profile.subscription.to_json())
            answer = self._ask(
                claim, kind="subscribe", rows=profile.rows, host=profile.host, maps=profile.maps, seen=self.version,
                subscription=profile.subscription.digest, values=profile.subscription.values, token=self._version_from,
            )  # fmt: skip
            if answer["kind"] != "absent":  # removed with the last job that wanted the same
                break
        if answer["kind"] != "accepted":
            raise RefusedValueError(f"the publisher of {self._paths.name!r} refuses this job: {answer.get('why')}")
        self._registered = claim.token

    def register_until(self, end: float, profile: Profile) -> None:
        """With the publisher that was found, or with the one that takes its place if it does not live."""
        while True:
            try:
                self.register(profile)
                return
            except ExchangeError as error:
                if isinstance(error, RefusedValueError) or time.monotonic() > end:
                    raise
            time.sleep(0.05)
            with suppress(MeetingLostError):
                self._claim = Claim.at(self._meeting, self._paths) or self._claim

    def took_over(self, version: Version) -> None:
        """The weights are of this version now, of the publisher that answered last."""
        self.version, self._version_from = version, self._claim.token if self._claim else ""
        self.weights = f"The weights are still of version {version[1]}"

    def restore_subscription(self, subscription: Subscription) -> None:
        """Write again what this job wants, if the meeting point has lost it."""
        path = self._paths.subscription(subscription.digest)
        if not self._meeting.has(path):
            self._meeting.put(path, subscription.to_json())

    def forget_registration(self) -> None:
        """Register again before the next pull."""
        self._registered = ""

    def request(
        self, version: int | None, profile: Profile, *, have: Version | None, base: Version | None
    ) -> Grant | None:
        """Ask for a version, or the newest; None if `have` is that. `base`: what a delta could build on."""
        end = time.monotonic() + self._patience
        while True:
            try:
                claim = self._publisher_now(end)
                if claim.token != self._registered:
                    self.register(profile, claim)  # it must publish the same tensors
                    self._readers_unknown = True
                safe_base = None if self._readers_unknown else base
                answer = self._ask(claim, kind="pull", version=version, have=have, base=safe_base)
            except (MeetingLostError, LostError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
                continue
            if answer["kind"] == "unknown":  # it had dropped this job
                self._registered = ""
                continue
            return self._granted(claim, version, answer)

    def _granted(self, claim: Claim, version: int | None, answer: dict[str, Any]) -> Grant | None:
        if answer["kind"] == "gone":
            there = ", ".join(map(str, answer["held"])) or "none yet"
            raise RefusedValueError(f"version {version} cannot be pulled. The publisher offers {there}")
        self._claim = claim
        if answer["kind"] != "go":
            return None
        tainted, self._readers_unknown = self._readers_unknown or answer["tainted"], False
        return Grant(Order.of(answer["order"]), claim.token, tainted)

    # --- news --------------------------------------------------------------------------------------------------------

    def confirm(self, order: Order, *, holds: bool) -> bool:
        """Tell that a version has arrived. True if it was held until then: so nothing of it was overwritten meanwhile.

        `holds`: other jobs of this host can pull it from here.
        """
        assert self._claim is not None, "which has ordered it"
        return bool(self._ask(self._claim, kind="received", order=order.id, holds=holds)["kind"] == "valid")

    def give_up(self, order: Order, why: str) -> bool:
        """Tell that a pull failed. True if the publisher lives."""
        assert self._claim is not None, "which has ordered it"
        try:
            self._check_alive(self._claim)
            self._tell(self._claim, kind="failed", order=order.id, why=why[:LONGEST])
        except ExchangeError:
            return False
        return True

    def refuse(self, why: str) -> None:
        """Tell why this job does not subscribe, for the log of the publisher."""
        if self._claim is not None:
            with suppress(MeetingLostError):
                message = {"kind": "refused", "from": f"on {socket.gethostname()}", "why": why[:LONGEST]}
                self._meeting.post(self._paths.requests(self._claim.token), message)

    def leave(self) -> None:
        """Tell that this job needs no more versions."""
        if self._claim is not None:
            with suppress(MeetingLostError):
                requests = self._paths.requests(self._registered or self._claim.token)
                self._meeting.post(requests, {"kind": "leave", "from": self.party})


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["kind"] == "error":
        raise ExchangeError(f"the publisher could not handle a request: {answer['why']}. See its log")
    return answer
