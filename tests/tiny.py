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


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Save a llama with grouped queries."""
    return save_model(folder, LlamaConfig(**{**_SHAPE, **overrides}))


def tiny_qwen2(folder: Path, **overrides: Any) -> Path:
    """Save a qwen2, which has biases and tied embeddings here."""
    return save_model(folder, Qwen2Config(**{**_SHAPE, "tie_word_embeddings": True, **overrides}))
