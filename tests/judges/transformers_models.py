"""Tiny models of transformers with random weights: one for each architecture."""

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SMALL, "head_dim": 8}
EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": lambda: transformers.Gemma2Config(**HEADS),
    "gemma3": lambda: transformers.Gemma3TextConfig(**HEADS),
    "phi3": lambda: transformers.Phi3Config(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**SMALL, "num_key_value_heads": 4}),
    "bloom": lambda: transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **HEADS, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=96, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 7 % 96


def made(name, seed=0):
    """The model of an architecture with random weights, none of which is one or zero by default."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits
