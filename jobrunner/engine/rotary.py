"""Let attention modules rotate queries and keys in one pass. Knows no families.

In transformers the `forward` of an attention module calls a function of its file by the name
`apply_rotary_pos_emb`. A module gets a copy of that `forward` which finds ours under the name:
the file, and every other model, keep theirs. Shapes: H heads, T tokens, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

Rotary = Callable[..., Any]
# of queries and keys `[1, H, T, D]` with cosines and sines `[1, T, D]`
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_NAME = "apply_rotary_pos_emb"
_SEED = 20240229
# some roundings of bfloat16 in a row
_NEAR = 2.0**-6
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


def fuse_rotary(model: nn.Module, rotate: Rotate) -> int:
    """Let each attention module whose rotation is the usual one use `rotate`; count them.

    Only for bfloat16 on a CPU; whatever else a module rotates goes its own way.
    """
    count = 0
    proven: dict[Rotary, bool] = {}
    for module in model.modules():
        forward = _plain_forward(module)
        if forward is None or _NAME not in forward.__code__.co_names:
            continue
        theirs = forward.__globals__.get(_NAME)
        if not callable(theirs):
            continue
        if theirs not in proven:
            proven[theirs] = _is_usual(theirs, rotate)
        if proven[theirs]:
            module.forward = MethodType(_copy(forward, _either(theirs, rotate)), module)
            count += 1
    return count


def _plain_forward(module: nn.Module) -> FunctionType | None:
    """A module's own `forward` as it was written; None where it is wrapped to do more."""
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        # it only renames arguments, which nobody passes by their old names
        if not forward.__code__.co_qualname.startswith("deprecate_kwarg."):
            return None
        forward = forward.__wrapped__
    replaced = "forward" in vars(module)
    return forward if inspect.isfunction(forward) and not replaced else None


def _copy(forward: FunctionType, rotary: Rotary) -> FunctionType:
    names = {**forward.__globals__, _NAME: rotary}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _either(theirs: Rotary, rotate: Rotate) -> Rotary:
    def rotary(*arguments: Any, **named: Any) -> Any:
        if len(arguments) == 4 and not named and _is_served(*arguments):
            return rotate(*arguments)
        return theirs(*arguments, **named)

    return rotary


def _is_served(q_1HTD: Any, k_1HTD: Any, cos_1TD: Any, sin_1TD: Any) -> bool:
    for x in (q_1HTD, k_1HTD, cos_1TD, sin_1TD):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
            return False
    q, k, rows = q_1HTD.shape, k_1HTD.shape, cos_1TD.shape
    if not (len(q) == len(k) == 4 and len(rows) == 3 and rows == sin_1TD.shape):
        return False
    alike: bool = q[0] == k[0] == rows[0] == 1 and q[2:] == k[2:] == rows[1:]
    return alike


def _is_usual(theirs: Rotary, rotate: Rotate) -> bool:
    generator = torch.Generator().manual_seed(_SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    arguments = random(1, 4, 5, 8), random(1, 2, 5, 8), random(1, 5, 8), random(1, 5, 8)
    try:
        expected = theirs(*arguments)
    except _FAILURES:
        # it takes other arguments
        return False
    if not isinstance(expected, tuple) or len(expected) != 2:
        return False
    actual = _either(theirs, rotate)(*arguments)
    return all(
        x.shape == y.shape and float((y.float() - x.float()).norm() / x.float().norm()) < _NEAR
        for x, y in zip(expected, actual, strict=True)
    )
