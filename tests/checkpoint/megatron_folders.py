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


def whole_model(args, bias=False):
    """All tensors of a model under the names of Megatron core, layers one by one."""
    torch.manual_seed(0)
    hidden, ffn, head, experts = (
        args.hidden_size,
        args.ffn_hidden_size,
        args.kv_channels,
        getattr(args, "num_experts", 0),
    )
    made = {"embedding.word_embeddings.weight": (args.padded_vocab_size, hidden)}
    for layer in range(args.num_layers):
        heads = args.num_attention_heads + 2 * args.num_query_groups
        mlp = {"": "mlp"} if not experts else {at: f"mlp.experts.local_experts.{at}" for at in range(experts)}
        shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": (heads * head, hidden),
            "self_attention.linear_qkv.bias": (heads * head,),
            "self_attention.linear_proj.weight": (hidden, args.num_attention_heads * head),
            "pre_mlp_layernorm.weight": (hidden,),
            **({"mlp.router.weight": (experts, hidden)} if experts else {}),
            **{f"{where}.linear_fc1.weight": ((1 + args.swiglu) * ffn, hidden) for where in mlp.values()},
            **{f"{where}.linear_fc2.weight": (hidden, ffn) for where in mlp.values()},
        }
        made |= {f"decoder.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    made["decoder.final_layernorm.weight"] = (hidden,)
    if args.untie_embeddings_and_output_weights:
        made["output_layer.weight"] = (args.padded_vocab_size, hidden)
    return {name: torch.randn(shape) for name, shape in made.items()}


def cut(name, whole, tp, gated):
    """The parts of all tensor parallel ranks, by torch alone."""
    kind = name.rpartition(".")[0].rpartition(".")[2]
    if kind == "linear_fc1" and gated:
        return [torch.cat(parts) for parts in zip(*(half.chunk(tp) for half in whole.chunk(2)), strict=True)]
    if kind in ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1"):
        return whole.chunk(tp)
    if kind in ("linear_proj", "linear_fc2") and name.endswith("weight"):
        return whole.chunk(tp, 1)
    return [whole] * tp


def place(name, args, chunks):
    """The pipeline stage, the part of it, and the name there."""
    pp, parts = args.pipeline_model_parallel_size, chunks
    if name.startswith("embedding"):
        return 0, 0, name
    if not name.startswith("decoder.layers."):
        return pp - 1, parts - 1, name
    layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
    turn, at = divmod(int(layer), args.num_layers // (pp * parts))
    return turn % pp, turn // pp, f"decoder.layers.{at}.{rest}"


def write_ranks(
    folder, wholes, args, *, chunks=1, ep=1, iteration=100, renamed=lambda name: name, file="model_optim_rng.pt"
):
    """The files of all ranks: `chunks` parts of the model in each."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    states = {}
    for name, whole in wholes.items():
        stage, part, local = place(name, args, chunks)
        expert = name.partition("local_experts.")[2].partition(".")[0]
        count = getattr(args, "num_experts", 0) // ep
        for rank, shard in enumerate(cut(name, whole, tp, args.swiglu)):
            for at in range(ep) if not expert else [int(expert) // count]:
                here = local.replace(f"local_experts.{expert}.", f"local_experts.{int(expert or 0) % max(count, 1)}.")
                model = "model" if chunks == 1 else f"model{part}"
                states.setdefault((rank, stage, at), {}).setdefault(model, {})[renamed(here)] = shard.clone()
    if not args.untie_embeddings_and_output_weights and pp > 1:
        for rank, shard in enumerate(wholes["embedding.word_embeddings.weight"].chunk(tp)):
            for at in range(ep):
                states[rank, pp - 1, at]["model" if chunks == 1 else f"model{chunks - 1}"]["output_layer.weight"] = (
                    shard
                )
    for (rank, stage, at), state in states.items():
        name = f"mp_rank_{rank:02d}{f'_{stage:03d}' * (pp > 1)}{f'_{at:03d}' * (ep > 1)}"
        (folder / name).mkdir(parents=True)
        more = {"args": args, "iteration": iteration, "checkpoint_version": 3.0, "rng_state": [{"random": rank}]}
        torch.save({**more, **state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, folder / name / file)
