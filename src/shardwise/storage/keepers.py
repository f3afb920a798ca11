"""Keepers of a run on this host: processes that hold files of its steps in memory. They are started and found here.

Each listens at a socket in a directory of this user. Its name begins with the name of the run on this host.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Self

from shardwise.errors import CheckpointError
from shardwise.storage import keeper_process
from shardwise.storage.background import OutlivingProcess, start_python
from shardwise.storage.keeper_process import MAX_FILES, MAX_PACKET

PATIENCE, START = 10.0, 120.0  # seconds for an answer: a keeper does nothing that takes long, but it has to start
BACKLOG = 128
ALONE = "-I", "-S"  # it needs only the standard library: not even this package, which takes longer to import
SHM = "/dev/shm"


class KeeperLostError(CheckpointError):
    """A keeper that has ended, or does not answer."""


class HeldStep(NamedTuple):
    """What a keeper holds of a save: its token, what is known of the step, and the sizes of its files."""

    token: str
    step: Mapping[str, object]
    sizes: Mapping[str, int]


class KeeperConnection:
    """To a keeper. As long as it is open, the keeper stays."""

    def __init__(self, address: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.address, self._process = address, process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _open.add(self)
        try:
            self._socket.settimeout(PATIENCE if process is None else START)
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise KeeperLostError(f"the keeper at {address} cannot be reached: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, token: str, step: Mapping[str, object], files: Mapping[str, tuple[int, int]]) -> None:
        """Let it keep memory: descriptor and size by name."""
        if len(files) > MAX_FILES:
            raise CheckpointError(f"a keeper holds at most {MAX_FILES} files of a step, but {len(files)} are given")
        sizes = {name: size for name, (_, size) in files.items()}
        self._ask({"do": "hold", "token": token, "step": step, "names": sizes}, [file for file, _ in files.values()])

    def retain(self, tokens: Sequence[str]) -> None:
        """Let it forget all other saves."""
        self._ask({"do": "retain", "tokens": list(tokens)})

    def held(self) -> list[HeldStep]:
        """What it holds."""
        answer, _ = self._ask({"do": "list"})
        held = answer["held"]
        assert isinstance(held, list)
        return [HeldStep(token, step, sizes) for token, step, sizes in held]

    def fetch(self, token: str, names: Sequence[str]) -> list[int]:
        """Descriptors of the memory of files. The caller closes them."""
        _, files = self._ask({"do": "fetch", "token": token, "names": list(names)})
        return files

    def end(self) -> None:
        """End the keeper: its memory is freed once nobody else uses it."""
        with suppress(KeeperLostError):
            self._ask({"do": "end"})
        with suppress(OSError):
            os.unlink(self.address)  # if it was killed
        self.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)

    def kill(self) -> None:
        """End a keeper that was started here, and does not answer."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            os.unlink(self.address)
        self.close()

    def close(self) -> None:
        """Leave it alone."""
        self._socket.close()

    def _ask(self, request: Mapping[str, object], files: Sequence[int] = ()) -> tuple[dict[str, object], list[int]]:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            packet, received, *_ = socket.recv_fds(self._socket, MAX_PACKET, MAX_FILES)
        except OSError as error:
            packet, received, why = b"", [], f": {error}"
        else:
            why = ""
        if not packet:
            self.close()  # an answer that comes late is of no use
            raise KeeperLostError(f"the keeper at {self.address} has ended, or does not answer{why}")
        self._socket.settimeout(PATIENCE)
        answer: dict[str, object] = json.loads(packet)
        if "error" in answer:
            raise CheckpointError(f"the keeper at {self.address} refuses: {answer['error']}")
        return answer, received


def host_name() -> str:
    """Equal for processes that can use one keeper: of one running system, network namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def name_on_this_host(run: str) -> str:
    """How the addresses of the keepers of a run begin."""
    return blake2b(f"{run}\n{host_name()}".encode(), digest_size=12).hexdigest()


def directory() -> Path:
    """Where keepers of this user listen: nobody else may look into it. It is made if it does not exist."""
    parent = SHM if os.access(SHM, os.W_OK) else tempfile.gettempdir()
    path = Path(parent, f"shardwise-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CheckpointError(
            f"{path} is not a directory that only this user can open: remove it, or give Run without memory="
        )
    return path


def start_keeper(name: str, lease: float) -> KeeperConnection:
    """Start a keeper for this process. It ends `lease` seconds after the last process of the run has left it."""
    address = directory() / f"{name}.{token_hex(4)}"
    aside = address.with_name(f".{address.name}")  # it gets its name when it listens
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(aside))
            listener.listen(BACKLOG)
            aside.rename(address)
            number = listener.fileno()
            words = *ALONE, keeper_process.__file__, str(number), str(address), str(lease)
            process = start_python(*words, socket=number, kind=OutlivingProcess)
    except OSError as error:
        with suppress(OSError):
            address.unlink()
        raise CheckpointError(
            f"the process that keeps steps in memory cannot be started: {error}. Give Run without memory="
        ) from error
    return KeeperConnection(str(address), process)


def find_keepers(name: str) -> list[KeeperConnection]:
    """All that live. What dead ones have left is removed."""
    found = list[KeeperConnection]()
    for path in sorted(directory().glob(f"{name}.*")):
        try:
            found.append(KeeperConnection(str(path)))
        except KeeperLostError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                with suppress(OSError):
                    path.unlink()
    return found


_open = weakref.WeakSet[KeeperConnection]()


def _close_all() -> None:
    """In a process that was forked: it is no process of the run, and must not keep keepers."""
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_all)
