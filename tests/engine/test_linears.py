"""Packed linear layers: the same numbers, the weight in memory once, everything else left alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from jobrunner.engine.linears import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (7, 5), (576, 192)])
def test_a_packed_layer_gives_the_same_numbers_but_for_one_rounding(rows, bias, inputs, outputs):
    own = linear(inputs, outputs, bias=bias)
    x = torch.randn(1, rows, inputs).bfloat16()
    expected, actual = own(x), PackedLinear(own)(x)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-8)


def test_inputs_need_not_lie_side_by_side():
    own = linear(32, 48)
    x = torch.randn(1, 5, 64).bfloat16()[..., ::2]
    torch.testing.assert_close(PackedLinear(own)(x), own(x), rtol=2**-7, atol=2**-8)


def test_the_weight_can_still_be_read():
    own = linear(33, 17)
    assert torch.equal(PackedLinear(own).weight, own.weight)


def test_nobody_keeps_the_weight_that_was_packed():
    model = nn.Sequential(linear(8, 8))
    weight = weakref.ref(model[0].weight)
    assert pack_linears(model) == 1
    assert weight() is None


def test_a_weight_that_is_also_an_embedding_stays_one():
    model = nn.Module()
    model.embedding = nn.Embedding(16, 8).bfloat16().requires_grad_(False)
    model.head = nn.Linear(8, 16, bias=False)
    model.head.weight = model.embedding.weight
    before = model.embedding.weight.clone()
    pack_linears(model)
    assert torch.equal(model.embedding.weight, before)
    assert torch.equal(model.head.weight, before)


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_that_do_more_than_multiply_are_left_alone():
    doubling = Doubling(8, 8).bfloat16()
    hooked = linear(8, 8)
    hooked.register_forward_hook(lambda module, arguments, output: output + 1)
    wide = nn.Linear(8, 8)
    model = nn.Sequential(doubling, hooked, wide)
    assert pack_linears(model) == 0
    assert list(model) == [doubling, hooked, wide]
