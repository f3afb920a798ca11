"""Inference engines: their parameters as targets under the checkpoint's names, found by running their own loaders."""

from shardwise.engines import vllm
from shardwise.engines.explain import Explanation, RecordedName
from shardwise.engines.record import Recorded, explain, record

__all__ = ["Explanation", "Recorded", "RecordedName", "explain", "record", "vllm"]
