"""A switch between hosts in user space: frames take their time, and some are lost. Linux only, as root.

The kernel's own way, netem, is a module that many systems do not have.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import multiprocessing
import os
import random
import select
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

from shardwise.testing.ranks import end_with

EVERY_PROTOCOL = socket.htons(3)  # of Linux, as are these
PACKET, VNET_HEADER, IGNORE_OUTGOING = 263, 15, 23
HEADER = 10  # bytes before every frame: which checksums are still to be made
LARGEST = 2**16 + 256
QUEUE = 2**24  # bytes that a port may hold for this process


class SlowSwitch:
    """Forwards frames between ports of one namespace, each after `delay` seconds; `loss` of them never arrive."""

    def __init__(self, enter: Callable[[], None], ports: Sequence[str], delay: float) -> None:
        fork = multiprocessing.get_context("fork")
        self._loss = fork.RawValue(ctypes.c_double, 0.0)
        self._process: BaseProcess = fork.Process(
            target=self._run, args=(enter, ports, delay, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            self._process.start()

    def lose(self, share: float) -> None:
        """Lose this share of all frames from now on."""
        self._loss.value = share

    def end(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.join()

    def _run(self, enter: Callable[[], None], ports: Sequence[str], delay: float, parent: int) -> None:
        end_with(parent)
        gc.freeze()  # the collector would visit, and so copy, all that the parent has
        try:
            enter()
            _forward(list(map(_open, ports)), delay, lambda: random.random() < self._loss.value)
        finally:
            os._exit(0)  # no handler of the parent runs here


def _open(port: str) -> socket.socket:
    """All frames that come in at a port, with the header that says what was left to hardware."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, EVERY_PROTOCOL)
    frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE)
    frames.setsockopt(PACKET, VNET_HEADER, 1)
    frames.setsockopt(PACKET, IGNORE_OUTGOING, 1)
    frames.bind((port, 0))
    return frames


def _forward(ports: Sequence[socket.socket], delay: float, lost: Callable[[], bool]) -> None:
    """For ever. A frame goes to the port that its receiver was seen at; to all others if to none yet."""
    under_way = list[tuple[float, int, socket.socket, bytes]]()
    seen, number = dict[bytes, socket.socket](), 0
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for port in select.select(ports, [], [], wait)[0]:
            frame = port.recv(LARGEST)
            to, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            seen[sender] = port
            for other in [seen[to]] if to in seen else [one for one in ports if one is not port]:
                if not lost():
                    number += 1
                    heapq.heappush(under_way, (time.monotonic() + delay, number, other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(under_way)
            _send(port, frame)


def _send(port: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the link is down, or full: then a frame is lost
        port.send(frame)
