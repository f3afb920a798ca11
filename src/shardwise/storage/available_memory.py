"""How much memory the system can still give to this process: as the machine has it, and as its control group allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# of both versions of control groups: the limit, what is used, and what of that are files that can be dropped
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        most = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except OSError:  # not a Linux
        most = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min([most, *_room_in_groups(proc, groups)])


def _room_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What each control group around this process has left."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                inside = PurePosixPath(path.lstrip("/"))
                for one in (inside, *inside.parents):
                    yield from _room(groups / controllers / one)


def _room(group: Path) -> Iterator[int]:
    for limit, used, droppable in GROUP_FILES:
        with suppress(OSError, ValueError):  # without a limit it says "max"
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, most - now + int(stat.get(droppable, 0)))
