"""Whole state dicts: visit and flatten them, reshard all tensors at once, sync one model into another every step."""

from shardwise.job.background import RunHandle
from shardwise.job.plan import ModelPlan
from shardwise.job.remap import Concat, Interleaved, Padded, Rotary, Stack, Transposed
from shardwise.state.flatten import _flatten_sharded_tensors, flatten_sharded_tensors
from shardwise.state.reshard import reshard_state_dict
from shardwise.state.resharder import Resharder
from shardwise.state.shared_memory import empty, share_
from shardwise.state.traverse import (
    OBJ_PATH,
    STATE_DICT_ITEM,
    STATE_DICT_TYPE,
    flatten_state_dict,
    get_element,
    set_element,
    traverse_state_dict,
    unflatten_state_dict,
)

__all__ = [
    "OBJ_PATH",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "Concat",
    "Interleaved",
    "ModelPlan",
    "Padded",
    "Resharder",
    "Rotary",
    "RunHandle",
    "Stack",
    "Transposed",
    "_flatten_sharded_tensors",
    "empty",
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "get_element",
    "reshard_state_dict",
    "set_element",
    "share_",
    "traverse_state_dict",
    "unflatten_state_dict",
]
