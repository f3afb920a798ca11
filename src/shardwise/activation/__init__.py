"""Activations saved as shards between forward and backward."""

from shardwise.activation.account import Account, Measure, measure
from shardwise.activation.forward import input_reshard, input_reshard_handle

__all__ = ["Account", "Measure", "input_reshard", "input_reshard_handle", "measure"]
