"""Packed linear layers: the same numbers, the weight in memory once, everything else left alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from jobrunner.engine import linears
from jobrunner.engine.attention.pair_tiles import multiplies_pairs
from jobrunner.engine.linears import (
    MergedLinear,
    OneDnnProduct,
    PackedLinear,
    PartialLinear,
    can_merge,
    merge_gate,
    pack_linears,
)
from jobrunner.engine.pair_products import PairProduct

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


@pytest.mark.parametrize("rows", [0, 1, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_added_is_rounded_with_the_product(rows, bias):
    own = linear(32, 48, bias=bias)
    x, other = torch.randn(1, rows, 32).bfloat16(), torch.randn(1, rows, 48).bfloat16()
    expected = x.float() @ own.weight.float().T + other.float()
    if bias:
        expected += own.bias.float()
    actual = PackedLinear(own).plus(x, other)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-4)


PAIRED = [(32, 32), (2, 64), (576, 96), (1030, 32)]


@pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no products of pairs")
@pytest.mark.parametrize("rows", [1, 3, 5, 16, 29, 253])
@pytest.mark.parametrize(("inputs", "outputs"), PAIRED)
def test_products_of_pairs_are_rounded_once_with_what_is_done_to_them(rows, inputs, outputs):
    own = linear(inputs, outputs, bias=True)
    x = torch.randn(1, rows, 2 * inputs).bfloat16()[..., :inputs]
    other = torch.randn(1, rows, outputs).bfloat16()
    product = PairProduct(own.weight, own.bias)
    exact = x.double() @ own.weight.double().T + own.bias.double()
    for actual, expected in (
        (product.activate(x, "none", ""), exact),
        (product.activate(x, "swish", ""), silu(exact)),
        (product.times(x, other), exact * other.double()),
        (product.plus(x, other), exact + other.double()),
    ):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2e-5)
    assert torch.equal(product.weight(), own.weight)


@pytest.fixture
def no_tiles(monkeypatch):
    """A processor that multiplies pairs and no tiles, whatever this one does."""
    monkeypatch.setattr(linears, "cpu_multiplies_tiles", lambda: False)
    linears._pair_product.cache_clear()
    yield
    linears._pair_product.cache_clear()


def test_products_are_left_to_a_processor_that_multiplies_tiles(monkeypatch, caplog):
    caplog.set_level("INFO", "cbjob")
    linears._pair_product.cache_clear()
    monkeypatch.setattr(linears, "cpu_multiplies_tiles", lambda: True)
    layers = [PackedLinear(linear(64, 64)) for _ in range(2)]
    linears._pair_product.cache_clear()
    assert {type(layer._product) for layer in layers} == {OneDnnProduct}
    assert caplog.messages == ["products are oneDNN's: the processor multiplies tiles"]


@pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no products of pairs")
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_what_it_opens_for_are_one_product(bias, no_tiles):
    gate = PackedLinear(linear(64, 48, bias=bias))
    torch.manual_seed(5)
    up = PackedLinear(nn.Linear(64, 48, bias=bias).bfloat16().requires_grad_(False))
    x = torch.randn(1, 31, 64).bfloat16()
    merged = merge_gate(gate, up)
    assert merged is not None
    expected = silu(gate(x).float()) * up(x).float()
    torch.testing.assert_close(merged(x).float(), expected, rtol=2**-6, atol=2**-7)
    assert merge_gate(gate, PackedLinear(linear(64, 32, bias=bias))) is None
    assert merge_gate(gate, PackedLinear(linear(64, 48, bias=not bias))) is None


@pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no products of pairs")
def test_sums_that_are_no_numbers_and_large_ones_go_through():
    own = linear(32, 32)
    x = torch.zeros(1, 2, 32).bfloat16()
    x[0, 0] = float("nan")
    x[0, 1] = 1e30
    out = PairProduct(own.weight, None).activate(x, "swish", "")
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()


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


SIZES = (48, 16, 16)


def merged(*, bias: bool = False) -> tuple[list[PackedLinear], list[PartialLinear]]:
    own = [PackedLinear(linear(32, outputs, bias=bias)) for outputs in SIZES]
    together = MergedLinear(own)
    return own, [PartialLinear(together, index) for index in range(len(own))]


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the rows of each product of a merged layer from now on."""
    rows: list[int] = []
    multiply = MergedLinear.forward

    def counted(self: MergedLinear, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[-2])
        return multiply(self, x)

    monkeypatch.setattr(MergedLinear, "forward", counted)
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_parts_of_a_merged_layer_give_what_the_layers_gave(bias, rows):
    own, parts = merged(bias=bias)
    x = torch.randn(1, rows, 32).bfloat16()
    for layer, part in zip(own, parts, strict=True):
        torch.testing.assert_close(part(x), layer(x), rtol=2**-7, atol=2**-8)


def test_heads_can_be_seen_in_a_part_without_a_copy():
    _, parts = merged()
    x = torch.randn(1, 5, 32).bfloat16()
    out = parts[0](x)
    assert out.view(1, 5, -1, 8).transpose(1, 2).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_input_is_multiplied_once(order, monkeypatch):
    _, parts = merged()
    rows = products(monkeypatch)
    x = torch.randn(1, 5, 32).bfloat16()
    for index in order:
        parts[index](x)
    assert rows == [5]


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_is_held_once_all_is_taken(inference):
    _, parts = merged()
    with torch.inference_mode(inference):
        x = torch.randn(1, 5, 32).bfloat16()
        outs = [weakref.ref(part(x)) for part in parts]
    seen = weakref.ref(x)
    del x
    assert seen() is None
    assert [out() for out in outs] == [None] * len(parts)


def test_each_input_has_its_own_answer():
    own, parts = merged()
    x, y = torch.randn(2, 1, 5, 32).bfloat16()
    for index, given in ((0, x), (0, x), (1, y), (1, x), (0, y), (2, y), (2, x), (0, x)):
        torch.testing.assert_close(parts[index](given), own[index](given), rtol=2**-7, atol=2**-8)


def test_an_input_that_changed_in_place_is_another():
    own, parts = merged()
    x = torch.randn(1, 5, 32).bfloat16()
    parts[0](x)
    x.neg_()
    torch.testing.assert_close(parts[1](x), own[1](x), rtol=2**-7, atol=2**-8)


def test_weight_and_bias_of_a_part_can_still_be_read():
    own, parts = merged(bias=True)
    for layer, part in zip(own, parts, strict=True):
        assert torch.equal(part.weight, layer.weight)
        assert torch.equal(part.bias, layer.bias)
    assert merged()[1][0].bias is None


def test_layers_of_other_inputs_or_biases_cannot_be_merged():
    packed = [PackedLinear(linear(32, 16, bias=bias)) for bias in (False, False, True)]
    assert can_merge(packed[:2])
    assert not can_merge(packed)
    assert not can_merge([packed[0], PackedLinear(linear(16, 16))])
