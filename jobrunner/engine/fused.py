"""Replace parts of a model by faster ones, each shown to compute the same. Knows no families.

A part is recognised by what it holds and taken only if its own answer to made-up input is
matched; else it stays. Shapes: T tokens, W width of a row, H heads, D width of a head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from jobrunner.engine.linears import (
    MergedLinear,
    PackedLinear,
    PartialLinear,
    can_merge,
    merge_gate,
    pack_linears,
    packs,
)
from jobrunner.engine.residuals import fuse_residuals
from jobrunner.engine.rotary import fuse_rotary

log = logging.getLogger("cbjob")

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddRmsNorm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]

# some roundings of bfloat16 in a row; another formula is further off
_NEAR = 2.0**-6
_SEED = 20240229
_TOKENS = 6
# so small that epsilon counts, as usual, and so large that squares would leave float16
_SCALES = (1e-3, 1.0, 300.0)
_GATED = ("gate_proj", "up_proj", "down_proj")
_ATTENDED = ("q_proj", "k_proj", "v_proj")
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True)
class NormKernels:
    """A norm of rows, and one of the sums of two."""

    norm: RmsNorm
    add_norm: AddRmsNorm


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation that oneDNN applies to sums, as it names it."""

    kind: str
    algorithm: str
    compute: Callable[[torch.Tensor], torch.Tensor]


_ACTIVATIONS = (
    _Activation("swish", "", silu),
    _Activation("gelu", "none", gelu),
    _Activation("gelu", "tanh", lambda x: gelu(x, approximate="tanh")),
)


class GatedLinear(nn.Module):  # type: ignore[misc]
    """`down(activation(gate(x)) * up(x))` with what lies between the products done inside them.

    So is the sum with what goes past the unit, if it is given.
    """

    takes_residual = True

    def __init__(self, own: nn.Module, activation: _Activation) -> None:
        super().__init__()
        self.down_proj: PackedLinear = own.down_proj
        swish = activation.kind == "swish"
        self.gate_up = merge_gate(own.gate_proj, own.up_proj) if swish else None
        if self.gate_up is None:
            self.gate_proj: PackedLinear = own.gate_proj
            self.up_proj: PackedLinear = own.up_proj
        self._activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gated = self._gated(x) if self.gate_up is None else self.gate_up(x)
        return self.down_proj(gated) if residual is None else self.down_proj.plus(gated, residual)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj.activate(x, self._activation.kind, self._activation.algorithm)
        return self.up_proj.times(x, gate)


class FusedNorm(nn.Module):  # type: ignore[misc]
    """Root-mean-square norm in one pass, rounded once; what is not bfloat16 goes the own way."""

    def __init__(self, own: nn.Module, kernels: NormKernels, epsilon: float, offset: float) -> None:
        super().__init__()
        self.own = own
        self.weight: torch.Tensor = own.weight
        self._kernels = kernels
        self._epsilon = epsilon
        self._weight_W = (own.weight.detach().float() + offset).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            out: torch.Tensor = self.own(x)
            return out
        return self._kernels.norm(x, self._weight_W, self._epsilon)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x + y` and the norm of that."""
        if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16 or x.shape != y.shape:
            total = x + y
            return total, self(total)
        return self._kernels.add_norm(x, y, self._weight_W, self._epsilon)


def make_fast(model: nn.Module) -> None:
    """Pack the linear layers of a bfloat16 model on a CPU, in place, and fuse what is around.

    Any other model is left as it is.
    """
    if not packs(model):
        return
    with torch.inference_mode():
        linears = pack_linears(model)
        gated = _replace(model, _gated)
        log.info("packed %d linear layers, fused %d gated units of them", linears, gated)
        merged = sum(_merge(module) for module in list(model.modules()))
        log.info("merged queries, keys and values of %d attention modules", merged)
        try:
            from jobrunner.engine.row_kernels import add_rms_norm, rms_norm, rotate
        except (ImportError, RuntimeError) as error:
            # numba is absent, or finds no folder to keep what it compiled in
            log.info("norms and rotations stay as transformers computes them: %s", error)
            return
        kernels = NormKernels(rms_norm, add_rms_norm)
        norms = _replace(model, lambda own: _norm(own, kernels))
        rotations = fuse_rotary(model, rotate)
        layers = fuse_residuals(model)
    log.info("%d norms and %d rotations take one pass each", norms, rotations)
    log.info("%d layers add within their parts", layers)


def _replace(model: nn.Module, improve: Callable[[nn.Module], nn.Module | None]) -> int:
    count = 0
    for parent, name, child in list(_children(model)):
        better = improve(child)
        if better is not None:
            setattr(parent, name, better.eval())
            count += 1
    return count


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _gated(own: nn.Module) -> GatedLinear | None:
    """Return a match for a gated linear unit of packed layers, None for anything else."""
    parts = [getattr(own, name, None) for name in _GATED]
    if not all(isinstance(part, PackedLinear) for part in parts):
        return None
    activation = _activation(getattr(own, "act_fn", None))
    if activation is None:
        return None
    better = GatedLinear(own, activation)
    x_1TW = _random(own.gate_proj.in_features)
    try:
        theirs = own(x_1TW)
    except _FAILURES:
        # it takes more than a row of tokens: something else by the same names
        return None
    return better if _error(theirs, better(x_1TW)) < _NEAR else None


def _merge(own: nn.Module) -> bool:
    """Let one product make queries, keys and values, if they are made of one input; tell so."""
    found = (getattr(own, name, None) for name in _ATTENDED)
    parts = [part for part in found if isinstance(part, PackedLinear)]
    if len(parts) < len(_ATTENDED) or not can_merge(parts) or not _gives_all_the_same(own, parts):
        return False
    merged = MergedLinear(parts)
    for index, name in enumerate(_ATTENDED):
        setattr(own, name, PartialLinear(merged, index).eval())
    return True


class _AllAskedError(Exception):
    """Each layer was asked; what a module does with the answers does not matter."""


def _gives_all_the_same(own: nn.Module, parts: list[PackedLinear]) -> bool:
    """Whether a module, first of all, asks each layer once for one input, left as it is."""
    x_1TW = _random(parts[0].in_features)
    asked: list[PackedLinear] = []
    given: list[torch.Tensor] = []
    before: list[torch.Tensor] = []

    def listen(part: PackedLinear) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            asked.append(part)
            given.append(x)
            before.append(x.clone())
            if len(asked) == len(parts):
                raise _AllAskedError
            return part.activate(x, "none")

        part.forward = forward  # type: ignore[assignment, method-assign]

    for part in parts:
        listen(part)
    try:
        own(x_1TW, position_embeddings=(x_1TW, x_1TW), attention_mask=None)
    except _AllAskedError:
        pass
    except _FAILURES:
        # it takes other arguments
        return False
    finally:
        for part in parts:
            del part.forward
    return set(asked) == set(parts) and all(
        x is given[0] and torch.equal(then, before[0])
        for x, then in zip(given, before, strict=True)
    )


def _activation(own: Any) -> _Activation | None:
    if not callable(own):
        return None
    x = torch.linspace(-8, 8, 257)
    theirs = own(x)
    for known in _ACTIVATIONS:
        if torch.allclose(theirs, known.compute(x), rtol=1e-6, atol=1e-6):
            return known
    return None


def _norm(own: nn.Module, kernels: NormKernels) -> FusedNorm | None:
    """Return a match for a root-mean-square norm, None for anything else."""
    weight: Any = getattr(own, "weight", None)
    epsilon = getattr(own, "variance_epsilon", getattr(own, "eps", None))
    if not isinstance(epsilon, float) or not isinstance(weight, torch.Tensor):
        return None
    alone = [name for name, _ in own.named_parameters()] == ["weight"]
    if not alone or weight.dim() != 1 or weight.dtype != torch.bfloat16:
        return None
    # an offset tells it from norms that take the mean away
    x_STW = torch.cat([scale * _random(len(weight), 0.5) for scale in _SCALES])
    try:
        theirs = own(x_STW)
    except _FAILURES:
        return None
    # some multiply by the weight, some by 1 more
    found = [FusedNorm(own, kernels, epsilon, offset) for offset in (0.0, 1.0)]
    errors = [_error(theirs, norm(x_STW)) for norm in found]
    best = min(range(len(found)), key=errors.__getitem__)
    return found[best] if errors[best] < _NEAR else None


def _error(theirs: Any, ours: torch.Tensor) -> float:
    """The largest relative error of a row of the last dimension."""
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape:
        return math.inf
    theirs, ours = theirs.float(), ours.float()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)
    return float(error.nan_to_num(nan=math.inf).max())


def _random(width: int, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    x_1TW = torch.randn(1, _TOKENS, width, generator=generator) + mean
    return x_1TW.bfloat16()
