"""Small models of megatron-core on CPUs, with the modules of its local spec, in a world of gloo ranks."""

import argparse
import contextlib
import multiprocessing
import types

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from shardwise.testing import on_ranks

KINDS = ("llama", "mixtral", "gpt2")
TOKENS = torch.arange(10)[None] * 7 % 128
ARGS = {  # what Megatron's own trainer keeps of them
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "padded_vocab_size": 128,
}


def arguments(kind, tp=1, pp=1, ep=1, vp=None):
    """The arguments of a model."""
    swiglu, gpt = kind != "gpt2", kind == "gpt2"
    return argparse.Namespace(
        **ARGS,
        group_query_attention=not gpt,
        num_query_groups=1 if gpt else 2,
        swiglu=swiglu,
        normalization="LayerNorm" if gpt else "RMSNorm",
        position_embedding_type="learned_absolute" if gpt else "rope",
        untie_embeddings_and_output_weights=not gpt,
        num_experts=4 if kind == "mixtral" else None,
        moe_ffn_hidden_size=64,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=vp,
        params_dtype=torch.float32,
    )


def without_gpu():
    """CPUs do what megatron-core asks of a GPU, as far as saving, loading and one forward pass go."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    tracker = types.SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    for module in (tensor_parallel, parallel_random):
        module.get_cuda_rng_tracker = lambda: tracker
    moe_utils.te_general_gemm = None  # which it forgets to define where Transformer Engine is missing


def on_megatron(ranks, work):
    """`work` on ranks. The processes that megatron-core starts there and never ends are ended."""

    def ending(rank):
        try:
            return work(rank)
        finally:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()

    return on_ranks(ranks, ending, timeout=300)


def start(tp, pp, ep=1, vp=None):
    """The parallel groups of megatron-core."""
    without_gpu()
    multiprocessing.current_process()._config["daemon"] = False  # it starts processes that write
    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=vp, expert_model_parallel_size=ep
    )


def model(kind, tp=1, pp=1, ep=1, vp=None, part=None):
    """This rank's part of a model; one of `vp` parts where the pipeline is interleaved."""
    gpt, experts = kind == "gpt2", 4 if kind == "mixtral" else None
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4 if gpt else 2,
        kv_channels=8,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32,
        gated_linear_unit=not gpt,
        activation_func=torch.nn.functional.gelu if gpt else torch.nn.functional.silu,
        add_bias_linear=gpt,
        normalization="LayerNorm" if gpt else "RMSNorm",
        layernorm_epsilon=1e-5,
        num_moe_experts=experts,
        moe_ffn_hidden_size=64 if experts else None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    made = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp is None, vp_stage=part),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp is None, vp_stage=part),
        share_embeddings_and_output_weights=gpt,
        position_embedding_type="learned_absolute" if gpt else "rope",
        rotary_base=10000,
        parallel_output=False,
        vp_stage=part,
    ).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # norms of ones would hide where they went
            if parameter.dim() == 1:
                parameter.copy_(1 + torch.arange(len(parameter)) / 64)
    return made


def save(parts, path, args, **metadata):
    """As Megatron saves the parts of a model with --ckpt-format torch_dist."""
    path.mkdir(parents=True, exist_ok=True)
    state = {f"model{at}": part.sharded_state_dict(metadata=metadata or None) for at, part in enumerate(parts)}
    dist_checkpointing.save({**state, "args": args, "iteration": 3}, str(path))


def save_ranks(parts, folder, args, rank):
    """A file for this rank, in the structure that Megatron's trainer writes, which is not in megatron-core."""
    sizes = args.tensor_model_parallel_size, args.expert_model_parallel_size, args.pipeline_model_parallel_size
    tp, ep, pp = (int(at) for at in np.unravel_index(rank, sizes[::-1])[::-1])
    name = f"mp_rank_{tp:02d}{f'_{pp:03d}' * (sizes[2] > 1)}{f'_{ep:03d}' * (sizes[1] > 1)}"
    names = ["model"] if len(parts) == 1 else [f"model{at}" for at in range(len(parts))]
    state = {name: part.state_dict() for name, part in zip(names, parts, strict=True)}
    (folder / name).mkdir(parents=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 3, **state}, folder / name / "model_optim_rng.pt")


def load(made, path):
    """What megatron-core loads, into the model. Extra states, of which local modules have none, may be missing."""
    wanted = {"model": made.sharded_state_dict()}
    found = dist_checkpointing.load(wanted, str(path), strict=StrictHandling.LOG_ALL)
    missing, unexpected = made.load_state_dict(found["model"], strict=False)
    assert not unexpected
    assert not [name for name in missing if "_extra_state" not in name]


def logits(made):
    """Of all tokens, by megatron-core."""
    mask = torch.ones(1, 1, 10, 10).tril() < 0.5
    with torch.no_grad():
        return made(TOKENS, torch.arange(10)[None], mask)
