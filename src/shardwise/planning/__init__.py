"""How to turn one layout into another. Nothing here knows whether a transport or a disk carries it out."""

from shardwise.planning.copies import Copies, Copy
from shardwise.planning.explain import columns, count, size, size_in_bytes
from shardwise.planning.hosts import Hosts, Network
from shardwise.planning.plan import Part, Plan, plan, plan_parts, reduces
from shardwise.planning.redistribute import Redistribution, redistributed
from shardwise.planning.traffic import Traffic

__all__ = [
    "Copies",
    "Copy",
    "Hosts",
    "Network",
    "Part",
    "Plan",
    "Redistribution",
    "Traffic",
    "columns",
    "count",
    "plan",
    "plan_parts",
    "redistributed",
    "reduces",
    "size",
    "size_in_bytes",
]
