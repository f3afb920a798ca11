"""Small folders as Megatron writes them, made without Megatron: `torch_dist`, and a file for every rank."""

import argparse
import io
import json
import pickle
import warnings

import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

LLAMA = {  # the arguments of a small model: 4 layers, 4 heads in 2 groups
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 48,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "params_dtype": torch.float32,
}


class Planner(DefaultSavePlanner):
    """Bytes are saved as they are."""

    def transform_object(self, write_item, object):
        return object


def write_dist(folder, tensors, *, values=None, common=None):
    """A `torch_dist` folder; `values` are those that differ from rank to rank, by their keys."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {key: io.BytesIO() for key in values or {}}
    for key, value in (values or {}).items():
        torch.save([value], packed[key])
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings(action="ignore"):  # that this is one process
        writer = FileSystemWriter(folder)
        torch_checkpoint.save({**tensors, **packed}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save(common or {}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.all_local_plans, metadata.planner_data = [planner.plan], None  # as Megatron leaves them
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def arguments(**more):
    return argparse.Namespace(**(LLAMA | more))
