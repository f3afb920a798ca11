"""What shardwise remembers from call to call, and how to make it forget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def forget() -> None:
    """As in a new process; takes about a microsecond."""
    for clear in _caches():
        clear()


@cache
def _caches() -> list[Callable[[], Any]]:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "shardwise"]
    found = {id(value): value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")}
    return [value.cache_clear for value in found.values()]
