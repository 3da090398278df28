"""Let decoder layers add what goes past a part within the part's own pass. Knows no families.

The usual layer computes `x + attention(norm(x))`, then `y + mlp(norm(y))`. Which one does so shows
when its parts are stood in for: what they are given, and what the layer returns, is then known to
the bit. Shapes: T tokens, W width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

Forward = Callable[..., Any]

_NAMES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_SEED = 20240229
_TOKENS = 6
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


@runtime_checkable
class AddingNorm(Protocol):
    """A norm that can add first: returns `x + y` and the norm of that."""

    weight: torch.Tensor

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@runtime_checkable
class AddingUnit(Protocol):
    """A unit that adds its second argument, if there is one, to its output."""

    takes_residual: bool

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, /) -> torch.Tensor: ...


def fuse_residuals(model: nn.Module) -> int:
    """Let each usual layer whose norms can add do so; count them."""
    count = 0
    for module in model.modules():
        if not isinstance(getattr(module, _NAMES[2], None), AddingNorm):
            continue
        if "forward" in vars(module):
            continue
        defaults = _defaults(module)
        if defaults is not None:
            adds = isinstance(module.mlp, AddingUnit)
            module.forward = MethodType(_forward(module.forward, defaults, adds=adds), module)
            count += 1
    return count


def _forward(theirs: Forward, defaults: dict[str, Any], *, adds: bool) -> Forward:
    def forward(layer: Any, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or hidden_states.dtype != torch.bfloat16:
            return theirs(hidden_states, *more, **named)
        normed = layer.input_layernorm(hidden_states)
        attended = layer.self_attn(hidden_states=normed, **{**defaults, **named})[0]
        total, normed = layer.post_attention_layernorm.add(hidden_states, attended)
        return layer.mlp(normed, total) if adds else total + layer.mlp(normed)

    return forward


def _defaults(layer: nn.Module) -> dict[str, Any] | None:
    """What a layer tells its attention when it is told nothing itself; None for an unusual one."""
    others = [child for name, child in layer.named_children() if name not in _NAMES]
    if layer.training or not all(isinstance(child, nn.Dropout) for child in others):
        return None
    try:
        defaults = _told(layer, {})
        # whatever else it is told has to reach the attention as it is
        given = {name: object() for name in (*defaults, "anything")}
        return defaults if _told(layer, given) == given else None
    except _FAILURES:
        # it lacks a part, or takes other arguments
        return None


def _told(layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer tells its attention beside the rows, when it is told what is `given`.

    Raises ValueError where it does not add the parts as usual.
    """
    x, attended, changed, *norms = _random(5, len(layer.input_layernorm.weight))
    told: dict[str, Any] = {}
    seen: list[torch.Tensor] = []

    def answer(out: Any) -> Forward:
        def forward(rows: torch.Tensor) -> Any:
            seen.append(rows)
            return out

        return forward

    def attend(*, hidden_states: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None]:
        seen.append(hidden_states)
        told.update(named)
        return attended, None

    stand_ins = (answer(norms[0]), attend, answer(norms[1]), answer(changed))
    with _standing_in(layer, stand_ins):
        out = layer(x.clone(), **given)
    total = x + attended
    expected = [x, norms[0], total, norms[1], total + changed]
    actual = [*seen, out]
    if len(actual) != len(expected) or not all(map(torch.equal, actual, expected)):
        raise ValueError("the parts are joined in another way")
    return told


@contextmanager
def _standing_in(layer: nn.Module, stand_ins: tuple[Forward, ...]) -> Iterator[None]:
    parts = [getattr(layer, name) for name in _NAMES]
    own = [vars(part).get("forward") for part in parts]
    for part, stand_in in zip(parts, stand_ins, strict=True):
        part.forward = stand_in
    try:
        yield
    finally:
        for part, forward in zip(parts, own, strict=True):
            if forward is None:
                del part.forward
            else:
                part.forward = forward


def _random(count: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return list(torch.randn(count, 1, _TOKENS, width, generator=generator).bfloat16())
