"""Linear layers whose weights lie as the processor's matrix products read them.

Products are our own where the processor adds two at a time and multiplies no tiles, else oneDNN's.
Knows no families.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from jobrunner.engine.devices import cpu_has_bfloat16, cpu_multiplies_tiles

log = logging.getLogger("cbjob")

# oneDNN chooses the layout for so many rows; measured from 1 to 512, no other hint wins anywhere
_ROWS = 64


class _Product(Protocol):
    """A weight, `[O, I]`, as products read it, and a bias: `[..., O]` for `[..., I]`."""

    def weight(self) -> torch.Tensor: ...

    def activate(self, x: torch.Tensor, kind: str, algorithm: str) -> torch.Tensor: ...

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor: ...


class OneDnnProduct:
    """Products by oneDNN, which otherwise re-orders a weight at every call."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS)
        self._bias_O = bias_O

    def weight(self) -> torch.Tensor:
        """The weight in its usual order, made anew each time."""
        return self._packed.to_dense()

    def activate(self, x: torch.Tensor, kind: str, algorithm: str) -> torch.Tensor:
        """Return activated outputs: "none", "swish", or "gelu" by an algorithm."""
        return torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias_O, kind, [], algorithm
        )

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return outputs times `other`."""
        return self._binary(x, other, "mul")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return outputs plus `other`."""
        return self._binary(x, other, "add")

    def _binary(self, x: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self._bias_O, kind)


class PackedLinear(nn.Module):  # type: ignore[misc]
    """What a linear layer computes, from a packed copy of its weight.

    Sums are float32. They are rounded once, with what is done to them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # not a buffer: what walks over buffers expects to read them
        self._product = _product(linear.weight.detach(), linear.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its usual order, made anew each time."""
        return self._product.weight()

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return `[..., O]`."""
        return self._product.activate(x_TI, "none", "")

    def activate(self, x_TI: torch.Tensor, kind: str, algorithm: str = "") -> torch.Tensor:
        """Return SiLU ("swish") or GELU ("gelu", by "none" or "tanh") of the layer's outputs."""
        return self._product.activate(x_TI, kind, algorithm)

    def times(self, x_TI: torch.Tensor, other_TO: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs times `other`."""
        return self._product.times(x_TI, other_TO)

    def plus(self, x_TI: torch.Tensor, other_TO: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs plus `other`."""
        return self._product.plus(x_TI, other_TO)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> _Product:
    made = _pair_product()
    if made is not None and made.serves(weight_OI):
        product: _Product = made.PairProduct(weight_OI, bias_O)
        return product
    return OneDnnProduct(weight_OI, bias_O)


@cache
def _pair_product() -> Any:
    """Products compiled by numba, None where there are none, or oneDNN's are faster."""
    if cpu_multiplies_tiles():
        log.info("products are oneDNN's: the processor multiplies tiles")
        return None
    try:
        from jobrunner.engine import pair_products

        pair_products.compiled()
    except (ImportError, RuntimeError) as error:
        # numba is absent, or finds no folder to keep what it compiled in
        log.info("products stay oneDNN's: %s", error)
        return None
    return pair_products


class _Held:
    """What a product gave and nobody has taken yet, and the input that it was made of."""

    __slots__ = ("input", "parts", "version")

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.version = 0
        self.parts: dict[int, torch.Tensor] = {}


class MergedLinear(PackedLinear):
    """Several packed layers as one product: all that they say of one input is computed at once.

    What is left to be asked for is held, with its input, until the last part has been taken.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__(_side_by_side(parts))
        self.sizes = [part.out_features for part in parts]
        # not attributes of the module, which take microseconds to set
        self._held = _Held()

    def part(self, index: int, x_TI: torch.Tensor) -> torch.Tensor:
        """Return what one of the layers makes of an input: a slice `[..., O]` of the rows of all.

        Only an input that was not seen before, or changed since, is multiplied.
        """
        held = self._held
        # what is held cannot give its place to another tensor
        seen = x_TI is held.input and _version(x_TI) == held.version
        if not seen or index not in held.parts:
            held.parts = dict(enumerate(self(x_TI).split_with_sizes(self.sizes, -1)))
            held.input, held.version = x_TI, _version(x_TI)
        out = held.parts.pop(index)
        if not held.parts:
            held.input = None
        return out


class PartialLinear(nn.Module):  # type: ignore[misc]
    """One of the layers that a merged one computes, in its place."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self.in_features = merged.in_features
        self.out_features = merged.sizes[index]
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its usual order, made anew each time."""
        return self.merged.weight.split(self.merged.sizes)[self._index]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, a part of that of all."""
        bias = self.merged.bias
        return None if bias is None else bias.split(self.merged.sizes)[self._index]

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return `[..., O]`."""
        return self.merged.part(self._index, x_TI)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class GateUpLinear(nn.Module):  # type: ignore[misc]
    """SiLU of one packed layer times another one of the same input, both in one product."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, made: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = gate.in_features, gate.out_features
        both = [_side_by_side_in_groups(*pair) for pair in _weights_and_biases(gate, up)]
        self._product = made.PairProduct(both[0], both[1] if len(both) > 1 else None)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of both in their usual order, made anew each time."""
        groups = self._product.weight().unflatten(0, (-1, 2, 16))
        return groups[:, 0].flatten(0, 1), groups[:, 1].flatten(0, 1)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return `[..., O]`."""
        out: torch.Tensor = self._product.gated(x_TI)
        return out


def merge_gate(gate: PackedLinear, up: PackedLinear) -> GateUpLinear | None:
    """Return both as one, None where no product of ours serves them."""
    made = _pair_product()
    groups = gate.out_features % 16 == 0 and gate.out_features == up.out_features
    if made is None or not groups or not can_merge([gate, up]):
        return None
    return GateUpLinear(gate, up, made) if made.serves(_side_by_side([gate, up]).weight) else None


def _weights_and_biases(*layers: PackedLinear) -> list[list[torch.Tensor]]:
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return [weights, biases] if biases else [weights]


def _side_by_side_in_groups(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """16 rows of one, 16 of the other, and so on."""
    groups = [values.unflatten(0, (-1, 16)) for values in (one, other)]
    return torch.stack(groups, dim=1).flatten(0, 2)


def can_merge(parts: Sequence[PackedLinear]) -> bool:
    """Whether these layers could take one input, all with a bias or all without."""
    return len({(part.in_features, part.bias is None) for part in parts}) == 1


def _side_by_side(parts: Sequence[PackedLinear]) -> nn.Linear:
    inputs, outputs = parts[0].in_features, sum(part.out_features for part in parts)
    linear = nn.Linear(inputs, outputs, bias=parts[0].bias is not None, device="meta")
    linear.weight = _fixed(torch.cat([part.weight for part in parts]))
    if linear.bias is not None:
        linear.bias = _fixed(torch.cat([part.bias for part in parts]))
    return linear


def _fixed(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _version(x: torch.Tensor) -> int:
    """How often a tensor was changed in place, which tensors of inference do not count."""
    return 0 if x.is_inference() else x._version


def packs(model: nn.Module) -> bool:
    """Whether this model's layers gain from it: bfloat16 on a processor that multiplies it."""
    device: torch.device = next(model.parameters()).device
    dtype = getattr(model, "dtype", None)
    return device.type == "cpu" and dtype == torch.bfloat16 and cpu_has_bfloat16()


def pack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer by a packed one, in place; return how many there were.

    One at a time, so that no more than one weight is in memory twice. A weight that is also an
    embedding stays beside its packed copy.
    """
    places = list(_plain_linears(model))
    for parent, name in places:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    # tensors of one checkpoint share its mapped file, which stays while one of them is left
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return len(places)


def _plain_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each bfloat16 linear layer that does nothing but multiply: where it hangs, and its name."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_plain(child):
                yield parent, name


def _is_plain(module: nn.Module) -> bool:
    # a subclass computes something of its own, and a hook would not be called
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.dtype == torch.bfloat16
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
