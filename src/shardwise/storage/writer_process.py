"""A process that writes files from shared memory, beside the training: `python -m shardwise.storage.writer_process N`.

N is the descriptor of a socket. An order is a packet with descriptors: the memory of the file; the order and the index;
and the lock of the directory, on the rank that has it. The answer is a packet, too. The process imports no torch, and
ends when the socket closes. An order that it has is carried out to the end, whatever became of who gave it.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
from contextlib import suppress

from shardwise.storage.increments import Written
from shardwise.storage.locks import WriteClaim
from shardwise.storage.orders import WriteOrder, carry_out, claim_of

MAX_PACKET, MAX_FILES, MAX_ERROR = 2**14, 3, 2**12
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # sent to all processes of a job: the order is finished first


def main() -> None:
    """Carry out orders until the socket closes."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            try:
                packet, files, *_ = socket.recv_fds(orders, MAX_PACKET, MAX_FILES)
            except OSError:
                return
            if not packet:
                return
            error, written = _done(json.loads(packet), files)
            answer = {"number": json.loads(packet)["number"], "error": error, "written": written}
            with suppress(OSError):  # who gave the order has ended
                orders.send(json.dumps(answer).encode())


def _done(packet: dict[str, object], files: list[int]) -> tuple[str | None, Written]:
    """Why the order could not be carried out, None if it was; and how much was written."""
    try:
        data, order, *lock = files
        size = packet["order"]
        os.umask(int(str(packet["umask"])))
        text = os.pread(order, os.fstat(order).st_size, 0)
        known = WriteOrder.from_json(text[: int(str(size))])
        claim = claim_of(known, str(packet["lock"]) if lock else None, lock[0] if lock else None)
        return None, _write(known, data, text[int(str(size)) :], claim)
    except BaseException as error:
        return (str(error) or type(error).__name__)[:MAX_ERROR], Written(0, 0)
    finally:
        for file in files[:2]:
            os.close(file)


def _write(order: WriteOrder, data: int, index: bytes, claim: WriteClaim) -> Written:
    memory = mmap.mmap(data, os.fstat(data).st_size)  # closed with the last view of it, also after an error
    return carry_out(order, memoryview(memory), index, claim)


if __name__ == "__main__":
    main()
