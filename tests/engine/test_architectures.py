"""Every kind of decoder: greedy tokens equal `generate` with chunks, prefix hits, preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.equality import compare_with_generate
from tests.tiny import save_shaken_model, shrunk

# the width of a head is 8, so there are four frequencies
SHORT_FACTORS, LONG_FACTORS = [1.0, 1.1, 1.3, 1.6], [1.0, 2.0, 4.0, 8.0]
THETA = 1e4


def frozen_at(frequencies: torch.Tensor, scaling: float) -> Callable[[Any], None]:
    """Give a reference model rotary frequencies that do not follow the text's length."""

    def prepare(model: Any) -> None:
        rotary = model.model.rotary_emb
        rotary.rope_type = "default"
        rotary.inv_freq = frequencies
        rotary.attention_scaling = scaling

    return prepare


def frequencies(base: float, factors: list[float]) -> torch.Tensor:
    return 1 / (torch.tensor(factors) * base ** (torch.arange(0, 8, 2) / 8))


@dataclass(frozen=True)
class Case:
    """A configuration by its kind and what is said of it, and how the reference is prepared."""

    name: str
    kind: str
    overrides: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        kind = CONFIG_MAPPING[self.kind]
        return shrunk(kind, **{"num_hidden_layers": 2, **self.overrides})


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": THETA, **parameters}}


BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
LONGROPE = rope("longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS)
# sqrt(1 + log(128 / 16) / log(16)) and sqrt(1 + log(128 / 64) / log(64))
LONG_SCALING, SHORT_SCALING = 1.75**0.5, (7 / 6) ** 0.5

CASES = [
    Case("llama", "llama"),
    Case("mistral, window shorter than the prompt", "mistral"),
    Case("qwen2", "qwen2"),
    Case("qwen2 with windows", "qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    Case("qwen2_moe", "qwen2_moe"),
    Case(
        "qwen2_moe with windows", "qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1}
    ),
    Case("qwen3", "qwen3"),
    Case("qwen3_moe", "qwen3_moe"),
    Case("mixtral", "mixtral"),
    Case("gemma2, soft caps", "gemma2", BOTH | {"attn_logit_softcapping": 5.0}),
    Case("gemma3, local and global rotary", "gemma3_text", BOTH),
    Case("phi3", "phi3"),
    Case("phimoe, window in the mask only", "phimoe"),
    Case("llama4, chunks", "llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}),
    Case("olmo2", "olmo2"),
    Case("gpt_oss, sinks", "gpt_oss", BOTH),
    Case("deepseek_v3, K wider than V", "deepseek_v3"),
    Case("granite, scaled logits", "granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    Case("cohere, scaled logits", "cohere", {"logit_scale": 0.3}),
    Case("gpt2, learned positions", "gpt2", {"num_hidden_layers": 2}),
    Case("opt, learned positions", "opt"),
    Case("yarn", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    Case("linear", "llama", rope("linear", factor=4.0)),
    Case(
        "llama3 scaling",
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    Case(
        "longrope beyond the original length",
        "phi3",
        LONGROPE | {"original_max_position_embeddings": 16},
        frozen_at(frequencies(THETA, LONG_FACTORS), LONG_SCALING),
        # phi3 drops its cache where a text crosses the original length, and errs in doing so
        {"use_cache": False},
    ),
    Case(
        "longrope within the original length",
        "phi3",
        LONGROPE | {"original_max_position_embeddings": 64},
        frozen_at(frequencies(THETA, SHORT_FACTORS), SHORT_SCALING),
        {"max_model_len": 64},
    ),
    Case(
        "dynamic beyond the length it was made for",
        "llama",
        rope("dynamic", factor=4.0) | {"max_position_embeddings": 32},
        frozen_at(frequencies(THETA * (4 * 64 / 32 - 3) ** (8 / 6), [1.0] * 4), 1.0),
        {"max_model_len": 64},
    ),
    Case("dynamic within", "llama", rope("dynamic", factor=4.0)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_equal_generate(case: Case, tmp_path: Path) -> None:
    folder = save_shaken_model(tmp_path, case.config())
    verdict = compare_with_generate(folder, prepare=case.prepare, **case.settings)
    assert verdict.equal, verdict.difference or verdict.near_ties
    assert verdict.distinct >= 5, "the texts hardly differ"
    assert verdict.preemptions > 0
    assert verdict.tokens_cached > 0
