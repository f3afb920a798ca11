"""Sockets of the meeting point: where it listens, and how long connections to it may be silent."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path


def limit_silence(host: str, port: int, seconds: float) -> None:
    """Let calls fail, and the system end connections of this process to a store, when nothing comes back for so long.

    A call would wait for ever where the store stands still, and for minutes where a link is cut. The store does not
    show its sockets.
    """
    if sys.platform != "linux":
        return
    options = [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))]
    options += [(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))]
    options += [(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)]
    options += [(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(seconds / 2)))]
    options += [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    peers = {(_plain(str(info[4][0])), port) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and _peer(sock) in peers:
                    for option in options:
                        sock.setsockopt(*option)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _peer(sock: socket.socket) -> tuple[str, int]:
    address, port, *_ = sock.getpeername()
    return _plain(address), port


def _plain(address: str) -> str:
    """An address of IPv4 as such, also where it is written as one of IPv6."""
    return address.removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    """True if a host name stands for this host alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(one)).is_loopback for one in found)


def listen(host: str, port: int) -> socket.socket:
    """On that address of this host alone: the store itself would listen on all of them."""
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(4096)
    except BaseException:
        listener.close()
        raise
    return listener


def write_private(path: Path, text: str) -> None:
    """Readable by this user alone, and never half-written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(aside, path)
