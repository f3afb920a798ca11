"""How to turn one layout into another. Nothing here knows whether a wire or a disk carries it out."""

from shardwise.plan.copies import Copies, Copy
from shardwise.plan.explain import columns, size
from shardwise.plan.plan import Part, Plan, plan
from shardwise.plan.traffic import Traffic

__all__ = ["Copies", "Copy", "Part", "Plan", "Traffic", "columns", "plan", "size"]
