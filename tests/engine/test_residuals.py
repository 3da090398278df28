"""Layers that add within their parts: the usual ones only; their attention is told the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from jobrunner.engine.devices import cpu_has_bfloat16
from jobrunner.engine.fused import make_fast
from jobrunner.engine.residuals import fuse_residuals
from tests.tiny import shrunk

WIDTH = 8


class Norm(nn.Module):
    """Halves; tells when it added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(WIDTH)
        self.added = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.added += 1
        return x + y, self(x + y)


class Attention(nn.Module):
    """Shifts, and remembers what it was told."""

    def forward(self, hidden_states: torch.Tensor, **told: Any) -> tuple[torch.Tensor, None]:
        self.told = told
        return hidden_states + 1, None


class Mlp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class AddingMlp(Mlp):
    takes_residual = True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x)
        return out if residual is None else out + residual


class Layer(nn.Module):
    """The usual one."""

    def __init__(self, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = mlp()
        self.eval()

    def forward(self, hidden_states, mask=None, cache=False, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, mask=mask, cache=cache, **kwargs
        )
        hidden_states = self.joined(residual, hidden_states)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return self.joined(residual, self.mlp(hidden_states))

    def joined(self, residual, hidden_states):
        return residual + hidden_states


def rows() -> torch.Tensor:
    return torch.randn(1, 5, WIDTH).bfloat16()


@pytest.mark.parametrize("mlp", [Mlp, AddingMlp])
def test_a_usual_layer_computes_the_same_and_adds_in_its_norm(mlp):
    layer = Layer(mlp)
    x = rows()
    expected = layer(x)
    assert fuse_residuals(layer) == 1
    assert torch.equal(layer(x), expected)
    assert layer.post_attention_layernorm.added == 1
    assert "forward" not in vars(layer.mlp), "nothing stands in for it any more"


def test_the_attention_is_told_what_it_was_told_before():
    layer = Layer()
    fuse_residuals(layer)
    layer(rows())
    assert layer.self_attn.told == {"mask": None, "cache": False}
    layer(rows(), cache=True, scale=2)
    assert layer.self_attn.told == {"mask": None, "cache": True, "scale": 2}


def test_other_types_and_arguments_by_place_go_the_own_way():
    layer = Layer()
    x = rows()
    expected = layer(x.float()), layer(x, "mask")
    fuse_residuals(layer)
    assert torch.equal(layer(x.float()), expected[0])
    assert torch.equal(layer(x, "mask"), expected[1])
    assert layer.self_attn.told == {"mask": "mask", "cache": False}
    assert layer.post_attention_layernorm.added == 0


class Scaled(Layer):
    def joined(self, residual, hidden_states):
        return residual + hidden_states * 0.5


class Silent(Layer):
    """Does not pass on what it is told."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states)


class Pair(Layer):
    def forward(self, *arguments, **kwargs):
        return super().forward(*arguments, **kwargs), None


class Parallel(Layer):
    """Gives both parts one input."""

    def forward(self, hidden_states, **kwargs):
        normed = self.input_layernorm(hidden_states)
        self.post_attention_layernorm(normed)
        return hidden_states + self.self_attn(hidden_states=normed)[0] + self.mlp(normed)


class Wider(Layer):
    """Holds one part more."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)


def hooked() -> Layer:
    layer = Layer()
    layer.forward = lambda hidden_states, **kwargs: hidden_states
    return layer


def without_mlp() -> Layer:
    layer = Layer()
    del layer.mlp
    return layer


@pytest.mark.parametrize(
    "make",
    [Scaled, Silent, Pair, Parallel, Wider, hooked, without_mlp],
    ids=lambda make: make.__name__,
)
def test_another_layer_is_left_alone(make: Callable[[], Layer]):
    layer = make()
    forward = layer.forward
    assert fuse_residuals(layer) == 0
    assert layer.forward == forward
    assert not any("forward" in vars(part) for part in layer.children())


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="no bfloat16 instructions here")
@pytest.mark.parametrize(
    ("kind", "layers"),
    [(kind, 2) for kind in "llama mistral qwen2 qwen3 qwen3_moe mixtral phi3 deepseek_v3".split()]
    + [(kind, 0) for kind in "gemma2 olmo2 cohere gpt2".split()],
)
def test_families_whose_layers_are_usual(kind, layers):
    pytest.importorskip("numba")
    config = shrunk(CONFIG_MAPPING[kind], num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    make_fast(model.eval().requires_grad_(False))
    changed = [m for m in model.modules() if hasattr(m, "mlp") and "forward" in vars(m)]
    assert len(changed) == layers
