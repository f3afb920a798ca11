"""Work in a process of its own, whose memory is measured, and which is ended where it takes far too long."""

import os
import pickle
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10  # far more than anything here takes: machines are busy
ROOM = 2**31  # bytes of addresses: what asks for more is refused by the system, not by what is tested
MEMORY = 200  # MiB


@dataclass(frozen=True)
class Ending:
    """How it ended: what it raised or returned, and the MiB that it used at most."""

    error: BaseException | None
    result: object
    memory: float


def confined(work):
    """Do the work in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends it also inside C
            signal.alarm(SECONDS)
            os.write(write, pickle.dumps(_ending(work)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    assert found, f"it took more than {SECONDS} s, or was killed: status {status}"
    return pickle.loads(found)


def refused(work, kind, *words):
    """The work raises an error of that kind with these words, in little memory."""
    ending = confined(work)
    assert isinstance(ending.error, kind), ending
    for word in words:
        assert word in str(ending.error), f"{word!r} is not in {ending.error}"
    assert str(ending.error).replace("\n", "").isprintable()
    assert ending.memory < MEMORY, ending
    return str(ending.error)


def _ending(work):
    limit = _status("VmSize") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before, error, result = _status("VmRSS"), None, None
    try:
        result = work()
    except Exception as raised:
        error = raised.with_traceback(None)
        error.__cause__ = error.__context__ = None
    return Ending(error, result, (_status("VmHWM") - before) / 2**20)


def _status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
