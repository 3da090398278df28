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


def assert_rotated_once(
    q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor
) -> None:
    """Both are what float32 gives, rounded once."""
    rotated = rotate(q_1HTD, k_1KTD, cos_1TD, sin_1TD)
    for x, actual in zip((q_1HTD, k_1KTD), rotated, strict=True):
        x = x.float()
        expected = x * cos_1TD[:, None] + modeling_llama.rotate_half(x) * sin_1TD[:, None]
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("width", [2, 8, 64])
def test_a_rotation_is_rounded_once(tokens, heads, kv_heads, width):
    q_1HTD = torch.randn(1, tokens, heads, width).bfloat16().transpose(1, 2)
    k_1KTD = torch.randn(1, tokens, kv_heads, width).bfloat16().transpose(1, 2)
    cos_1TD, sin_1TD = torch.randn(2, 1, tokens, width).bfloat16()
    assert_rotated_once(q_1HTD, k_1KTD, cos_1TD, sin_1TD)


def test_queries_and_keys_may_be_slices_of_one_tensor():
    all_1TXD = torch.randn(1, 9, 7, 8).bfloat16()
    q_1HTD, k_1KTD, _ = all_1TXD.transpose(1, 2).split((4, 2, 1), 1)
    cos_1TD, sin_1TD = torch.randn(2, 1, 9, 16).bfloat16()[..., 4:12]
    assert_rotated_once(q_1HTD, k_1KTD, cos_1TD, sin_1TD)


def test_a_head_need_not_lie_side_by_side():
    q_1HTD, k_1KTD = torch.randn(2, 1, 3, 9, 16).bfloat16()[..., ::2]
    cos_1TD, sin_1TD = torch.randn(2, 1, 9, 8).bfloat16()
    assert_rotated_once(q_1HTD, k_1KTD, cos_1TD, sin_1TD)


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

    def counted(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return rotate(*arguments)

    fuse_rotary(model, counted)
    calls.clear()
    logits(other)
    assert modeling_llama.apply_rotary_pos_emb is theirs
    assert calls == []
    logits(model)
    assert len(calls) == 2, "one for each layer"


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_what_the_kernel_does_not_serve_goes_its_own_way(dtype, rows):
    model = model_of("llama", dtype)
    expected = logits(model, rows)
    fuse_rotary(model, rotate)
    assert torch.equal(logits(model, rows), expected)
