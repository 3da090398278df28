"""Tiny random models that transformers saves and loads like real ones. Know no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

VOCABULARY = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # weights this large give logits far apart: the greedy texts vary and have no near ties
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_model(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """Save a model of random float32 weights, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def save_shaken_model(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """Save a model none of whose weights are zeros or ones, as many are at first.

    So biases, sinks and norms that an attention leaves out change the answers.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.4)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(folder)
    return folder


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
# what the configurations of single kinds insist on, and both kinds of layer for hybrids
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "hrm_text": {"prefix_lm": False},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
}

# by the names under which configurations know them; the first group are sizes of tensors
_SHRUNK: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff"], 48),
    **dict.fromkeys(["intermediate_size_mlp", "mlp_hidden_size", "dense_intermediate_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size", "moe_latent_size"], 16),
    **dict.fromkeys(["hidden_size_per_layer_input", "laurel_rank", "dim_model_base"], 16),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "attn_key_value_heads"], 2),
    **dict.fromkeys(["num_global_key_value_heads", "swa_num_key_value_heads"], 2),
    "swa_num_attention_heads": 4,
    **dict.fromkeys(["head_dim", "query_pre_attn_scalar", "attention_head_dim", "kv_channels"], 8),
    **dict.fromkeys(["global_head_dim", "swa_head_dim", "rotary_dim", "index_head_dim"], 8),
    **dict.fromkeys(["v_head_dim", "swa_v_head_dim"], 6),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_rope_head_dim"], 4),
    **dict.fromkeys(["qk_nope_head_dim"], 8),
    "qk_head_dim": 12,
    **dict.fromkeys(["n_routed_experts", "num_experts", "num_local_experts"], 4),
    **dict.fromkeys(["moe_num_experts", "zero_expert_num"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "num_shared_experts"], 1),
    "first_k_dense_replace": 1,
    **dict.fromkeys(["sliding_window", "attention_chunk_size", "window_size"], 9),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 128),
    **dict.fromkeys(["bos_token_id", "eos_token_id"], 1),
    "pad_token_id": 0,
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size", "mamba_d_ssm"], 8),
    **dict.fromkeys(["num_kv_shared_layers", "num_nextn_predict_layers"], 0),
}


def shrunk(kind: type[PretrainedConfig], **overrides: Any) -> PretrainedConfig:
    """A configuration of this kind for a model of some thousand weights.

    Windows are shorter than prompts; both kinds of layer occur where a model has two.
    """
    known = vars(kind())
    overrides = {**_OWN.get(kind.model_type, {}), **overrides}
    values = {name: value for name, value in _SHRUNK.items() if name in known}
    if "qk_rope_head_dim" in known:
        # there the width of a head is the sum of its parts, and every head has its own keys
        values |= {"head_dim": values["qk_rope_head_dim"]} if "head_dim" in known else {}
        values |= {"num_key_value_heads": 4} if "num_key_value_heads" in known else {}
    config = kind(**{**values, **overrides})
    types = getattr(config, "layer_types", None)
    if types and set(types) == {"sliding_attention"}:
        both = ["sliding_attention", "full_attention"] * len(types)
        config = kind(**{**values, "layer_types": both[: len(types)], **overrides})
    return config


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Save a llama with grouped queries."""
    return save_model(folder, LlamaConfig(**{**_SHAPE, **overrides}))


def tiny_qwen2(folder: Path, **overrides: Any) -> Path:
    """Save a qwen2, which has biases and tied embeddings here."""
    return save_model(folder, Qwen2Config(**{**_SHAPE, "tie_word_embeddings": True, **overrides}))
