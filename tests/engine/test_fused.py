"""Fused parts: taken where they compute the same, left where not, no further from float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from jobrunner.engine.devices import cpu_has_bfloat16
from jobrunner.engine.fused import FusedNorm, GatedLinear, make_fast
from jobrunner.engine.linears import MergedLinear, PackedLinear, PartialLinear
from tests.tiny import save_shaken_model, shrunk

pytest.importorskip("numba")

from jobrunner.engine.row_kernels import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(not cpu_has_bfloat16(), reason="no bfloat16 instructions here")

KINDS = """llama mistral qwen2 qwen3 qwen3_moe mixtral gemma2 gemma3_text phi3 olmo2 gpt_oss
deepseek_v3 granite cohere gpt2 opt glm starcoder2 gpt_neox""".split()


class Around(nn.Module):
    """A model of one part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.dtype = torch.bfloat16
        self.bfloat16().requires_grad_(False).eval()


def made_fast(part: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model = Around(part)
    make_fast(model)
    return model.part


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("width", [1, 8, 33])
def test_a_fused_norm_is_the_norm_rounded_once(norm, width):
    fused = made_fast(norm(width))
    assert isinstance(fused, FusedNorm)
    x = torch.randn(3, 5, width).bfloat16()
    # its own answer in a wider type, from the same weights
    expected = norm(width)
    expected.load_state_dict(fused.own.state_dict())
    torch.testing.assert_close(fused(x).float(), expected(x.float()), rtol=2**-8, atol=1e-6)


MANY = 90


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., :8].view(1, MANY, 1, 8),
        lambda x: x[..., 4:12].view(1, MANY, 2, 4).transpose(1, 2),
        lambda x: x.view(1, MANY, 4, 8)[:, :, 1:3],
        lambda x: x.view(1, MANY, 4, 8)[..., ::2],
        lambda x: x.view(2, MANY // 2, 4, 8)[:, :, :3],
        lambda x: x[0, 0],
        lambda x: x[:, :0],
    ],
)
def test_rows_of_a_norm_may_lie_anywhere(view):
    x = view(torch.randn(1, MANY, 32).bfloat16())
    weight_W = torch.randn(x.shape[-1])
    wide = x.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight_W
    actual = rms_norm(x, weight_W, 1e-3)
    assert actual.shape == x.shape
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, MANY])
def test_a_sum_is_rounded_before_it_is_normed(rows):
    x, y = torch.randn(2, 1, rows, 33).bfloat16()
    weight_W = torch.randn(33)
    total, normed = add_rms_norm(x, y, weight_W, 1e-3)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, rms_norm(x + y, weight_W, 1e-3))


def test_a_fused_norm_leaves_other_types_to_its_own():
    fused = made_fast(LlamaRMSNorm(8))
    x = torch.randn(2, 8)
    assert torch.equal(fused(x), fused.own(x))


def test_not_a_number_stays_one_and_stays_in_its_row():
    fused = made_fast(LlamaRMSNorm(8))
    x = torch.ones(2, 8).bfloat16()
    x[0, 3] = torch.nan
    assert fused(x).isnan().tolist() == [[True] * 8, [False] * 8]


class Twice(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), CohereLayerNorm(8), Twice(8)]
)
def test_other_norms_stay(norm):
    assert made_fast(norm) is norm


def gated(activation: str = "silu", kind: type[nn.Module] = LlamaMLP) -> nn.Module:
    return kind(shrunk(CONFIG_MAPPING["llama"], hidden_act=activation))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_a_gated_unit_is_computed_within_its_products(activation):
    own = gated(activation)
    fused = made_fast(own)
    assert isinstance(fused, GatedLinear)
    x = torch.randn(1, 9, 32).bfloat16()
    if fused.gate_up is None:
        parts = fused.gate_proj.weight, fused.up_proj.weight
    else:
        parts = fused.gate_up.weights()
    gate, up, down = (weight.float() for weight in (*parts, fused.down_proj.weight))
    expected = (own.act_fn(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
    error = (fused(x).float() - expected).norm() / expected.norm()
    assert error < 2**-7


def test_a_gated_unit_adds_what_goes_past_it():
    fused = made_fast(gated())
    x, residual = torch.randn(2, 1, 9, 32).bfloat16()
    torch.testing.assert_close(fused(x, residual), residual + fused(x), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_adds_what_it_norms(dtype):
    fused = made_fast(LlamaRMSNorm(8))
    x, y = torch.randn(2, 1, 5, 8)
    total, normed = fused.add(x.bfloat16(), y.to(dtype))
    assert torch.equal(total, x.bfloat16() + y.to(dtype))
    assert torch.equal(normed, fused(total))


class Halved(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


@pytest.mark.parametrize("own", [gated("relu"), gated(kind=Halved)], ids=["relu", "halved"])
def test_another_unit_of_the_same_names_stays_and_its_layers_are_packed(own):
    part = made_fast(own)
    assert part is own
    assert isinstance(part.gate_proj, PackedLinear)


class Attention(nn.Module):
    """Asks its three layers as attention modules do."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, *, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, heads * 8, bias=bias)
        self.k_proj = nn.Linear(32, kv_heads * 8, bias=bias)
        self.v_proj = nn.Linear(32, kv_heads * 8, bias=bias)

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x, x

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        for_q, for_k, for_v = self.inputs(x)
        shape = (*x.shape[:-1], -1, 8)
        q, k = self.q_proj(for_q).view(shape), self.k_proj(for_k).view(shape)
        return torch.cat([q, k, self.v_proj(for_v).view(shape)], dim=-2)


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_are_one_product(bias):
    own = Attention(bias=bias)
    fast = made_fast(own)
    assert isinstance(fast.k_proj, PartialLinear)
    x = torch.randn(1, 9, 32).bfloat16()
    layers = (fast.q_proj, fast.k_proj, fast.v_proj)
    expected = [x.float() @ part.weight.float().T for part in layers]
    if bias:
        expected = [y + part.bias.float() for y, part in zip(expected, layers, strict=True)]
    actual = fast(x).flatten(-2).float()
    torch.testing.assert_close(actual, torch.cat(expected, dim=-1), rtol=2**-7, atol=2**-7)


def test_merged_weights_are_in_memory_once():
    fast = made_fast(Attention(bias=True))
    merged = [module for module in fast.modules() if isinstance(module, MergedLinear)]
    assert len(merged) == 1
    assert not any(type(module) is PackedLinear for module in fast.modules())
    assert [tuple(parameter.shape) for parameter in fast.parameters()] == [(64,)]


class Crossed(Attention):
    """Keys and values of something else."""

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x.flip(-2), x


class Changing(Attention):
    """Changes the input between the layers."""

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        x = x.clone()
        q = self.q_proj(x)
        k = self.k_proj(x.mul_(2))
        return torch.cat([q, k, self.v_proj(x)], dim=-1)


class Shared(Attention):
    """Takes its keys for values."""

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1)


def mixed_biases() -> nn.Module:
    own = Attention(bias=True)
    own.k_proj.bias = None
    return own


@pytest.mark.parametrize(
    "own",
    [Crossed(), Changing(), Shared(), mixed_biases()],
    ids="crossed changing shared mixed".split(),
)
def test_layers_that_are_not_asked_alike_stay_apart(own):
    fast = made_fast(own)
    assert type(fast.k_proj) is PackedLinear
    assert "forward" not in vars(fast.k_proj)


def test_a_float32_model_is_left_alone():
    model = Around(LlamaRMSNorm(8)).float()
    model.dtype = torch.float32
    own = model.part
    make_fast(model)
    assert model.part is own


def logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(
            input_ids=ids_BT, position_ids=torch.arange(ids_BT.shape[1])[None], use_cache=False
        ).logits.float()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_model_is_no_further_from_float32(kind: str, tmp_path: Path):
    folder = save_shaken_model(tmp_path, shrunk(CONFIG_MAPPING[kind], num_hidden_layers=2))

    def load(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        return model.eval().requires_grad_(False)

    generator = torch.Generator().manual_seed(1)
    # one row: as the engine computes, and as rotations are fused
    rows = torch.randint(2, 96, (24, 1, 24), generator=generator)
    exact, own, fast = load(torch.float32), load(torch.bfloat16), load(torch.bfloat16)
    make_fast(fast)
    own_error, fast_error = [], []
    for ids in rows:
        expected = logits(exact, ids)
        own_error.append((logits(own, ids) - expected).abs().mean())
        fast_error.append((logits(fast, ids) - expected).abs().mean())
    # where another expert is chosen a row is far off: the median tells
    assert torch.stack(fast_error).median() <= 1.05 * torch.stack(own_error).median()


@pytest.mark.parametrize(
    "kind", "llama mistral qwen2 qwen3 qwen3_moe mixtral gemma2 gemma3_text gpt_oss olmo2".split()
)
def test_the_usual_families_are_merged(kind: str):
    config = shrunk(CONFIG_MAPPING[kind], num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    make_fast(model.eval().requires_grad_(False))
    assert sum(isinstance(module, MergedLinear) for module in model.modules()) == 2
