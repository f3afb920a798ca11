"""Checkpoints: open any, load it into any sharding, save, convert offline, compare."""

from shardwise.checkpoint.comparing import Difference, verify
from shardwise.checkpoint.converting import convert
from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.opaque import Opaque
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.rules import Rules, read_rules
from shardwise.checkpoint.saving import save
from shardwise.job.remap import Concat, Interleaved, Padded, Rotary, Stack, Transposed
from shardwise.quantized.recognition import Quantized

__all__ = [
    "Checkpoint",
    "Concat",
    "Difference",
    "Entry",
    "Interleaved",
    "Opaque",
    "Padded",
    "Quantized",
    "Rotary",
    "Rules",
    "Stack",
    "Transposed",
    "convert",
    "load",
    "open",
    "read_rules",
    "save",
    "verify",
]
