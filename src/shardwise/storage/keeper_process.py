"""A process that keeps steps of a run in memory: `python keeper_process.py LISTENER ADDRESS LEASE`.

It imports only the standard library, and outlives the process that started it. LISTENER is the descriptor of a socket
that listens at ADDRESS. A request is a packet of JSON with descriptors of memory, and so is the answer. Processes of
the run stay connected. The keeper ends when one of them says so, or when none has been connected for LEASE seconds. Its
memory has no name: it ends with its last user.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

MAX_PACKET, MAX_FILES, MAX_HELD = 2**17, 250, 2**10
IGNORED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # sent to all processes of a job, which this one outlives


class Held(NamedTuple):
    """Files of a step in memory, by name: descriptor and size. `step` says what else is known of it."""

    step: Mapping[str, object]
    files: Mapping[str, tuple[int, int]]

    def close(self) -> None:
        """Forget the memory."""
        for file, _ in self.files.values():
            os.close(file)


class Keeper:
    """Answers requests. `held`: by the token of the save."""

    def __init__(self) -> None:
        self.held, self.ending = dict[str, Held](), False

    def answer(self, packet: bytes, files: list[int]) -> tuple[dict[str, object], list[int]]:
        """To a request, with the descriptors that go along."""
        requests: dict[str, Callable[..., tuple[dict[str, object], list[int]]]] = {
            "hold": self._hold,
            "retain": self._retain,
            "list": self._list,
            "fetch": self._fetch,
            "end": self._end,
        }
        try:
            request = json.loads(packet)
            return requests[request.pop("do")](files=files, **request)
        except Exception as error:
            for file in files:
                os.close(file)
            return {"error": f"{type(error).__name__}: {error}"}, []

    def _hold(
        self, files: list[int], token: str, step: dict[str, object], names: dict[str, int]
    ) -> tuple[dict[str, object], list[int]]:
        """Keep the memory of these files, which have these sizes."""
        if len(files) != len(names) or len(self.held) >= MAX_HELD:
            raise ValueError(f"{len(names)} files came with {len(files)} descriptors")
        if token in self.held:
            self.held.pop(token).close()
        self.held[token] = Held(step, dict(zip(names, zip(files, names.values(), strict=True), strict=True)))
        return {}, []

    def _retain(self, files: list[int], tokens: list[str]) -> tuple[dict[str, object], list[int]]:
        """Forget all others."""
        for token in self.held.keys() - set(tokens):
            self.held.pop(token).close()
        return {}, []

    def _list(self, files: list[int]) -> tuple[dict[str, object], list[int]]:
        sizes = {token: {name: size for name, (_, size) in one.files.items()} for token, one in self.held.items()}
        return {"held": [[token, one.step, sizes[token]] for token, one in self.held.items()]}, []

    def _fetch(self, files: list[int], token: str, names: list[str]) -> tuple[dict[str, object], list[int]]:
        """The memory of some files."""
        there = self.held[token].files
        return {}, [there[name][0] for name in names]

    def _end(self, files: list[int]) -> tuple[dict[str, object], list[int]]:
        self.ending = True
        return self._retain(files, [])


def serve(listener: socket.socket, lease: float) -> None:
    """Until it is told to end, or nobody has been connected for the lease."""
    keeper, alone_since = Keeper(), time.monotonic()
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        while not keeper.ending:
            connected = len(waiting.get_map()) > 1
            left = None if connected else alone_since + lease - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in waiting.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is listener:
                    _accept(listener, waiting)
                elif not _serve_one(keeper, key.fileobj):
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()
                    alone_since = time.monotonic()


def _accept(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    """Processes of this user only."""
    with suppress(OSError):
        one, _ = listener.accept()
        _, user, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user != os.getuid():
            one.close()
            return
        one.setblocking(False)  # who does not read is dropped: nobody else waits for that
        waiting.register(one, selectors.EVENT_READ)


def _serve_one(keeper: Keeper, one: socket.socket) -> bool:
    """Answer a request; False if the process has ended, or does not read."""
    try:
        packet, files, *_ = socket.recv_fds(one, MAX_PACKET, MAX_FILES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if not packet:
        return False
    answer, sent = keeper.answer(packet, files)
    try:
        socket.send_fds(one, [json.dumps(answer).encode()], sent)
    except OSError:
        return False
    return True


def main() -> None:
    """Keep, and remove the address in the end."""
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    number, address, lease = sys.argv[1:]
    with socket.socket(fileno=int(number)) as listener:
        listener.setblocking(False)
        try:
            serve(listener, float(lease))
        finally:
            with suppress(OSError):
                os.unlink(address)


if __name__ == "__main__":
    main()
