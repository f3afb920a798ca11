"""Tiny models of many families: a configuration, random weights, and files as transformers saves them."""

from pathlib import Path
from typing import Any

import torch

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # at four ranks two ranks share each head of keys
LLAMA = SMALL | HEADS | {"intermediate_size": 128, "vocab_size": 128, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 128}
BLOOM = {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 128}
FALCON = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
NEW_FALCON = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}
MAMBA = {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 128, "time_step_rank": 4}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
HEAD_DIM = {"head_dim": 32}
# vLLM's own gpt-oss cannot share heads of keys between ranks
GPT_OSS = LLAMA | HEAD_DIM | {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", LLAMA),
    "Llama, vocabulary 1003": ("llama", LLAMA | {"vocab_size": 1003}),
    "Qwen2": ("qwen2", LLAMA),
    "Qwen3": ("qwen3", LLAMA | HEAD_DIM),
    "Qwen3-MoE": ("qwen3_moe", LLAMA | HEAD_DIM | EXPERTS),
    "Mixtral": ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 2": ("gemma2", LLAMA | HEAD_DIM | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "Gemma 3": ("gemma3_text", LLAMA | HEAD_DIM | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "Phi-3": ("phi3", LLAMA | {"pad_token_id": 0}),
    "GPT-2": ("gpt2", GPT2),
    "GPT-NeoX": ("gpt_neox", SMALL | {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128}),
    "BLOOM": ("bloom", BLOOM),
    "Falcon": ("falcon", NEW_FALCON),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "Mamba": ("mamba", MAMBA),
}


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    """A folder with the configuration and random weights of a tiny model, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = MODELS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)  # also norms and biases, which otherwise are all ones and zeros
    model.save_pretrained(folder)
    return folder


def folder_name(name: str) -> str:
    """A name of a model as the name of a folder."""
    return name.replace(",", "").replace(" ", "-").lower()
