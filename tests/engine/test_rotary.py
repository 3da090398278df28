"""Fused rotations: the same numbers, in one model only; other rotations are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.tiny import shrunk

pytest.importorskip("numba")

from jobrunner.engine.rotary import fuse_rotary
from jobrunner.engine.row_kernels import rotate


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[kind], num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def logits(model: Any, rows: int = 1) -> torch.Tensor:
    ids = torch.arange(7).repeat(rows, 1)
    positions = torch.arange(7).expand(rows, -1) + 5
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [2, 8, 64])
def test_a_rotation_is_rounded_once(tokens, heads, width):
    x_HTD = torch.randn(tokens, heads, width).bfloat16().transpose(0, 1)
    cos_TD, sin_TD = torch.randn(2, tokens, width).bfloat16()
    expected = x_HTD.float() * cos_TD + modeling_llama.rotate_half(x_HTD.float()) * sin_TD
    torch.testing.assert_close(
        rotate(x_HTD, cos_TD, sin_TD).float(), expected, rtol=2**-8, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mixtral", "phi3"])
def test_the_usual_rotation_is_fused_and_computes_the_same(kind):
    model = model_of(kind)
    expected = logits(model)
    assert fuse_rotary(model, rotate) == 2
    error = (logits(model) - expected).norm() / expected.norm()
    assert 0 <= error < 0.02


@pytest.mark.parametrize("kind", ["cohere", "glm", "gpt2"])
def test_another_rotation_or_none_is_left_alone(kind):
    model = model_of(kind)
    expected = logits(model)
    fuse_rotary(model, rotate)
    assert torch.equal(logits(model), expected)


def test_only_the_given_model_is_changed():
    theirs = modeling_llama.apply_rotary_pos_emb
    other, model = model_of("llama"), model_of("llama")
    calls = []

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return rotate(*arguments)

    fuse_rotary(model, counted)
    calls.clear()
    logits(other)
    assert modeling_llama.apply_rotary_pos_emb is theirs
    assert calls == []
    logits(model)
    assert len(calls) == 4, "queries and keys of two layers"


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_what_the_kernel_does_not_serve_goes_its_own_way(dtype, rows):
    model = model_of("llama", dtype)
    expected = logits(model, rows)
    fuse_rotary(model, rotate)
    assert torch.equal(logits(model, rows), expected)
