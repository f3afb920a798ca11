"""How fast moves are on this machine: ours, torch's, and the copies that no way can do without."""

from shardwise.bench.short import MoveTimes, bench
from shardwise.bench.table import LEGEND, as_json, table

__all__ = ["LEGEND", "MoveTimes", "as_json", "bench", "table"]
