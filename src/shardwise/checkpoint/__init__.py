"""Checkpoints: open any, load it into any sharding, save, convert offline, compare."""

from shardwise.checkpoint.async_saves import SaveHandle, SaveReport
from shardwise.checkpoint.checking import LoadReport
from shardwise.checkpoint.comparing import Difference, verify
from shardwise.checkpoint.converting import convert
from shardwise.checkpoint.damage import Damage
from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.kept_loading import Resumed
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.megatron_names import translation
from shardwise.checkpoint.opaque import Opaque
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.random_state import RandomState, random_state
from shardwise.checkpoint.receipts import Receipt, TensorReceipt, receipt
from shardwise.checkpoint.rules import Rules, read_rules
from shardwise.checkpoint.run import Run
from shardwise.checkpoint.saving import prepare, save
from shardwise.job.remap import Concat, Interleaved, Padded, Rotary, Stack, Transposed
from shardwise.quantized.recognition import Quantized

__all__ = [
    "Checkpoint",
    "Concat",
    "Damage",
    "Difference",
    "Entry",
    "Interleaved",
    "LoadReport",
    "Opaque",
    "Padded",
    "Quantized",
    "RandomState",
    "Receipt",
    "Rotary",
    "Rules",
    "Resumed",
    "Run",
    "SaveHandle",
    "SaveReport",
    "Stack",
    "TensorReceipt",
    "Transposed",
    "convert",
    "load",
    "open",
    "prepare",
    "random_state",
    "read_rules",
    "receipt",
    "save",
    "translation",
    "verify",
]
